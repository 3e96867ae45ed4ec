"""A whole optimizer step, from ragged groups to the loss and the gradient's norm that the learner
reports, against a decoder run on one sequence at a time and the oracles' weights and slopes.
Float64 throughout.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles import advantages, losses
from oracles import ragged as oracle
from oracles.cases import column, groups, kept
from oracles.ragged import Ragged, Row, weights_of
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState
from ratchet.algorithms.config.advantages import GroupRelative
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.config.policy_losses import PPO
from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.algorithms.sft import build_sft
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy

VOCAB = 11


def model() -> DecoderPolicy:
    return DecoderPolicy(
        Decoder(DecoderConfig(VOCAB, 16, 2, 2, 1, 8, 24, init_std=0.4)).init_weights(3).double()
    )


def random_rows(seed: int, ending: str) -> list[Row]:
    """Five ragged groups: environment spans inside, a row without trained tokens, a failure, a
    baseline, a fork."""
    rng = np.random.default_rng(seed)
    rows = []
    for g in range(5):
        for attempt in range(1 if ending == "unjudged" else int(rng.integers(1, 5))):
            prompt, length = int(rng.integers(1, 4)), int(rng.integers(0, 7))
            trained = [False] * prompt + rng.choice([True, True, False], length).tolist()
            tokens = rng.integers(0, VOCAB, len(trained)).tolist()
            reward = None if ending == "unjudged" else float(rng.integers(0, 3))
            rows.append(Row(f"g{g}", attempt, tokens, trained, ending, reward))
    if ending == "scored":
        last = rows[-1]
        rows += [
            replace(last, attempt=10, ending="failed", reward=None),
            replace(last, attempt=11, use="baseline", reward=9.0),
            # a fork of one attempt
            replace(last, tokens=[*last.tokens, 1, 2], trained=[*last.trained, False, True]),
        ]
    return rows


def logprobs_alone(net: DecoderPolicy, row: Row) -> list[Tensor]:
    """log p(token | tokens before) at the trained tokens of one row, which has the model to
    itself."""
    n = len(row.tokens)
    hidden = net.hidden(torch.tensor(row.tokens), torch.arange(n), [n])
    log_p = (hidden @ net.decoder.head_weight.T).log_softmax(-1)
    zero = log_p.new_zeros(())
    return [log_p[t - 1, row.tokens[t]] if trains else zero for t, trains in enumerate(row.mask)]


def with_live_logprobs(
    net: DecoderPolicy, rows: list[Row], seed: int
) -> tuple[list[Row], list[list[Tensor]]]:
    rng = np.random.default_rng(seed)
    live = [logprobs_alone(net, row) for row in rows]
    filled = []
    for row, own in zip(rows, live, strict=True):
        logprobs = [lp.item() for lp in own]
        old = [
            lp - rng.normal(0, 0.3) if trains else 0.0
            for lp, trains in zip(logprobs, row.mask, strict=True)
        ]
        filled.append(replace(row, logprobs=logprobs, old_logprobs=old))
    return filled, live


def expected_norm(net: DecoderPolicy, live: list[list[Tensor]], by_logprob: Ragged) -> float:
    loss = sum(
        (
            slope * lp
            for slopes, own in zip(by_logprob, live, strict=True)
            for slope, lp in zip(slopes, own, strict=True)
        ),
        torch.zeros((), dtype=torch.float64),
    )
    found = torch.autograd.grad(loss, list(net.parameters()))
    return float(torch.sqrt(sum((g**2).sum() for g in found)))  # pyright: ignore[reportArgumentType]


def step(
    net: DecoderPolicy, algo: Algorithm, rows: list[Row], micro_batch_tokens: int
) -> dict[str, float]:
    batch = pack(groups(rows)).fill_tokens(
        old_logprobs=column(kept(rows, [row.old_logprobs for row in rows]))
    )
    mini = algo.weigh(algo.advantage(batch, AlgoState()), AlgoState())
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=None)
    learner = LocalLearner(
        LocalConfig(micro_batch_tokens=micro_batch_tokens), net, optimizer=optimizer, total_steps=10
    )
    return dict(asyncio.run(learner.update(mini, algo.losses["policy"])))


def times(a: Ragged, b: Ragged) -> Ragged:
    return [
        [x * y for x, y in zip(a_row, b_row, strict=True)]
        for a_row, b_row in zip(a, b, strict=True)
    ]


def assert_step(metrics: dict[str, float], loss: float, norm: float) -> None:
    assert metrics["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-9)


@pytest.mark.parametrize("micro_batch_tokens", [1, 13, 1000])
@pytest.mark.parametrize(
    ("options", "mean", "constants"),
    [
        ({"weighting": "token_mean", "loss": PPO(clip_high=0.28)}, oracle.token_mean, ()),
        ({"weighting": "sequence_mean"}, oracle.sequence_mean, ()),
        (
            {
                "weighting": "fixed_length",
                "fixed_length": 6,
                "advantage": GroupRelative(scale="none"),
            },
            oracle.fixed_length,
            (6,),
        ),
    ],
    ids=["token_mean", "sequence_mean", "fixed_length"],
)
def test_grpo_step(options: dict, mean, constants, micro_batch_tokens: int):
    net = model()
    rows, live = with_live_logprobs(net, random_rows(0, "scored"), seed=1)
    # two steps a batch: the column's old logprobs are used
    config = GRPOConfig(**options, epochs=2)
    assert isinstance(config.advantage, GroupRelative)
    assert isinstance(config.loss, PPO)
    by_row = advantages.group_relative(rows, scale=config.advantage.scale, epsilon=1e-6)
    spec = {"clip_low": 0.2, "clip_high": config.loss.clip_high}
    x, slope = losses.clipped_surrogate(rows, advantages.on_tokens(rows, by_row), **spec)
    norm = expected_norm(net, live, times(weights_of(mean, rows, *constants), slope))
    assert_step(
        step(net, build_policy_gradient(config), rows, micro_batch_tokens),
        mean(rows, x, *constants),
        norm,
    )


@pytest.mark.parametrize("micro_batch_tokens", [1, 13, 1000])
@pytest.mark.parametrize("name", ["token_mean", "sequence_mean"])
def test_sft_step(name, micro_batch_tokens: int):
    net, mean = model(), getattr(oracle, name)
    rows, live = with_live_logprobs(net, random_rows(5, "unjudged"), seed=1)
    x, slope = losses.nll(rows)
    norm = expected_norm(net, live, times(weights_of(mean, rows), slope))
    algo = build_sft(SFTConfig(weighting=name))
    assert_step(step(net, algo, rows, micro_batch_tokens), mean(rows, x), norm)
