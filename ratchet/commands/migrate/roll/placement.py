"""Convert ROLL's accelerators and parallel sizes to a learner and a generator.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

import re
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import Conversion, Dropped, PeerConfig, Values

RANGE = re.compile(r"(?:list\()?range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*(\d+)\s*)?\)\)?")
LIST = re.compile(r"(?:list\()?\[([\d,\s]*)\]\)?")
MAX_DEVICES = 1_000_000  # maximum devices counted in one range


def count_accelerators(role: str, config: PeerConfig) -> int:
    """Return the number of accelerators of a role, at least 1.

    The role's device_mapping is a sum of Python ranges and lists. It is parsed, never executed.
    """
    key = f"{role}.device_mapping"
    mapping = config[key]
    if mapping is None:
        return 1
    if isinstance(mapping, list):
        return max(1, len(mapping))
    return max(1, sum(_count_devices(part.strip(), key) for part in str(mapping).split("+")))


def _count_devices(text: str, key: str) -> int:
    """Return the number of devices in one range or list. Raises InvalidValue for any other text."""
    if match := LIST.fullmatch(text):
        return len([device for device in match[1].split(",") if device.strip()])
    if (match := RANGE.fullmatch(text)) and len(text) < 100:
        devices = numbers.parse_range(match[1], match[2], match[3])
        return len(devices[:MAX_DEVICES])
    raise InvalidValue(
        f"{key} is {text[:40]!r}, and not of the form list(range(0,8)) or [0,1]: set learner, "
        "generator and cluster by hand"
    )


def parallel_size(role: str, part: str, config: PeerConfig) -> int:
    """Return one parallel size of a role, such as its tensor_model_parallel_size."""
    return config.whole(f"{role}.strategy_args.strategy_config.{part}", 1)


def data_ranks(role: str, config: PeerConfig) -> int:
    """Return a role's data-parallel size: its accelerators over its other parallel sizes."""
    parts = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    ranks_per_replica = 1
    for part in parts:
        ranks_per_replica *= parallel_size(role, part, config)
    ranks_per_replica *= config.whole(f"{role}.model_args.ulysses_size", 1)
    return numbers.quotient(
        count_accelerators(role, config),
        ranks_per_replica,
        f"{role}'s accelerators over its parallel sizes",
    )


def learner(role: str) -> Conversion:
    """Return a conversion of a role's strategy_name to the learner and its parallel sizes."""

    def convert(value: Any, config: PeerConfig) -> Any:
        if value not in ("megatron_train", "fsdp2_train"):
            return Dropped("learner.kind is local, dtensor (FSDP2) or megatron here")
        if value == "fsdp2_train":
            if count_accelerators(role, config) == 1:
                return Values(
                    {"learner.kind": "local"},
                    "one accelerator: the learner runs in the main process",
                )
            context = config.whole(f"{role}.model_args.ulysses_size", 1)
            return Values(
                {
                    "learner.kind": "dtensor",
                    "learner.dp_shard": data_ranks(role, config),
                    **({"learner.context_parallel": context} if context > 1 else {}),
                }
            )
        sizes = {
            f"learner.{part}_parallel": parallel_size(role, f"{part}_model_parallel_size", config)
            for part in ("tensor", "pipeline", "expert")
        }
        sizes["learner.context_parallel"] = parallel_size(role, "context_parallel_size", config)
        parallel_sizes = {key: size for key, size in sizes.items() if size > 1}
        return Values(
            {
                "learner.kind": "megatron",
                "learner.data_parallel": data_ranks(role, config),
                **parallel_sizes,
            }
        )

    return convert


def convert_generator(value: Any, config: PeerConfig) -> Any:
    """Convert vLLM and its parallel size to a generator, or to workers for several replicas."""
    if value != "vllm":
        return Dropped(
            "generator.kind is engine, vllm or hf here: the recipe uses the built-in engine instead"
        )
    keys, replicas = make_vllm("actor_infer", config)
    generator = {"kind": "workers", "workers": replicas, "worker": keys} if replicas > 1 else keys
    megatron = config["actor_train.strategy_args.strategy_name"] == "megatron_train"
    note = (
        "vLLM can't be colocated with learner.kind=megatron: both need accelerators of their own"
        if megatron
        else "if learner and vLLM share accelerators, set cluster: {colocated: true}"
    )
    return Values({"generator": generator}, note)


def make_vllm(role: str, config: PeerConfig) -> tuple[dict[str, Any], int]:
    """Return a role's vLLM engine as a generator's section, and the number of its replicas."""
    tensor_parallel = parallel_size(role, "tensor_parallel_size", config)
    keys: dict[str, Any] = {"kind": "vllm", "tensor_parallel": tensor_parallel}
    length = f"{role}.strategy_args.strategy_config.max_model_len"
    if config[length] is not None:
        keys["max_context"] = config.whole(length)
    return keys, max(1, count_accelerators(role, config) // tensor_parallel)
