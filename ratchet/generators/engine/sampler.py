"""Sample tokens from hidden states (`Sampler`, for the engine) or from logits (pure functions).

All generators that run in this process (the engine and transformers) use the functions.

N = rows, d = hidden size, V = vocabulary, F = rows with a filter (top-k, top-p or min-p).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ratchet.generators.engine.layout import round_up_to
from ratchet.generators.grammar_masks import BatchMasks
from ratchet.models.decoder import Decoder
from ratchet.types import Sampling
from ratchet.utils.transfer import upload_together

# The constants of SplitMix64.
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
BITS = 24  # random bits of a uniform number: the precision of float32
# Maximum number of logits sampled at a time: 128 MiB in float32, and a few copies of them exist.
CHUNK_ELEMENTS = 2**25


# --- randomness: a counter-based generator, so that a draw depends only on (seed, token index)


def derive_stream(seed: int, drawn: int = 0) -> int:
    """Return the state of a seed's random stream, a signed 64-bit number.

    Seeds are scrambled, so neighbouring seeds give unrelated streams.

    drawn: number of the stream's values that earlier requests have used.
    """
    x = (seed + GOLDEN) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * MIX_1) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * MIX_2) & (2**64 - 1)
    return _to_signed(((x ^ (x >> 31)) + drawn * GOLDEN) & (2**64 - 1))


def draw_uniforms(streams_N: Tensor, index_N: Tensor) -> Tensor:
    """Return uniform numbers for token `index` of each stream (both int64 [N]).

    They are float32 in [0, 1) and multiples of 2^-24: SplitMix64 (Steele, Lea, Flood: Fast
    splittable pseudorandom number generators, 2014) at position `index`.
    """
    x = streams_N + (index_N + 1) * _to_signed(GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _to_signed(MIX_1)
    x = (x ^ _shift_right(x, 27)) * _to_signed(MIX_2)
    return _shift_right(x ^ _shift_right(x, 31), 64 - BITS).to(torch.float32) * 2.0**-BITS


def _to_signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Return the logical right shift; `>>` of torch repeats the sign bit."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


# --- settings

SETTING_DTYPE = np.dtype(
    [
        ("stream", np.int64),
        ("top_k", np.int64),
        ("temperature", np.float32),
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("greedy", np.bool_),
        ("filtered", np.bool_),
    ]
)


def make_setting_row(
    sampling: Sampling, vocab_size: int
) -> tuple[int, int, float, float, float, bool, bool]:
    """Return a row of SETTING_DTYPE. A filter that is off has a value that removes no token."""
    return (
        derive_stream(sampling.seed, sampling.drawn),
        sampling.top_k or vocab_size,
        1.0 if sampling.greedy else sampling.temperature,
        # With top_p = 1, a float32 sum could reach 1 before the last token.
        np.inf if sampling.top_p >= 1 else sampling.top_p,
        sampling.min_p,
        sampling.greedy,
        sampling.has_filters,
    )


@dataclass(frozen=True)
class SamplingFilters:
    """The filters of F rows of a batch."""

    rows_F: Tensor  # index of each row in the batch
    top_k_F: Tensor
    top_p_F: Tensor
    min_p_F: Tensor


@dataclass(frozen=True)
class SamplingSettings:
    """The sampling settings of N rows. `greedy_N` and `filters` are None if no row needs them."""

    streams_N: Tensor
    temperature_N: Tensor
    greedy_N: Tensor | None
    filters: SamplingFilters | None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors of all settings that are not None."""
        tensors = [self.streams_N, self.temperature_N]
        if self.greedy_N is not None:
            tensors.append(self.greedy_N)
        if (filters := self.filters) is not None:
            tensors += [filters.rows_F, filters.top_k_F, filters.top_p_F, filters.min_p_F]
        return tensors

    @classmethod
    def from_table(
        cls, table_N: NDArray[np.void], device: torch.device, *, pads_filters: bool = False
    ) -> SamplingSettings:
        """Return the settings of N rows of SETTING_DTYPE, on a device.

        pads_filters: True to repeat the last filtered row until F = N, if a row is filtered.
        """
        rows_F = np.flatnonzero(table_N["filtered"])
        if pads_filters and len(rows_F):
            rows_F = np.pad(rows_F, (0, len(table_N) - len(rows_F)), mode="edge")
        columns = [table_N[name].copy() for name in ("stream", "temperature", "greedy")]
        columns += [rows_F, *(table_N[name][rows_F] for name in ("top_k", "top_p", "min_p"))]
        streams_N, temperature_N, greedy_N, *filter_columns = upload_together(
            [torch.from_numpy(column) for column in columns], device
        )
        return cls(
            streams_N=streams_N,
            temperature_N=temperature_N,
            greedy_N=greedy_N if table_N["greedy"].any() else None,
            filters=SamplingFilters(*filter_columns) if len(rows_F) else None,
        )

    @classmethod
    def from_samplings(
        cls, samplings: Sequence[Sampling], vocab_size: int, device: torch.device
    ) -> SamplingSettings:
        """Return the settings of N samplings, on a device."""
        return cls.from_table(
            np.array(
                [make_setting_row(sampling, vocab_size) for sampling in samplings],
                dtype=SETTING_DTYPE,
            ),
            device,
        )


