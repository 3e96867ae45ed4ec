"""Define what a learner requires of a language model, and implement it for the built-in decoder.

T = tokens of packed sequences laid end to end, n = a subset of them, d = hidden size,
V = vocabulary size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.lora_targets import resolve_decoder_targets
from ratchet.config.schema import LoRAConfig
from ratchet.models.decoder import Decoder
from ratchet.models.flops import DecoderCost, TokenCost
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.layers.packed_inputs import PackedInputs, pack_inputs, pack_read_inputs
from ratchet.models.lora import decoder as lora
from ratchet.models.lora.decoder import Adapter, is_adapter_parameter, merge_lazily
from ratchet.models.parallel.tensor_parallel import VocabParallelLogits
from ratchet.models.transformers.tensor_parallel import TPDivision
from ratchet.models.weights.hf_weights import SavableTensor, canonical_weights, save_decoder
from ratchet.models.weights.weight_layout import list_pieces

UNLIMITED = 2**31 - 1  # `max_positions` of a model whose configuration names no limit


class PolicyModel(nn.Module, ABC):
    """A language model that a learner can train."""

    # How the architecture's own plan divided the model over tensor-parallel ranks. None if the
    # model is whole, and for the built-in decoder, which has its own shards.
    divided: TPDivision | None = None
    # The adapter that is trained instead of the model's own weights; None: the weights are.
    adapter: Adapter | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The number of rows of the output embedding over all ranks. Token ids are below it."""

    @property
    @abstractmethod
    def hidden_size(self) -> int:
        """The width of the final hidden states."""
        ...

    @property
    @abstractmethod
    def max_positions(self) -> int:
        """The longest sequence, in tokens."""

    @property
    @abstractmethod
    def eos_ids(self) -> tuple[int, ...]:
        """The tokens that end a completion, from the model's own configuration."""

    @abstractmethod
    def matrices(self) -> Mapping[str, Sequence[int]]:
        """Return the matrices that the layers multiply hidden states by.

        The keys are parameter names on this rank. The values are the numbers of rows of the
        matrices in that parameter, in order: a fused parameter has several. Embeddings and the
        language head are left out.
        """

    @property
    def work(self) -> TokenCost | None:
        """The arithmetic of one text token's forward pass; None if it can't be determined."""
        return None

    @property
    def head_matrix(self) -> Tensor | None:
        """The head's matrix [V, d], in any dtype; None if `logits` is more than a product with
        it.
        """
        return None

    @property
    def shares_prefixes(self) -> bool:
        """True if `hidden` computes a prefix once that several sequences share."""
        return False

    @property
    def routes(self) -> bool:
        """True if the model has expert routers that `hidden` can replay and monitor."""
        return False

    @property
    def reads_media(self) -> bool:
        """True if `hidden` accepts media (see `ratchet.models.transformers.multimodal_policy`)."""
        return False

    @property
    def vocabulary(self) -> VocabParallelLogits | None:
        """The division of the vocabulary over ranks; None if this rank computes all logits."""
        return None if self.divided is None else self.divided.vocabulary

    @property
    @abstractmethod
    def checkpointing(self) -> bool:
        """True if each layer's activations are recomputed in the backward pass instead of kept."""

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
        read_T: Tensor | None = None,
    ) -> Tensor:
        """Return the final hidden states [T, d]. Each sequence is computed independently of the
        others.

        Args:
            positions_T: positions of the tokens, restarting at 0 in each sequence.
            lengths: tokens of each sequence, each at least 1; they sum to T.
            routing: replay and monitoring of the T tokens' experts, if the model `routes`.
            read_T: bool; True for the tokens whose states the caller reads; None: all. The other
                states may be any finite numbers, so a model need not compute them.
        """

    def forward(self, *inputs: Any, **options: Any) -> Tensor:
        """Return `hidden(...)`.

        Call it instead of `hidden` where torch's module hooks must run: FSDP gathers the weights
        in one.
        """
        return self.hidden(*inputs, **options)

    @abstractmethod
    def logits(self, hidden_nd: Tensor) -> Tensor:
        """Return the logits of the next token [n, V] in float32 (float64 for float64 models).

        They have this precision even under autocast: a bfloat16 head errs by about 1e-2 nats per
        token, as much as a whole policy step changes.
        """

    @abstractmethod
    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, detached tensor that shares the parameter's memory), each
        weight once.

        The adapter's weights are left out.
        """

    # --- an adapter

    @abstractmethod
    def check_adapter(self, lora: LoRAConfig) -> tuple[str, ...]:
        """Return the names of the linear maps that an adapter would adapt.

        Raises ConfigError if the model lacks a linear map that `lora` names.
        """

    @abstractmethod
    def attach(self, adapter: Adapter) -> None:
        """Add the adapter and freeze all other weights. This does not change the outputs."""

    @abstractmethod
    def merge(self) -> None:
        """Add the adapter to the weights, unfreeze them, and remove the adapter."""

    @abstractmethod
    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (peft's name, detached tensor that shares the parameter's memory), each weight
        once.
        """

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[None]:
        """Switch the adapter off inside the context."""

    def trained(self) -> list[tuple[str, nn.Parameter]]:
        """Return the (name, parameter) pairs that an update changes: the adapter's if there is one,
        otherwise all.
        """
        return [
            (name, p)
            for name, p in self.named_parameters()
            if self.adapter is None or is_adapter_parameter(name)
        ]

    def resting(self) -> frozenset[str]:
        """Return the names of the canonical weights that no update changes."""
        return (
            frozenset()
            if self.adapter is None
            else frozenset(name for name, _ in self.canonical_weights())
        )

    def merged_weights(self) -> Mapping[str, SavableTensor]:
        """Return the canonical weights with the adapter merged into them."""
        weights = dict(self.canonical_weights())
        if self.adapter is None:
            return weights
        return merge_lazily(weights, dict(self.adapter_weights()), self.adapter.lora.scale)

    @abstractmethod
    def save(self, directory: Path, weights: Mapping[str, SavableTensor] | None = None) -> None:
        """Write a Hugging Face directory. Each file is written atomically.

        Args:
            weights: all weights by canonical name; None: the model's own.
        """


