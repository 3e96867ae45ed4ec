"""Convert NeMo RL's accelerators and parallel sizes to a learner, a generator and a cluster.

"there" in a note means NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.table import Conversion, Dropped, Inert, PeerConfig, Values, only_if

GENERATION = "policy.generation"
DTENSOR = "policy.dtensor_cfg"
MEGATRON = "policy.megatron_cfg"
# The parallel dimensions of a Megatron learner.
PARALLEL_DIMENSIONS = ("tensor", "pipeline", "expert", "context")


def uses_megatron(config: PeerConfig) -> bool:
    return config.flag(f"{MEGATRON}.enabled")


def explain_disabled(backend: str) -> str:
    """Return the reason why the keys of a backend have no effect."""
    return f"{backend} is not enabled there"


def when_megatron(condition: bool, convert: Conversion | None = None) -> Conversion:
    """Return the conversion, limited to files that enable Megatron.

    Args:
        condition: False limits the conversion to files that do not enable Megatron.
        convert: The conversion; None copies the value.
    """
    return only_if(
        lambda config: uses_megatron(config) == condition,
        convert,
        explain_disabled("megatron_cfg" if condition else "dtensor_cfg"),
    )


def count_gpus(config: PeerConfig) -> int:
    """Return the number of accelerators of the whole cluster."""
    return config.whole("cluster.gpus_per_node", 1) * config.whole("cluster.num_nodes", 1)


def generates_separately(config: PeerConfig) -> bool:
    """Return True if the generator has accelerators of its own (is not colocated)."""
    key = f"{GENERATION}.colocated.enabled"
    return config[key] is not None and not config.flag(key)


def count_learner_gpus(config: PeerConfig) -> int:
    """Return the number of accelerators without those of a separate generator."""
    if not generates_separately(config):
        return count_gpus(config)
    per_node = config.whole("cluster.gpus_per_node", 1)
    nodes = config.whole("cluster.num_nodes", 1)
    resources = f"{GENERATION}.colocated.resources"
    generator_per_node = config.whole(f"{resources}.gpus_per_node", per_node)
    generator_nodes = config.whole(f"{resources}.num_nodes", 1 if nodes == 1 else 0, 0)
    return max(1, count_gpus(config) - generator_per_node * generator_nodes)


def data_parallel_size(config: PeerConfig, ranks_per_replica: int) -> int:
    """Return the data-parallel size, if each replica has `ranks_per_replica` accelerators."""
    return numbers.quotient(
        count_learner_gpus(config),
        ranks_per_replica,
        "the learner's accelerators over its parallel sizes",
    )


def dtensor(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value) or uses_megatron(config):
        return Inert(
            explain_disabled("dtensor_cfg")
            if not numbers.flag(value)
            else "megatron_cfg is enabled there"
        )
    if count_learner_gpus(config) == 1:
        return Values(
            {"learner.kind": "local"}, "one accelerator: the learner runs in the main process"
        )
    tensor, context = (
        config.whole(f"{DTENSOR}.{part}_parallel_size", 1) for part in ("tensor", "context")
    )
    sizes = {"tensor_parallel": tensor, "context_parallel": context}
    return Values(
        {
            "learner.kind": "dtensor",
            "learner.dp_shard": data_parallel_size(config, tensor * context),
            **{f"learner.{part}": size for part, size in sizes.items() if size > 1},
        }
    )


def megatron_learner(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert(explain_disabled("megatron_cfg"))
    sizes = {
        part: config.whole(
            f"{MEGATRON}.{part}{'' if part == 'context' else '_model'}_parallel_size", 1
        )
        for part in PARALLEL_DIMENSIONS
    }
    return Values(
        {
            "learner.kind": "megatron",
            "learner.data_parallel": data_parallel_size(
                config, sizes["tensor"] * sizes["pipeline"] * sizes["context"]
            ),
            **{f"learner.{part}_parallel": size for part, size in sizes.items() if size > 1},
        }
    )


def stage_layers(value: Any, config: PeerConfig) -> Any:
    """Convert the number of layers of the first or the last pipeline stage."""
    if config.whole(f"{MEGATRON}.pipeline_model_parallel_size", 1) == 1:
        return Inert("the pipeline has one rank there, with all layers")
    return numbers.whole(value, least=1)


def flag_if_distributed(value: Any, config: PeerConfig) -> Any:
    """Convert a flag that only exists for a learner on several accelerators."""
    return (
        numbers.flag(value)
        if count_learner_gpus(config) > 1
        else Inert("learner.kind=local, on one accelerator, has no such key")
    )


def convert_generator(value: Any, config: PeerConfig) -> Any:
    if value != "vllm":
        return Dropped(
            "generator.kind is engine, vllm or hf here: the recipe uses the built-in engine instead"
        )
    keys: dict[str, Any] = {
        "kind": "vllm",
        "tensor_parallel": config.whole(f"{GENERATION}.vllm_cfg.tensor_parallel_size", 1),
    }
    if (pipeline := config.whole(f"{GENERATION}.vllm_cfg.pipeline_parallel_size", 1)) > 1:
        keys["pipeline_parallel"] = pipeline
    if config[f"{GENERATION}.vllm_cfg.max_model_len"] is not None:
        keys["max_context"] = config.whole(f"{GENERATION}.vllm_cfg.max_model_len")
    is_apart = generates_separately(config)
    devices = count_gpus(config) - count_learner_gpus(config) if is_apart else count_gpus(config)
    replicas = max(1, devices // (keys["tensor_parallel"] * pipeline))
    generator = {"kind": "workers", "workers": replicas, "worker": keys} if replicas > 1 else keys
    colocation = {} if is_apart else {"cluster.colocated": True}
    return Values({"generator": generator, **colocation})


def convert_nodes(value: Any, config: PeerConfig) -> Any:
    count = numbers.whole(value, least=1)
    if count == 1:
        return Inert("one node: cluster.kind=local uses all its accelerators")
    gpus = config.whole("cluster.gpus_per_node", 1)
    return Values({"cluster.kind": "ray", "cluster.nodes": count, "cluster.gpus_per_node": gpus})
