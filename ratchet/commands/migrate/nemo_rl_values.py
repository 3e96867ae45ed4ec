"""Convert values of a NeMo RL configuration to values of a recipe.

A function of (value, config) converts the key of a row in `nemo_rl`. "there" in a note means
NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import Conversion, Dropped, Inert, PeerConfig, Values, only_if

GENERATION, DTENSOR, MEGATRON = "policy.generation", "policy.dtensor_cfg", "policy.megatron_cfg"
TIS = "loss_fn.truncated_importance_sampling"
# The parallel dimensions of a Megatron learner.
PARALLEL_DIMENSIONS = ("tensor", "pipeline", "expert", "context")
WARMUP_NOTE = "counts batches there and optimizer steps here (x minibatches)"


def tokenizer(value: Any, config: PeerConfig) -> Any:
    return (
        Inert("the model's own tokenizer is the default here")
        if value == config["policy.model_name"]
        else value
    )


def uses_megatron(config: PeerConfig) -> bool:
    return config.flag(f"{MEGATRON}.enabled")


def explain_disabled(backend: str) -> str:
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
        return Values({"algorithm.kind": "grpo", **scale_key})
    note = (
        "a leave-one-out baseline is rloo here; the standard deviation is over the whole group "
        "here, and leaves the answer out there"
    )
    return Values({"algorithm.kind": "rloo", **scale_key}, note)


def estimator(value: Any, config: PeerConfig) -> Any:
    if value == "grpo":
        return Inert("algorithm.kind is set by the key of the baseline")
    if value == "reinforce_plus_plus":
        baseline = "group" if config.flag("grpo.adv_estimator.minus_baseline") else "none"
        return Values(
            {"algorithm.kind": "reinforce_pp", "algorithm.advantage": {"baseline": baseline}}
        )
    if value == "gdpo":
        return Values({"algorithm.kind": "gdpo", "algorithm.advantage": {}})
    return Dropped(
        "only grpo, gdpo and reinforce_plus_plus are converted: the recipe has the baseline of "
        "grpo or rloo"
    )


def updates_per_batch(config: PeerConfig) -> int:
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
    return updates_per_batch(config)


def clip(value: Any, config: PeerConfig) -> Any:
    if config.flag("loss_fn.disable_ppo_ratio"):
        return Values({"algorithm.loss.kind": "reinforce"})
    low, high = config.number("loss_fn.ratio_clip_min"), config.number("loss_fn.ratio_clip_max")
    if config.flag("loss_fn.use_cispo"):
        # ratio_clip_min=1 means that there is no lower bound.
        lower_bound = {"algorithm.loss.clip_low": low if low < 1 else None}
        return Values(
            {"algorithm.loss.kind": "cispo", **lower_bound, "algorithm.loss.clip_high": high}
        )
    kind = "gspo" if config.flag("loss_fn.sequence_level_importance_ratios") else "ppo"
    return Values(
        {
            "algorithm.loss.kind": kind,
            "algorithm.loss.clip_low": low,
            "algorithm.loss.clip_high": high,
        },
        "ratio_clip_min becomes clip_low, ratio_clip_max becomes clip_high",
    )


def kl(value: Any, config: PeerConfig) -> Any:
    coef = numbers.real(value)
    if not coef:
        return Values({"algorithm.kl.coef": 0.0})
    if config.flag("loss_fn.use_kl_in_reward"):
        return Values(
            {"algorithm.kl.coef": coef, "algorithm.kl.place": "reward"}, "k1 of each token"
        )
    kind = config["loss_fn.reference_policy_kl_type"]
    note = (
        "the KL(policy || reference) as there, but without the clamps of the log-ratio (20) and of "
        "the penalty (10)"
    )
    return Values({"algorithm.kl.coef": coef, "algorithm.kl.estimator": kind}, note)


def correction(value: Any, config: PeerConfig) -> Any:
    """Convert truncated importance sampling between policy and sampler.

    A ratio outside of [min, max] is clamped (tis) or masked (icepop, seq-mask-tis).
    """
    if not numbers.flag(value):
        return Inert("off there: algorithm.correction is null")
    weight = "sequence" if config.flag("loss_fn.sequence_level_importance_ratios") else "token"
    kind = config[f"{TIS}_type"] or "tis"
    level = {"tis": "none", "icepop": weight, "seq-mask-tis": "geometric"}.get(kind)
    if level is None:
        return Dropped(
            f"{TIS}_type={kind}: algorithm.correction has only weights and masks at the levels "
            "token, turn, sequence and geometric"
        )
    low, high = (
        None if config[key] is None else config.number(key)
        for key in (f"{TIS}_ratio_min", f"{TIS}_ratio")
    )
    if level == "none" or high is None:
        lower_bound = {} if low is None or high is None else {"weight_low": low}
        note = "" if high is not None else "has no upper bound, as there: set weight_high"
        return Values(
            {"algorithm.correction": {"weight": weight, **lower_bound, "weight_high": high}}, note
        )
    if low is None:
        raise InvalidValue(
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
    return Values({"algorithm.correction": mask_correction})


def overlong_penalty(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert("off there")
    section = "grpo.reward_shaping"
    if config[f"{section}.stop_properly_penalty_coef"] is not None:
        return Dropped(
            "scales the reward of a truncated answer: set algorithm.truncated, or write a reward"
        )
    length = config.whole(f"{section}.max_response_length")
    penalty = {
        "kind": "overlong_penalty",
        "max_length": length,
        "buffer": config.whole(f"{section}.overlong_buffer_length"),
        "factor": numbers.real(config[f"{section}.overlong_buffer_penalty"]),
    }
    return Values(
        {"algorithm.shaping": [penalty]},
        "is never below -factor here (DAPO, eq. 13); there it falls further with the length",
    )


def count_gpus(config: PeerConfig) -> int:
    """Return the number of accelerators of the whole cluster."""
    return config.whole("cluster.gpus_per_node", 1) * config.whole("cluster.num_nodes", 1)


def generates_separately(config: PeerConfig) -> bool:
    """Return True if the generator has accelerators of its own (is not colocated)."""
    key = f"{GENERATION}.colocated.enabled"
    return config[key] is not None and not config.flag(key)


def count_learner_gpus(config: PeerConfig) -> int:
    """Return the number of the learner's accelerators: all, minus those of a separate generator."""
    if not generates_separately(config):
        return count_gpus(config)
    per_node, nodes = config.whole("cluster.gpus_per_node", 1), config.whole("cluster.num_nodes", 1)
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


