"""The policy-gradient algorithms, built from their configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from ratchet.algorithms.advantages.compose import (
    Transform,
    clip_advantages,
    mixture,
    pipeline,
    whiten,
)
from ratchet.algorithms.advantages.per_turn import penalise_malformed_turns
from ratchet.algorithms.base import (
    Algorithm,
    AlgorithmTerm,
    AlgoState,
    Pass,
    Role,
    TermFunction,
    Weighting,
    no_adaptation,
)
from ratchet.algorithms.config.advantages import AdvantageMixture
from ratchet.algorithms.config.base import AlgorithmPart
from ratchet.algorithms.config.policy_gradient import PolicyGradientConfig
from ratchet.algorithms.config.policy_losses import CorrectionConfig, KLConfig
from ratchet.algorithms.config.shaping import ShapingPart
from ratchet.algorithms.filters import (
    drop_by_mean_reward,
    drop_groups_without_signal,
    drop_truncated,
    fill_has_signal,
)
from ratchet.algorithms.kl import COEF, adapt_kl, kl_in_reward, kl_penalty, report_kl_coef
from ratchet.algorithms.loss_aggregation import WEIGHTINGS, fixed_length, positive_mean, valued_mean
from ratchet.algorithms.losses.common import entropy_bonus, nll, value_loss
from ratchet.algorithms.losses.expert_balance import router_terms
from ratchet.algorithms.rollout_correction import apply_correction, apply_correction_mask
from ratchet.algorithms.shaping import copy_judged_rewards
from ratchet.algorithms.teacher_passes import build_teacher_passes
from ratchet.batch import Batch
from ratchet.config.resolve import build


def build_policy_gradient(config: PolicyGradientConfig) -> Algorithm:
    """Return the algorithm of a `policy_gradient` section, or of a named one such as `grpo`."""
    losses = {"policy": _build_policy_terms(config)}
    roles: dict[str, Role] = {}
    passes = list(_list_policy_passes(config))
    warmup: dict[str, int] = {}
    if config.kl.coef > 0:
        roles["reference"] = Role()
        passes.append(Pass("reference", "logprobs", "ref_logprobs"))
    if config.teacher is not None:
        aligned = config.teacher_tokens == "aligned"
        columns = {"logprobs": "teacher_logprobs"}
        if aligned:
            columns["spans"] = "teacher_spans"
        teachers, teacher_passes = build_teacher_passes(config.teacher, columns, aligned=aligned)
        roles |= teachers
        passes += teacher_passes
    if config.critic is not None:
        roles["critic"] = Role(lr=config.critic.lr)
        warmup["policy"] = config.critic.warmup_steps
        passes += [
            Pass("critic", "values", "values"),
            Pass("critic", "scores", "bootstrap_values", level="sequence"),
        ]
        critic_loss = partial(value_loss, clip=config.critic.value_clip)
        losses["critic"] = (
            AlgorithmTerm("value", critic_loss, valued_mean, needs=frozenset({"values"})),
        )
    uses_sampler_logprobs = config.old_logprobs == "sampler"
    return Algorithm(
        name=config.display_name,
        source=config.source,
        losses=losses,
        passes=tuple(passes),
        roles=roles,
        warmup=warmup,
        advantage=partial(pipeline, transforms=_list_transforms(config)),
        fills=frozenset({"old_logprobs"}) if uses_sampler_logprobs else frozenset(),
        adapt=_build_adaptation(config.kl),
        minibatches=config.minibatches,
        minibatches_of=config.minibatches_of,
        epochs=config.epochs,
        group_size=config.group_size,
        greedy_baseline="greedy" in config.reads,
        reads_reward=config.reads_reward,
        reads_parts="parts" in config.reads,
        mean_reward_range=config.mean_reward_range,
        replays_routes=config.router is not None and config.router.replay,
        exempt=_list_exemptions(config),
    )


def build_mixture(section: AdvantageMixture) -> Transform:
    """Return the estimator that mixes a section's parts by their weights."""
    parts: tuple[Any, ...] = section.parts  # the slot gives each part a key `weight`
    weighted_estimators = tuple((build(part), float(part.weight)) for part in parts)
    return partial(mixture, weighted_estimators=weighted_estimators)


