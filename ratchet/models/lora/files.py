"""Adapters on disk, in peft's form: `adapter_config.json` and `adapter_model.safetensors`; and
which base one belongs to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from xxhash import xxh3_128

from ratchet.config.schema import LoRAConfig
from ratchet.errors import CheckpointError, MissingDependency, ModelError
from ratchet.models.lora.decoder import Adapter
from ratchet.models.weights.hf_weights import Savable
from ratchet.models.weights.weight_layout import PEFT
from ratchet.utils import safe_read
from ratchet.utils.atomic_files import atomic_path
from ratchet.utils.terminal_text import first_line

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
INITS: Mapping[str, bool | str] = {"kaiming": True, "gaussian": "gaussian"}  # in peft's words
# What of peft's changes the arithmetic, and has to be off here.
PLAIN = (
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "layer_replication",
    "lora_bias",
)


def require_peft() -> None:
    """Raises MissingDependency."""
    if find_spec("peft") is None:
        raise MissingDependency("peft", extra="lora", needed_for="a stage with lora")


def peft_config(adapter: Adapter, names: Sequence[str]) -> Any:
    """peft's `LoraConfig`. names: of the maps that have one."""
    require_peft()
    from peft import LoraConfig  # it loads transformers

    lora = adapter.lora
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType] (a whole number is what it says, not what it needs)
        lora_dropout=lora.dropout,
        target_modules=sorted(names),
        init_lora_weights=INITS[lora.init],  # pyright: ignore[reportArgumentType]
        use_rslora=lora.rslora,
        base_model_name_or_path=adapter.base or None,
        task_type="CAUSAL_LM",
    )


def save_adapter(
    directory: Path, adapter: Adapter, names: Sequence[str], weights: Mapping[str, Savable]
) -> None:
    """Writes what `peft.PeftModel.from_pretrained` reads, in float32. names: of the maps that have
    one. weights: by peft's names."""
    config = peft_config(adapter, names)
    config.inference_mode = True
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: weight.to("cpu", torch.float32, copy=True).contiguous()
        for name, weight in weights.items()
    }
    with atomic_path(directory / WEIGHTS) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    config.save_pretrained(str(directory))


@dataclass(frozen=True)
class Stored:
    """An adapter that was read. weights: on the CPU, by peft's names."""

    adapter: Adapter
    names: tuple[str, ...]
    weights: Mapping[str, Tensor]

    def check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """shapes: of a base's weights, by canonical name. Raises ModelError where the adapter is of
        another base."""
        rank = self.adapter.lora.rank
        for name, low_rank in self.weights.items():
            path, _, which = name.removeprefix(PEFT).rpartition(".lora_")
            shape = shapes.get(f"{path}.weight")
            if shape is None:
                raise ModelError(
                    f"the adapter's weight '{name}' is of a map that this model doesn't have: it "
                    "has another base"
                )
            wanted = (rank, shape[1]) if which.startswith("A") else (shape[0], rank)
            if tuple(low_rank.shape) != wanted:
                raise ModelError(
                    f"the adapter's weight '{name}' has shape {tuple(low_rank.shape)}, the base "
                    f"wants {wanted}"
                )


def load_adapter(directory: Path) -> Stored:
    """Raises ModelError where it is damaged, or more than A and B of linear maps."""
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
        reason = first_line(str(error))
        raise ModelError(
            f"{directory} is no adapter that peft reads ({CONFIG}, {WEIGHTS}): {reason}"
        ) from None
    if str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise ModelError(
            f"{directory} holds a {config.peft_type} adapter, and only LORA is known here"
        )
    more = [key for key in PLAIN if getattr(config, key, None)] + (
        [] if config.bias == "none" else ["bias"]
    )
    if more:
        raise ModelError(
            f"{directory}: the adapter has {more[0]}={getattr(config, more[0])!r}, which is not "
            "plain LoRA"
        )
    for name in weights:
        if not (name.startswith(PEFT) and name.endswith((".lora_A.weight", ".lora_B.weight"))):
            raise ModelError(
                f"{directory}: weight '{name}' is neither A nor B of a linear map: it is not plain "
                "LoRA"
            )
    names = tuple(sorted({name.split(".")[-3] for name in weights}))
    try:
        lora = LoRAConfig(
            rank=config.r,
            alpha=float(config.lora_alpha),
            target_modules=names,
            rslora=bool(config.use_rslora),
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(
            f"{directory / CONFIG} holds numbers that no adapter has: {first_line(str(error))}"
        ) from None
    return Stored(Adapter(lora, base=config.base_model_name_or_path or ""), names, weights)


def bit_sum(tensor: Tensor) -> int:
    """Of the numbers' bits, modulo 2^64: the sums of a tensor's blocks add up to its own, however
    it is divided."""
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return int(tensor.detach().contiguous().view(words).sum(dtype=torch.int64))


def fingerprint(sums: Mapping[str, int]) -> str:
    """Of a model's weights: the sums of their bits by name."""
    return xxh3_128(repr(sorted(sums.items())).encode()).hexdigest()


def check_base(directory: Path, saved: object, own: str) -> None:
    """Raises CheckpointError for a checkpoint of an adapter of another base, or of a model with
    other weights at rest."""
    if saved != own:
        raise CheckpointError(
            f"{directory} holds an adapter of another base, or what trains beside other weights at "
            f"rest (they are {saved}, "
            f"these {own}): resume with the model that the run began with"
        )
