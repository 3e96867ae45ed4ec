"""What a name promises: the defaults of each named algorithm against its paper's objective,
normaliser included, value and gradient, on random ragged batches. A sum over all of a batch, in
plain Python, from the oracles of the parts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from oracles import advantages, losses, policy_losses
from oracles import ragged as oracle
from oracles.cases import column, gradient, groups, kept, leaf, outputs, rollouts
from oracles.ragged import Ragged, Row, weights_of

from ratchet.algorithms.base import AlgoState
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack

Advantage = Callable[[list[Row]], list[float]]
Value = tuple[float, Ragged]  # the loss, and its slope by every log-probability

CLIP = {"clip_low": 0.2, "clip_high": 0.2}
CLIP_HIGHER = {"clip_low": 0.2, "clip_high": 0.28}
STD = partial(advantages.group_relative, scale="std", epsilon=1e-6)
CENTRED = partial(advantages.group_relative, scale="none", epsilon=1e-6)


def answers_mean(rows: list[Row], x_S: list[float]) -> list[float]:
    """1 / answers for each answer that trains: the weight of one value a row."""
    count = sum(any(row.mask) for row in rows)
    return [float(any(row.mask)) / max(count, 1) for row in rows]


@dataclass(frozen=True)
class Named:
    """advantage: by row. loss: the oracle of the policy loss. mean: over tokens; None: over
    answers, of a value each."""

    advantage: Advantage
    loss: Callable[..., tuple[Any, Ragged]]
    mean: Callable[..., float] | None
    options: tuple[tuple[str, Any], ...] = ()
    constants: tuple[int, ...] = ()

    def __call__(self, rows: list[Row]) -> Value:
        x, slopes = self.loss(rows, advantages.on_tokens(rows, self.advantage(rows)))
        if self.mean is None:
            by_row = answers_mean(rows, x)
            value = sum(w * v for w, v in zip(by_row, x, strict=True))
            weights: Ragged = [[w] * len(row.tokens) for w, row in zip(by_row, rows, strict=True)]
        else:
            value = self.mean(rows, x, *self.constants)
            weights = weights_of(self.mean, rows, *self.constants)
        products = [
            [w * s for w, s in zip(w_row, s_row, strict=True)]
            for w_row, s_row in zip(weights, slopes, strict=True)
        ]
        return value, products


PPO = partial(losses.clipped_surrogate, **CLIP)
NAMED = {
    # the mean over answers of their means over tokens, eq. 3
    "grpo": Named(STD, PPO, oracle.sequence_mean),
    # the sum over tokens, over a constant
    "dr_grpo": Named(CENTRED, PPO, oracle.fixed_length, (("fixed_length", 7),), (7,)),
    # the mean over tokens, eq. 8
    "dapo": Named(
        STD,
        partial(losses.clipped_surrogate, **CLIP_HIGHER),
        oracle.token_mean,
        (("equal_rewards", "keep"),),
    ),
    "cispo": Named(
        STD, partial(policy_losses.cispo, clip_low=None, clip_high=2.0), oracle.token_mean
    ),
    # an answer is one action: the sum of its tokens' log-probabilities, over the count of answers
    "rloo": Named(advantages.rloo, policy_losses.reinforce, oracle.token_sum),
    "topr": Named(
        CENTRED, partial(policy_losses.topr, negative_low=0.0, negative_high=1.0), oracle.token_sum
    ),
    "kimi": Named(CENTRED, partial(policy_losses.kimi, tau=0.1), None),
    # the mean over answers of a ratio of each
    "gspo": Named(STD, partial(policy_losses.gspo, clip_low=3e-4, clip_high=4e-4), None),
    "gmpo": Named(STD, partial(policy_losses.gmpo, clip_low=0.4, clip_high=0.4), None),
    "sapo": Named(
        STD, partial(policy_losses.sapo, tau_pos=1.0, tau_neg=1.05), oracle.sequence_mean
    ),
    # the mean over tokens, as in their authors' code
    "opo": Named(advantages.opo, PPO, oracle.token_mean),
    "remax": Named(
        lambda rows: advantages.remax(rows)[0], policy_losses.reinforce, oracle.token_mean
    ),
}


def sampled(rows: list[Row]) -> list[Row]:
    """The sampler's log-probabilities are the old ones, as it records them: in float32."""
    rounded = [[float(np.float32(lp)) for lp in row.old_logprobs] for row in rows]
    return [
        replace(row, old_logprobs=old, rollout_logprobs=old)
        for row, old in zip(rows, rounded, strict=True)
    ]


@pytest.mark.fault("M12")
@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=10)
@given(rows=rollouts(max_groups=3))
def test_a_name_is_its_papers_objective(name: str, rows: list[Row]):
    named = NAMED[name]
    rows = sampled(kept(rows, rows))
    assume(rows)
    if name == "remax":  # a group without a greedy answer has no baseline, and leaves the batch
        greedy = Counter(row.group for row in rows if row.use == "baseline")
        assume(max(greedy.values(), default=0) <= 1)  # as rollouts draw it
        stays = advantages.remax(rows)[1]
        left = [
            row if s else replace(row, trained=[False] * len(row.trained))
            for row, s in zip(rows, stays, strict=True)
        ]
        x, slopes = named.loss(left, advantages.on_tokens(rows, named.advantage(rows)))
        value, expected = oracle.token_mean(left, x), _weighed(left, slopes)
    else:
        value, expected = named(rows)
    algorithm = build(resolve("algorithm", {"kind": name, **dict(named.options)}))
    batch = algorithm.weigh(algorithm.advantage(pack(groups(rows)), AlgoState()), AlgoState())
    if name == "topr":  # what drew the answer, not what the learner computes anew
        assert torch.equal(batch.need("old_logprobs"), batch.rollout_logprobs_T)
    logprobs_T = leaf([row.logprobs for row in rows])
    zeros_T = torch.zeros_like(logprobs_T.detach())
    loss = sum(
        term(outputs(batch, logprobs_T, rows, zeros_T), batch)[0]
        for term in algorithm.losses["policy"]
    )
    assert isinstance(loss, torch.Tensor)
    assert loss.item() == pytest.approx(value, rel=1e-9, abs=1e-11)
    torch.testing.assert_close(gradient(loss, logprobs_T), column(expected), rtol=1e-9, atol=1e-9)


def _weighed(rows: list[Row], slopes: Ragged) -> Ragged:
    weights = weights_of(oracle.token_mean, rows)
    return [
        [w * s for w, s in zip(w_row, s_row, strict=True)]
        for w_row, s_row in zip(weights, slopes, strict=True)
    ]