def fill_old_from_sampler(batch: Batch, state: AlgoState) -> Batch:
    """Fill `old_logprobs` with the sampler's log-probabilities, in place of a scoring pass."""
    return batch.fill_tokens(old_logprobs=batch.rollout_logprobs_T)


def _list_policy_passes(config: PolicyGradientConfig) -> tuple[Pass, ...]:
    """Return the scoring pass of the policy for old log-probabilities, if one is needed.

    No pass is needed if a batch gets a single optimizer step and only the loss reads these
    log-probabilities: the forward pass of the update computes the same values.
    """
    has_several_updates = config.minibatches * config.epochs > 1
    is_read_before_update = (
        config.correction is not None
        or config.kl.place == "reward"
        or "old_logprobs" in config.reads
    )
    if config.old_logprobs == "sampler" or not (has_several_updates or is_read_before_update):
        return ()
    return (Pass("policy", "logprobs", "old_logprobs"),)


def _build_policy_terms(config: PolicyGradientConfig) -> tuple[AlgorithmTerm, ...]:
    """Return the loss terms of the policy."""
    weighting: Weighting = (
        WEIGHTINGS[config.weighting]
        if config.fixed_length is None
        else partial(fixed_length, length=config.fixed_length)
    )
    ratio_inputs = frozenset({"logprobs", "old_logprobs"})
    level = config.loss.level
    loss: TermFunction = build(config.loss)
    if config.correction is not None:
        loss = partial(apply_correction, fn=loss, level=level)
    terms = [AlgorithmTerm("policy_gradient", loss, weighting, level=level, needs=ratio_inputs)]
    kl = config.kl
    if kl.coef > 0 and kl.place == "loss":
        penalty: TermFunction = partial(
            kl_penalty,
            objective=kl.objective,
            estimator=kl.estimator or "k3",
            importance_weight=kl.importance_weight,
        )
        if config.correction is not None:
            penalty = partial(apply_correction, fn=penalty)
        terms.append(AlgorithmTerm("kl", penalty, weighting, needs=ratio_inputs, coef=kl.coef))
    # A token that the correction masks must not train in any term. mask_denominator=kept removes
    # such tokens from the final mask. mask_denominator=all leaves them in it, so the entropy and
    # NLL terms must be 0 at these tokens.
    entropy_loss, likelihood_loss = (
        _zero_where_masked(fn, config.correction) for fn in (entropy_bonus, nll)
    )
    # With entropy_coef=0 this term only measures the entropy, which shows if the policy still
    # explores.
    terms.append(
        AlgorithmTerm(
            "entropy",
            entropy_loss,
            weighting,
            needs=frozenset({"entropy"}),
            coef=config.entropy_coef,
        )
    )
    if config.positive_nll_coef > 0:
        positive_weighting = partial(positive_mean, above=config.positive_nll_above)
        terms.append(
            AlgorithmTerm(
                "positive_nll", likelihood_loss, positive_weighting, coef=config.positive_nll_coef
            )
        )
    if config.router is not None and config.router.reads_router_outputs:
        terms += router_terms(balance_coef=config.router.balance_coef, z_coef=config.router.z_coef)
    return tuple(terms)


def _zero_where_masked(fn: TermFunction, correction: CorrectionConfig | None) -> TermFunction:
    """Return `fn` with value 0 at tokens that the correction masks but keeps in the denominator."""
    keeps_masked_tokens = (
        correction is not None
        and correction.mask != "none"
        and correction.mask_denominator == "all"
    )
    return partial(apply_correction_mask, fn=fn) if keeps_masked_tokens else fn


