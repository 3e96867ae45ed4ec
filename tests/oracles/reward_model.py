"""Losses of models that give scores, with their derivative by every score, worked out by hand."""

from __future__ import annotations

import math

from oracles.preference import minus_log_sigmoid, pairs, sigmoid
from oracles.ragged import Ragged, Row

Labels = list[list[float | None]]  # a label at a step's last token, None elsewhere


def bradley_terry(rows: list[Row], scores: list[float]) -> tuple[list[float], list[float]]:
    """Log loss of P(chosen beats rejected) = s(s_c - s_r): x by pair, dx/dscore by row."""
    values, slopes = [], [0.0] * len(rows)
    for c, r in pairs(rows):
        gap = scores[c] - scores[r]
        values.append(minus_log_sigmoid(gap))
        slopes[c], slopes[r] = -sigmoid(-gap), sigmoid(-gap)
    return values, slopes


def score_regression(rows: list[Row], scores: list[float]) -> tuple[list[float], list[float]]:
    """(score - reward)^2, both by row."""
    gaps = []
    for row, score in zip(rows, scores, strict=True):
        assert row.reward is not None
        gaps.append(score - row.reward)
    return [gap * gap for gap in gaps], [2 * gap for gap in gaps]


def process_reward(token_scores: Ragged, labels: Labels) -> tuple[Ragged, Ragged]:
    """Cross entropy of Bernoulli(s(score)) with the label at the last token of every step, 0
    elsewhere.

    -y log s(z) - (1 - y) log s(-z), whose derivative by z is -y s(-z) + (1 - y) s(z) = s(z) - y.
    """
    values, slopes = [], []
    for scores_row, labels_row in zip(token_scores, labels, strict=True):
        at = list(zip(scores_row, labels_row, strict=True))
        values.append(
            [
                0.0 if y is None else y * minus_log_sigmoid(z) + (1 - y) * minus_log_sigmoid(-z)
                for z, y in at
            ]
        )
        slopes.append([0.0 if y is None else sigmoid(z) - y for z, y in at])
    return values, slopes


def labelled_turn_mean(rows: list[Row], labels: Labels, x: Ragged) -> float:
    """The mean over the labelled tokens that train."""
    kept = []
    for row, labels_row, x_row in zip(rows, labels, x, strict=True):
        kept += [
            value
            for trains, y, value in zip(row.mask, labels_row, x_row, strict=True)
            if trains and y is not None
        ]
    return math.fsum(kept) / len(kept) if kept else 0.0
