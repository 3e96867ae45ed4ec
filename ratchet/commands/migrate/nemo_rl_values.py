"""The conversions of values in a NeMo RL configuration to values of a recipe.

"there" and "theirs" in a note mean NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import Misread
from ratchet.commands.migrate.table import Convert, Idle, PeerConfig, Sets, Without, when

GENERATION, DTENSOR, MEGATRON = "policy.generation", "policy.dtensor_cfg", "policy.megatron_cfg"
TIS = "loss_fn.truncated_importance_sampling"
# the parallel dimensions of a Megatron learner
SCALES = ("tensor", "pipeline", "expert", "context")
RISES = "counted in batches there, in optimizer steps here (x minibatches)"


def tokenizer(value: Any, config: PeerConfig) -> Any:
    return (
        Idle("the model's own, as here by default")
        if value == config["policy.model_name"]
        else value
    )


def megatron(config: PeerConfig) -> bool:
    return config.flag(f"{MEGATRON}.enabled")


def off(backend: str) -> str:
    """Return the reason why the keys of a backend have no effect."""
    return f"{backend} is not enabled there"


def _estimator_flag(name: str, config: PeerConfig) -> bool:
    """Return a flag of the advantage estimator.

    The key in `grpo.adv_estimator` overrides the one in `grpo`.
    """
    section_key = f"grpo.adv_estimator.{name}"
    return config.flag(f"grpo.{name}" if config[section_key] is None else section_key)


def advantage(value: Any, config: PeerConfig) -> Any:
    scale = "std" if _estimator_flag("normalize_rewards", config) else "none"
    scale_key = {"algorithm.advantage.scale": scale}
    if not _estimator_flag("use_leave_one_out_baseline", config):
        return Sets({"algorithm.kind": "grpo", **scale_key})
    note = (
        "a leave-one-out baseline is rloo here, over the group's own standard deviation; "
        "theirs "
        "leaves the answer out there too"
    )
    return Sets({"algorithm.kind": "rloo", **scale_key}, note)


def estimator(value: Any, config: PeerConfig) -> Any:
    if value == "grpo":
        return Idle("read into algorithm.kind with its baseline")
    if value == "reinforce_plus_plus":
        baseline = "group" if config.flag("grpo.adv_estimator.minus_baseline") else "none"
        return Sets(
            {"algorithm.kind": "reinforce_pp", "algorithm.advantage": {"baseline": baseline}}
        )
    if value == "gdpo":
        return Sets({"algorithm.kind": "gdpo", "algorithm.advantage": {}})
    return Without(
        "there are grpo, gdpo and reinforce_plus_plus: the recipe has grpo's or rloo's baseline"
    )


def updates(config: PeerConfig) -> int:
    """Return the number of optimizer steps per batch."""
    answers = config.whole("grpo.num_prompts_per_step") * config.whole(
        "grpo.num_generations_per_prompt"
    )
    return numbers.quotient(
        answers,
        config.whole("policy.train_global_batch_size"),
        "a batch over train_global_batch_size",
    )


def minibatches(value: Any, config: PeerConfig) -> int:
    return updates(config)


def clip(value: Any, config: PeerConfig) -> Any:
    if config.flag("loss_fn.disable_ppo_ratio"):
        return Sets({"algorithm.loss.kind": "reinforce"})
    low, high = config.number("loss_fn.ratio_clip_min"), config.number("loss_fn.ratio_clip_max")
    if config.flag("loss_fn.use_cispo"):
        # ratio_clip_min=1 means that there is no lower bound.
        lower_bound = {"algorithm.loss.clip_low": low if low < 1 else None}
        return Sets(
            {"algorithm.loss.kind": "cispo", **lower_bound, "algorithm.loss.clip_high": high}
        )
    kind = "gspo" if config.flag("loss_fn.sequence_level_importance_ratios") else "ppo"
    return Sets(
        {
            "algorithm.loss.kind": kind,
            "algorithm.loss.clip_low": low,
            "algorithm.loss.clip_high": high,
        },
        "ratio_clip_min is clip_low, ratio_clip_max is clip_high",
    )


def kl(value: Any, config: PeerConfig) -> Any:
    coef = numbers.real(value)
    if not coef:
        return Sets({"algorithm.kl.coef": 0.0})
    if config.flag("loss_fn.use_kl_in_reward"):
        return Sets({"algorithm.kl.coef": coef, "algorithm.kl.place": "reward"}, "k1 of each token")
    kind = config["loss_fn.reference_policy_kl_type"]
    note = (
        "of KL(policy || reference), as theirs, but without their clamps of the log-ratio (20) "
        "and of the penalty (10)"
    )
    return Sets({"algorithm.kl.coef": coef, "algorithm.kl.estimator": kind}, note)


def correction(value: Any, config: PeerConfig) -> Any:
    """Convert truncated importance sampling between policy and sampler.

    A ratio outside of [min, max] is clamped (tis) or masked (icepop, seq-mask-tis).
    """
    if not numbers.flag(value):
        return Idle("off there: algorithm.correction is null")
    weight = "sequence" if config.flag("loss_fn.sequence_level_importance_ratios") else "token"
    kind = config[f"{TIS}_type"] or "tis"
    level = {"tis": "none", "icepop": weight, "seq-mask-tis": "geometric"}.get(kind)
    if level is None:
        return Without(
            f"{TIS}_type={kind}: algorithm.correction has weights and masks by token, turn, "
            "sequence and geometric"
        )
    low, high = (
        None if config[key] is None else config.number(key)
        for key in (f"{TIS}_ratio_min", f"{TIS}_ratio")
    )
    if level == "none" or high is None:
        lower_bound = {} if low is None or high is None else {"weight_low": low}
        note = "" if high is not None else "without a bound, as there: set weight_high"
        return Sets(
            {"algorithm.correction": {"weight": weight, **lower_bound, "weight_high": high}}, note
        )
    if low is None:
        raise Misread(
            f"{TIS}_ratio_min is not set, and {kind} needs it: set algorithm.correction by hand"
        )
    mask_correction = {
        "weight": weight,
        "weight_high": None,
        "mask": level,
        "mask_low": low,
        "mask_high": high,
        "mask_denominator": "all",
    }
    return Sets({"algorithm.correction": mask_correction})


def overlong(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Idle("off there")
    section = "grpo.reward_shaping"
    if config[f"{section}.stop_properly_penalty_coef"] is not None:
        return Without(
            "scales what a cut-off answer earns: algorithm.truncated, or a reward of yours"
        )
    length = config.whole(f"{section}.max_response_length")
    penalty = {
        "kind": "overlong_penalty",
        "max_length": length,
        "buffer": config.whole(f"{section}.overlong_buffer_length"),
        "factor": numbers.real(config[f"{section}.overlong_buffer_penalty"]),
    }
    return Sets(
        {"algorithm.shaping": [penalty]},
        "never below -factor here (DAPO, eq. 13); theirs goes on with the length",
    )


def gpus(config: PeerConfig) -> int:
    """Return the number of accelerators of the whole cluster."""
    return config.whole("cluster.gpus_per_node", 1) * config.whole("cluster.num_nodes", 1)


def separate(config: PeerConfig) -> bool:
    """True if generation has its own accelerators, apart from the learner's."""
    key = f"{GENERATION}.colocated.enabled"
    return config[key] is not None and not config.flag(key)


