"""Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300), with the options that later work showed to matter."""

from __future__ import annotations

from functools import partial

from ratchet.algorithms.advantages import group_relative
from ratchet.algorithms.base import Algorithm, Pass, Term, Weighting
from ratchet.algorithms.config import GRPOConfig
from ratchet.algorithms.losses import clipped_surrogate, entropy_bonus, kl_penalty
from ratchet.algorithms.weightings import WEIGHTINGS, fixed_length


def build_grpo(config: GRPOConfig) -> Algorithm:
    weighting: Weighting = (
        WEIGHTINGS[config.weighting] if config.fixed_length is None else partial(fixed_length, length=config.fixed_length)
    )
    surrogate = partial(clipped_surrogate, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip)
    terms = [Term("policy_gradient", surrogate, weighting, needs=frozenset({"logprobs", "old_logprobs"}))]
    passes = [Pass("policy", "logprobs", "old_logprobs")]
    if config.kl_coef > 0:
        penalty = partial(kl_penalty, objective=config.kl_objective, estimator=config.kl_estimator)
        needs = frozenset({"logprobs", "old_logprobs"})
        terms.append(Term("kl", penalty, weighting, needs=needs, coef=config.kl_coef))
        passes.append(Pass("reference", "logprobs", "ref_logprobs"))
    if config.entropy_coef > 0:
        terms.append(Term("entropy", entropy_bonus, weighting, needs=frozenset({"entropy"}), coef=config.entropy_coef))
    return Algorithm(
        name="grpo",
        source=config.source,
        losses={"policy": tuple(terms)},
        passes=tuple(passes),
        advantage=partial(
            group_relative, scale=config.advantage_scale, epsilon=config.std_epsilon, equal_rewards=config.equal_rewards
        ),
        minibatches=config.minibatches,
        epochs=config.epochs,
        group_size=config.group_size,
    )