@dataclass(frozen=True)
class LogitsChunk:
    """A range of rows whose logits are in memory at the same time."""

    rows: slice
    settings: SamplingSettings


def make_chunks(
    table_N: NDArray[np.void],
    vocab_size: int,
    row_multiple: int,
    device: torch.device,
    *,
    pads_filters: bool = False,
) -> tuple[LogitsChunk, ...]:
    """Return the chunks of N rows of SETTING_DTYPE, with their settings on a device.

    pads_filters: see `SamplingSettings.from_table`.
    """
    chunk_rows = max(CHUNK_ELEMENTS // vocab_size // row_multiple, 1) * row_multiple
    row_ranges = [
        slice(start, min(start + chunk_rows, len(table_N)))
        for start in range(0, len(table_N), chunk_rows)
    ]
    return tuple(
        LogitsChunk(
            rows, SamplingSettings.from_table(table_N[rows], device, pads_filters=pads_filters)
        )
        for rows in row_ranges
    )


# --- drawing


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of N rows, with their logprobs."""

    tokens_N: Tensor  # int64
    # float32, at the sampling temperature (greedy: 1), before filters, among the tokens that a
    # grammar allows
    logprobs_N: Tensor
    log_kept_F: Tensor | None  # log of the probability mass that the filters keep


def draw_tokens(logits_NV: Tensor, uniforms_N: Tensor, settings: SamplingSettings) -> SampledTokens:
    """Sample one token per row by inverting its cumulative distribution.

    logits: float32 or wider; overwritten. A row that isn't finite gives an arbitrary valid token
    with logprob NaN.
    """
    scaled_NV = logits_NV.div_(settings.temperature_N[:, None])
    probs_NV = scaled_NV.softmax(-1)
    cdf_NV = probs_NV.cumsum(-1)
    tokens_N = invert_cdf(cdf_NV, uniforms_N, cdf_NV[:, -1])
    # On an accelerator, rounding in the parallel cumsum may select a token of probability 0.
    if cdf_NV.device.type != "cpu":
        drawn_p_N = probs_NV.gather(1, tokens_N[:, None])[:, 0]
        tokens_N = torch.where(drawn_p_N > 0, tokens_N, probs_NV.argmax(-1))
    log_kept_F = None
    if settings.filters is not None:
        rows_F = settings.filters.rows_F
        tokens_F, log_kept_F = draw_filtered(probs_NV[rows_F], uniforms_N[rows_F], settings.filters)
        tokens_N = tokens_N.index_copy(0, rows_F, tokens_F)
    if settings.greedy_N is not None:
        tokens_N = torch.where(settings.greedy_N, scaled_NV.argmax(-1), tokens_N)
    token_logprobs_N = scaled_NV.log_softmax(-1).gather(1, tokens_N[:, None])[:, 0]
    return SampledTokens(tokens_N, token_logprobs_N.to(torch.float32), log_kept_F)


def invert_cdf(cdf_NV: Tensor, uniforms_N: Tensor, total_N: Tensor) -> Tensor:
    """Return the first token whose cumulative mass exceeds `uniform * total`, int64 [N].

    `total_N` is the mass of the tokens that may be drawn. The threshold is kept below the total, so
    the result is never past the first entry that reaches `total`, and the token's probability is
    above 0. This assumes that rounding does not make the cumulative sum decrease (see
    `draw_tokens`).
    """
    below_total_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    threshold_N = torch.minimum(uniforms_N * total_N, below_total_N)
    return torch.searchsorted(cdf_NV, threshold_N[:, None], right=True)[:, 0].clamp_(
        max=cdf_NV.shape[1] - 1
    )


def draw_filtered(
    probs_FV: Tensor, uniforms_F: Tensor, filters: SamplingFilters
) -> tuple[Tensor, Tensor]:
    """Sample from filtered rows and return (tokens [F], log of the kept mass [F]).

    Each filter keeps the most probable tokens of the distribution at the sampling temperature.
    Among equal probabilities, the lower id comes first. The sample is drawn from the tokens that
    all filters keep.
    """
    sorted_FV, order_FV = probs_FV.sort(dim=-1, descending=True, stable=True)
    cdf_FV = sorted_FV.cumsum(-1)
    kept_count_F = count_kept(sorted_FV, cdf_FV, filters)
    total_F = cdf_FV.gather(1, kept_count_F[:, None] - 1)[:, 0]
    rank_F = torch.minimum(invert_cdf(cdf_FV, uniforms_F, total_F), kept_count_F - 1)
    return order_FV.gather(1, rank_F[:, None])[:, 0], total_F.log().clamp_(max=0.0)


def count_kept(sorted_FV: Tensor, cdf_FV: Tensor, filters: SamplingFilters) -> Tensor:
    """Return the number of tokens that all filters keep, int64 [F].

    Args:
        sorted_FV: probabilities, in descending order.
        cdf_FV: their cumulative sums.
    """
    # Top-p keeps tokens until their mass reaches top_p, including the token that reaches it.
    top_p_count_F = (cdf_FV[:, :-1] < filters.top_p_F[:, None]).sum(-1) + 1
    min_p_count_F = (sorted_FV >= filters.min_p_F[:, None] * sorted_FV[:, :1]).sum(-1)
    return torch.minimum(torch.minimum(filters.top_k_F, top_p_count_F), min_p_count_F).clamp_(
        min=1, max=sorted_FV.shape[1]
    )


class Sampler:
    """The decoder's head with sampling: it takes hidden states and returns a token per row.

    row_multiple: see `engine.batch_invariance`.
    """

    def __init__(self, decoder: Decoder, row_multiple: int) -> None:
        self.decoder = decoder
        self.row_multiple = row_multiple

    def __call__(
        self,
        hidden_Nd: Tensor,
        chunks: Sequence[LogitsChunk],
        token_index_N: Tensor,
        masks: BatchMasks | None = None,
    ) -> list[SampledTokens]:
        """Return the sampled tokens of each chunk.

        Args:
            hidden_Nd: may end with padding rows.
            token_index_N: index of the new token in each completion, int64.
            masks: the tokens that grammars allow; None: no row has a grammar.
        """
        # The learner computes logits in this dtype too.
        weight_Vd = self.decoder.head_weight
        dtype = torch.promote_types(weight_Vd.dtype, torch.float32)
        weight_Vd = weight_Vd.to(dtype)
        streams_N = torch.cat([chunk.settings.streams_N for chunk in chunks])
        uniforms_N = draw_uniforms(streams_N, token_index_N)
        draws = []
        for chunk in chunks:
            rows = chunk.rows
            padded_end = round_up_to(rows.stop, self.row_multiple)
            padded_hidden = hidden_Nd[rows.start : padded_end].to(dtype)
            logits_NV = F.linear(padded_hidden, weight_Vd)[: rows.stop - rows.start]
            if masks is not None:
                masks.apply(logits_NV, rows.start)
            draws.append(draw_tokens(logits_NV, uniforms_N[rows], chunk.settings))
        return draws