def learner_accelerators(config: PeerConfig) -> int:
    """Return the number of accelerators that train: all, less those of separate generation."""
    if not separate(config):
        return gpus(config)
    per_node, nodes = config.whole("cluster.gpus_per_node", 1), config.whole("cluster.num_nodes", 1)
    resources = f"{GENERATION}.colocated.resources"
    generator_per_node = config.whole(f"{resources}.gpus_per_node", per_node)
    generator_nodes = config.whole(f"{resources}.num_nodes", 1 if nodes == 1 else 0, 0)
    return max(1, gpus(config) - generator_per_node * generator_nodes)


def ranks(config: PeerConfig, ways: int) -> int:
    """Return the number of data-parallel ranks, each of which has `ways` accelerators."""
    return numbers.quotient(
        learner_accelerators(config), ways, "the learner's accelerators over its parallel sizes"
    )


def dtensor(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value) or megatron(config):
        return Idle(
            off("dtensor_cfg") if not numbers.flag(value) else "megatron_cfg is enabled there"
        )
    if learner_accelerators(config) == 1:
        return Sets(
            {"learner.kind": "local"}, "one accelerator: the learner is in the run's own process"
        )
    tensor, context = (
        config.whole(f"{DTENSOR}.{part}_parallel_size", 1) for part in ("tensor", "context")
    )
    sizes = {"tensor_parallel": tensor, "context_parallel": context}
    return Sets(
        {
            "learner.kind": "dtensor",
            "learner.dp_shard": ranks(config, tensor * context),
            **{f"learner.{part}": size for part, size in sizes.items() if size > 1},
        }
    )


