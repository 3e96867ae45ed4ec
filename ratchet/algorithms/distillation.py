"""The distillation algorithms, built from their configuration."""

from __future__ import annotations

from functools import partial

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.algorithms.config.distillation import DistillationConfig
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.common import nll
from ratchet.algorithms.losses.distillation import divergence
from ratchet.algorithms.teacher_passes import build_teacher_passes

DISTILLATION_EXEMPTIONS = {
    "on_policy": "no policy gradient: the divergence itself is differentiated",
    "equal_rewards": "no advantages: the teacher's distribution is the signal",
    "lone_attempt": "no advantages: each row is a datum of its own",
}


def build(config: DistillationConfig) -> Algorithm:
    """Return the distillation algorithm of a section."""
    mix = 0.5 if config.mix is None else config.mix
    loss = partial(divergence, objective=config.objective, mix=mix, clip=config.token_clip)
    terms = [AlgorithmTerm("divergence", loss, token_mean, needs=frozenset({"topk_logprobs"}))]
    if config.likelihood_coef > 0:
        terms.append(AlgorithmTerm("nll", nll, token_mean, coef=config.likelihood_coef))
    columns = {"topk_logprobs": "teacher_topk_logprobs"}
    # Without top_k the ids are those of the whole vocabulary, 0, 1, 2, ...: they need no column.
    if config.top_k is not None:
        columns["topk_ids"] = "teacher_ids"
    roles, passes = build_teacher_passes(
        config.teacher, columns, top_k=config.top_k or 0, temperature=config.teacher_temperature
    )
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
