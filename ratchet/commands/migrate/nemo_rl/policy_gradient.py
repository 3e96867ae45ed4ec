"""The rows of NeMo RL's clipped policy-gradient loss and of rewards, which GRPO and PPO share.

"there" in a note means NeMo RL; "here" means Ratchet.
"""

from __future__ import annotations

from typing import Any

from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.numbers import InvalidValue
from ratchet.commands.migrate.table import (
    Conversion,
    Dropped,
    Inert,
    KeyRow,
    PeerConfig,
    Values,
    choose,
    dropped,
    flag,
    no_effect,
    number,
    only_if,
    rows_covered_by,
    switches,
    whole,
)

TIS = "loss_fn.truncated_importance_sampling"


def clip(value: Any, config: PeerConfig) -> Any:
    if config.flag("loss_fn.disable_ppo_ratio"):
        return Values({"algorithm.loss.kind": "reinforce"})
    low = config.number("loss_fn.ratio_clip_min")
    high = config.number("loss_fn.ratio_clip_max")
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
            {"algorithm.kl.coef": coef, "algorithm.kl.place": "reward"},
            "the penalty is k1 of each token",
        )
    kind = config["loss_fn.reference_policy_kl_type"]
    note = (
        "it is KL(policy || reference) as there, but without the clamps of the log-ratio (20) and "
        "of the penalty (10)"
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
    if low is not None and high is not None and low > high:
        raise InvalidValue(
            f"{TIS}_ratio_min must be <= truncated_importance_sampling_ratio, and {low} > {high}"
        )
    if level == "none" or high is None:
        lower_bound = {} if low is None or high is None else {"weight_low": low}
        note = (
            "" if high is not None else "the weight has no upper bound, as there: set weight_high"
        )
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


def shaping(section: str, part: str) -> Conversion:
    """Return the conversion of the switch of `reward_scaling` or of `reward_shaping`.

    Both set `algorithm.shaping`, in the order in which NeMo RL applies them.

    Args:
        section: The section of the trainer's own keys.
        part: The section of the switch.
    """

    def convert(value: Any, config: PeerConfig) -> Any:
        converted = {
            "reward_scaling": _scale_rewards(f"{section}.reward_scaling", config),
            "reward_shaping": _penalise_length(f"{section}.reward_shaping", config),
        }
        result = converted[part]
        if not isinstance(result, Values):
            return result
        steps = [
            step
            for other in converted.values()
            if isinstance(other, Values)
            for step in other.values["algorithm.shaping"]
        ]
        return Values({"algorithm.shaping": steps}, result.note)

    return convert


def _scale_rewards(section: str, config: PeerConfig) -> Values | Inert | Dropped:
    """Convert the map of rewards from [source_min, source_max] to [target_min, target_max]."""
    if not config.flag(f"{section}.enabled"):
        return Inert("it is off there")
    low, high, target_low, target_high = (
        numbers.real(0.0 if config[key] is None else config[key], key)
        for key in (
            f"{section}.{name}" for name in ("source_min", "source_max", "target_min", "target_max")
        )
    )
    if low >= high or target_low >= target_high:
        return Dropped("its range is empty: set algorithm.shaping (clip and scale) by hand")
    factor = (target_high - target_low) / (high - low)
    shift = target_low - factor * low
    steps: list[dict[str, Any]] = [{"kind": "clip", "low": low, "high": high}]
    if (factor, shift) != (1, 0):
        steps.append({"kind": "scale", "factor": factor} | ({"shift": shift} if shift else {}))
    return Values({"algorithm.shaping": steps})


def _penalise_length(section: str, config: PeerConfig) -> Values | Inert | Dropped:
    """Convert the penalty of long or truncated answers."""
    if not config.flag(f"{section}.enabled"):
        return Inert("it is off there")
    if config[f"{section}.stop_properly_penalty_coef"] is not None:
        return Dropped(
            "it scales the reward of a truncated answer: set algorithm.shaping with kind "
            "stop_properly"
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
        "the penalty is at least -factor here (DAPO, eq. 13); there it falls with the length",
    )


KL_NOTE = "the ratio to the sampler's policy weights the KL here, without clamps"


def _kl_part(value: Any, config: PeerConfig) -> Inert | None:
    coef = config["loss_fn.reference_policy_kl_penalty"]
    return None if coef is None or numbers.real(coef) else Inert("the KL penalty is 0 there")


def _kl_detail(value: Any, config: PeerConfig) -> Any:
    coef = config["loss_fn.reference_policy_kl_penalty"]
    if value is False or not numbers.real(coef):
        return Inert("it is off there")
    return Dropped(KL_NOTE)


LOSS = (
    KeyRow("loss_fn.ratio_clip_min", "algorithm.loss", convert=clip, default=0.2),
    KeyRow("loss_fn.ratio_clip_max", "algorithm.loss", convert=clip, default=0.2),
    KeyRow(
        "loss_fn.ratio_clip_c",
        "algorithm.loss.dual_clip",
        convert=only_if(
            lambda config: (
                not (config.flag("loss_fn.disable_ppo_ratio") or config.flag("loss_fn.use_cispo"))
            ),
            number,
            "it acts only on the clipped ratio there",
        ),
    ),
    KeyRow(
        "loss_fn.token_level_loss",
        "algorithm.weighting",
        convert=choose({True: "token_mean", False: "sequence_mean"}),
        default=True,
    ),
    KeyRow("loss_fn.reference_policy_kl_penalty", "algorithm.kl", convert=kl, default=0.01),
    KeyRow(
        "loss_fn.reference_policy_kl_type",
        covered_by="loss_fn.reference_policy_kl_penalty",
        convert=_kl_part,
        default="k3",
    ),
    KeyRow(
        "loss_fn.use_importance_sampling_correction", "algorithm.correction", convert=correction
    ),
    *switches("with minibatches=1 and epochs=1 all ratios are 1", "loss_fn.force_on_policy_ratio"),
    KeyRow("loss_fn.positive_example_nll_weight", "algorithm.positive_nll_coef", convert=number),
    *rows_covered_by(
        "loss_fn.ratio_clip_min",
        "loss_fn.disable_ppo_ratio",
        "loss_fn.use_cispo",
        "loss_fn.sequence_level_importance_ratios",
    ),
    *rows_covered_by(
        "loss_fn.use_importance_sampling_correction",
        f"{TIS}_type",
        f"{TIS}_ratio",
        f"{TIS}_ratio_min",
    ),
    KeyRow(
        "loss_fn.use_kl_in_reward",
        covered_by="loss_fn.reference_policy_kl_penalty",
        convert=_kl_part,
    ),
    *(
        KeyRow(name, note=KL_NOTE, convert=_kl_detail)
        for name in ("loss_fn.use_on_policy_kl_approximation", "loss_fn.kl_*")
    ),
)


def reward_rows(section: str) -> tuple[KeyRow, ...]:
    """Return the rows of rewards; `section` holds the trainer's own keys."""
    asynchronous = f"{section}.async_{section}"
    return (
        KeyRow(
            f"{section}.overlong_filtering",
            "algorithm.truncated",
            convert=choose({True: "drop", False: "keep"}),
        ),
        KeyRow(f"{section}.use_dynamic_sampling", "rollouts.dynamic_sampling", convert=flag),
        KeyRow(
            f"{section}.dynamic_sampling_max_gen_batches",
            "rollouts.max_replaced",
            "max_replaced is the number of replaced groups per step over batch_size; beyond it "
            "groups are kept "
            "here, and the run stops there",
            only_if(
                lambda config: config.flag(f"{section}.use_dynamic_sampling"),
                whole,
                "use_dynamic_sampling is false there",
            ),
        ),
        KeyRow(
            f"{section}.reward_scaling.enabled",
            "algorithm.shaping",
            convert=shaping(section, "reward_scaling"),
        ),
        KeyRow(
            f"{section}.reward_shaping.enabled",
            "algorithm.shaping",
            convert=shaping(section, "reward_shaping"),
        ),
        *rows_covered_by(f"{section}.reward_shaping.enabled", f"{section}.reward_shaping.*"),
        *rows_covered_by(f"{section}.reward_scaling.enabled", f"{section}.reward_scaling.*"),
        # The defaults of a range that the file leaves out.
        KeyRow(
            f"{section}.reward_scaling.source_max",
            covered_by=f"{section}.reward_scaling.enabled",
            default=1.0,
        ),
        KeyRow(
            f"{section}.reward_scaling.target_max",
            covered_by=f"{section}.reward_scaling.enabled",
            default=1.0,
        ),
        KeyRow(
            f"{asynchronous}.max_trajectory_age_steps",
            "rollouts.max_staleness",
            convert=only_if(
                lambda config: config.flag(f"{asynchronous}.enabled"),
                number,
                f"async_{section} is off there",
            ),
        ),
        *rows_covered_by(f"{asynchronous}.max_trajectory_age_steps", f"{asynchronous}.enabled"),
        *no_effect(
            "running requests get new weights with each weight sync; generator.keep_kv keeps their "
            "KV cache",
            f"{asynchronous}.*",
        ),
        *switches(
            "these are weighted rewards here: malformed_tool_calls, format, unwanted_text",
            f"{section}.penalize_*",
        ),
        *dropped(
            "algorithm.correction.mask masks answers whose logprobs differ between sampler and "
            "learner",
            f"{section}.seq_logprob_error_threshold",
        ),
        *no_effect(
            "groups are replaced one by one here, without oversampling",
            f"{section}.dynamic_sampling_oversample_ratio",
            f"{section}.batch_multiplier",
        ),
        *no_effect(
            "it changes how the trainer computes, not its results",
            f"{section}.skip_reference_policy_logprobs_calculation",
        ),
    )
