"""Convert values of TRL's configurations to values of a recipe.

Functions of (value, config) are the converters in the tables of the modules `trl` and
`training_arguments`. "there" in a note means TRL; "here" means Ratchet.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import (
    Conversion,
    Dropped,
    Inert,
    PeerConfig,
    Values,
    choose,
    only_if,
)

CORRECTION = "vllm_importance_sampling"
ADAMW_NAMES = (
    "adamw_hf",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_apex_fused",
)
ADAMW_8BIT_NAMES = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit")
OPTIMIZERS = dict.fromkeys(ADAMW_NAMES, "adamw") | dict.fromkeys(ADAMW_8BIT_NAMES, "adamw8bit")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def answers_per_step(config: PeerConfig) -> int:
    """Return the number of answers in an optimizer step of one process."""
    return config.whole("per_device_train_batch_size") * config.whole("gradient_accumulation_steps")


def answers_per_batch(config: PeerConfig) -> int:
    """Return the number of answers in a generation batch. One process is assumed."""
    if config["generation_batch_size"] is not None:
        return config.whole("generation_batch_size")
    steps = (
        "gradient_accumulation_steps"
        if config["steps_per_generation"] is None
        else "steps_per_generation"
    )
    return config.whole("per_device_train_batch_size") * config.whole(steps)


def prompts_per_batch(value: Any, config: PeerConfig) -> int:
    return numbers.quotient(
        answers_per_batch(config),
        config.whole("num_generations"),
        "answers of a batch over num_generations",
    )


def minibatches(config: PeerConfig) -> int:
    return numbers.quotient(
        answers_per_batch(config),
        answers_per_step(config),
        "answers of a batch over those of an optimizer step",
    )


def set_minibatches(value: Any, config: PeerConfig) -> Values:
    """Return the keys of mini-batches. As in TRL, answers are shuffled before a batch is split."""
    count = minibatches(config)
    return Values(
        {
            "algorithm.minibatches": count,
            **({"algorithm.minibatches_of": "attempts"} if count > 1 else {}),
        }
    )


def updates_per_batch(config: PeerConfig) -> int:
    """Return the number of optimizer steps per batch."""
    return minibatches(config) * config.whole("num_iterations") if config["num_generations"] else 1


def convert_max_steps(value: Any, config: PeerConfig) -> Any:
    steps = numbers.whole(value, least=-1)
    steps_per_batch = updates_per_batch(config)
    if steps <= 0:
        return Inert("num_train_epochs sets the length there")
    n_batches = max(1, math.ceil(steps / steps_per_batch))
    return (
        n_batches
        if n_batches * steps_per_batch == steps
        else Values(
            {"steps": n_batches},
            f"{steps} optimizer steps there, {n_batches * steps_per_batch} here",
        )
    )


def convert_epochs(value: Any, config: PeerConfig) -> Any:
    if config["max_steps"] is not None and config.number("max_steps") > 0:
        return Inert(shared.OVERRIDDEN.format(key="max_steps"))
    return shared.passes(value)


def convert_batch_size(value: Any, config: PeerConfig) -> int:
    return answers_per_step(config)


def convert_interval(strategy_key: str, recipe_key: str) -> Conversion:
    """Return the conversion of an interval in steps, if TRL's `strategy_key` is "steps"."""

    def convert(value: Any, config: PeerConfig) -> Any:
        if config[strategy_key] != "steps":
            return Dropped(
                f"{strategy_key}={config[strategy_key]} there, but {recipe_key} counts steps here: "
                f"set {recipe_key} by hand (0: only at the end)"
            )
        steps = numbers.number(value)
        if steps < 1:
            return Dropped("it is a share of all steps there: set a number of steps")
        steps = numbers.whole(value)
        steps_per_batch = updates_per_batch(config)
        n_batches = max(1, round(steps / steps_per_batch))
        if n_batches * steps_per_batch == steps:
            return n_batches
        return Values(
            {recipe_key: n_batches},
            f"every {steps} optimizer steps there, every {n_batches * steps_per_batch} here",
        )

    return convert


