"""Read and write LoRA adapters in peft's format, and fingerprint the base model of an adapter.

The files are `adapter_config.json` and `adapter_model.safetensors`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from xxhash import xxh3_128

from ratchet.config.lora import LoRAConfig
from ratchet.errors import CheckpointError, MissingDependency, ModelError
from ratchet.models.lora.decoder import Adapter, Factors
from ratchet.models.weights.hf_weights import SavableTensor
from ratchet.models.weights.tensor_files import save_tensors
from ratchet.models.weights.weight_layout import PEFT_PREFIX
from ratchet.utils import safe_read
from ratchet.utils.atomic_files import atomic_path
from ratchet.utils.terminal_text import get_first_line

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# Ratchet's name of an initialisation -> peft's value.
PEFT_INITS: Mapping[str, bool | str] = {"kaiming": True, "gaussian": "gaussian"}
# Settings of peft that must be off, because only plain LoRA is supported.
UNSUPPORTED_SETTINGS = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
# Initialisations of peft that leave the base's weights as they are. With any other, such as PiSSA,
# the adapter belongs to a base from which a part was subtracted.
PLAIN_INITS = (True, False, "gaussian", "orthogonal", "eva", "mica")


def require_peft() -> None:
    """Raise MissingDependency if peft is not installed."""
    if find_spec("peft") is None:
        raise MissingDependency("peft", extra="lora", needed_for="a stage with lora")


def peft_config(adapter: Adapter, target_modules: Sequence[str]) -> Any:
    """Return peft's `LoraConfig`; `target_modules` are the linear layers that have an adapter."""
    require_peft()
    from peft import LoraConfig  # imported late, because it imports transformers

    lora = adapter.lora
    return LoraConfig(
        r=lora.rank,
        # peft's annotation says int, but any number works.
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=sorted(target_modules),
        target_parameters=sorted(lora.target_parameters) or None,
        init_lora_weights=PEFT_INITS[lora.init],  # pyright: ignore[reportArgumentType]
        use_rslora=lora.rslora,
        base_model_name_or_path=adapter.base_model or None,
        task_type="CAUSAL_LM",
    )


def save_adapter(
    directory: Path,
    adapter: Adapter,
    target_modules: Sequence[str],
    weights: Mapping[str, SavableTensor],
) -> None:
    """Write an adapter in float32, for `peft.PeftModel.from_pretrained`.

    Args:
        target_modules: names of the linear layers that have an adapter.
        weights: the adapter's weights by peft's names.
    """
    config = peft_config(adapter, target_modules)
    config.inference_mode = True
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.to("cpu", torch.float32, copy=True).contiguous()
        for name, weight in weights.items()
    }
    with atomic_path(directory / WEIGHTS) as temporary:
        save_tensors(tensors, temporary, metadata={"format": "pt"})
    config.save_pretrained(str(directory))


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter read from files."""

    adapter: Adapter
    target_modules: tuple[str, ...]  # names of the linear layers that have an adapter
    weights: Mapping[str, Tensor]  # by peft's names, on the CPU

    @property
    def fused_paths(self) -> frozenset[str]:
        """The paths of the adapters of fused experts."""
        lora = self.adapter.lora
        return _find_fused_paths(self.weights, lora.rank) if lora.target_parameters else frozenset()

    def check_served(self, name: str) -> None:
        """Raise ModelError if the adapter is for fused experts, which only the policy's can be.

        name: its name in requests.
        """
        if self.adapter.lora.target_parameters:
            raise ModelError(
                f"adapter '{name}' is for fused experts (target_parameters), and an adapter beside "
                "the policy's can't be. Serve the merged model: ratchet convert BASE NEW "
                "--merge-lora ADAPTER"
            )

    def check(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        experts: Mapping[str, Factors] | None = None,
    ) -> None:
        """Raise ModelError if the adapter doesn't fit a base model.

        Args:
            shapes: shapes of the base's weights, by canonical name.
            experts: the factors of the base's experts for which the adapter has fused ones.
        """
        rank = self.adapter.lora.rank
        located = {factors.path for factors in (experts or {}).values()}
        fused = self.fused_paths
        for name, weight in self.weights.items():
            layer, factor = _split_name(name)
            if layer in located:
                continue
            if layer in fused:
                raise ModelError(
                    f"the adapter's weight '{name}' is for fused experts (target_parameters), "
                    "which this model doesn't have"
                )
            shape = shapes.get(f"{layer}.weight")
            if shape is None:
                raise ModelError(
                    f"the adapter's weight '{name}' is for a linear layer that this model doesn't "
                    "have: the adapter belongs to another base model"
                )
            expected = (rank, shape[1]) if factor.startswith("A") else (shape[0], rank)
            if tuple(weight.shape) != expected:
                raise ModelError(
                    f"the adapter's weight '{name}' has shape {tuple(weight.shape)}, but the base "
                    f"model needs {expected}"
                )


def _split_name(name: str) -> tuple[str, str]:
    """Return the path of a weight's layer, and the rest, which begins with A or B."""
    layer, _, factor = name.removeprefix(PEFT_PREFIX).rpartition(".lora_")
    return layer, factor


