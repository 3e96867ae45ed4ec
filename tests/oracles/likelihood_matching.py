"""Approximate likelihood matching (arXiv:2503.20083) with several teachers, token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence


def span_loss(log_p: float, log_q: float, temperature: float) -> tuple[float, float]:
    """(x, dx / d log q) of one span, from the log-likelihoods of teacher and student."""
    p, q = math.exp(log_p / temperature), math.exp(log_q / temperature)
    x = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    return x, (-p + (1 - p) * q / (1 - q)) / temperature


def teachers_loss(
    rows: Sequence[Sequence[float]],
    teachers: Sequence[tuple[float, Sequence[Sequence[int]], Sequence[dict[int, float]]]],
    temperature: float,
) -> tuple[float, list[list[float]]]:
    """(loss, its gradient by each log q): the sum of spans over the number of all tokens, summed
    over teachers by their weights.

    rows: log q of each row's tokens. teachers: the weight; each token's span, -1 for none; the
    teacher's log-likelihood of each span, by row.
    """
    n_tokens = sum(map(len, rows))
    loss, slopes = 0.0, [[0.0] * len(row) for row in rows]
    for weight, spans, likelihoods in teachers:
        for r, row in enumerate(rows):
            for span, log_p in likelihoods[r].items():
                places = [t for t, other in enumerate(spans[r]) if other == span]
                x, slope = span_loss(log_p, sum(row[t] for t in places), temperature)
                loss += weight * x / n_tokens
                for t in places:
                    slopes[r][t] += weight * slope / n_tokens
    return loss, slopes