def warmup(value: Any, config: PeerConfig) -> Any:
    """Convert a number of optimizer steps, which is rounded down.

    A value below 1 is a share of all steps; the resulting number of steps is rounded up.
    """
    number = numbers.number(value)
    if number < 0:
        raise InvalidValue(f"is {number}, and not at least 0: set optimizer.warmup_steps by hand")
    if number >= 1:
        return Values({"optimizer.warmup_steps": math.floor(number)})
    steps = None if config["max_steps"] is None else config.whole("max_steps", least=-1)
    return shared.warmup_share(value, steps if steps and steps > 0 else None, math.ceil)


def schedule(value: Any, config: PeerConfig) -> Any:
    if value == "cosine_with_min_lr" and "min_lr_rate" in (options := _options(config)):
        return Values(
            {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": options["min_lr_rate"]},
            _note_unused(options, "min_lr_rate"),
        )
    if value == "warmup_stable_decay" and "num_decay_steps" in (options := _options(config)):
        return Values(
            {
                "optimizer.schedule": "wsd",
                "optimizer.decay_steps": numbers.whole(
                    options["num_decay_steps"], "num_decay_steps", 1
                ),
            },
            _note_unused(options, "num_decay_steps"),
        )
    return choose(SCHEDULES)(value, config)


def _options(config: PeerConfig) -> Mapping[str, Any]:
    """Return lr_scheduler_kwargs, which the file sets as dotted keys or as one mapping."""
    as_mapping = config["lr_scheduler_kwargs"]
    from_dotted_keys = {
        key.partition(".")[2]: config[key]
        for key in config.values
        if key.startswith("lr_scheduler_kwargs.")
    }
    return from_dotted_keys or (as_mapping if isinstance(as_mapping, Mapping) else {})


def _note_unused(options: Mapping[str, Any], converted_key: str) -> str:
    unused = ", ".join(
        f"{name}={value}" for name, value in options.items() if name != converted_key
    )
    return f"lr_scheduler_kwargs' {unused} has no counterpart" if unused else ""


def optimizer(value: Any, config: PeerConfig) -> Any:
    return choose(OPTIMIZERS)(str(value), config)


def only_with_adapter(convert: Conversion | None = None) -> Conversion:
    """Return the conversion, applied only if use_peft is true."""
    return only_if(
        lambda config: config.flag("use_peft"),
        convert,
        "use_peft is false there, so there is no adapter",
    )


def reports(value: Any, config: PeerConfig) -> Any:
    return shared.sinks(value, config["project"])


def _clip_high(config: PeerConfig) -> int | float:
    return config.number("epsilon" if config["epsilon_high"] is None else "epsilon_high")


def loss(value: Any, config: PeerConfig) -> Any:
    if value == "sapo":
        taus = {
            "algorithm.loss.tau_pos": config.number("sapo_temperature_pos"),
            "algorithm.loss.tau_neg": config.number("sapo_temperature_neg"),
        }
        return Values({"algorithm.kind": "sapo", **taus, "algorithm.weighting": "token_mean"})
    if value == "cispo":
        high = _clip_high(config)
        if high <= 1:
            return Dropped(
                f"epsilon_high={high} is the largest weight of a token there. Here it is "
                "1 + clip_high, which can't be 1 or less: set algorithm.loss.clip_high yourself"
            )
        note = "the largest weight of a token is epsilon_high there, and 1 + clip_high here"
        return Values({"algorithm.kind": "cispo", "algorithm.loss.clip_high": high - 1}, note)
    if value not in ("grpo", "dapo", "bnpo", "dr_grpo"):
        return Dropped(
            "it has no counterpart: algorithm.loss can be ppo, gspo, cispo, sapo, gmpo, topr or "
            "kimi. The recipe keeps grpo"
        )
    level = config["importance_sampling_level"]
    if level not in (None, "token", "sequence"):
        return Dropped(f"importance_sampling_level={level} is not known here: set algorithm.loss")
    clip = {
        "algorithm.loss.clip_low": config.number("epsilon"),
        "algorithm.loss.clip_high": _clip_high(config),
    }
    kind = {"algorithm.kind": "gspo" if level == "sequence" else "grpo", **clip}
    if value == "dr_grpo":
        length = config.whole("max_completion_length")
        return Values(
            {**kind, "algorithm.weighting": "fixed_length", "algorithm.fixed_length": length}
        )
    mean = {"grpo": "the mean over answers", "bnpo": "the mean over tokens"}.get(value)
    note = (
        f"{mean} is over the whole optimizer step here, over each micro-batch there" if mean else ""
    )
    return Values(
        {**kind, "algorithm.weighting": "sequence_mean" if value == "grpo" else "token_mean"}, note
    )


def reward_scale(value: Any, config: PeerConfig) -> Any:
    scales = {True: "std", "group": "std", "batch": "batch_std", "none": "none", False: "none"}
    if value not in scales:
        return Dropped("algorithm.advantage.scale is std, batch_std or none")
    return Values({"algorithm.advantage.scale": scales[value], "algorithm.advantage.epsilon": 1e-4})


def rewards(value: Any, config: PeerConfig) -> Any:
    conversions: Mapping[str, Any] = {
        "accuracy_reward": {"kind": "math"},
        "reasoning_accuracy_reward": {"kind": "math", "require_marker": True},
        "think_format_reward": {"kind": "format", "tags": ["think"], "outside": True},
    }
    value = shared.as_list(value, config)
    peer_weights = config["reward_weights"]
    weights = (
        [1.0] * len(value)
        if peer_weights is None
        else [numbers.real(weight, "reward_weights") for weight in peer_weights]
    )
    # A name with dots is the import path of the user's own reward function.
    conversions = {
        **{name: shared.make_user_reward("trl", name) for name in value if "." in str(name)},
        **conversions,
    }
    recipe_rewards = [
        {**conversions[name], "weight": weight}
        for name, weight in zip(value, weights, strict=True)
        if name in conversions
    ]
    unknown = [
        name for name in value if name not in conversions and name != "get_soft_overlong_punishment"
    ]
    values: dict[str, Any] = {"rewards": recipe_rewards} if recipe_rewards else {}
    notes = [f"{', '.join(unknown)} is left out: {shared.USER_REWARD}"] if unknown else []
    if "get_soft_overlong_punishment" in value:
        factor = dict(zip(value, weights, strict=True))["get_soft_overlong_punishment"]
        length = config.whole("max_completion_length")
        penalty = {
            "kind": "overlong_penalty",
            "max_length": length,
            "buffer": 256,
            "factor": factor,
        }
        values["algorithm.shaping"] = [penalty]
        notes.append(
            "buffer is 256 here, because the file does not contain the soft_punish_cache of "
            "get_soft_overlong_punishment"
        )
    if not values:
        return Dropped(f"{', '.join(unknown)}: {shared.USER_REWARD}")
    return Values(values, "; ".join(notes))


def kl(value: Any, config: PeerConfig) -> Any:
    coef = numbers.real(value)
    if not coef:
        return Values({"algorithm.kl.coef": 0.0})
    if config.flag("use_bias_correction_kl"):
        return Values({"algorithm.kl.coef": coef, "algorithm.kl.objective": "reverse"})
    return Values(
        {"algorithm.kl.coef": coef, "algorithm.kl.objective": "forward"}, shared.KL_FORWARD
    )


def correction(value: Any, config: PeerConfig) -> Any:
    if not (numbers.flag(value) and config.flag("use_vllm")):
        return Inert("use_vllm or the correction is false there")
    mode = config[f"{CORRECTION}_mode"]
    level, _, action = str(mode).partition("_")
    if action not in ("mask", "truncate") or level not in ("token", "sequence"):
        return Dropped(f"{CORRECTION}_mode={mode} is not known here: set algorithm.correction")
    low, high = (
        None
        if config[f"{CORRECTION}_clip_{side}"] is None
        else config.number(f"{CORRECTION}_clip_{side}")
        for side in ("min", "max")
    )
    lower_bound = {} if low is None else {"weight_low": low}
    if action == "truncate" or high is None:
        note = (
            ""
            if action == "truncate"
            else "TRL masks nothing without an upper bound, so there is no mask here"
        )
        return Values(
            {"algorithm.correction": {"weight": level, **lower_bound, "weight_high": high}}, note
        )
    masks = {"mask": level, "mask_low": low or 0.0, "mask_high": high, "mask_denominator": "all"}
    return Values({"algorithm.correction": {"weight": level, "weight_high": None, **masks}})


def vllm(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert(
            "here the built-in engine generates; for transformers, as there, set generator.kind=hf"
        )
    colocated = {"cluster.colocated": True} if config["vllm_mode"] == "colocate" else {}
    adapter = {"generator.lora_rank": config.whole("lora_r")} if config.flag("use_peft") else {}
    return Values({"generator.kind": "vllm", **adapter, **colocated})


def preference(value: Any, config: PeerConfig) -> Any:
    loss_type = value[0] if isinstance(value, list) and len(value) == 1 else value
    beta = {"algorithm.beta": numbers.real(config["beta"], "beta")}
    if loss_type == "sigmoid":
        smoothing = 0 if config["label_smoothing"] is None else config.number("label_smoothing")
        return Values(
            {
                "algorithm.kind": "dpo",
                **beta,
                **({"algorithm.label_smoothing": smoothing} if smoothing else {}),
            }
        )
    if loss_type == "ipo":
        return Values(
            {"algorithm.kind": "ipo", **beta, "algorithm.normalize": "mean"},
            "IPO takes the mean over an answer's tokens there, which is normalize: mean here",
        )
    if loss_type == "sigmoid_norm":
        return Values({"algorithm.kind": "dpo", **beta, "algorithm.normalize": "mean"})
    if isinstance(value, list) and sorted(value) == ["sft", "sigmoid"]:
        peer_weights = config["loss_weights"]
        weight_list = (
            [1.0, 1.0]
            if peer_weights is None
            else [numbers.real(weight, "loss_weights") for weight in peer_weights]
        )
        weights = dict(zip(value, weight_list, strict=True))
        lr_hint = (
            f"; scale optimizer.lr by {weights['sigmoid']:g}" if weights["sigmoid"] != 1 else ""
        )
        note = (
            "sft_coef is the weight of the SFT loss relative to that of the preference loss"
            f"{lr_hint}"
        )
        return Values(
            {
                "algorithm.kind": "dpo",
                **beta,
                "algorithm.sft_coef": weights["sft"] / weights["sigmoid"],
            },
            note,
        )
    return Dropped(
        "has no counterpart: Ratchet has dpo, ipo, rpo, simpo, orpo and kto. The recipe keeps dpo"
    )


def kept_checkpoints(value: Any, config: PeerConfig) -> Any:
    count = numbers.whole(value)
    return count if count > 0 else Inert("it is not above 0 there: set checkpoint.keep")


def targets(value: Any, config: PeerConfig) -> Any:
    names = shared.as_list(value, config)
    return names[0] if names == ["all-linear"] else names


def reward_clip(value: Any, config: PeerConfig) -> Any:
    low, high = (numbers.real(bound, "reward_clip_range") for bound in value)
    return [{"kind": "clip", "low": low, "high": high}]


def kl_in_reward(value: Any, config: PeerConfig) -> Values:
    coef = numbers.real(value)
    return Values({"algorithm.kl": {"coef": coef, "place": "reward"} if coef else {}})
