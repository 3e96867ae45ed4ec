"""TRL: values of its keys as values of a recipe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ratchet.tools.importing import shared
from ratchet.tools.importing.table import Config, Convert, Sets, Without, choose, when

CORRECTION = "vllm_importance_sampling"
SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}


def answers(config: Config) -> int:
    """In a generation batch, of one process."""
    per_step = config["per_device_train_batch_size"] * (config["steps_per_generation"] or config["gradient_accumulation_steps"])
    return config["generation_batch_size"] or per_step


def prompts(value: Any, config: Config) -> int:
    return max(1, answers(config) // config["num_generations"])


def minibatches(config: Config) -> int:
    return max(1, answers(config) // (config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]))


def divided(value: Any, config: Config) -> Sets:
    """There answers are shuffled before a batch is divided."""
    count = minibatches(config)
    return Sets({"algorithm.minibatches": count, **({"algorithm.minibatches_of": "attempts"} if count > 1 else {})})


def updates(config: Config) -> int:
    """Optimizer steps a batch."""
    return minibatches(config) * config["num_iterations"] if config["num_generations"] else 1


def batches(value: Any, config: Config) -> Any:
    if value <= 0:
        return Without(shared.EPOCHS)
    return max(1, round(value / updates(config)))


def epochs(value: Any, config: Config) -> Any:
    return Without("max_steps goes first" if (config["max_steps"] or 0) > 0 else shared.EPOCHS)


def rows(value: Any, config: Config) -> int:
    return config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]


def every(strategy: str) -> Convert:
    def how(value: Any, config: Config) -> Any:
        if config[strategy] != "steps":
            return Without(f"{strategy} is {config[strategy]} there, and counted in steps here: 0 is only at the end")
        return (
            max(1, round(value / updates(config))) if value >= 1 else Without("a share of all steps there: give their number")
        )

    return how


def warmup(value: Any, config: Config) -> Any:
    steps = config["max_steps"] or 0
    if value >= 1 or value == 0:
        return round(value)
    return shared.rate(steps if steps > 0 else None)(value, config)


def schedule(value: Any, config: Config) -> Any:
    options = config["lr_scheduler_kwargs"] or {}
    if value == "cosine_with_min_lr" and "min_lr_rate" in options:
        return Sets({"optimizer.schedule": "cosine", "optimizer.min_lr_ratio": options["min_lr_rate"]})
    if value == "warmup_stable_decay" and "num_decay_steps" in options:
        return Sets({"optimizer.schedule": "wsd", "optimizer.decay_steps": options["num_decay_steps"]})
    return choose(SCHEDULES)(value, config)


def optimizer(value: Any, config: Config) -> Any:
    if value.startswith("adamw") and ("8bit" in value or "bnb" in value):
        return "adamw8bit"
    if value.startswith("adamw"):
        return "adamw"
    return Without("optimizer.kind has adamw, adamw8bit and muon")


def lora(how: Convert | None = None) -> Convert:
    return when(lambda config: config["use_peft"], how, "use_peft is false there, so no adapter is trained")


def reports(value: Any, config: Config) -> Any:
    return shared.sinks(value, config["project"])


def loss(value: Any, config: Config) -> Any:
    sequence = config["importance_sampling_level"] == "sequence"
    high = config["epsilon_high"] or config["epsilon"]
    clip = {"algorithm.loss.clip_low": config["epsilon"], "algorithm.loss.clip_high": high}
    kind = {"algorithm.kind": "gspo" if sequence else "grpo", **clip}
    if value == "grpo":
        return Sets(
            {**kind, "algorithm.weighting": "sequence_mean"},
            "the mean over answers is over the whole optimizer step here, over each micro-batch there",
        )
    if value in ("dapo", "bnpo"):
        note = (
            "the mean over tokens is over the whole optimizer step here, over each micro-batch there" if value == "bnpo" else ""
        )
        return Sets({**kind, "algorithm.weighting": "token_mean"}, note)
    if value == "dr_grpo":
        return Sets({**kind, "algorithm.weighting": "fixed_length", "algorithm.fixed_length": config["max_completion_length"]})
    if value == "cispo":
        note = "their epsilon_high is the greatest weight itself; here the weight is clipped above 1 + clip_high"
        return Sets({"algorithm.kind": "cispo", "algorithm.loss.clip_high": max(high - 1, 1e-3)}, note)
    if value == "sapo":
        taus = {
            "algorithm.loss.tau_pos": config["sapo_temperature_pos"],
            "algorithm.loss.tau_neg": config["sapo_temperature_neg"],
        }
        return Sets({"algorithm.kind": "sapo", **taus, "algorithm.weighting": "token_mean"})
    return Without("algorithm.loss has ppo, gspo, cispo, sapo, gmpo, topr and kimi: the recipe is grpo's own")


def reward_scale(value: Any, config: Config) -> Any:
    if value in (True, "group", "none", False):
        scale = "std" if value in (True, "group") else "none"
        return Sets({"algorithm.advantage.scale": scale, "algorithm.advantage.epsilon": 1e-4})
    if value == "batch":
        return Sets(
            {"algorithm.advantage.scale": "none", "algorithm.whiten": True},
            "whiten normalises advantages over all tokens of the batch; there they are over the rewards' standard deviation",
        )
    return Without("algorithm.advantage.scale has std and none")


def rewards(value: Any, config: Config) -> Any:
    known: Mapping[str, Any] = {
        "accuracy_reward": {"kind": "math"},
        "reasoning_accuracy_reward": {"kind": "math", "require_marker": True},
        "think_format_reward": {"kind": "format", "tags": ["think"], "outside": True},
    }
    weights = config["reward_weights"] or [1.0] * len(value)
    taken = [{**known[name], "weight": weight} for name, weight in zip(value, weights, strict=True) if name in known]
    left = [name for name in value if name not in known and name != "get_soft_overlong_punishment"]
    values: dict[str, Any] = {"rewards": taken} if taken else {}
    if "get_soft_overlong_punishment" in value:
        values["algorithm.shaping"] = [
            {"kind": "overlong_penalty", "max_length": config["max_completion_length"], "buffer": 256}
        ]
    if not values:
        return Without(f"{', '.join(left)}: {shared.OWN_REWARD}")
    return Sets(values, f"{', '.join(left)} is left out: {shared.OWN_REWARD}" if left else "")


def kl(value: Any, config: Config) -> Any:
    if not value:
        return Sets({"algorithm.kl.coef": 0.0})
    if config["use_bias_correction_kl"]:
        return Sets({"algorithm.kl.coef": value, "algorithm.kl.objective": "reverse"})
    return Sets({"algorithm.kl.coef": value, "algorithm.kl.objective": "forward"}, shared.KL_FORWARD)


def correction(value: Any, config: Config) -> Any:
    if not (value and config["use_vllm"]):
        return Without("use_vllm is false there, or it is off")
    level, _, act = config[f"{CORRECTION}_mode"].partition("_")
    low, high = config[f"{CORRECTION}_clip_min"] or 0.0, config[f"{CORRECTION}_clip_max"]
    if act == "mask":
        masks = {"mask": level, "mask_low": low, "mask_high": high}
        return Sets({"algorithm.correction": {"weight": level, "weight_high": None, **masks}})
    return Sets({"algorithm.correction": {"weight": level, "weight_low": low, "weight_high": high}})


def vllm(value: Any, config: Config) -> Any:
    if not value:
        return Without("the engine that is built in generates, or generator.kind=hf")
    colocated = {"cluster.colocated": True} if config["vllm_mode"] == "colocate" else {}
    adapter = {"generator.lora_rank": config["lora_r"]} if config["use_peft"] else {}
    return Sets({"generator.kind": "vllm", **adapter, **colocated})


def preference(value: Any, config: Config) -> Any:
    first = value[0] if isinstance(value, list) and len(value) == 1 else value
    beta, smoothing = {"algorithm.beta": config["beta"]}, config["label_smoothing"]
    if first == "sigmoid":
        return Sets({"algorithm.kind": "dpo", **beta, **({"algorithm.label_smoothing": smoothing} if smoothing else {})})
    if first == "ipo":
        return Sets(
            {"algorithm.kind": "ipo", **beta, "algorithm.normalize": "mean"},
            "their ipo takes the mean over an answer's tokens (normalize)",
        )
    if first == "sigmoid_norm":
        return Sets({"algorithm.kind": "dpo", **beta, "algorithm.normalize": "mean"})
    if isinstance(value, list) and sorted(value) == ["sft", "sigmoid"]:
        weights = dict(zip(value, config["loss_weights"] or [1.0, 1.0], strict=True))
        note = "the likelihood of the chosen answer beside the loss is sft_coef"
        return Sets({"algorithm.kind": "dpo", **beta, "algorithm.sft_coef": weights["sft"] / weights["sigmoid"]}, note)
    return Without("there are dpo, ipo, rpo, simpo, orpo and kto here: the recipe is dpo's own")