def _find_fused_paths(weights: Mapping[str, Tensor], rank: int) -> frozenset[str]:
    """Return the paths of the layers whose A has `rank` rows for each of several experts."""
    return frozenset(
        _split_name(name)[0]
        for name, weight in weights.items()
        if ".lora_A." in name and len(weight) != rank
    )


def load_adapter(directory: Path) -> StoredAdapter:
    """Return the adapter in a directory.

    Raises ModelError if it is damaged, or if it is not plain LoRA of linear layers and experts.
    """
    require_peft()
    from peft import PeftConfig

    try:
        for name in (CONFIG, WEIGHTS):
            safe_read.require_file(directory / name)
        if not isinstance(safe_read.read_json(directory / CONFIG), dict):
            raise ValueError(f"{CONFIG} holds no object")
        config: Any = PeftConfig.from_pretrained(str(directory))
        weights = load_file(directory / WEIGHTS)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, SafetensorError) as error:
        reason = get_first_line(str(error))
        raise ModelError(
            f"{directory} is not an adapter that peft can read ({CONFIG}, {WEIGHTS}): {reason}"
        ) from None
    if config.peft_type != "LORA":  # a text, or an enum of texts
        raise ModelError(
            f"{directory} holds a {config.peft_type} adapter, but only LORA is supported"
        )
    unsupported = [key for key in UNSUPPORTED_SETTINGS if getattr(config, key, None)]
    unsupported += [] if config.bias == "none" else ["bias"]
    unsupported += [] if config.init_lora_weights in PLAIN_INITS else ["init_lora_weights"]
    if unsupported:
        raise ModelError(
            f"{directory}: the adapter has {unsupported[0]}={getattr(config, unsupported[0])!r}, "
            "which is not plain LoRA: merge the adapter into its base model with peft, and use the "
            "merged model"
        )
    for name in weights:
        if not (
            name.startswith(PEFT_PREFIX) and name.endswith((".lora_A.weight", ".lora_B.weight"))
        ):
            raise ModelError(
                f"{directory}: weight '{name}' is neither the A nor the B of a linear layer, so "
                "this is not plain LoRA"
            )
    target_parameters = tuple(sorted(config.target_parameters or ()))
    fused = _find_fused_paths(weights, config.r) if target_parameters else frozenset()
    layers = {_split_name(name)[0] for name in weights} - fused
    target_modules = tuple(sorted({path.rpartition(".")[2] for path in layers}))
    try:
        lora = LoRAConfig(
            rank=config.r,
            alpha=float(config.lora_alpha),
            target_modules=target_modules,
            target_parameters=target_parameters,
            rslora=bool(config.use_rslora),
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(
            f"{directory / CONFIG} has impossible numbers: {get_first_line(str(error))}"
        ) from None
    return StoredAdapter(
        Adapter(lora, base_model=config.base_model_name_or_path or ""), target_modules, weights
    )


def sum_bits(tensor: Tensor) -> int:
    """Return the sum of a tensor's bit patterns, modulo 2^64.

    The sums of a tensor's shards add up to the sum of the whole tensor, however it is sharded.
    """
    bits_dtype = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return int(tensor.detach().contiguous().view(bits_dtype).sum(dtype=torch.int64))


def fingerprint_weights(sums: Mapping[str, int]) -> str:
    """Return a hash of a model's weights, from the bit sum of each weight by name."""
    return xxh3_128(repr(sorted(sums.items())).encode()).hexdigest()


def check_base(directory: Path, saved: object, current: str) -> None:
    """Raise CheckpointError if a checkpoint's frozen weights differ from the model's.

    Args:
        saved: The fingerprint in the checkpoint.
        current: The fingerprint of the model.
    """
    if saved != current:
        raise CheckpointError(
            f"{directory} was saved with another base model: its frozen weights have the "
            f"fingerprint {saved}, those of this model {current}. Resume with the model that the "
            "run began with."
        )
