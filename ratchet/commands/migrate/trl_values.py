"""Conversions of TRL's values to values of a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import Misread
from ratchet.commands.migrate.table import Convert, Idle, PeerConfig, Sets, Without, choose, when

CORRECTION = "vllm_importance_sampling"
WHOLE = (
    "adamw_hf",
    "adamw_torch",
    "adamw_torch_fused",
    "adamw_torch_xla",
    "adamw_torch_npu_fused",
    "adamw_apex_fused",
)
IN_8_BITS = ("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit")
OPTIMIZERS = dict.fromkeys(WHOLE, "adamw") | dict.fromkeys(IN_8_BITS, "adamw8bit")
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def micro(config: PeerConfig) -> int:
    """Return the number of answers in an optimizer step of one process."""
    return config.whole("per_device_train_batch_size") * config.whole("gradient_accumulation_steps")


def answers(config: PeerConfig) -> int:
    """Return the number of answers in a generation batch of one process."""
    if config["generation_batch_size"] is not None:
        return config.whole("generation_batch_size")
    steps = (
        "gradient_accumulation_steps"
        if config["steps_per_generation"] is None
        else "steps_per_generation"
    )
    return config.whole("per_device_train_batch_size") * config.whole(steps)


def prompts(value: Any, config: PeerConfig) -> int:
    return numbers.quotient(
        answers(config), config.whole("num_generations"), "answers of a batch over num_generations"
    )


def minibatches(config: PeerConfig) -> int:
    return numbers.quotient(
        answers(config), micro(config), "answers of a batch over those of an optimizer step"
    )


def divided(value: Any, config: PeerConfig) -> Sets:
    """Set the mini-batches. As in TRL, answers are shuffled before a batch is divided."""
    count = minibatches(config)
    return Sets(
        {
            "algorithm.minibatches": count,
            **({"algorithm.minibatches_of": "attempts"} if count > 1 else {}),
        }
    )


def updates(config: PeerConfig) -> int:
    """Return the number of optimizer steps per batch."""
    return minibatches(config) * config.whole("num_iterations") if config["num_generations"] else 1


def batches(value: Any, config: PeerConfig) -> Any:
    steps, steps_per_batch = numbers.whole(value, least=-1), updates(config)
    if steps <= 0:
        return Idle(shared.EPOCHS)
    steps_here = max(1, math.ceil(steps / steps_per_batch))
    return (
        steps_here
        if steps_here * steps_per_batch == steps
        else Sets(
            {"steps": steps_here},
            f"{steps} optimizer steps there, {steps_here * steps_per_batch} here",
        )
    )


def epochs(value: Any, config: PeerConfig) -> Any:
    return (
        Idle("max_steps goes first")
        if config["max_steps"] is not None and config.number("max_steps") > 0
        else Without(shared.EPOCHS)
    )


def rows(value: Any, config: PeerConfig) -> int:
    return micro(config)


def every(strategy: str, ours: str) -> Convert:
    def convert(value: Any, config: PeerConfig) -> Any:
        if config[strategy] != "steps":
            return Without(
                f"{strategy} is {config[strategy]} there, and counted in steps here: 0 is only at "
                "the end"
            )
        steps = numbers.number(value)
        if steps < 1:
            return Without("a share of all steps there: give their number")
        steps, steps_per_batch = numbers.whole(value), updates(config)
        steps_here = max(1, round(steps / steps_per_batch))
        if steps_here * steps_per_batch == steps:
            return steps_here
        return Sets(
            {ours: steps_here},
            f"every {steps} optimizer steps there, every {steps_here * steps_per_batch} here",
        )

    return convert


def warmup(value: Any, config: PeerConfig) -> Any:
    """Convert optimizer steps, rounded down, or (below 1) a share of all steps, rounded up."""
    number = numbers.number(value)
    if number < 0:
        raise Misread(f"is {number}, and not at least 0: set optimizer.warmup_steps by hand")
    if number >= 1:
        return math.floor(number)
    steps = None if config["max_steps"] is None else config.whole("max_steps", least=-1)
    return shared.share(value, steps if steps and steps > 0 else None, math.ceil)


def schedule(value: Any, config: PeerConfig) -> Any:
    if value == "cosine_with_min_lr" and "min_lr_rate" in (options := _options(config)):
        return Sets(
            {"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": options["min_lr_rate"]},
            _note_unused(options, "min_lr_rate"),
        )
    if value == "warmup_stable_decay" and "num_decay_steps" in (options := _options(config)):
        return Sets(
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
    """Return lr_scheduler_kwargs, given as dotted keys or as one mapping."""
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


def lora(how: Convert | None = None) -> Convert:
    return when(
        lambda config: config.flag("use_peft"),
        how,
        "use_peft is false there, so no adapter is trained",
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
        return Sets({"algorithm.kind": "sapo", **taus, "algorithm.weighting": "token_mean"})
    if value == "cispo":
        high = _clip_high(config)
        if high <= 1:
            return Without(
                f"epsilon_high={high} is the greatest weight of a token there, and 1 + clip_high "
                "is above 1 here"
            )
        note = (
            "their epsilon_high is the greatest weight itself; here the weight is clipped "
            "above 1 + clip_high"
        )
        return Sets({"algorithm.kind": "cispo", "algorithm.loss.clip_high": high - 1}, note)
    if value not in ("grpo", "dapo", "bnpo", "dr_grpo"):
        return Without(
            "algorithm.loss has ppo, gspo, cispo, sapo, gmpo, topr and kimi: the recipe is grpo's "
            "own"
        )
    level = config["importance_sampling_level"]
    if level not in (None, "token", "sequence"):
        return Without(f"importance_sampling_level={level} is not known here: set algorithm.loss")
    clip = {
        "algorithm.loss.clip_low": config.number("epsilon"),
        "algorithm.loss.clip_high": _clip_high(config),
    }
    kind = {"algorithm.kind": "gspo" if level == "sequence" else "grpo", **clip}
    if value == "dr_grpo":
        length = config.whole("max_completion_length")
        return Sets(
            {**kind, "algorithm.weighting": "fixed_length", "algorithm.fixed_length": length}
        )
    mean = {"grpo": "the mean over answers", "bnpo": "the mean over tokens"}.get(value)
    note = (
        f"{mean} is over the whole optimizer step here, over each micro-batch there" if mean else ""
    )
    return Sets(
        {**kind, "algorithm.weighting": "sequence_mean" if value == "grpo" else "token_mean"}, note
    )


def reward_scale(value: Any, config: PeerConfig) -> Any:
    if value in (True, "group", "none", False):
        scale = "std" if value in (True, "group") else "none"
        return Sets({"algorithm.advantage.scale": scale, "algorithm.advantage.epsilon": 1e-4})
    if value == "batch":
        return Sets(
            {"algorithm.advantage.scale": "none", "algorithm.whiten": True},
            "whiten normalises advantages over all tokens of the batch; there they are over the "
            "rewards' standard deviation",
        )
    return Without("algorithm.advantage.scale has std and none")


def rewards(value: Any, config: PeerConfig) -> Any:
    conversions: Mapping[str, Any] = {
        "accuracy_reward": {"kind": "math"},
        "reasoning_accuracy_reward": {"kind": "math", "require_marker": True},
        "think_format_reward": {"kind": "format", "tags": ["think"], "outside": True},
    }
    value = shared.listed(value, config)
    weights_there = config["reward_weights"]
    weights = (
        [1.0] * len(value)
        if weights_there is None
        else [numbers.real(weight, "reward_weights") for weight in weights_there]
    )
    rewards_here = [
        {**conversions[name], "weight": weight}
        for name, weight in zip(value, weights, strict=True)
        if name in conversions
    ]
    unknown = [
        name for name in value if name not in conversions and name != "get_soft_overlong_punishment"
    ]
    values: dict[str, Any] = {"rewards": rewards_here} if rewards_here else {}
    notes = [f"{', '.join(unknown)} is left out: {shared.OWN_REWARD}"] if unknown else []
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
        notes.append("buffer is 256 here; the file doesn't say what the punishment was made with")
    if not values:
        return Without(f"{', '.join(unknown)}: {shared.OWN_REWARD}")
    return Sets(values, "; ".join(notes))


def kl(value: Any, config: PeerConfig) -> Any:
    coef = numbers.real(value)
    if not coef:
        return Sets({"algorithm.kl.coef": 0.0})
    if config.flag("use_bias_correction_kl"):
        return Sets({"algorithm.kl.coef": coef, "algorithm.kl.objective": "reverse"})
    return Sets({"algorithm.kl.coef": coef, "algorithm.kl.objective": "forward"}, shared.KL_FORWARD)


def correction(value: Any, config: PeerConfig) -> Any:
    if not (numbers.flag(value) and config.flag("use_vllm")):
        return Idle("use_vllm is false there, or it is off")
    mode = config[f"{CORRECTION}_mode"]
    level, _, action = str(mode).partition("_")
    if action not in ("mask", "truncate") or level not in ("token", "sequence"):
        return Without(f"{CORRECTION}_mode={mode} is not known here: set algorithm.correction")
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
            else "nothing is above a bound of null, so nothing is masked there either"
        )
        return Sets(
            {"algorithm.correction": {"weight": level, **lower_bound, "weight_high": high}}, note
        )
    masks = {"mask": level, "mask_low": low or 0.0, "mask_high": high, "mask_denominator": "all"}
    return Sets({"algorithm.correction": {"weight": level, "weight_high": None, **masks}})


def vllm(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Idle("the engine that is built in generates, or generator.kind=hf")
    colocated = {"cluster.colocated": True} if config["vllm_mode"] == "colocate" else {}
    adapter = {"generator.lora_rank": config.whole("lora_r")} if config.flag("use_peft") else {}
    return Sets({"generator.kind": "vllm", **adapter, **colocated})


def preference(value: Any, config: PeerConfig) -> Any:
    loss_type = value[0] if isinstance(value, list) and len(value) == 1 else value
    beta = {"algorithm.beta": numbers.real(config["beta"], "beta")}
    if loss_type == "sigmoid":
        smoothing = 0 if config["label_smoothing"] is None else config.number("label_smoothing")
        return Sets(
            {
                "algorithm.kind": "dpo",
                **beta,
                **({"algorithm.label_smoothing": smoothing} if smoothing else {}),
            }
        )
    if loss_type == "ipo":
        return Sets(
            {"algorithm.kind": "ipo", **beta, "algorithm.normalize": "mean"},
            "their ipo takes the mean over an answer's tokens (normalize)",
        )
    if loss_type == "sigmoid_norm":
        return Sets({"algorithm.kind": "dpo", **beta, "algorithm.normalize": "mean"})
    if isinstance(value, list) and sorted(value) == ["sft", "sigmoid"]:
        weights_there = config["loss_weights"]
        weight_list = (
            [1.0, 1.0]
            if weights_there is None
            else [numbers.real(weight, "loss_weights") for weight in weights_there]
        )
        weights = dict(zip(value, weight_list, strict=True))
        lr_hint = (
            f"; scale optimizer.lr by {weights['sigmoid']:g}" if weights["sigmoid"] != 1 else ""
        )
        note = (
            "the likelihood of the chosen answer beside the loss is sft_coef, over the loss's "
            f"own weight{lr_hint}"
        )
        return Sets(
            {
                "algorithm.kind": "dpo",
                **beta,
                "algorithm.sft_coef": weights["sft"] / weights["sigmoid"],
            },
            note,
        )
    return Without("there are dpo, ipo, rpo, simpo, orpo and kto here: the recipe is dpo's own")


def kept(value: Any, config: PeerConfig) -> Any:
    count = numbers.whole(value)
    return count if count > 0 else Idle("not above 0 there keeps one: checkpoint.keep does too")


def targets(value: Any, config: PeerConfig) -> Any:
    names = shared.listed(value, config)
    return names[0] if names == ["all-linear"] else names


def clipped(value: Any, config: PeerConfig) -> Any:
    low, high = (numbers.real(bound, "reward_clip_range") for bound in value)
    return [{"kind": "clip", "low": low, "high": high}]


def kl_in_reward(value: Any, config: PeerConfig) -> Sets:
    coef = numbers.real(value)
    return Sets({"algorithm.kl": {"coef": coef, "place": "reward"} if coef else {}})