def when_megatron(condition: bool, convert: Conversion | None = None) -> Conversion:
    """Return the conversion, limited to files that enable Megatron.

    Args:
        condition: False limits it to files that do not enable Megatron.
    """
    return only_if(
        lambda config: uses_megatron(config) == condition,
        convert,
        explain_disabled("megatron_cfg" if condition else "dtensor_cfg"),
    )


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
            "generator.kind is engine, vllm or hf here: the recipe has the built-in engine"
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
    colocation = {} if is_apart or uses_megatron(config) else {"cluster.colocated": True}
    note = (
        "vLLM can't be colocated with learner.kind=megatron: lower data_parallel or workers, so "
        "that both fit"
        if uses_megatron(config) and not is_apart
        else ""
    )
    return Values({"generator": generator, **colocation}, note)


def convert_nodes(value: Any, config: PeerConfig) -> Any:
    count = numbers.whole(value, least=1)
    if count == 1:
        return Inert("one node: cluster.kind=local uses all its accelerators")
    gpus = config.whole("cluster.gpus_per_node", 1)
    return Values({"cluster.kind": "ray", "cluster.nodes": count, "cluster.gpus_per_node": gpus})


def batches(value: Any, config: PeerConfig) -> int:
    """Return the number of optimizer steps for a number of batches.

    NeMo RL's scheduler counts batches. A file without batch sizes counts as one optimizer step per
    batch.
    """
    has_batch_sizes = (
        config["grpo.num_prompts_per_step"] is not None
        and config["policy.train_global_batch_size"] is not None
    )
    return numbers.whole(value, least=0) * (updates_per_batch(config) if has_batch_sizes else 1)


def _counts_steps(section: str, config: PeerConfig) -> bool:
    """True unless `max_num_steps` is unset, or so large that `max_num_epochs` ends training."""
    steps, epochs = config[f"{section}.max_num_steps"], config[f"{section}.max_num_epochs"]
    count = 0 if steps is None else numbers.number(steps)
    return count > 0 and (epochs is None or count < shared.UNLIMITED_STEPS)


def steps(section: str) -> Conversion:
    def convert(value: Any, config: PeerConfig) -> Any:
        return numbers.whole(value) if _counts_steps(section, config) else Inert("epochs count")

    return convert


def passes(section: str) -> Conversion:
    def convert(value: Any, config: PeerConfig) -> Any:
        if _counts_steps(section, config):
            return Dropped("max_num_steps is taken: set passes instead if they end first")
        return shared.passes(value)

    return convert


