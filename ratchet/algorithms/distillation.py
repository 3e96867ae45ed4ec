"""The distillation algorithms, built from their configuration."""

from __future__ import annotations

from functools import partial

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.algorithms.config.distillation import DistillationConfig
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.common import nll
from ratchet.algorithms.losses.distillation import divergence
from ratchet.algorithms.losses.likelihood_matching import match_likelihoods
from ratchet.algorithms.teacher_passes import build_teacher_passes, build_weighted_passes

DISTILLATION_EXEMPTIONS = {
    "on_policy": "no policy gradient: the divergence itself is differentiated",
    "equal_rewards": "no advantages: the teacher's distribution is the signal",
    "lone_attempt": "no advantages: each row is a datum of its own",
}


def build(config: DistillationConfig) -> Algorithm:
    """Return the distillation algorithm of a section."""
    aligned = config.teacher_tokens == "aligned"
    if aligned:
        columns = {"logprobs": "teacher_logprobs", "spans": "teacher_spans"}
    else:
        columns = {"topk_logprobs": "teacher_topk_logprobs"}
        # Without top_k the ids are those of the whole vocabulary, 0, 1, 2, ..., without a column.
        if config.top_k is not None:
            columns["topk_ids"] = "teacher_ids"
    if isinstance(config.teacher, tuple):
        roles, passes = build_weighted_passes(
            config.teacher, columns, aligned=aligned, temperature=config.teacher_temperature
        )
        share = 1 / len(config.teacher)
        terms = [
            _build_term(config, f"_{i}", share if teacher.weight is None else teacher.weight)
            for i, teacher in enumerate(config.teacher, start=1)
        ]
    else:
        roles, passes = build_teacher_passes(
            config.teacher,
            columns,
            aligned=aligned,
            top_k=0 if aligned else config.top_k or 0,
            temperature=config.teacher_temperature,
        )
        terms = [_build_term(config, "", 1.0)]
    if config.likelihood_coef > 0:
        terms.append(AlgorithmTerm("nll", nll, token_mean, coef=config.likelihood_coef))
    return Algorithm(
        name=config.display_name,
        source=config.source,
        turns=config.trained_tokens,
        losses={"policy": tuple(terms)},
        passes=passes,
        roles=roles,
        minibatches=config.minibatches,
        epochs=config.epochs,
        group_size=config.n_attempts,
        temperature=config.tau,
        reads_reward=config.reads_reward,
        exempt=DISTILLATION_EXEMPTIONS,
    )


def _build_term(config: DistillationConfig, ending: str, weight: float) -> AlgorithmTerm:
    """Return the loss of one teacher, whose columns have this ending."""
    if config.teacher_tokens == "aligned":
        loss = partial(match_likelihoods, temperature=config.span_temperature, ending=ending)
        return AlgorithmTerm(f"likelihood{ending}", loss, token_mean, coef=weight)
    mix = 0.5 if config.mix is None else config.mix
    loss = partial(
        divergence, objective=config.objective, mix=mix, clip=config.token_clip, ending=ending
    )
    needs = frozenset({"topk_logprobs"})
    return AlgorithmTerm(f"divergence{ending}", loss, token_mean, needs=needs, coef=weight)