def megatron_learner(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Idle(off("megatron_cfg"))
    sizes = {
        part: config.whole(
            f"{MEGATRON}.{part}{'' if part == 'context' else '_model'}_parallel_size", 1
        )
        for part in SCALES
    }
    return Sets(
        {
            "learner.kind": "megatron",
            "learner.data_parallel": ranks(
                config, sizes["tensor"] * sizes["pipeline"] * sizes["context"]
            ),
            **{f"learner.{part}_parallel": size for part, size in sizes.items() if size > 1},
        }
    )


def when_megatron(condition: bool, how: Convert | None = None) -> Convert:
    """Return the conversion `how`, limited to files that enable Megatron.

    Args:
        condition: False limits it to files that do not enable Megatron.
    """
    return when(
        lambda config: megatron(config) == condition,
        how,
        off("megatron_cfg" if condition else "dtensor_cfg"),
    )


def spread(value: Any, config: PeerConfig) -> Any:
    """Convert a flag that only a learner on several accelerators has."""
    return (
        numbers.flag(value)
        if learner_accelerators(config) > 1
        else Idle("learner.kind=local, on one accelerator, has no such key")
    )


def convert_generator(value: Any, config: PeerConfig) -> Any:
    if value != "vllm":
        return Without(
            "generator.kind is engine, vllm or hf here: the recipe has the engine that is built in"
        )
    keys: dict[str, Any] = {
        "kind": "vllm",
        "tensor_parallel": config.whole(f"{GENERATION}.vllm_cfg.tensor_parallel_size", 1),
    }
    if (pipeline := config.whole(f"{GENERATION}.vllm_cfg.pipeline_parallel_size", 1)) > 1:
        keys["pipeline_parallel"] = pipeline
    if config[f"{GENERATION}.vllm_cfg.max_model_len"] is not None:
        keys["max_context"] = config.whole(f"{GENERATION}.vllm_cfg.max_model_len")
    is_separate = separate(config)
    devices = gpus(config) - learner_accelerators(config) if is_separate else gpus(config)
    copies = max(1, devices // (keys["tensor_parallel"] * pipeline))
    generator = {"kind": "workers", "workers": copies, "worker": keys} if copies > 1 else keys
    colocation = {} if is_separate or megatron(config) else {"cluster.colocated": True}
    note = (
        "vLLM needs accelerators of its own beside learner.kind=megatron: lower data_parallel or "
        "workers"
        if megatron(config) and not is_separate
        else ""
    )
    return Sets({"generator": generator, **colocation}, note)


def convert_nodes(value: Any, config: PeerConfig) -> Any:
    count = numbers.whole(value, least=1)
    if count == 1:
        return Idle("one node: cluster.kind=local, with every accelerator that it sees")
    per_node = config.whole("cluster.gpus_per_node", 1)
    return Sets({"cluster.kind": "ray", "cluster.nodes": count, "cluster.gpus_per_node": per_node})


def batches(value: Any, config: PeerConfig) -> int:
    """Return the number of optimizer steps for a number of batches.

    NeMo RL's scheduler counts batches. A file without batch sizes counts as one optimizer step per
    batch.
    """
    has_batch_sizes = (
        config["grpo.num_prompts_per_step"] is not None
        and config["policy.train_global_batch_size"] is not None
    )
    return numbers.whole(value, least=0) * (updates(config) if has_batch_sizes else 1)


def warmup(value: Any, config: PeerConfig) -> Any:
    """Convert a chain of torch's schedulers: a warm-up, then a constant rate or a cosine.

    An item without a name has `milestones`, which should repeat the step where the warm-up ends.
    """
    chain = value if isinstance(value, list) else [value]
    parts = [part for part in chain if isinstance(part, Mapping)]
    # the arguments of each scheduler, by the name of its class
    kinds = {
        str(part["name"]).rpartition(".")[2]: part.get("kwargs") or {}
        for part in parts
        if "name" in part
    }
    values: dict[str, Any] = {}
    notes = [RISES]
    if "LinearLR" in kinds:
        values["optimizer.warmup_steps"] = batches(kinds["LinearLR"].get("total_iters", 5), config)
        start = numbers.number(kinds["LinearLR"].get("start_factor", 1 / 3), "start_factor")
        notes.append(f"the rate rises from 0 here, from {start:g} x lr there")
        if numbers.number(kinds["LinearLR"].get("end_factor", 1.0), "end_factor") != 1:
            return Without(
                "an end_factor other than 1: set optimizer.lr, warmup_steps and schedule"
            )
    if "CosineAnnealingLR" in kinds:
        values["optimizer.schedule"] = "cosine"
        values["optimizer.min_lr_ratio"] = _min_lr_ratio(
            kinds["CosineAnnealingLR"].get("eta_min", 0), config
        )
        notes.append(
            "the cosine ends with the steps here, after "
            f"T_max={kinds['CosineAnnealingLR'].get('T_max')} batches there"
        )
    if (
        "ConstantLR" in kinds
        and numbers.number(kinds["ConstantLR"].get("factor", 1 / 3), "factor") != 1
    ):
        return Without(
            "a ConstantLR with a factor other than 1: set optimizer.lr, warmup_steps and schedule"
        )
    if set(kinds) - {"LinearLR", "ConstantLR", "CosineAnnealingLR"} or not values:
        return Without(
            "set optimizer.warmup_steps and optimizer.schedule (constant, linear, cosine or wsd)"
        )
    ends = [end for part in parts if "name" not in part for end in part.get("milestones", ())]
    if ends and [numbers.whole(end, "milestones") for end in ends] != [
        _total_iters(kinds.get("LinearLR", {}).get("total_iters"))
    ]:
        notes.append(
            f"milestones {ends} are not where the warm-up ends: what follows begins at its end here"
        )
    return Sets(values, "; ".join(notes))


def _total_iters(value: Any) -> Any:
    """Return the `total_iters` of a scheduler, None if it is not set."""
    return value if value is None else numbers.whole(value, "total_iters")


def _min_lr_ratio(value: Any, config: PeerConfig) -> Any:
    """Return the ratio of a cosine's last learning rate to its first."""
    end = numbers.number(value, "eta_min")
    return end / config.number("policy.optimizer.kwargs.lr") if end else 0.0


def optimizer(value: Any, config: PeerConfig) -> Any:
    name = str(value).rpartition(".")[2].lower()
    if name == "adam" and config["policy.optimizer.kwargs.weight_decay"]:
        return Sets(
            {"optimizer.kind": "adamw"},
            "weight decay is AdamW's here, apart from the gradient's statistics",
        )
    return (
        "adamw"
        if name in ("adamw", "adam")
        else Without("optimizer.kind has adamw, adamw8bit and muon")
    )


def lora(how: Convert | None = None) -> Convert:
    """Return the conversion `how`, limited to files that enable LoRA."""
    return when(
        lambda config: config.flag(f"{DTENSOR}.lora_cfg.enabled"),
        how,
        "lora_cfg.enabled is false there",
    )


def targets(value: Any, config: PeerConfig) -> Any:
    key = f"{DTENSOR}.lora_cfg.match_all_linear"
    matches_all = config[key] is None or config.flag(key)
    return "all-linear" if matches_all or not value else shared.listed(value, config)


def rows(value: Any, config: PeerConfig) -> Any:
    """Convert the training data. The path of a file overrides `value`, the name of its reader."""
    return shared.rows(
        config["data.train.data_path"] or config["data.train_data_path"] or value, config
    )


def column(usual: str) -> Convert:
    """Return a conversion that names the data's column for the environment's `usual` one."""
    return lambda value, config: Sets({f"environment.columns.{usual}": value})


def convert_project(tracker: str) -> Convert:
    """Return a conversion of a tracker's switch, which sets all trackers that are enabled."""

    def how(value: Any, config: PeerConfig) -> Any:
        trackers = [name for name in shared.TRACKERS if config.flag(f"logger.{name}_enabled")]
        if not numbers.flag(value):
            return Idle("off there")
        project = {
            name: config[f"logger.{name}.project"] or config[f"logger.{name}.experiment_name"]
            for name in trackers
        }
        return [
            {
                "kind": name,
                **(
                    {"experiment" if name == "mlflow" else "project": project[name]}
                    if project[name]
                    else {}
                ),
            }
            for name in trackers
        ]

    return how


def sft_coef(value: Any, config: PeerConfig) -> float:
    """Return the coefficient of the SFT loss relative to the preference loss."""
    return numbers.number(value) / config.number("dpo.preference_loss_weight")


def advantage_clip(value: Any, config: PeerConfig) -> Any:
    low, high = (config[f"grpo.advantage_clip_{side}"] for side in ("low", "high"))
    if low is None or high is None or numbers.number(low) != -numbers.number(high):
        return Without(
            f"algorithm.advantage_clip bounds both sides alike: {low} and {high} are not"
        )
    return numbers.real(high)
