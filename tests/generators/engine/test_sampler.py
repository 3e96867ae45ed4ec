"""Numbers worked by hand, and frequencies against exact distributions. N = rows, V = vocabulary."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ratchet.generators.engine.sampler import (
    SamplingSettings,
    derive_stream,
    draw_tokens,
    draw_uniforms,
    invert_cdf,
)
from ratchet.types import Sampling

CPU = torch.device("cpu")
P = [0.4, 0.3, 0.2, 0.1]


def one(p, u, sampling=None):
    """(token, exp(logprob), kept mass) of a draw from probabilities `p` with the uniform number
    `u`."""
    sampling = sampling or Sampling()
    logits = torch.tensor([p], dtype=torch.float32).log()
    drawn = draw_tokens(
        logits, torch.tensor([u]), SamplingSettings.from_samplings([sampling], len(p), CPU)
    )
    kept = 1.0 if drawn.log_kept_F is None else float(drawn.log_kept_F.exp())
    return int(drawn.tokens_N), float(drawn.logprobs_N.exp()), kept


@pytest.mark.parametrize(
    ("u", "token"),
    [(0.0, 0), (0.39, 0), (0.41, 1), (0.69, 1), (0.71, 2), (0.89, 2), (0.91, 3), (0.999, 3)],
)
def test_inversion_follows_the_cumulative_distribution(u, token):
    assert one(P, u)[0] == token
    assert one(P, u)[1] == pytest.approx(P[token], rel=1e-6)


def test_top_k_draws_from_the_head_and_records_the_whole_distribution():
    # 0.4 and 0.3 remain: the border lies at 0.4 / 0.7 = 0.571
    assert one(P, 0.56, Sampling(top_k=2)) == pytest.approx((0, 0.4, 0.7), rel=1e-6)
    assert one(P, 0.58, Sampling(top_k=2)) == pytest.approx((1, 0.3, 0.7), rel=1e-6)
    assert one(P, 0.999999, Sampling(top_k=1)) == pytest.approx((0, 0.4, 0.4), rel=1e-6)


def test_top_p_keeps_the_smallest_head_that_reaches_it():
    assert one(P, 0.999, Sampling(top_p=0.65)) == pytest.approx((1, 0.3, 0.7), rel=1e-6)
    assert one(P, 0.999, Sampling(top_p=0.75)) == pytest.approx((2, 0.2, 0.9), rel=1e-6)
    assert one(P, 0.999, Sampling(top_p=0.01)) == pytest.approx((0, 0.4, 0.4), rel=1e-6)


def test_min_p_is_relative_to_the_most_probable_token():
    # 0.45 * 0.4 = 0.18
    assert one(P, 0.999, Sampling(min_p=0.45)) == pytest.approx((2, 0.2, 0.9), rel=1e-6)
    assert one(P, 0.999, Sampling(min_p=0.99)) == pytest.approx((0, 0.4, 0.4), rel=1e-6)


def test_filters_judge_the_distribution_of_the_temperature_and_all_must_keep_a_token():
    # top_k=3 alone would leave 0.9, in which 0.65 * 0.9 = 0.585 needs two tokens; of the whole,
    # 0.65 needs two as well, but 0.72 needs three, while 0.72 of 0.9 would need two: top_p reads
    # the whole.
    assert one(P, 0.999, Sampling(top_k=3, top_p=0.72))[0] == 2
    assert one(P, 0.999, Sampling(top_k=3, top_p=0.72, min_p=0.7))[0] == 1
    # temperature 0.5 squares: 0.16, 0.09, 0.04, 0.01 of 0.3 = 0.533, 0.3, 0.133, 0.033
    token, p, kept = one(P, 0.999, Sampling(temperature=0.5, top_p=0.6))
    assert (token, p, kept) == pytest.approx((1, 0.3, 0.25 / 0.3), rel=1e-5)


def test_sorting_is_undone_and_equal_probabilities_favour_the_lower_id():
    assert one([0.1, 0.4, 0.2, 0.3], 0.999, Sampling(top_k=3))[0] == 2
    assert one([0.25, 0.25, 0.25, 0.25], 0.999, Sampling(top_k=2))[0] == 1


def test_greedy_ignores_filters_and_records_under_temperature_one():
    assert one([0.2, 0.5, 0.3], 0.999, Sampling(temperature=0, top_k=2)) == pytest.approx(
        (1, 0.5, 1.0)
    )
    assert one([0.4, 0.4, 0.2], 0.999, Sampling(temperature=0))[0] == 0


def test_rows_with_different_settings_dont_touch_each_other():
    samplings = [
        Sampling(),
        Sampling(top_k=1),
        Sampling(temperature=0),
        Sampling(temperature=2.0),
        Sampling(top_p=0.5),
    ]
    u = torch.tensor([0.95, 0.95, 0.95, 0.5, 0.95])
    drawn = draw_tokens(
        torch.tensor([P] * 5).log(), u, SamplingSettings.from_samplings(samplings, 4, CPU)
    )
    assert drawn.tokens_N.tolist() == [3, 0, 0, 1, 1]
    roots = np.sqrt(P)
    assert drawn.logprobs_N[3].exp() == pytest.approx(roots[1] / roots.sum(), rel=1e-6)
    assert drawn.log_kept_F is not None
    assert drawn.log_kept_F.exp().tolist() == pytest.approx([0.4, 0.7])


@given(
    st.lists(st.one_of(st.just(0.0), st.floats(1e-30, 1.0)), min_size=1, max_size=40).filter(
        lambda p: sum(p) > 0
    ),
    st.sampled_from([0.0, 2.0**-24, 0.5, 1 - 2.0**-24]),
)
def test_no_token_without_probability_is_ever_drawn(weights, u):
    p = torch.tensor([weights], dtype=torch.float32)
    p = p / p.sum()
    cdf = p.cumsum(-1)
    token = int(invert_cdf(cdf, torch.tensor([u]), cdf[:, -1]))
    assert p[0, token] > 0


@given(
    st.integers(1, 50),
    st.floats(0.01, 1.0),
    st.floats(0.0, 0.99),
    st.sampled_from([0.0, 0.3, 1 - 2.0**-24]),
    st.integers(0, 99),
)
def test_no_token_that_a_filter_cut_is_ever_drawn(top_k, top_p, min_p, u, seed):
    logits = torch.randn(1, 50, generator=torch.Generator().manual_seed(seed)) * 3
    p, order = logits.softmax(-1)[0].sort(descending=True, stable=True)
    settings = SamplingSettings.from_samplings(
        [Sampling(top_k=top_k, top_p=top_p, min_p=min_p)], 50, CPU
    )
    rank = order.tolist().index(
        int(draw_tokens(logits.clone(), torch.tensor([u]), settings).tokens_N)
    )
    assert rank < top_k
    assert float(p[:rank].sum()) < top_p + 1e-6
    assert p[rank] >= min_p * p[0] * (1 - 1e-6)


def test_top_p_of_one_cuts_nothing_though_rounded_sums_pass_one_early():
    p = torch.full((1, 4096), 1 / 4096)
    settings = SamplingSettings.from_samplings([Sampling(top_p=1.0, top_k=4096)], 4096, CPU)
    assert int(draw_tokens(p.log(), torch.tensor([1 - 2.0**-24]), settings).tokens_N) == 4095


FILTERS = {
    "plain": (Sampling(), lambda p: p > 0),
    "hot": (Sampling(temperature=1.7), lambda p: p > 0),
    "cold": (Sampling(temperature=0.6), lambda p: p > 0),
    "top_k": (Sampling(top_k=5), lambda p: p >= np.sort(p)[-5]),
    "top_p": (Sampling(temperature=1.2, top_p=0.8), lambda p: p >= head(p, 0.8)),
    "min_p": (Sampling(min_p=0.2), lambda p: p >= 0.2 * p.max()),
    "all": (
        Sampling(temperature=1.3, top_k=9, top_p=0.9, min_p=0.1),
        lambda p: (p >= np.sort(p)[-9]) & (p >= head(p, 0.9)) & (p >= 0.1 * p.max()),
    ),
}


def head(p, mass):
    """Probability of the last token of the smallest head that has `mass`."""
    ordered = np.sort(p)[::-1]
    return ordered[np.flatnonzero(ordered.cumsum() >= mass)[0]]


@pytest.mark.parametrize("name", FILTERS)
def test_frequencies_follow_the_exact_filtered_distribution(name):
    from scipy.stats import chisquare  # a second to import

    sampling, keeps = FILTERS[name]
    draws, vocab = 40_000, 24
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    scaled = logits.double().numpy() / sampling.temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    kept = np.where(keeps(p), p, 0.0)
    streams = torch.tensor([derive_stream(seed) for seed in range(draws)])
    settings = SamplingSettings.from_samplings([sampling] * draws, vocab, CPU)
    drawn = draw_tokens(
        logits.repeat(draws, 1),
        draw_uniforms(streams, torch.zeros(draws, dtype=torch.int64)),
        settings,
    )
    counts = np.bincount(drawn.tokens_N.numpy(), minlength=vocab)
    assert counts[kept == 0].sum() == 0
    expected = kept[kept > 0] / kept.sum() * draws
    assert chisquare(counts[kept > 0], expected).pvalue > 1e-4
    np.testing.assert_allclose(
        drawn.logprobs_N.numpy(), np.log(p)[drawn.tokens_N.numpy()], atol=1e-5
    )
    if sampling.has_filters:
        assert drawn.log_kept_F is not None
        np.testing.assert_allclose(drawn.log_kept_F.numpy(), math.log(kept.sum()), atol=1e-5)


def test_uniforms_are_uniform_over_seeds_and_over_tokens_and_differ():
    from scipy.stats import kstest  # a second to import

    streams = torch.tensor([derive_stream(seed) for seed in range(5000)])
    over_seeds = draw_uniforms(streams, torch.zeros(5000, dtype=torch.int64))
    over_tokens = draw_uniforms(torch.full((5000,), derive_stream(0)), torch.arange(5000))
    for values in (over_seeds, over_tokens):
        assert values.min() >= 0
        assert values.max() < 1
        assert kstest(values.numpy(), "uniform").pvalue > 1e-3
        assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.05
    assert abs(np.corrcoef(over_seeds, over_tokens)[0, 1]) < 0.05


def test_a_uniform_is_splitmix64_of_its_seed_and_index():
    def reference(seed, index):
        mask = 2**64 - 1
        x = (derive_stream(seed) + (index + 1) * 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return ((x ^ (x >> 31)) >> 40) / 2**24

    pairs = [(0, 0), (1, 0), (0, 1), (2**63 - 1, 7), (12345, 100_000)]
    streams = torch.tensor([derive_stream(seed) for seed, _ in pairs])
    ours = draw_uniforms(streams, torch.tensor([index for _, index in pairs]))
    assert ours.tolist() == [reference(*pair) for pair in pairs]


def test_a_row_that_is_not_finite_gives_a_valid_token_and_says_nan():
    drawn = draw_tokens(
        torch.full((1, 5), float("nan")),
        torch.tensor([0.5]),
        SamplingSettings.from_samplings([Sampling()], 5, CPU),
    )
    assert 0 <= int(drawn.tokens_N) < 5
    assert math.isnan(float(drawn.logprobs_N))