def _list_transforms(config: PolicyGradientConfig) -> tuple[Transform, ...]:
    """Return the transforms of a batch, in the order in which they are applied.

    The order is: reward shaping, KL penalty, advantage estimator, filters, rollout correction,
    changes to advantages.
    """
    steps: list[Transform] = [fill_old_from_sampler] if config.old_logprobs == "sampler" else []
    if config.positive_nll_coef > 0 or config.mean_reward_range is not None:
        steps.append(copy_judged_rewards)
    estimator: Transform = build(config.advantage)
    if config.equal_rewards == "drop" and _adds_signal(config.shaping):
        # A length penalty gives answers of equal reward different advantages, which would keep
        # their group. So the signal is measured without such shaping.
        neutral_shaping = [build(part) for part in config.shaping if not _adds_signal((part,))]
        steps.append(partial(fill_has_signal, transforms=(*neutral_shaping, estimator)))
    steps += [build(part) for part in config.shaping]
    if config.kl.coef > 0:
        steps.append(
            partial(
                {"reward": kl_in_reward, "loss": report_kl_coef}[config.kl.place],
                coef=config.kl.coef,
            )
        )
    steps.append(estimator)
    if config.equal_rewards != "keep":
        steps.append(drop_groups_without_signal)
    if config.mean_reward_range is not None:
        low, high = config.mean_reward_range
        steps.append(partial(drop_by_mean_reward, low=low, high=high))
    if config.truncated == "drop":
        steps.append(drop_truncated)
    if config.correction is not None:
        steps.append(build(config.correction))
    if config.whiten:
        steps.append(whiten)
    calls, thinking = config.malformed_call_advantage, config.malformed_thinking_advantage
    if calls is not None or thinking is not None:
        steps.append(partial(penalise_malformed_turns, calls=calls, thinking=thinking))
    if config.advantage_bounds is not None:
        low, high = config.advantage_bounds
        steps.append(partial(clip_advantages, low=low, high=high))
    return tuple(steps)


def _adds_signal(shaping: tuple[ShapingPart, ...]) -> bool:
    """True if shaping changes equal rewards to unequal ones, by length or by truncation."""
    return any("equal_rewards" in part.exempt for part in shaping)


def _build_adaptation(kl: KLConfig) -> Any:
    """Return the function that adapts the KL coefficient after each step, if it is adaptive."""
    if kl.coef == 0 or kl.target is None:
        return no_adaptation
    metric = "policy/kl/kl" if kl.place == "loss" else "batch/kl/kl"
    return partial(adapt_coef, coef=kl.coef, metric=metric, target=kl.target, rate=kl.rate)


def adapt_coef(
    state: AlgoState,
    metrics: Mapping[str, float],
    *,
    coef: float,
    metric: str,
    target: float,
    rate: float,
) -> None:
    """Set the KL coefficient of the next step from this step's KL, the metric named `metric`.

    The coefficient does not change if the metric is missing, or is not finite: the learner skips
    such a step, and a coefficient of NaN would make every later step NaN.
    """
    if math.isfinite(metrics.get(metric, math.nan)):
        state.numbers[COEF] = adapt_kl(
            state.numbers.get(COEF, coef), metrics[metric], target=target, rate=rate
        )


def _list_exemptions(config: PolicyGradientConfig) -> dict[str, str]:
    """Return the properties that the algorithm does not have because of its parts and options.

    Each comes with its reason, see `ratchet.algorithms.properties`.
    """
    # equal_rewards=drop removes the groups whose rewards differ only because of shaping, so shaping
    # needs no exemption.
    shaping = () if config.equal_rewards == "drop" else config.shaping
    parts: tuple[AlgorithmPart, ...] = (*config.estimators, *shaping, config.loss)
    exemptions: list[Mapping[str, str]] = []
    if config.kl.coef > 0 and config.kl.place == "reward":
        exemptions += [part.exempt_under_kl for part in config.estimators]
    exemptions += [part.exempt for part in parts]
    return {name: reason for exempt in exemptions for name, reason in exempt.items()}