class DecoderPolicy(PolicyModel):
    """The built-in decoder as a policy."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    @property
    def shape(self) -> DecoderConfig:
        """The shape of the whole model, not of a shard."""
        return self.decoder.config

    @property
    def work(self) -> TokenCost:
        return DecoderCost(self.shape).work

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
        layers = {
            name: parameter_pieces
            for name, parameter_pieces in list_pieces(self.decoder).items()
            if name.startswith("layers.")
        }
        return {
            f"decoder.{name}": [len(piece.rows) for piece in parameter_pieces]
            for name, parameter_pieces in layers.items()
            if len(parameter_pieces[0].shape) == 2
        }

    @property
    def head_matrix(self) -> Tensor | None:
        return self.decoder.head_weight

    @property
    def shares_prefixes(self) -> bool:
        return True

    @property
    def routes(self) -> bool:
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
        read_T: Tensor | None = None,
    ) -> Tensor:
        if read_T is None or routing is not None or not read_T.any():
            feed = self.feed(tokens_T, positions_T, lengths, routing)
        else:
            feed = pack_read_inputs(
                tokens_T, positions_T, lengths, read_T, shares=self.shares_prefixes
            )
        hidden = self.decoder(
            feed.tokens_U, feed.positions_U, feed.attend, route=feed.routing, read=feed.read_U
        )
        return feed.unfold(hidden)

    def feed(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> PackedInputs:
        """Return the inputs that the decoder computes for these sequences, see `PackedInputs`."""
        if routing is not None:
            routing.check(self.shape)
        return pack_inputs(tokens_T, positions_T, lengths, routing, shares=self.shares_prefixes)

    def logits(self, hidden_nd: Tensor) -> Tensor:
        weight_Vd = self.decoder.head_weight
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)
        with torch.autocast(hidden_nd.device.type, enabled=False):
            return hidden_nd.to(dtype) @ weight_Vd.to(dtype).T

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        return canonical_weights(self.decoder)

    def check_adapter(self, lora: LoRAConfig) -> tuple[str, ...]:
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
