"""Run any causal language model of transformers as a policy.

Importing this file takes seconds, because it imports transformers.

T = tokens of packed sequences, n = any selection of these tokens, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.lora_targets import resolve_target_modules
from ratchet.errors import ConfigError, ModelError
from ratchet.models.flops import TokenCost
from ratchet.models.flops_transformers import estimate_token_cost
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.lora import transformers as transformers_lora
from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.experts import (
    ExpertFactors,
    list_expert_parameters,
    resolve_expert_factors,
    strip_base_layers,
)
from ratchet.models.parallel.collectives import Group, all_reduce_max
from ratchet.models.parallel.stages import ModelStage
from ratchet.models.policy import UNLIMITED, PolicyModel
from ratchet.models.transformers import packed_attention
from ratchet.models.transformers.backbone_inputs import BackboneInputs
from ratchet.models.transformers.context_parallel import DividedAttention
from ratchet.models.transformers.expert_adapters import attach_adapter
from ratchet.models.transformers.expert_parallel import choose_experts_forward, find_stacked_experts
from ratchet.models.transformers.head import find_head_name, run_head
from ratchet.models.transformers.loading import (
    load_config,
    refuse_missing_weights,
    translate_errors,
    without_dropout,
)
from ratchet.models.transformers.modules import find_largest_module_list
from ratchet.models.transformers.packed_attention import set_packed_attention
from ratchet.models.transformers.probe import PROBE_LENGTHS, is_close, make_probe_states
from ratchet.models.transformers_settings import read_max_positions
from ratchet.models.weights.hf_weights import SavableTensor, remove_stale_weights
from ratchet.types import Medium
from ratchet.utils.temp_dirs import TemporaryFolder


class TransformersPolicy(PolicyModel):
    """A policy that transformers runs.

    Packed sequences share one forward pass, in which their positions separate them. A probe tests
    that the architecture keeps them independent. If it does not, each sequence runs alone (`packs`
    is False).

    Logits come from the model's own forward, in which a stand-in for the backbone returns the given
    hidden states. So soft-capping, logit scales and biases apply in every architecture. Dropout is
    off, because a policy must score the distribution from which it sampled.
    """

    # True if attention may get the lengths of packed sequences in place of a mask.
    may_pack_by_lengths: ClassVar[bool] = True
    packs_by_lengths = False  # True if it does; a probe has found it equal
    probe_images: Sequence[Medium] = ()  # two images for probes, if the model reads images
    # Path of the language model inside the backbone; "": the backbone is the language model.
    language_path = ""
    # Number of the first layers after which features of images are added to the hidden states.
    n_feature_layers = 0

    def __init__(
        self, model: PreTrainedModel, *, saved_config: PreTrainedConfig | None = None
    ) -> None:
        """Wrap a model and probe it.

        saved_config: the configuration that `save` writes; None: the model's.

        Raises ModelError if the logits depend on more than the backbone's hidden states.
        """
        super().__init__()
        self.model = model.eval()
        # The tensors of files that are no parameters, such as biases of routers. They never change.
        # All are kept, because a pipeline stage has only those of its layers.
        parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self._saved_buffers = {
            name: tensor
            for name, tensor in model.state_dict().items()
            if name not in parameter_names
        }
        self.backbone_path = self.find_backbone(model)
        self.head_name = find_head_name(model)
        self.saved_config = saved_config or model.config
        self.text_config: Any = model.config.get_text_config()
        self._vocab_size = model.get_parameter(self.head_name).shape[0]
        # What can have an adapter, in any pipeline stage: linear layers, and fused experts.
        self._linear_layers = transformers_lora.list_linear_layers(self.layers())
        self._expert_parameters = list_expert_parameters(model)
        self.divided_attention: DividedAttention | None = None
        self.takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters
        choose_experts_forward(model)
        set_packed_attention(model, enabled=False)  # a policy may have had the model before
        self._check_logits()
        # The pipeline stages on this rank; none if the model is not cut into stages.
        self.stages = nn.ModuleList()
        self.packs = self.takes_positions and self._keeps_sequences_apart()
        if self.packs and self.may_pack_by_lengths and set_packed_attention(model, enabled=True):
            self.packs_by_lengths = True
            self.packs_by_lengths = self._keeps_sequences_apart()
            set_packed_attention(model, enabled=self.packs_by_lengths)

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
        hf: Mapping[str, Any] | None = None,
    ) -> TransformersPolicy:
        """Load a Hugging Face directory. Raises ModelError if transformers can't read it.

        hf: Content of `config.json` to use in place of the file's; None: the file's.
        """
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        with translate_errors(directory, "a causal language model"):
            saved_config = load_config(directory, hf, trust_remote_code=trust_remote_code)
            config = without_dropout(saved_config)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                output_loading_info=True,
                **options,
            )
            model, loading = loaded
            refuse_missing_weights(directory, loading)
            policy = cls(model, saved_config=saved_config)
            # The constructor's probes run on the CPU in float32, before the model moves: on an
            # accelerator, rounding depends on the shapes, so packing would seem to change results.
            nn.Module.to(model, device)
            return policy

    def find_backbone(self, model: PreTrainedModel) -> str:
        """Return the dotted path of the backbone, the module whose output the head reads."""
        backbone = model.get_decoder()
        for path, module in model.named_modules():
            if module is backbone and path:
                return path
        raise ModelError(f"{type(model).__name__} has no backbone separate from its head")

    @property
    def backbone(self) -> nn.Module:
        return self.model.get_submodule(self.backbone_path)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def max_positions(self) -> int:
        return int(read_max_positions(self.text_config) or UNLIMITED)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        generation = self.model.generation_config
        ids = None if generation is None else generation.eos_token_id
        ids = self.text_config.eos_token_id if ids is None else ids
        return tuple(ids) if isinstance(ids, list) else () if ids is None else (int(ids),)

    @property
    def checkpointing(self) -> bool:
        return self.model.is_gradient_checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        if on == self.checkpointing:
            return
        if on and not self.model.supports_gradient_checkpointing:
            raise ModelError(
                f"{type(self.model).__name__} does not support activation checkpointing: set "
                "activation_checkpointing=false"
            )
        if on:
            options: dict[str, Any] = {"use_reentrant": False}
            if self.divided_attention is not None:
                options["context_fn"] = self.divided_attention.keep_split
            self.model.gradient_checkpointing_enable(options)
        else:
            self.model.gradient_checkpointing_disable()
        # transformers only checkpoints in training mode. Dropout is off in both modes.
        self.model.train(on)

    @property
    def local_stages(self) -> Sequence[ModelStage]:
        return [cast(ModelStage, stage) for stage in self.stages]

    @property
    def context_group(self) -> Group | None:
        return None if self.divided_attention is None else self.divided_attention.group

    # --- the forward

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        output_mask_T: Tensor | None = None,
    ) -> Tensor:
        assert routing is None, "router replay does not support transformers models"
        assert sum(lengths) == len(tokens_T), (
            f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
        )
        if self.packs or self.divided_attention is not None:
            return self._run_packed(self.pack_inputs(tokens_T, positions_T, lengths))
        rows = zip(tokens_T.split(list(lengths)), positions_T.split(list(lengths)), strict=True)
        n_unread = self.count_unread_rows(len(lengths))
        hidden_by_row = [self._run(tokens, positions) for tokens, positions in rows]
        return torch.cat([*hidden_by_row, *self.run_unread_rows(n_unread)])

    def count_unread_rows(self, n_rows: int) -> int:
        """Return how many more forwards another rank runs, if each of `n_rows` rows has its own.

        FSDP gathers weights in each forward, and again in its backward, so all ranks must run
        equally many. All of them call this before the first.
        """
        if self.forward_group is None:
            return 0
        most = all_reduce_max(torch.tensor([n_rows], device=self.model.device), self.forward_group)
        return int(most) - n_rows

    def run_unread_rows(self, n: int) -> list[Tensor]:
        """Run n forwards of a token that nothing reads, and return n times no hidden states."""
        token = torch.zeros(1, dtype=torch.int64, device=self.model.device)
        return [self._run(token, token)[:0] for _ in range(n)]

    def _run_packed(self, packed: BackboneInputs) -> Tensor:
        """Return the hidden states of packed sequences, from one forward."""
        n_tokens = len(packed.tokens_U)
        # A context-parallel rank without tokens computes one that nothing reads.
        padded = packed.pad(max(1, n_tokens))
        hidden = None
        for stage in self.local_stages:
            if hidden is None and stage.index.index:  # only a probe runs such a stage here
                hidden = make_probe_states(self, padded.tokens_U)
            hidden = stage(hidden, packed=padded)
        if hidden is None:
            hidden = self.run_backbone(padded)
        return packed.unfold(hidden[:n_tokens])

    def pack_inputs(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
    ) -> BackboneInputs:
        """Return the backbone's inputs for packed sequences; arguments as in `hidden`."""
        context_split = self.split_context(lengths)
        if context_split is not None:
            return BackboneInputs.from_split(tokens_T, positions_T, context_split)
        if not self.packs_by_lengths:
            return BackboneInputs(tokens_T, positions_T)
        return BackboneInputs.from_lengths(
            tokens_T, positions_T, lengths, uses_varlen=self.uses_varlen
        )

    def run_backbone(
        self,
        packed: BackboneInputs,
        states_Ud: Tensor | None = None,
        backbone: nn.Module | None = None,
    ) -> Tensor:
        """Return the hidden states [U, d].

        Args:
            packed: Packed sequences.
            states_Ud: Hidden states in place of the embeddings; None: embed the tokens.
            backbone: The part of the backbone to run; None: all of it.
        """
        inputs = (
            {"input_ids": packed.tokens_U[None]}
            if states_Ud is None
            else {"inputs_embeds": states_Ud[None]}
        )
        options = self._make_options(packed)
        return (self.backbone if backbone is None else backbone)(**inputs, **options)[0][0]

    def _make_options(self, packed: BackboneInputs) -> dict[str, Any]:
        """Return the backbone's arguments for the positions and attention of packed inputs.

        The attention of divided tokens gets their division without an argument.
        """
        if self.divided_attention is not None:
            self.divided_attention.split = packed.split
        # With a cache or a mask of ones, transformers would let packed sequences attend to each
        # other, without an error.
        options: dict[str, Any] = {"attention_mask": None, "use_cache": False}
        if packed.attend is not None:
            options[packed_attention.ARGUMENT] = packed.attend
        if self.takes_positions:
            options["position_ids"] = packed.positions_U.unsqueeze(-2)
        return options

    def _run(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Return the hidden states of one sequence [T, d]."""
        return self.run_backbone(BackboneInputs(tokens_T, positions_T))

    def add_zero_gradients(self, hidden_Ud: Tensor) -> Tensor:
        """Return the hidden states, connected to the trained weights that a batch may not use."""
        return hidden_Ud

    def logits(self, hidden_nd: Tensor) -> Tensor:
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        with torch.autocast(hidden_nd.device.type, enabled=False):
            return run_head(self.model, self.backbone_path, hidden_nd.to(dtype))

    # --- probes, at load

    def _check_logits(self) -> None:
        """Raise ModelError if `logits` of the hidden states differ from the model's logits."""
        tokens = self.make_probe_tokens(7)
        with torch.no_grad():
            try:
                logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
                recomputed = self.logits(self._run(tokens, torch.arange(7, device=tokens.device)))
            except (AttributeError, TypeError, RuntimeError) as error:
                raise ModelError(
                    f"{type(self.model).__name__} can't be split into a backbone and a head: "
                    f"{error}"
                ) from None
        if not is_close(recomputed, logits, self.model.dtype):
            raise ModelError(
                f"{type(self.model).__name__}: the logits depend on more than the hidden states of "
                "the backbone"
            )

    def _keeps_sequences_apart(self) -> bool:
        """True if packing changes hidden states by no more than rounding errors.

        Packed sequences are compared with separate ones, and with packs in which the neighbours
        differ. In a mixture of experts, tokens of a forward share matrix products, which causes
        rounding differences between packed and separate sequences.
        """
        rows = [self.make_probe_tokens(n) for n in PROBE_LENGTHS]
        changed_rows = [(row + 1) % self.vocab_size if i % 2 else row for i, row in enumerate(rows)]
        positions = torch.cat([torch.arange(n, device=rows[0].device) for n in PROBE_LENGTHS])
        starts = [sum(PROBE_LENGTHS[:i]) for i in range(len(PROBE_LENGTHS))]
        unchanged = torch.cat(
            [torch.arange(starts[i], starts[i] + PROBE_LENGTHS[i]) for i in range(0, len(rows), 2)]
        )
        with torch.no_grad():
            try:
                packed, perturbed = (
                    self._run_packed(self.pack_inputs(torch.cat(tokens), positions, PROBE_LENGTHS))
                    for tokens in (rows, changed_rows)
                )
            except (NotImplementedError, TypeError):  # it can't attend by lengths
                if not self.packs_by_lengths:
                    raise
                return False
            separate = torch.cat(
                [self._run(row, torch.arange(len(row), device=row.device)) for row in rows]
            )
        return is_close(perturbed[unchanged], packed[unchanged], self.model.dtype) and is_close(
            packed, separate, self.model.dtype
        )

    def make_probe_tokens(self, n: int) -> Tensor:
        """Return n different tokens [n], for a test of what the model computes."""
        return (torch.arange(n, device=self.model.device) * 7919 + n) % self.vocab_size

    # --- weights

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        return transformers_lora.canonical_weights(self.model)

    def resolve_adapter_layers(self, lora: LoRAConfig) -> tuple[str, ...]:
        if lora.base is not None:
            raise ConfigError(
                f"lora.base={lora.base} is for Ratchet's own decoder, but transformers runs this "
                "model: remove lora.base"
            )
        self.resolve_expert_factors(lora)  # refuses unknown names
        return resolve_target_modules(lora, self._linear_layers)

    def resolve_expert_factors(self, lora: LoRAConfig) -> Mapping[str, ExpertFactors]:
        return resolve_expert_factors(lora, self._expert_parameters)

    def attach(self, adapter: Adapter) -> None:
        names = self.resolve_adapter_layers(adapter.lora)
        self.tp_division, self.expert_division = attach_adapter(
            self.model,
            adapter,
            names,
            self.resolve_expert_factors(adapter.lora),
            self.tp_division,
            self.expert_division,
            within=self.language,
        )
        self.adapter = adapter

    @property
    def language(self) -> PreTrainedModel:
        """The language model without encoders: the part of the model that an adapter is for."""
        return self.model

    def merge(self) -> None:
        transformers_lora.merge(self.model)
        self.adapter = None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return transformers_lora.adapter_weights(self.model)

    def without_adapter(self) -> AbstractContextManager[None]:
        return transformers_lora.disable_peft_adapters(self.model)

    def matrices(self) -> Mapping[str, Sequence[int]]:
        """Return the number of rows of each two-dimensional weight of the layers, by name.

        Three-dimensional weights are left out, because they may be experts or convolution kernels.
        So are the stacked biases of experts.
        """
        # With the adapters around them.
        paths = map(strip_base_layers, find_stacked_experts(self.model))
        stacked = [self.model.get_submodule(path) for path in paths]
        expert_parameters = {parameter for module in stacked for parameter in module.parameters()}
        layer_matrices = {
            parameter
            for layer in self.layers()
            for parameter in layer.parameters()
            if parameter.dim() == 2 and parameter not in expert_parameters
        }
        return {
            name: [len(parameter)]
            for name, parameter in self.named_parameters()
            if parameter in layer_matrices
        }

    @property
    def token_cost(self) -> TokenCost | None:
        """The cost of a token, without an adapter; None if the model is divided over ranks."""
        if self.stages or self.tp_division is not None or self.expert_division is not None:
            return None
        modules = (
            module for module in self.backbone.modules() if not isinstance(module, nn.Embedding)
        )
        adapter_parameters = (
            set() if self.adapter is None else {p for _, p in self.trained_parameters()}
        )
        weights = (
            p
            for module in modules
            for p in module.parameters(recurse=False)
            if p not in adapter_parameters
        )
        return estimate_token_cost(
            weights, self.model.get_parameter(self.head_name), self.text_config
        )

    def layers(self) -> list[nn.Module]:
        """Return the repeated blocks of the backbone, which hold most of the weights."""
        return find_largest_module_list(self.backbone)

    def save(self, directory: Path, weights: Mapping[str, SavableTensor] | None = None) -> None:
        options: dict[str, Any] = {}
        if weights is None and self.adapter is not None:
            weights = dict(self.canonical_weights())
        if weights is not None:
            options["state_dict"] = {
                name: buffer.to("cpu", copy=True) for name, buffer in self._saved_buffers.items()
            } | {
                name: weight.to("cpu", self.model.dtype, copy=True)
                for name, weight in weights.items()
            }
        directory.mkdir(parents=True, exist_ok=True)
        with TemporaryFolder("partial", directory) as temporary:
            draft = temporary / "model"
            self.model.save_pretrained(draft, **options)
            self.saved_config.save_pretrained(draft)
            files = sorted(draft.iterdir())
            for path in files:
                path.replace(directory / path.name)
        remove_stale_weights(directory, {path.name for path in files})
