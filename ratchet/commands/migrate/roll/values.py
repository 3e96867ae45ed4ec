"""Convert values of ROLL's keys to values of recipe keys.

Each function of (value, config) converts one ROLL key, which the tables of this folder name.
"there" in a note means ROLL; "here" means Ratchet.
"""

from __future__ import annotations

from typing import Any

from ratchet.commands.migrate import numbers, shared
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.roll.placement import data_ranks
from ratchet.commands.migrate.table import Conversion, Dropped, Inert, PeerConfig, Values, only_if

CORRECTION = "train_infer_correction"


def rows_per_step(role: str, config: PeerConfig) -> int:
    """Return the number of rows in an optimizer step."""
    args = f"{role}.training_args"
    rows_per_rank = config.whole(f"{args}.per_device_train_batch_size") * config.whole(
        f"{args}.gradient_accumulation_steps"
    )
    return rows_per_rank * data_ranks(role, config)


def minibatches(value: Any, config: PeerConfig) -> int:
    """Return the number of optimizer steps per batch."""
    answers = config.whole("rollout_batch_size") * config.whole("num_return_sequences_in_group")
    count = numbers.quotient(
        answers,
        rows_per_step("actor_train", config),
        "a batch's answers over those of an optimizer step",
    )
    if count > config.whole("rollout_batch_size"):
        raise InvalidValue(
            f"a batch has {count} optimizer steps there, more than prompts: set "
            "algorithm.minibatches by hand"
        )
    return count


def rows(role: str) -> Conversion:
    """Return a conversion to the rows of a role's optimizer step."""
    return lambda value, config: rows_per_step(role, config)


def estimator(value: Any, config: PeerConfig) -> Any:
    """Convert adv_estimator and the normalisation keys to an algorithm with its advantages."""
    if value == "gae":
        return Values(
            {
                "algorithm.kind": "ppo",
                "algorithm.advantage.gamma": numbers.real(config["gamma"], "gamma"),
                "algorithm.advantage.lam": numbers.real(config["lambd"], "lambd"),
                "algorithm.advantage.bootstrap": False,
            }
        )
    if value == "gigpo":
        return Values(
            {
                "algorithm.kind": "gigpo",
                "algorithm.advantage.gamma": config.number("step_reward_gamma"),
            }
        )
    if value not in ("grpo", "reinforce"):
        return Dropped(
            "only gae (ppo here), grpo, reinforce and gigpo are converted: the recipe uses grpo"
        )
    mean, std = config["norm_mean_type"], config["norm_std_type"]
    if value == "grpo":
        return Values(
            {"algorithm.kind": "grpo", "algorithm.advantage.scale": "std"},
            "the baseline is the group's mean",
        )
    if mean not in (None, "batch", "group", "running") or std not in (
        None,
        "batch",
        "group",
        "running",
    ):
        return Dropped(
            f"norm_mean_type={mean} and norm_std_type={std} are not known here: set "
            "algorithm.shaping"
        )
    group_scales = {"group": "std", "batch": "batch_std", None: "none"}
    if mean == "group" and std in group_scales:
        scale = {"algorithm.advantage.scale": group_scales[std]}
        return Values({"algorithm.kind": "grpo", **scale}, "the baseline is the group's mean")
    shaping = _reward_clip(config) + (
        [{"kind": "normalise", "over": std, "center": mean == std}] if std else []
    )
    keys = {
        "algorithm.kind": "policy_gradient",
        "algorithm.advantage.kind": "turn_returns",
        **({"algorithm.shaping": shaping} if shaping else {}),
    }
    note = (
        f"the only baseline is the {mean} mean"
        if mean
        else "there is no baseline, as in ROLL. For one, set algorithm.kind=grpo"
    )
    return Values(keys, note)


def difficulty(value: Any, config: PeerConfig) -> Any:
    """Convert difficulty_mask and its thresholds to a range of the group's mean reward."""
    if not numbers.flag(value):
        return Inert("it is off there")
    low, high = (
        numbers.real(config[f"difficulty_{side}_threshold"], f"difficulty_{side}_threshold")
        for side in ("low", "high")
    )
    return Values({"algorithm.mean_reward_range": [low, high]})


