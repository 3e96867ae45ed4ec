"""Drawing tokens from logits: pure functions, shared by the generators of this process.

N = rows, V = vocabulary, F = those of the rows that cut their distribution.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ratchet.types import Sampling

GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
BITS = 24  # of a uniform: as many as float32 holds


# --- randomness: a counter-based generator, so that a draw depends on (seed, index of the token)
# and on nothing else


def stream_of(seed: int, drawn: int = 0) -> int:
    """The seed, scrambled into a signed 64-bit number: neighbouring seeds give unrelated streams.
    drawn: of which so many numbers have been used."""
    x = (seed + GOLDEN) & (2**64 - 1)
    x = ((x ^ (x >> 30)) * MIX_1) & (2**64 - 1)
    x = ((x ^ (x >> 27)) * MIX_2) & (2**64 - 1)
    return _signed(((x ^ (x >> 31)) + drawn * GOLDEN) & (2**64 - 1))


def uniforms(streams_N: Tensor, index_N: Tensor) -> Tensor:
    """Float32 in [0, 1), a multiple of 2^-24, for token `index` of each stream (int64 [N] both).

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) at
    position `index`.
    """
    x = streams_N + (index_N + 1) * _signed(GOLDEN)
    x = (x ^ _shift(x, 30)) * _signed(MIX_1)
    x = (x ^ _shift(x, 27)) * _signed(MIX_2)
    return _shift(x ^ _shift(x, 31), 64 - BITS).to(torch.float32) * 2.0**-BITS


def _signed(x: int) -> int:
    return x - 2**64 if x >= 2**63 else x


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift: torch's own repeats the sign."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


# --- settings

SETTING = np.dtype(
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


def setting(
    sampling: Sampling, vocab_size: int
) -> tuple[int, int, float, float, float, bool, bool]:
    """A row of SETTING, in which a filter that is off has a value that cuts nothing."""
    return (
        stream_of(sampling.seed, sampling.drawn),
        sampling.top_k or vocab_size,
        1.0 if sampling.greedy else sampling.temperature,
        # a float32 sum may reach 1 before the last token
        np.inf if sampling.top_p >= 1 else sampling.top_p,
        sampling.min_p,
        sampling.greedy,
        sampling.truncates,
    )


@dataclass(frozen=True)
class Filters:
    rows_F: Tensor
    top_k_F: Tensor
    top_p_F: Tensor
    min_p_F: Tensor


@dataclass(frozen=True)
class Settings:
    """How each of N rows is drawn. `greedy_N` and `filters` are None where they concern no row."""

    streams_N: Tensor
    temperature_N: Tensor
    greedy_N: Tensor | None
    filters: Filters | None

    @classmethod
    def of(cls, table_N: NDArray[np.void], device: torch.device) -> Settings:
        """table_N: rows of dtype SETTING."""

        def column(name: str, rows: NDArray[np.int64] | slice = slice(None)) -> Tensor:
            return torch.from_numpy(table_N[name][rows].copy()).to(device)

        rows = np.flatnonzero(table_N["filtered"])
        picked = [
            torch.from_numpy(rows).to(device),
            *(column(name, rows) for name in ("top_k", "top_p", "min_p")),
        ]
        return cls(
            streams_N=column("stream"),
            temperature_N=column("temperature"),
            greedy_N=column("greedy") if table_N["greedy"].any() else None,
            filters=Filters(*picked) if len(rows) else None,
        )

    @classmethod
    def from_samplings(
        cls, samplings: Sequence[Sampling], vocab_size: int, device: torch.device
    ) -> Settings:
        return cls.of(np.array([setting(s, vocab_size) for s in samplings], dtype=SETTING), device)


# --- drawing


@dataclass(frozen=True)
class Draw:
    """Tokens int64 [N], their logprobs under the temperature alone (at temperature 0: under 1),
    float32 [N], and for the rows F of `Settings.filters` the log of the mass that was kept."""

    tokens_N: Tensor
    logprobs_N: Tensor
    log_kept_F: Tensor | None


def draw(logits_NV: Tensor, uniforms_N: Tensor, settings: Settings) -> Draw:
    """One token a row by inversion of its cumulative distribution. logits: float32 (or better);
    overwritten.

    A row that isn't finite gives some valid token with logprob NaN.
    """
    scaled_NV = logits_NV.div_(settings.temperature_N[:, None])
    p_NV = scaled_NV.softmax(-1)
    cdf_NV = p_NV.cumsum(-1)
    tokens_N = invert(cdf_NV, uniforms_N, cdf_NV[:, -1])
    if cdf_NV.device.type != "cpu":  # a parallel scan may rise, by rounding, where p is 0
        drawn_N = p_NV.gather(1, tokens_N[:, None])[:, 0]
        tokens_N = torch.where(drawn_N > 0, tokens_N, p_NV.argmax(-1))
    log_kept_F = None
    if settings.filters is not None:
        rows_F = settings.filters.rows_F
        tokens_F, log_kept_F = draw_filtered(p_NV[rows_F], uniforms_N[rows_F], settings.filters)
        tokens_N = tokens_N.index_copy(0, rows_F, tokens_F)
    if settings.greedy_N is not None:
        tokens_N = torch.where(settings.greedy_N, scaled_NV.argmax(-1), tokens_N)
    chosen_N = scaled_NV.log_softmax(-1).gather(1, tokens_N[:, None])[:, 0]
    return Draw(tokens_N, chosen_N.to(torch.float32), log_kept_F)


def invert(cdf_NV: Tensor, uniforms_N: Tensor, total_N: Tensor) -> Tensor:
    """First token whose cumulative mass exceeds `u * total`, int64 [N].

    The threshold stays below the total, so the answer is a token at which the sum rises: one with a
    probability above 0, and none behind the entry that holds `total`.
    """
    below_N = torch.nextafter(total_N, torch.zeros_like(total_N))
    threshold_N = torch.minimum(uniforms_N * total_N, below_N)
    return torch.searchsorted(cdf_NV, threshold_N[:, None], right=True)[:, 0].clamp_(
        max=cdf_NV.shape[1] - 1
    )


def draw_filtered(p_FV: Tensor, uniforms_F: Tensor, filters: Filters) -> tuple[Tensor, Tensor]:
    """(tokens [F], log of the kept mass [F]). Each filter keeps a head of the sorted distribution
    (equal probabilities: the lower id first), judged on the distribution that the temperature gave;
    what all of them keep is drawn from."""
    sorted_FV, order_FV = p_FV.sort(dim=-1, descending=True, stable=True)
    cdf_FV = sorted_FV.cumsum(-1)
    # while less than top_p is kept, one more
    by_mass_F = (cdf_FV[:, :-1] < filters.top_p_F[:, None]).sum(-1) + 1
    by_ratio_F = (sorted_FV >= filters.min_p_F[:, None] * sorted_FV[:, :1]).sum(-1)
    kept_F = torch.minimum(torch.minimum(filters.top_k_F, by_mass_F), by_ratio_F).clamp_(
        min=1, max=p_FV.shape[1]
    )
    total_F = cdf_FV.gather(1, kept_F[:, None] - 1)[:, 0]
    rank_F = torch.minimum(invert(cdf_FV, uniforms_F, total_F), kept_F - 1)
    return order_FV.gather(1, rank_F[:, None])[:, 0], total_F.log().clamp_(max=0.0)
