"""The interface of a language model that a learner trains, and the built-in decoder behind it.

T = tokens of packed sequences, U = tokens that the decoder computes, after shared prefixes are
merged, n = a subset of the T tokens, d = hidden size, V = vocabulary size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.errors import ConfigError
from ratchet.models.decoder import Decoder
from ratchet.models.flops import DecoderCost, TokenCost
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.packed_inputs import PackedInputs, pack_inputs
from ratchet.models.lora import decoder as lora
from ratchet.models.lora.decoder import Adapter, Factors, is_adapter_parameter, merge_lazily
from ratchet.models.parallel.collectives import Group
from ratchet.models.parallel.context_parallel import ContextSplit, split_context
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.parallel.stages import ModelStage, StageInputs
from ratchet.models.parallel.tensor_parallel import VocabParallelLogits
from ratchet.models.transformers.expert_parallel import ExpertDivision
from ratchet.models.transformers.tensor_parallel import TPDivision
from ratchet.models.weights.hf_weights import SavableTensor, canonical_weights, save_decoder
from ratchet.models.weights.weight_layout import is_selected, list_pieces

UNLIMITED = 2**31 - 1  # `max_positions` of a model whose configuration has no limit


class PolicyModel(nn.Module, ABC):
    """A language model that a learner can train: the base class of all policies."""

    # The division of a transformers model over tensor-parallel ranks. None if the model is not
    # divided, and for the built-in decoder, which is sharded in another way.
    tp_division: TPDivision | None = None
    # The division of a transformers model's experts; None as above.
    expert_division: ExpertDivision | None = None
    # Canonical names of the weights of a transformers model that the first and the last pipeline
    # stage both have: a tied embedding.
    tied_stage_weights: frozenset[str] = frozenset()
    # The ranks that gather a layer's weights at the same time in each forward; None: one rank.
    forward_group: Group | None = None
    # The adapter that is trained instead of the weights; None: the weights are trained.
    adapter: Adapter | None = None
    # Names of the parameters (as in `named_parameters`) that no update changes.
    frozen_parameters: frozenset[str] = frozenset()
    # True if packed sequences attend by the kernel for variable lengths (`layers.varlen`).
    uses_varlen: bool = False

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of rows of the output embedding over all ranks. Token ids are smaller."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of the final hidden states."""

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """The maximum length of a sequence, in tokens."""

    @property
    @abstractmethod
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion, from the model's configuration."""

    @abstractmethod
    def matrices(self) -> Mapping[str, Sequence[int]]:
        """Return the matrices of the layers, without embeddings and the language head.

        A key is the name of a parameter on this rank. Its value lists the number of rows of each
        matrix in the parameter, in order: a fused parameter has several matrices.
        """

    @property
    def token_cost(self) -> TokenCost | None:
        """The cost (FLOP) of one text token's forward pass; None if it can't be determined."""
        return None

    @property
    def head_matrix(self) -> Tensor | None:
        """The matrix [V, d] of the head, in any dtype; None if the head is more than a matrix."""
        return None

    @property
    def shares_prefixes(self) -> bool:
        """True if `hidden` computes the shared prefix of several sequences only once."""
        return False

    @property
    def packs_on_host(self) -> bool:
        """True if `hidden` takes tensors in main memory, and uploads what it computes with.

        Packing needs the values of tokens and masks, and would wait for an accelerator to get them.
        """
        return False

    @property
    def has_routers(self) -> bool:
        """True if the model has expert routers that `hidden` can replay and monitor."""
        return False

    @property
    def reads_media(self) -> bool:
        """True if `hidden` accepts media (see `ratchet.models.transformers.multimodal_policy`)."""
        return False

    @property
    def vocab_parallel(self) -> VocabParallelLogits | None:
        """The operations on the divided logits; None if this rank computes all logits."""
        return None if self.tp_division is None else self.tp_division.vocab_parallel

    @property
    def context_group(self) -> Group | None:
        """The ranks over which the tokens of each sequence are divided; None: this rank has all."""
        return None

    def split_context(self, lengths: Sequence[int]) -> ContextSplit | None:
        """Return the tokens of packed sequences that this rank computes; None: all tokens.

        `hidden` returns only the states of these tokens.
        """
        group = self.context_group
        if group is None:
            return None
        return split_context(tuple(lengths), ShardIndex(group.rank(), group.size()))

    @property
    def local_stages(self) -> Sequence[ModelStage]:
        """The pipeline stages on this rank: one, or several if the pipeline is interleaved.

        Empty if the model is not cut into stages.
        """
        return ()

    def pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> StageInputs:
        """Return the inputs of `local_stages` for packed sequences; arguments as in `hidden`."""
        raise AssertionError("the model has no pipeline stages")

    @property
    @abstractmethod
    def checkpointing(self) -> bool:
        """True under activation checkpointing: the backward recomputes each layer's activations."""

    @checkpointing.setter
    @abstractmethod
    def checkpointing(self, on: bool) -> None: ...

    @abstractmethod
    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        output_mask_T: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, d]. No sequence depends on the others.

        Args:
            positions_T: Positions of the tokens, starting at 0 in each sequence.
            lengths: Number of tokens of each sequence, at least 1. They sum to T.
            routing: Replay and monitoring of the tokens' experts, if the model `has_routers`.
            output_mask_T: bool, True for tokens whose states the caller uses; None: all. Other
                states may be any finite numbers, so that a model need not compute them.
        """

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return `hidden(...)`, and run torch's module hooks.

        FSDP gathers the weights in such a hook.
        """
        return self.hidden(*inputs, **options)

    @abstractmethod
    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Return the logits of the next token [n, V] in float32 (float64 for float64 models).

        Autocast does not lower this precision. A bfloat16 head has an error of about 1e-2 nats per
        token, which is as large as the change by a whole policy step.
        """

    @abstractmethod
    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, detached view) of each weight once, without the adapter.

        A view shares the parameter's memory.
        """

    # --- an adapter

    @abstractmethod
    def resolve_adapter_layers(self, lora: LoRAConfig) -> tuple[str, ...]:
        """Return the names of the linear layers that an adapter with these settings would adapt.

        Raises ConfigError if the model lacks a linear layer that `lora` names.
        """

    def resolve_expert_factors(self, lora: LoRAConfig) -> Mapping[str, Factors]:
        """Return the factors of the fused expert weights that an adapter would adapt, by name.

        Raises ConfigError if the model lacks a parameter that `lora` names.
        """
        return {}

    @abstractmethod
    def attach(self, adapter: Adapter) -> None:
        """Add the adapter and freeze all other weights. The outputs do not change."""

    @abstractmethod
    def merge(self) -> None:
        """Add the adapter to the weights, unfreeze them, and remove the adapter."""

    @abstractmethod
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (peft's name, detached view) of each weight of the adapter."""

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[None]:
        """Switch the adapter off inside the context."""

    # --- trained parameters

    def freeze(self, patterns: Sequence[str]) -> None:
        """Exclude the weights that `patterns` select from training, besides those frozen before.

        Args:
            patterns: Names as in a Hugging Face checkpoint. The name of a module selects all
                weights below it; * matches any text.

        Raises:
            ConfigError: A pattern selects only some of the weights that one parameter fuses.
        """
        frozen_parameters: set[str] = set()
        for name, weight_names in self.weights_by_parameter().items():
            selected = [weight for weight in weight_names if is_selected(weight, patterns)]
            if selected and len(selected) < len(weight_names):
                others = [weight for weight in weight_names if weight not in selected]
                raise ConfigError(
                    f"model.freeze selects {selected[0]}, but not {' and '.join(others)}, in the "
                    "same parameter here. Select all of them, or none"
                )
            if selected:
                frozen_parameters.add(name)
        self.frozen_parameters |= frozen_parameters
        self.requires_grad_(True)

    def weights_by_parameter(self) -> Mapping[str, Sequence[str]]:
        """Return the canonical names of the weights in each parameter, by the parameter's name.

        The model has no adapter.
        """
        # The name of a parameter is a canonical name after the wrapper's prefix "model.".
        return {name: (name.partition(".")[2],) for name, _ in self.named_parameters()}

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        super().requires_grad_(requires_grad)
        for name, parameter in self.named_parameters():
            if name in self.frozen_parameters:
                parameter.requires_grad_(False)
        return self

    def trained_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return (name, parameter) of all parameters that an update changes.

        They are the adapter's parameters if there is an adapter, otherwise all but the frozen ones.
        """
        return [
            (name, p)
            for name, p in self.named_parameters()
            if (
                name not in self.frozen_parameters
                if self.adapter is None
                else is_adapter_parameter(name)
            )
        ]

    def frozen_names(self) -> frozenset[str]:
        """Return the canonical names of the weights that no update changes."""
        if self.adapter is not None:
            return frozenset(name for name, _ in self.canonical_weights())
        if not self.frozen_parameters:
            return frozenset()
        weights = self.weights_by_parameter()
        return frozenset(name for frozen in self.frozen_parameters for name in weights[frozen])

    def merged_weights(self) -> Mapping[str, SavableTensor]:
        """Return the canonical weights with the adapter merged into them."""
        weights = dict(self.canonical_weights())
        if self.adapter is None:
            return weights
        lora = self.adapter.lora
        experts = self.resolve_expert_factors(lora)
        return merge_lazily(weights, dict(self.adapter_weights()), lora.scale, experts)

    @abstractmethod
    def save(self, directory: Path, weights: Mapping[str, SavableTensor] | None = None) -> None:
        """Write a Hugging Face directory. Each file is written atomically.

        Args:
            weights: All weights by canonical name; None: the model's weights.
        """


def check_freeze(model: PolicyModel, patterns: Sequence[str]) -> None:
    """Raise ConfigError for a pattern of `freeze` without weights, or if nothing would train."""
    names = [name for weights in model.weights_by_parameter().values() for name in weights]
    for pattern in patterns:
        if not any(is_selected(name, [pattern]) for name in names):
            raise ConfigError(
                f"model.freeze={pattern} selects no weight of the model, which has names such as "
                f"{names[0]} and {names[-1]}. Mend it, or remove it"
            )
    if set(names) <= model.frozen_names():
        raise ConfigError(
            "model.freeze selects every weight that would train. Remove a pattern from it"
        )


class DecoderPolicy(PolicyModel):
    """A policy that runs the built-in decoder."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def shape(self) -> DecoderConfig:
        """The shape of the whole model, not of a shard."""
        return self.decoder.config

    def weights_by_parameter(self) -> Mapping[str, Sequence[str]]:
        return {
            f"decoder.{name}": list(dict.fromkeys(piece.name for piece in parameter_pieces))
            for name, parameter_pieces in list_pieces(self.decoder).items()
        }

    @property
    def token_cost(self) -> TokenCost | None:
        return DecoderCost(self.shape).token_cost

    @property
    def vocab_size(self) -> int:
        return self.shape.vocab_size

    @property
    def hidden_size(self) -> int:
        return self.shape.hidden_size

    @property
    def max_positions(self) -> int:
        return self.shape.max_positions

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.shape.eos_ids

    def matrices(self) -> Mapping[str, Sequence[int]]:
        return {
            f"decoder.{name}": [len(piece.rows) for piece in pieces]
            for name, pieces in list_pieces(self.decoder).items()
            if name.startswith("layers.") and len(pieces[0].shape) == 2
        }

    @property
    def head_matrix(self) -> Tensor | None:
        return self.decoder.head_weight

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def packs_on_host(self) -> bool:
        return True

    @property
    def has_routers(self) -> bool:
        return bool(self.shape.sparse_layers)

    @property
    def checkpointing(self) -> bool:
        return self.decoder.checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.decoder.checkpointing = on

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        output_mask_T: Tensor | None = None,
    ) -> Tensor:
        device = next(self.parameters()).device
        packed = self._pack_inputs(
            tokens_T, positions_T, lengths, routing, output_mask_T=output_mask_T, device=device
        ).to(device)
        hidden = self.decoder(
            packed.tokens_U,
            packed.positions_U,
            packed.attend,
            route=packed.routing,
            output_index=packed.output_index_n,
        )
        return packed.unfold(hidden)

    def pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> PackedInputs:
        """Return the decoder's inputs for packed sequences, see `PackedInputs`."""
        return self._pack_inputs(tokens_T, positions_T, lengths, routing)

    def _pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None,
        *,
        output_mask_T: Tensor | None = None,
        device: torch.device | None = None,
    ) -> PackedInputs:
        """Call `packed_inputs.pack_inputs` with the policy's settings."""
        if routing is not None:
            routing.check(self.shape)
        return pack_inputs(
            tokens_T,
            positions_T,
            lengths,
            routing,
            output_mask_T=output_mask_T,
            shares_prefixes=self.shares_prefixes,
            device=device,
            uses_varlen=self.uses_varlen,
        )

    def logits(self, hidden_nd: Tensor) -> Tensor:
        weight_Vd = self.decoder.head_weight
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)
        with torch.autocast(hidden_nd.device.type, enabled=False):
            return hidden_nd.to(dtype) @ weight_Vd.to(dtype).T

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        return canonical_weights(self.decoder)

    def resolve_adapter_layers(self, lora: LoRAConfig) -> tuple[str, ...]:
        return resolve_decoder_targets(self.shape, lora)

    def attach(self, adapter: Adapter) -> None:
        lora.attach(self.decoder, adapter)
        self.adapter = adapter

    def merge(self) -> None:
        lora.merge(self.decoder)
        self.adapter = None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return lora.adapter_weights(self.decoder)

    def without_adapter(self) -> AbstractContextManager[None]:
        return lora.disable_adapters(self)

    def save(self, directory: Path, weights: Mapping[str, SavableTensor] | None = None) -> None:
        save_decoder(self.decoder, directory, weights=weights)