def clip(value: Any, config: PeerConfig) -> Any:
    """Convert the clip bounds, importance_sampling and dual_clip_loss to the policy loss."""
    if config.flag("use_pg_clip_range"):
        low = config.number("pg_clip_low")
        high = config.number("pg_clip_high")
    else:
        low = high = config.number("pg_clip")
    level = config["importance_sampling"]
    if level not in (None, "token", "seq"):
        return Dropped(f"importance_sampling={level} is not known here: set algorithm.loss")
    kind = "gspo" if level == "seq" else "ppo"
    keys: dict[str, Any] = {
        "algorithm.loss.kind": kind,
        "algorithm.loss.clip_low": low,
        "algorithm.loss.clip_high": high,
    }
    if not config.flag("dual_clip_loss"):
        return Values(keys)
    if kind != "ppo":
        return Values(keys, "the dual clip there is dropped, because gspo has none here")
    return Values(
        {**keys, "algorithm.loss.dual_clip": 1 + 2 * config.number("pg_clip")},
        "dual_clip is 1 + 2 x pg_clip, as there",
    )


def aggregation(value: Any, config: PeerConfig) -> Any:
    step_mean = "the mean is over the whole optimizer step"
    if value == "token-mean":
        return Values({"algorithm.weighting": "token_mean"}, step_mean)
    if value == "seq-mean-token-mean":
        return Values(
            {"algorithm.weighting": "sequence_mean"},
            f"{step_mean}; it is the default there, and token_mean here",
        )
    if value == "seq-mean-token-sum":
        return Values(
            {"algorithm.weighting": "token_sum"},
            "the loss is the sum over tokens, divided by the number of answers",
        )
    if value == "seq-mean-token-sum-norm":
        return Values(
            {
                "algorithm.weighting": "fixed_length",
                "algorithm.fixed_length": max_answer_tokens(
                    config["actor_infer.generating_args.max_new_tokens"], config
                ),
            },
            "the constant is max_new_tokens",
        )
    return Dropped(
        "algorithm.weighting has token_mean, sequence_mean, prompt_mean, token_sum and fixed_length"
    )


