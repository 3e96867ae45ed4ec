"""Weights in bfloat16 by Megatron Core, with its copies in float32: near the learner of one process
that rounds to bfloat16 what it multiplies, and resumed bit by bit."""

from functools import cache

import pytest
import torch
from learners.megatron_cases import alone, weighed
from learners.ranks import run_ranks
from learners.spread_cases import assembled, columns_of

pytestmark = [pytest.mark.slow, pytest.mark.needs("megatron")]

HALF = {"weights": "bfloat16"}
DIVISIONS = {
    "dp2": {"data_parallel": 2},
    "dp2 whole optimizer": {"data_parallel": 2, "distributed_optimizer": False},
    "tp2": {"tensor_parallel": 2, "sequence_parallel": True},
    "pp2": {"pipeline_parallel": 2},
}
CASES = [
    *((name, "tied", "grpo") for name in DIVISIONS),
    *((name, "sparse", "sft") for name in ("dp2", "tp2")),
]


@cache
def expected(shape, kind):
    return alone(shape, kind, 3, autocast=True)


@cache
def found():
    cases = [
        {"shape": shape, "kind": kind, "options": {**HALF, **DIVISIONS[name]}}
        for name, shape, kind in CASES
    ]
    results = run_ranks(2, "learners.megatron_cases:run", cases, timeout_s=900)
    return dict(zip(CASES, ([list(parts) for parts in zip(*results, strict=True)]), strict=False))


@pytest.mark.parametrize(("name", "shape", "kind"), CASES)
def test_it_is_near_one_process_that_multiplies_in_bfloat16(name, shape, kind):
    """Within 3 % of losses and gradient norms, 2 % of each weight's norm, 0.05 nats a token. The
    two round other things: here also what is carried from layer to layer, and the language head's
    weights."""
    ranks = found()[name, shape, kind]
    assert not [text for text in ranks if isinstance(text, str)], ranks
    metrics, weights, columns = expected(shape, kind)
    for mine, wanted in zip(ranks[-1][0], metrics, strict=True):
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(wanted[key], rel=0.03), key
    for weight_name, tensor in assembled(ranks).items():
        assert tensor.dtype == torch.bfloat16
        assert (tensor.float() - weights[weight_name]).norm() < 0.02 * weights[
            weight_name
        ].norm(), weight_name
    scored = columns_of(ranks, weighed(kind, 0)[0])["logprobs"]
    assert scored.dtype == torch.float32
    assert (scored - columns["logprobs"]).abs().mean() < 0.05


@pytest.mark.parametrize("name", DIVISIONS)
def test_copies_and_sums_of_gradients_are_float32_and_it_goes_on_bit_by_bit(name, tmp_path):
    for rank in run_ranks(
        2,
        "learners.megatron_cases:goes_on",
        str(tmp_path),
        "tied",
        "sft",
        {**HALF, **DIVISIONS[name]},
    ):
        assert rank["weights"] == {torch.bfloat16}
        assert rank["copies"] == rank["gradients"] == {torch.float32}
        assert rank["same"]


def test_a_tied_pipeline_goes_on_bit_by_bit_in_float32_too(tmp_path):
    """Its last stage has two buckets, whose padding Megatron forgets when it saves them."""
    options = {"pipeline_parallel": 2}
    for rank in run_ranks(
        2, "learners.megatron_cases:goes_on", str(tmp_path), "tied", "sft", options
    ):
        assert rank["copies"] == {torch.float32}
        assert rank["same"]
