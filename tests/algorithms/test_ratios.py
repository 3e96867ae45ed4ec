"""Log-ratios far beyond float32's exponential: every policy loss, KL estimator, correction and
preference loss stays finite, an extreme token leaves the gradients of the others alone, and within
the bound nothing differs from the plain exponential.

T = all tokens laid end to end, S = sequences, G = groups.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.cases import groups
from oracles.ragged import Row
from torch import Tensor

from ratchet.algorithms import kl, rollout_correction
from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.kl import kl_penalty
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses import policy, preference
from ratchet.algorithms.losses.common import Metrics
from ratchet.algorithms.ratios import LOG_RATIO_BOUND, bounded_ratio, k3
from ratchet.algorithms.rollout_correction import apply_correction, correct
from ratchet.batch import Batch
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.protocols import Outputs

Loss = Callable[[Outputs, Batch], tuple[Tensor, Metrics]]

TRAINED = [3, 2, 1, 4]  # trained tokens of the four rows, two rows a group
ROW = [row for row, count in enumerate(TRAINED) for _ in range(count)]
COUNT = sum(TRAINED)
EDGES = [0.0, 0.3, -0.3, 19.9, 20.1, -20.1, 60.0, 88.0, 89.0, -89.0, 700.0, 1e4, -1e4]
EXTREME = st.lists(st.sampled_from(EDGES) | st.floats(-1e4, 1e4), min_size=COUNT, max_size=COUNT)
ORDINARY = st.lists(st.floats(-2, 2) | st.floats(-20, 20), min_size=COUNT, max_size=COUNT)
SIGNS = st.lists(st.sampled_from([1.0, -1.0, 0.0, 0.3]), min_size=COUNT, max_size=COUNT)

LOSSES: dict[str, Loss] = {
    kind: build(resolve("policy_loss", {"kind": kind})) for kind in KINDS["policy_loss"]
}
LOSSES["ppo with dual clip"] = partial(
    policy.clipped_surrogate, clip_low=0.2, clip_high=0.2, dual_clip=3.0
)
KLS: dict[str, Loss] = {
    f"kl {objective} {estimator}": partial(kl_penalty, objective=objective, estimator=estimator)  # pyright: ignore[reportArgumentType]
    for objective, estimator in [
        ("reverse", "k1"),
        ("reverse", "k2"),
        ("reverse", "k3"),
        ("forward", "k3"),
    ]
}
PREFERENCES: dict[str, Loss] = {
    "dpo": partial(preference.dpo, beta=0.1, label_smoothing=0.1),
    "dpo by the mean": partial(preference.dpo, beta=0.1, normalize="mean"),
    "ipo": partial(preference.ipo, beta=0.1),
    "rpo": partial(preference.rpo, beta=0.1, eta=1.0),
    "simpo": partial(preference.simpo, beta=2.0, gamma=1.0),
    "odds ratio": preference.odds_ratio,
    "kto": partial(preference.kto, beta=0.1),
}
OF_ROWS = {"gspo", "gspo_token", "topr", "gmpo", "kimi"}  # one ratio for a row: its tokens do share


def batch_of(dtype: torch.dtype) -> Batch:
    rows = [
        Row(f"g{i // 2}", i, [0] * (n + 1), [False] + [True] * n, reward=float(1 - i % 2))
        for i, n in enumerate(TRAINED)
    ]
    return pack(groups(rows)).to("cpu", dtype)


def placed(batch: Batch, numbers: list[float]) -> Tensor:
    """The numbers at the trained tokens, 0 elsewhere. [T]"""
    dtype = batch.rewards_S.dtype
    return torch.zeros(batch.n_tokens, dtype=dtype).masked_scatter(
        batch.trainable_T, torch.tensor(numbers, dtype=dtype)
    )


def tried(
    loss: Loss, log_ratios: list[float], advantages: list[float], dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Metrics]:
    """Return (x, gradient by each trained token's log-probability, metrics).

    The same log-ratios are against the old policy and against the reference.
    """
    batch = batch_of(dtype)
    logprobs_T = placed(batch, [-abs(x) / 2 - 0.1 for x in log_ratios])
    other_T = logprobs_T - placed(batch, log_ratios)
    batch = batch.fill_tokens(advantages=placed(batch, advantages), ref_logprobs=other_T)
    batch = batch.fill_sequences(kto_z0=torch.zeros(batch.n_sequences, dtype=dtype))
    leaf_T = logprobs_T.requires_grad_()
    x, metrics = loss(
        Outputs(sequence_sum=batch.sequence_sum, logprobs=leaf_T, old_logprobs=other_T), batch
    )
    if x.requires_grad:
        x.sum().backward()
    gradient_T = torch.zeros_like(leaf_T) if leaf_T.grad is None else leaf_T.grad
    return x.detach(), gradient_T[batch.trainable_T], metrics


def is_finite(*tensors: Tensor) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


@pytest.mark.fault("M11")
@pytest.mark.parametrize("name", [*LOSSES, *KLS, *PREFERENCES])
@settings(max_examples=10)
@given(log_ratios=EXTREME, advantages=SIGNS)
def test_values_and_gradients_are_finite(
    name: str, log_ratios: list[float], advantages: list[float]
):
    x, gradient, metrics = tried((LOSSES | KLS | PREFERENCES)[name], log_ratios, advantages)
    assert is_finite(x, gradient, *metrics.values())


@pytest.mark.fault("M11")
@pytest.mark.parametrize("name", [*LOSSES, *KLS])
@settings(max_examples=8)
@given(
    log_ratios=EXTREME,
    advantages=SIGNS,
    token=st.integers(0, COUNT - 1),
    value=st.sampled_from(EDGES),
)
def test_one_token_leaves_the_other_gradients_alone(
    name: str, log_ratios: list[float], advantages: list[float], token: int, value: float
):
    changed = [value if i == token else x for i, x in enumerate(log_ratios)]
    _, before, _ = tried((LOSSES | KLS)[name], log_ratios, advantages)
    _, after, _ = tried((LOSSES | KLS)[name], changed, advantages)
    touched = [ROW[i] == ROW[token] if name in OF_ROWS else i == token for i in range(COUNT)]
    others = ~torch.tensor(touched)
    assert torch.equal(before[others], after[others])


@pytest.mark.parametrize("name", [*LOSSES, *KLS])
@settings(max_examples=8)
@given(log_ratios=ORDINARY, advantages=SIGNS)
def test_within_the_bound_it_is_the_plain_exponential(
    name: str, log_ratios: list[float], advantages: list[float]
):
    if name in OF_ROWS:  # a sum over a row has to stay within the bound too
        log_ratios = [x / max(TRAINED) for x in log_ratios]
    bounded = tried((LOSSES | KLS)[name], log_ratios, advantages, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        for module in (policy, kl):
            patch.setattr(module, "bounded_ratio", torch.exp)
            patch.setattr(module, "k3", lambda d: (-d).exp() - 1 + d)
        plain = tried((LOSSES | KLS)[name], log_ratios, advantages, torch.float64)
    assert torch.equal(bounded[0], plain[0])
    assert torch.equal(bounded[1], plain[1])
    assert all(torch.equal(bounded[2][key], plain[2][key]) for key in plain[2])


def test_the_bound_by_hand():
    x = torch.tensor([-1e4, -1.0, 20.0, 20.5, 1e4], requires_grad=True)
    ratio = bounded_ratio(x)
    (slope,) = torch.autograd.grad(ratio.sum(), x)
    assert ratio.tolist() == pytest.approx([0.0, math.exp(-1), *[math.exp(LOG_RATIO_BOUND)] * 3])
    assert slope.tolist() == pytest.approx([0.0, math.exp(-1), math.exp(20), 0.0, 0.0])
    divergence = k3(x)
    (slope,) = torch.autograd.grad(divergence.sum(), x)
    edge = math.exp(LOG_RATIO_BOUND) - 1 - LOG_RATIO_BOUND
    assert divergence.tolist() == pytest.approx([edge, math.e - 2, 19, 19.5, 1e4 - 1])
    assert slope.tolist() == pytest.approx([0.0, 1 - math.e, 1, 1, 1])


@pytest.mark.parametrize(("advantage", "dual_clip"), [(1.0, None), (-1.0, 3.0), (-1.0, None)])
def test_a_clipped_token_beyond_the_range_has_no_gradient(
    advantage: float, dual_clip: float | None
):
    """exp(100) overflows float32. The gradient is exactly 0 where a clip or the bound holds."""
    loss = partial(policy.clipped_surrogate, clip_low=0.2, clip_high=0.2, dual_clip=dual_clip)
    x, gradient, _ = tried(loss, [100.0] + [0.0] * (COUNT - 1), [advantage] * COUNT)
    assert gradient[0] == 0
    assert gradient[1:].tolist() == pytest.approx([-advantage] * (COUNT - 1))
    assert is_finite(x)


# --- corrections


LEVELS = ["none", "token", "turn", "sequence", "geometric"]


def correction_of(gaps: list[float], **options: Any) -> Batch:
    """Return the corrected batch, float32; old log-probabilities exceed the sampler's by gaps."""
    batch = batch_of(torch.float64)
    batch = batch.fill_tokens(old_logprobs=placed(batch, gaps) + batch.rollout_logprobs_T)
    return correct(batch, AlgoState(), **options).to("cpu", torch.float32)


@pytest.mark.fault("M11")
@pytest.mark.parametrize("level", LEVELS)
@settings(max_examples=10)
@given(gaps=EXTREME)
def test_weights_and_measures_of_a_correction_are_finite(level: str, gaps: list[float]):
    batch = correction_of(
        gaps, weight=level, weight_high=None, mask=level, mask_low=0.0, mask_high=1e30
    )
    assert is_finite(batch.need("correction"))
    assert not batch.has("correction_S") or is_finite(batch.need("correction_S"))
    assert all(math.isfinite(value) for value in batch.metrics.values())


@settings(max_examples=10)
@given(gaps=EXTREME, log_ratios=EXTREME)
def test_a_corrected_loss_is_finite(gaps: list[float], log_ratios: list[float]):
    factor_T = correction_of(gaps, weight="token", weight_high=None).need("correction")

    def loss(out: Outputs, batch: Batch) -> tuple[Tensor, Metrics]:
        return apply_correction(out, batch.fill_tokens(correction=factor_T), fn=LOSSES["ppo"])

    x, gradient, _ = tried(loss, log_ratios, [1.0, -1.0] * (COUNT // 2))
    assert is_finite(x, gradient)


@settings(max_examples=10)
@given(gaps=ORDINARY)
@pytest.mark.parametrize("level", LEVELS)
def test_ordinary_weights_are_the_plain_exponential(level: str, gaps: list[float]):
    gaps = [x / max(TRAINED) for x in gaps]
    options = {"weight": level, "weight_high": None, "mask": level}
    bounded = correction_of(gaps, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rollout_correction, "bounded_ratio", torch.exp)
        plain = correction_of(gaps, **options)
    assert torch.equal(bounded.need("correction"), plain.need("correction"))
    assert torch.equal(bounded.trainable_T, plain.trainable_T)


# --- through the learner


@pytest.mark.fault("M11")
def test_one_corrupt_log_probability_costs_no_optimizer_step():
    model = DecoderPolicy(Decoder(DecoderConfig(11, 8, 1, 2, 1, 4, 12)).init_weights(0))
    batch = batch_of(torch.float64)
    old_T = placed(batch, [-200.0, *[-0.5] * (COUNT - 1)])
    batch = batch.fill_tokens(advantages=placed(batch, [1.0] * COUNT), old_logprobs=old_T)
    needs = frozenset({"logprobs", "old_logprobs"})
    term = AlgorithmTerm(
        "policy_gradient",
        partial(policy.clipped_surrogate, clip_low=0.2, clip_high=0.2),
        token_mean,
        needs=needs,
    )
    algorithm = Algorithm("test", {"policy": (term,)}, "rollouts")
    learner = LocalLearner(LocalConfig(), model, optimizer=OptimizerConfig(lr=1e-3), total_steps=1)
    update = asyncio.run(
        learner.update(algorithm.weigh(batch, AlgoState()), algorithm.losses["policy"])
    )
    assert update["skipped_nonfinite"] == 0.0
    assert 0 < update["grad_norm"] < math.inf


@pytest.mark.parametrize("infinite", [math.inf, -math.inf])
def test_an_infinite_old_logprob_is_no_nan_in_gspo_token(infinite: float):
    """The token's ratio to itself has no part in it; the answer's ratio is bounded, or 0."""
    count = sum(TRAINED)
    batch = batch_of(torch.float32)
    old_T = placed(batch, [infinite] + [-0.5] * (count - 1))
    logprobs_T = placed(batch, [-0.5] * count).requires_grad_()
    batch = batch.fill_tokens(advantages=placed(batch, [1.0] * count))
    out = Outputs(sequence_sum=batch.sequence_sum, logprobs=logprobs_T, old_logprobs=old_T)
    x_T, _ = policy.gspo_token(out, batch, clip_low=0.2, clip_high=0.2)
    x_T.sum().backward()
    assert logprobs_T.grad is not None
    assert is_finite(x_T.detach(), logprobs_T.grad)