def kl_loss(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert("it is off there, and here by default")
    coef = numbers.real(config["kl_loss_coef"], "kl_loss_coef")
    if not coef:
        return Inert("its coefficient is 0 there")
    return Values(
        {"algorithm.kl.coef": coef, "algorithm.kl.objective": "forward"}, shared.KL_FORWARD
    )


def kl_reward(value: Any, config: PeerConfig) -> Any:
    if not numbers.flag(value):
        return Inert("it is off there, and here by default")
    adaptive = (
        {} if config["target_kl"] is None else {"algorithm.kl.target": config.number("target_kl")}
    )
    return Values(
        {
            "algorithm.kl.coef": config.number("init_kl_coef"),
            "algorithm.kl.place": "reward",
            **adaptive,
        },
        "the penalty is the k1 estimate of each token, whatever ROLL's kl_penalty is",
    )


def max_staleness(value: Any, config: PeerConfig) -> Any:
    """Convert async_generation_ratio to the maximum staleness; 0 has no effect."""
    return numbers.number(value) or Inert("it is 0 there: rollouts are not asynchronous")


def correction(value: Any, config: PeerConfig) -> Any:
    """Convert the importance weight between sampler and learner, with its level and bound."""
    if not numbers.flag(value):
        return Inert("it is off there")
    level = config[f"{CORRECTION}.is_weight.weight_type"]
    bound = config[f"{CORRECTION}.is_weight.upper_bound"]
    note = "a segment is what a turn is here" if level == "segment" else ""
    high = None if bound is None else numbers.number(bound, "upper_bound")
    return Values(
        {
            "algorithm.correction.weight": {"segment": "turn"}.get(level, level),
            "algorithm.correction.weight_high": high,
        },
        note,
    )


def filters(value: Any, config: PeerConfig) -> Any:
    """Convert a single filter by ratio to the mask.

    ROLL may have several filters, or filters by difference, which have no counterpart.
    """
    enabled_rules = [
        rule
        for rule in shared.as_list(value, config)
        if rule and numbers.flag(rule.get("enabled", False), "enabled")
    ]
    if not enabled_rules:
        return Inert("no filter is enabled there")
    rule = enabled_rules[0]
    ratio, difference = (
        numbers.flag(rule.get(f"{kind}_enabled", kind == "ratio"), kind)
        for kind in ("ratio", "diff")
    )
    if len(enabled_rules) > 1 or difference or not ratio:
        return Dropped(
            "algorithm.correction has a single mask, by the ratio: set mask, mask_low and mask_high"
        )
    level = rule.get("agg_type", "token")
    low, high = (
        numbers.real(rule.get(f"ratio_{side}", default), side)
        for side, default in (("low", 0.8), ("high", 1.2))
    )
    mask_keys = {"mask": {"segment": "turn"}.get(level, level), "mask_low": low, "mask_high": high}
    mask_keys["mask_denominator"] = "kept"
    if not config.flag(f"{CORRECTION}.is_weight.enabled"):
        mask_keys["weight"] = "none"
    note = "a segment is what a turn is here" if level == "segment" else ""
    keys = {f"algorithm.correction.{key}": content for key, content in mask_keys.items()}
    return Values(keys, note)


def files(value: Any, config: PeerConfig) -> Any:
    """Convert the data files, and name ROLL's columns."""
    columns = {"environment.columns.prompt": "prompt", "environment.columns.answer": "ground_truth"}
    training_data = shared.training_data(value, config)
    return Values(
        {**training_data.values, **columns},
        "; ".join(
            filter(None, ["environment.columns names the columns there", training_data.note])
        ),
    )


def column(column_name: str) -> Conversion:
    """Return a conversion that sets environment.columns.`column_name` to the name in the data."""
    return lambda value, config: Values({f"environment.columns.{column_name}": value})


def tracker(value: Any, config: PeerConfig) -> Any:
    return shared.sinks(value, config["tracker_kwargs.project"])


def lora(role: str, convert: Conversion | None = None) -> Conversion:
    """Return the conversion, limited to files that set the role's lora_target."""
    return only_if(
        lambda config: config[f"{role}.model_args.lora_target"],
        convert,
        "lora_target is not set there, so there is no adapter",
    )


def targets(value: Any, config: PeerConfig) -> Any:
    return (
        "all-linear"
        if value in ("all-linear", "all")
        else [name.strip() for name in str(value).split(",")]
    )


def checkpointing(role: str) -> Conversion:
    """Return the conversion of disable_gradient_checkpointing. It has no effect for Megatron."""

    def is_not_megatron(config: PeerConfig) -> bool:
        return config[f"{role}.strategy_args.strategy_name"] != "megatron_train"

    return only_if(
        is_not_megatron,
        lambda value, config: not numbers.flag(value),
        "with megatron set learner.recompute",
    )


def epochs(value: Any, config: PeerConfig) -> Inert:
    return Inert("max_steps is the length there too")


def precision(value: Any, config: PeerConfig) -> Any:
    if value in ("bf16", "fp32", "bfloat16", "float32"):
        return Inert("products are in bfloat16 and weights in float32 here")
    return Dropped(shared.PRECISION)


def messages(value: Any, config: PeerConfig) -> Dropped:
    return Dropped(
        f"the column {value} holds the prompt with its system message there; here the column "
        "prompt is read, without the system message: set environment.system to its text"
    )


def domain_shares(value: Any, config: PeerConfig) -> Any:
    if numbers.real(value) == 1:
        return Inert("it is the only domain")
    return Dropped("environment.kind=mixture has parts with weights: here all rows are one set")


def kept_checkpoints(value: Any, config: PeerConfig) -> Any:
    """Convert the number of checkpoints to keep; 0 (all) has no counterpart."""
    count = numbers.whole(value, least=0)
    return count or Dropped("0 keeps all checkpoints there: set checkpoint.keep_every")


def _reward_clip(config: PeerConfig) -> list[dict[str, Any]]:
    """Return the shaping steps for reward_clip: one clip, or none."""
    if config["reward_clip"] is None:
        return []
    bound = numbers.real(config["reward_clip"], "reward_clip")
    return [{"kind": "clip", "low": -bound, "high": bound}]


def reward_clip(value: Any, config: PeerConfig) -> Any:
    """Return the reward shaping, which begins with the clip.

    If `estimator` sets further shaping steps, they follow the clip.
    """
    estimated = estimator(config["adv_estimator"], config)
    shaping = estimated.values.get("algorithm.shaping") if isinstance(estimated, Values) else None
    return shaping or _reward_clip(config)


def max_answer_tokens(value: Any, config: PeerConfig) -> Any:
    """Return the maximum number of tokens of an answer.

    This is sequence_length - prompt_length if sequence_length is set, else response_length, else
    `value`, which is max_new_tokens of generating_args. With train_env_manager the first two are
    lengths of whole episodes, so `value` is returned.
    """
    if any(
        key.startswith("train_env_manager.") and content is not None
        for key, content in config.values.items()
    ):
        return numbers.whole(value)
    if config["sequence_length"] is not None:
        return numbers.whole(
            config.whole("sequence_length") - config.whole("prompt_length"), "an answer's length", 1
        )
    return (
        config.whole("response_length")
        if config["response_length"] is not None
        else numbers.whole(value)
    )


def warmup_ratio(steps_key: str) -> Conversion:
    """Return the conversion of a warm-up's share, which has no effect if its steps are set."""

    def convert(value: Any, config: PeerConfig) -> Any:
        if config[steps_key] is not None and config.whole(steps_key, least=0) > 0:
            return Inert(shared.OVERRIDDEN.format(key="warmup_steps"))
        return numbers.number(value)

    return convert
