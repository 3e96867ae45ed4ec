"""Convert ROLL's accelerators and parallel sizes to a learner and a generator.

"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

import re
from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import (
    Conversion,
    Dropped,
    Inert,
    PeerConfig,
    Values,
    only_if,
)

RANGE = re.compile(r"(?:list\()?range\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?(?:,\s*(\d+)\s*)?\)\)?")
LIST = re.compile(r"(?:list\()?\[([\d,\s]*)\]\)?")
MAX_DEVICES = 1_000_000  # maximum devices counted in one range
# Repetitions in Megatron's pipeline layouts, such as (tt|)*29 and t*3.
REPETITIONS = (re.compile(r"\(([EtmL|]+)\)\*([0-9]{1,3})"), re.compile(r"([EtmL|])\*([0-9]{1,3})"))
MAX_LAYOUT = 10_000  # maximum characters of a layout, before and after its repetitions


def count_accelerators(role: str, config: PeerConfig) -> int:
    """Return the number of accelerators of a role, at least 1."""
    return max(1, len(_list_devices(role, config)))


def _list_devices(role: str, config: PeerConfig) -> list[int]:
    """Return the accelerators of a role by their numbers; [] if it names none.

    The role's device_mapping is a sum of Python ranges and lists. It is parsed, never executed.
    """
    key = f"{role}.device_mapping"
    mapping = config[key]
    if mapping is None:
        return []
    if isinstance(mapping, list):
        return [numbers.whole(device) for device in mapping]
    parts = str(mapping).split("+")
    return [device for part in parts for device in _parse_devices(part.strip(), key)]


def _parse_devices(text: str, key: str) -> list[int]:
    """Return the devices of one range or list. Raises InvalidValue for any other text."""
    if match := LIST.fullmatch(text):
        return [numbers.whole(part.strip()) for part in match[1].split(",") if part.strip()]
    if (match := RANGE.fullmatch(text)) and len(text) < 100:
        devices = numbers.parse_range(match[1], match[2], match[3])
        return list(devices[:MAX_DEVICES])
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


def _when_pipelined(role: str, convert: Conversion) -> Conversion:
    """Return the conversion, limited to roles that train with several Megatron pipeline stages."""
    return only_if(
        lambda config: (
            config[f"{role}.strategy_args.strategy_name"] == "megatron_train"
            and parallel_size(role, "pipeline_model_parallel_size", config) > 1
        ),
        convert,
        "no Megatron pipeline of several ranks trains there",
    )


def stage_layers(role: str) -> Conversion:
    """Return a conversion of the number of layers of a role's first or last pipeline stage."""
    return _when_pipelined(role, lambda value, config: numbers.whole(value, least=1))


def stage_layout(role: str) -> Conversion:
    """Return a conversion of a role's pipeline layout, such as "Et|tt*2|tL"."""

    def convert(value: Any, config: PeerConfig) -> Any:
        layers = _count_stage_layers(str(value))
        ranks = parallel_size(role, "pipeline_model_parallel_size", config)
        if layers is None or len(layers) != ranks or 0 in layers:
            return Dropped(
                "a pipeline rank has one number of layers here, at least 1: set "
                "learner.stage_layers by hand"
            )
        if len(set(layers)) == 1:
            return Inert("all stages have as many layers, as by default")
        return Values({"learner.stage_layers": layers})

    return _when_pipelined(role, convert)


def _count_stage_layers(layout: str) -> list[int] | None:
    """Return the layers of each stage of a layout; None for layers of other kinds or no layout."""
    layout = re.sub(r"[,\s]", "", layout[:MAX_LAYOUT])
    for repetition in REPETITIONS:
        length = sum(
            len(match[1]) * numbers.whole(match[2]) - len(match[0])
            for match in repetition.finditer(layout)
        )
        if len(layout) + length > MAX_LAYOUT:
            return None
        layout = repetition.sub(lambda match: match[1] * numbers.whole(match[2]), layout)
    if re.fullmatch(r"E[t|]*L", layout) is None:
        return None
    return [stage.count("t") for stage in layout.split("|")]


def convert_generator(value: Any, config: PeerConfig) -> Any:
    """Convert vLLM and its parallel size to a generator, or to workers for several replicas."""
    if value != "vllm":
        return Dropped(
            "generator.kind is engine, vllm or hf here: the recipe uses the built-in engine instead"
        )
    keys, replicas = make_vllm("actor_infer", config)
    generator = {"kind": "workers", "workers": replicas, "worker": keys} if replicas > 1 else keys
    train_devices = _list_devices("actor_train", config)
    if set(train_devices).isdisjoint(_list_devices("actor_infer", config)):
        return Values({"generator": generator})
    return Values(
        {"generator": generator, "cluster.colocated": True},
        "learner and vLLM take turns on the accelerators that both have, as there",
    )


def make_vllm(role: str, config: PeerConfig) -> tuple[dict[str, Any], int]:
    """Return a role's vLLM engine as a generator's section, and the number of its replicas."""
    tensor_parallel = parallel_size(role, "tensor_parallel_size", config)
    keys: dict[str, Any] = {"kind": "vllm", "tensor_parallel": tensor_parallel}
    length = f"{role}.strategy_args.strategy_config.max_model_len"
    if config[length] is not None:
        keys["max_context"] = config.whole(length)
    return keys, max(1, count_accelerators(role, config) // tensor_parallel)
