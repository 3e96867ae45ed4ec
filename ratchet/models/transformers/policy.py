"""Run any causal language model of transformers as a policy.

Importing this file takes seconds, because it imports transformers.

T = tokens of packed sequences laid end to end, n = any of them, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ratchet.config.model_shape.lora_targets import resolve_target_modules
from ratchet.config.schema import LoRAConfig
from ratchet.errors import ConfigError, ModelError
from ratchet.models.flops import TokenCost
from ratchet.models.flops_transformers import estimate_token_cost
from ratchet.models.layers.expert_routing import Routing
from ratchet.models.lora import transformers as on_transformers
from ratchet.models.lora.decoder import Adapter
from ratchet.models.parallel.collectives import Group, all_reduce_sum
from ratchet.models.policy import UNLIMITED, PolicyModel
from ratchet.models.transformers.loading import refuse_missing_weights, translate_errors
from ratchet.models.transformers.tensor_parallel import REMEDY, TPPlan, divide_model
from ratchet.models.weights.hf_weights import SavableTensor, remove_stale_weights
from ratchet.utils.temp_dirs import TemporaryFolder

PROBE_LENGTHS = (5, 1, 7, 3)
# Factor on the tolerance for a divided model: it sums in another order, and gradients nearly cancel
# out. A wrong plan changes them far more.
PROBE_ROUNDING = 100


class TransformersPolicy(PolicyModel):
    """A policy that transformers runs.

    Packed sequences share a forward pass, separated by their positions, if a probe finds that the
    architecture keeps them independent; otherwise each runs alone (`packs` is False).

    Logits come from the model's own forward, its backbone replaced by given hidden states, so
    soft-capping, logit scales and biases apply whatever they are called. Dropout is off: a policy
    must score what it sampled.
    """

    def __init__(
        self, model: PreTrainedModel, *, saved_config: PreTrainedConfig | None = None
    ) -> None:
        """Wrap a model and probe it.

        saved_config: written by `save`; None: the model's own. Raises ModelError if the logits
        aren't a function of the backbone's hidden states.
        """
        super().__init__()
        self.model = model.eval()
        self.path = self.find_backbone(model)
        self.head_name = _head_name(model)
        self.saved_config = saved_config or model.config
        self.text_config: Any = model.config.get_text_config()
        self.size_of_vocabulary = model.get_parameter(self.head_name).shape[0]
        self.takes_positions = "position_ids" in inspect.signature(self.backbone.forward).parameters
        self._check_logits()
        self.packs = self.takes_positions and self._keeps_sequences_apart()

    @classmethod
    def load(
        cls,
        directory: Path,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        trust_remote_code: bool = False,
    ) -> TransformersPolicy:
        """Load a Hugging Face directory. Raises ModelError if transformers can't read it."""
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        with translate_errors(directory, "a causal language model"):
            saved_config = AutoConfig.from_pretrained(directory, **options)
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
            nn.Module.to(model, device)
            return cls(model, saved_config=saved_config)

    def find_backbone(self, model: PreTrainedModel) -> str:
        """Return the dotted path of the module whose output the head reads."""
        backbone = model.get_decoder()
        for path, module in model.named_modules():
            if module is backbone and path:
                return path
        raise ModelError(f"{type(model).__name__} has no backbone apart from its head")

    @property
    def backbone(self) -> nn.Module:
        return self.model.get_submodule(self.path)

    @property
    def vocab_size(self) -> int:
        return self.size_of_vocabulary

    @property
    def hidden_size(self) -> int:
        return int(self.text_config.hidden_size)

    @property
    def max_positions(self) -> int:
        return int(getattr(self.text_config, "max_position_embeddings", None) or UNLIMITED)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        generation = self.model.generation_config
        ids = getattr(generation, "eos_token_id", None)
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
                f"{type(self.model).__name__} has no activation checkpointing: switch it off for "
                "this model"
            )
        if on:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        # transformers checkpoints in training mode only; dropout is off in both modes.
        self.model.train(on)

    # --- tensor parallelism

    def plan(self, ranks: int) -> TPPlan:
        """Return the plan by which tensor parallelism divides the model.

        Raises ModelError if there is none, or if so many ranks can't have equal parts.
        """
        plan = TPPlan.of(self.model, self.model.tp_plan, self.head_name.removesuffix(".weight"))
        counts = {"query heads": "num_attention_heads", "KV heads": "num_key_value_heads"}
        heads = {what: getattr(self.text_config, key, None) for what, key in counts.items()}
        plan.check(
            self.model, ranks, {what: total for what, total in heads.items() if total is not None}
        )
        return plan

    def divide(self, group: Group, device: torch.device | str) -> None:
        """Keep this rank's part only, on the device.

        Raises ModelError if the ranks together don't compute the same as the whole model.
        """
        plan, whole = self.plan(group.size()), self._probe()
        self.divided = divide_model(self.model, plan, group)
        nn.Module.to(self.model, device)
        what = f"the plan of {type(self.model).__name__} for tensor parallelism"
        try:
            probe = self._probe()
        except (AttributeError, TypeError, RuntimeError) as error:
            raise ModelError(f"{what} can't be followed ({error}): {REMEDY}") from None
        for name, computed in probe.items():
            expected = whole[name].to(computed)
            if name == "logits" and self.divided.vocabulary is not None:
                rows = self.divided.vocabulary.rows
                expected = expected[:, rows.start : rows.stop]
            if name in self.divided.partial:
                computed = all_reduce_sum(computed, group)
            if name not in self.divided.blocks and not is_close(
                computed, expected, self.model.dtype, PROBE_ROUNDING
            ):
                raise ModelError(f"{what} changes what it computes ({name}): {REMEDY}")

    def _probe(self) -> dict[str, Tensor]:
        """Return hidden states, logits and the gradients of all vectors for a few tokens, by name.

        The gradient of the first layer's norm depends on all later layers.
        """
        tokens = self._probe_tokens(7)
        vectors = {
            name: parameter
            for name, parameter in self.model.named_parameters()
            if parameter.dim() == 1
        }
        with torch.enable_grad():
            hidden = self._run(tokens, torch.arange(7, device=tokens.device))
            # Not a sum of squares, which a final norm makes nearly constant.
            slope = (
                torch.arange(hidden.numel(), dtype=hidden.dtype, device=hidden.device)
                .cos()
                .view_as(hidden)
            )
            total = (hidden * slope).sum()
            grads = (
                torch.autograd.grad(total, list(vectors.values()), allow_unused=True)
                if vectors
                else ()
            )
        with torch.no_grad():
            outputs = {"hidden states": hidden.detach(), "logits": self.logits(hidden)}
        return outputs | {
            name: grad for name, grad in zip(vectors, grads, strict=True) if grad is not None
        }

    # --- the forward

    def hidden(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        lengths: Sequence[int],
        routing: Routing | None = None,
        *,
        read_T: Tensor | None = None,
    ) -> Tensor:
        assert routing is None, "the routers of a transformers model are its own"
        assert sum(lengths) == len(tokens_T), (
            f"{sum(lengths)} tokens in `lengths`, {len(tokens_T)} in `tokens_T`"
        )
        if self.packs:
            return self._run(tokens_T, positions_T)
        rows = zip(tokens_T.split(list(lengths)), positions_T.split(list(lengths)), strict=True)
        return torch.cat([self._run(tokens, positions) for tokens, positions in rows])

    def _run(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        # With a cache or a mask of ones, transformers would not separate packed sequences: they'd
        # attend to each other without an error.
        options: dict[str, Any] = {"attention_mask": None, "use_cache": False}
        if self.takes_positions:
            options["position_ids"] = positions_T[None]
        return self.backbone(input_ids=tokens_T[None], **options)[0][0]

    def logits(self, hidden_nd: Tensor) -> Tensor:
        dtype = torch.promote_types(self.model.dtype, torch.float32)
        with torch.autocast(hidden_nd.device.type, enabled=False):
            return self._head(hidden_nd.to(dtype))

    def _head(self, hidden_nd: Tensor) -> Tensor:
        head = _with_backbone(self.model, self.path, _Given(hidden_nd[None]))
        wide = {name: weight.to(hidden_nd.dtype) for name, weight in head.named_parameters()}
        token = torch.zeros(1, hidden_nd.shape[0], dtype=torch.int64, device=hidden_nd.device)
        return functional_call(head, wide, (), {"input_ids": token, "use_cache": False}).logits[0]

    # --- probes, at load

    def _check_logits(self) -> None:
        tokens = self._probe_tokens(7)
        with torch.no_grad():
            try:
                logits = self.model(input_ids=tokens[None], use_cache=False).logits[0]
                ours = self.logits(self._run(tokens, torch.arange(7, device=tokens.device)))
            except (AttributeError, TypeError, RuntimeError) as error:
                raise ModelError(
                    f"{type(self.model).__name__} can't be split into a backbone and a head: "
                    f"{error}"
                ) from None
        if not is_close(ours, logits, self.model.dtype):
            raise ModelError(
                f"{type(self.model).__name__}: logits aren't a function of its backbone's hidden "
                "states alone"
            )

    def _keeps_sequences_apart(self) -> bool:
        """Return True if packing changes hidden states by no more than rounding.

        Packed sequences are compared with separate ones, and with packs of other neighbours.
        Experts shared by all tokens of a forward cause rounding differences even without a leak.
        """
        rows = [self._probe_tokens(n) for n in PROBE_LENGTHS]
        other = [(row + 1) % self.vocab_size if i % 2 else row for i, row in enumerate(rows)]
        positions = torch.cat([torch.arange(n, device=rows[0].device) for n in PROBE_LENGTHS])
        starts = [sum(PROBE_LENGTHS[:i]) for i in range(len(PROBE_LENGTHS))]
        kept = torch.cat(
            [torch.arange(starts[i], starts[i] + PROBE_LENGTHS[i]) for i in range(0, len(rows), 2)]
        )
        with torch.no_grad():
            packed, perturbed = (
                self._run(torch.cat(tokens), positions) for tokens in (rows, other)
            )
            separate = torch.cat(
                [self._run(row, torch.arange(len(row), device=row.device)) for row in rows]
            )
        return is_close(perturbed[kept], packed[kept], self.model.dtype) and is_close(
            packed, separate, self.model.dtype
        )

    def _probe_tokens(self, n: int) -> Tensor:
        return (torch.arange(n, device=self.model.device) * 7919 + n) % self.vocab_size

    # --- weights

    def canonical_weights(self) -> Iterator[tuple[str, Tensor]]:
        return on_transformers.canonical_weights(self.model)

    def check_adapter(self, lora: LoRAConfig) -> tuple[str, ...]:
        if lora.base is not None:
            raise ConfigError(
                f"lora.base={lora.base} is for Ratchet's own decoder, and transformers runs this: "
                "remove it"
            )
        return resolve_target_modules(lora, on_transformers.list_linear_maps(self.layers()))

    def attach(self, adapter: Adapter) -> None:
        on_transformers.attach(self.model, adapter, self.check_adapter(adapter.lora))
        self.adapter = adapter

    def merge(self) -> None:
        on_transformers.merge(self.model)
        self.adapter = None

    def adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        return on_transformers.adapter_weights(self.model)

    def without_adapter(self) -> AbstractContextManager[None]:
        return on_transformers.disable_peft_adapters(self.model)

    def matrices(self) -> Mapping[str, Sequence[int]]:
        """Return the two-dimensional weights of the layers.

        Three-dimensional ones are left out: they may be experts or convolution kernels.
        """
        inside = {
            parameter
            for layer in self.layers()
            for parameter in layer.parameters()
            if parameter.dim() == 2
        }
        return {
            name: [len(parameter)]
            for name, parameter in self.named_parameters()
            if parameter in inside
        }

    @property
    def work(self) -> TokenCost | None:
        """The cost of a token in the whole model, without an adapter; None if it is divided."""
        if self.divided is not None:
            return None
        modules = (
            module for module in self.backbone.modules() if not isinstance(module, nn.Embedding)
        )
        added = set() if self.adapter is None else {parameter for _, parameter in self.trained()}
        weights = (
            p for module in modules for p in module.parameters(recurse=False) if p not in added
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


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy with every dropout rate 0, whatever the architecture calls it."""
    config = copy.deepcopy(config)
    for part in (
        config,
        *(inner for inner in vars(config).values() if isinstance(inner, PreTrainedConfig)),
    ):
        for key, value in vars(part).items():
            if isinstance(value, float) and ("drop" in key):
                setattr(part, key, 0.0)
    return config


def find_largest_module_list(module: nn.Module) -> list[nn.Module]:
    """Return the `ModuleList` with the most parameters; [] if there is none."""
    lists = [inner for inner in module.modules() if isinstance(inner, nn.ModuleList) and len(inner)]
    return (
        list(max(lists, key=lambda found: sum(p.numel() for p in found.parameters())))
        if lists
        else []
    )


def _head_name(model: PreTrainedModel) -> str:
    """Return the dotted name of the output embedding [V, d]."""
    head = model.get_output_embeddings()
    for path, module in model.named_modules():
        if module is head and path:
            return f"{path}.weight"
    raise ModelError(f"{type(model).__name__} has no output embedding: it isn't a language model")


class _Given(nn.Module):
    """A stand-in for a backbone that returns these hidden states for any input."""

    def __init__(self, hidden_1nd: Tensor) -> None:
        super().__init__()
        self.hidden_1nd = hidden_1nd

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return _Output(self.hidden_1nd)


class _Output:
    """A backbone's output; caches, router logits and all other fields are None."""

    def __init__(self, hidden_1nd: Tensor) -> None:
        self.last_hidden_state = hidden_1nd

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _with_backbone(model: nn.Module, path: str, backbone: nn.Module) -> nn.Module:
    """Return a shallow copy of `model` with another module at `path`; parameters are shared."""
    name, _, rest = path.partition(".")
    clone = copy.copy(model)
    child = model.get_submodule(name)
    replaced = _with_backbone(child, rest, backbone) if rest else backbone
    clone.__dict__["_modules"] = {**model._modules, name: replaced}
    return clone


def is_close(a: Tensor, b: Tensor, dtype: torch.dtype, times: float = 1) -> bool:
    """Return True if `a` equals `b` up to `times` the rounding of a model in `dtype`.

    Rounding is relative to the largest entry of `b`. A leak changes entries far more.
    """
    tolerance = (1e-5 if dtype.itemsize >= 4 else 3e-2) * times
    return bool((a.float() - b.float()).abs().max() <= tolerance * b.float().abs().max())
