"""Distillation from its configuration."""

from __future__ import annotations

from functools import partial

from ratchet.algorithms.base import Algorithm, Pass, Term
from ratchet.algorithms.config.distillation import DistillationConfig
from ratchet.algorithms.losses.distillation import divergence
from ratchet.algorithms.teachers import teacher_roles
from ratchet.algorithms.weightings import token_mean

DISTILLED = {
    "on_policy": "no policy gradient: the divergence itself is differentiated",
    "equal_rewards": "no advantages: the teacher's distribution is the signal",
    "lone_attempt": "no advantages: each row is a datum of its own",
}


def build(config: DistillationConfig) -> Algorithm:
    mix = 0.5 if config.mix is None else config.mix
    loss = partial(divergence, objective=config.objective, mix=mix)
    roles = teacher_roles(config.teacher)
    passes = [
        Pass(role, wanted, column, tag=role.partition("/")[2] or None, top_k=config.top_k or 0)
        for role in roles
        for wanted, column in (("topk_ids", "teacher_ids"), ("topk_logprobs", "teacher_topk_logprobs"))
    ]
    return Algorithm(
        name=config.called,
        source=config.source,
        losses={"policy": (Term("divergence", loss, token_mean, needs=frozenset({"topk_logprobs"})),)},
        passes=tuple(passes),
        roles=roles,
        minibatches=config.minibatches,
        epochs=config.epochs,
        group_size=int(getattr(config, "group_size", 1)),
        temperature=config.tau,
        exempt=DISTILLED,
    )