def warmup(value: Any, config: PeerConfig) -> Any:
    """Convert a chain of torch's schedulers: a warm-up, then a constant rate or a cosine.

    An item without a name has `milestones`, which should repeat the step where the warm-up ends.
    """
    chain = value if isinstance(value, list) else [value]
    parts = [part for part in chain if isinstance(part, Mapping)]
    # The arguments of each scheduler, by the name of its class.
    kwargs = {
        str(part["name"]).rpartition(".")[2]: part.get("kwargs") or {}
        for part in parts
        if "name" in part
    }
    values: dict[str, Any] = {}
    notes = [WARMUP_NOTE]
    if "LinearLR" in kwargs:
        values["optimizer.warmup_steps"] = batches(kwargs["LinearLR"].get("total_iters", 5), config)
        start = numbers.number(kwargs["LinearLR"].get("start_factor", 1 / 3), "start_factor")
        notes.append(f"the learning rate rises from 0 here, from {start:g} x lr there")
        if numbers.number(kwargs["LinearLR"].get("end_factor", 1.0), "end_factor") != 1:
            return Dropped(
                "has an end_factor other than 1: set optimizer.lr, warmup_steps and schedule"
            )
    if "CosineAnnealingLR" in kwargs:
        values["optimizer.schedule"] = "cosine"
        values["optimizer.min_lr_ratio"] = _min_lr_ratio(
            kwargs["CosineAnnealingLR"].get("eta_min", 0), config
        )
        notes.append(
            "the cosine ends with the last step here, after "
            f"T_max={kwargs['CosineAnnealingLR'].get('T_max')} batches there"
        )
    if (
        "ConstantLR" in kwargs
        and numbers.number(kwargs["ConstantLR"].get("factor", 1 / 3), "factor") != 1
    ):
        return Dropped(
            "has a ConstantLR with a factor other than 1: set optimizer.lr, warmup_steps, schedule"
        )
    if set(kwargs) - {"LinearLR", "ConstantLR", "CosineAnnealingLR"} or not values:
        return Dropped(
            "set optimizer.warmup_steps and optimizer.schedule (constant, linear, cosine or wsd)"
        )
    milestones = [end for part in parts if "name" not in part for end in part.get("milestones", ())]
    if milestones and [numbers.whole(end, "milestones") for end in milestones] != [
        _total_iters(kwargs.get("LinearLR", {}).get("total_iters"))
    ]:
        notes.append(
            f"milestones {milestones} are not the end of the warm-up, at which the next schedule "
            "begins here"
        )
    return Values(values, "; ".join(notes))


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
        return Values({"optimizer.kind": "adamw"}, "weight decay is decoupled here (AdamW)")
    return (
        "adamw"
        if name in ("adamw", "adam")
        else Dropped("optimizer.kind has adamw, adamw8bit and muon")
    )


def lora(convert: Conversion | None = None) -> Conversion:
    """Return the conversion, limited to files that enable LoRA."""
    return only_if(
        lambda config: config.flag(f"{DTENSOR}.lora_cfg.enabled"),
        convert,
        "lora_cfg.enabled is false there",
    )


def targets(value: Any, config: PeerConfig) -> Any:
    key = f"{DTENSOR}.lora_cfg.match_all_linear"
    matches_all = config[key] is None or config.flag(key)
    return "all-linear" if matches_all or not value else shared.as_list(value, config)


def rows(value: Any, config: PeerConfig) -> Any:
    """Convert the training data. The path of a data file overrides `value`, a dataset's name."""
    return shared.training_data(
        config["data.train.data_path"] or config["data.train_data_path"] or value, config
    )


def column(column_name: str) -> Conversion:
    """Return a conversion of the data's name for the environment's column `column_name`."""
    return lambda value, config: Values({f"environment.columns.{column_name}": value})


def convert_project(tracker: str) -> Conversion:
    """Return a conversion of a tracker's switch, which sets all enabled trackers."""

    def convert(value: Any, config: PeerConfig) -> Any:
        trackers = [name for name in shared.TRACKERS if config.flag(f"logger.{name}_enabled")]
        if not numbers.flag(value):
            return Inert("off there")
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

    return convert


def sft_coef(value: Any, config: PeerConfig) -> float:
    """Return the coefficient of the SFT loss relative to the preference loss."""
    return numbers.number(value) / config.number("dpo.preference_loss_weight")


def advantage_clip(value: Any, config: PeerConfig) -> Any:
    low, high = (config[f"grpo.advantage_clip_{side}"] for side in ("low", "high"))
    if low is None or high is None or numbers.number(low) != -numbers.number(high):
        return Dropped(
            f"algorithm.advantage_clip is one bound for both sides, but these are {low} and {high}"
        )
    return numbers.real(high)
