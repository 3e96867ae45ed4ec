"""The oracles' own data: ragged python lists, one `RowLinear` per sequence. Nothing here is packed,
and nothing is shared with the product, so that an error of one is not an error of both. Everything
is float64, slow and obvious.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

Ragged = list[list[float]]  # one number per token, one list per row


@dataclass(frozen=True)
class Span:
    """Tokens [start, end) that the policy wrote in one turn; `reward`: what the environment paid
    for the turn itself."""

    start: int
    end: int
    reward: float | None = None
    state: str = ""


@dataclass(frozen=True)
class Row:
    """One sequence of an attempt. `trained` marks tokens as their writer did; whether the row takes
    part at all is decided by `use` and by `ending`: "unjudged" (there was nothing to judge: given
    text), "scored", "truncated" (with or without a reward), "failed" or "cancelled".
    """

    group: str
    attempt: int
    tokens: list[int]
    trained: list[bool]
    ending: str = "scored"
    reward: float | None = None
    use: str = "train"
    logprobs: list[float] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    ref_logprobs: list[float] = field(default_factory=list)
    entropy: list[float] = field(default_factory=list)
    rollout_logprobs: list[float] = field(default_factory=list)
    log_kept_mass: list[float] = field(default_factory=list)
    teacher_logprobs: list[float] = field(default_factory=list)
    # of the state in which the token at the same place is chosen
    values: list[float] = field(default_factory=list)
    token_rewards: list[float] = field(default_factory=list)
    bootstrap: float = 0.0  # value of the state after the last step, for a row that was cut off
    parts: dict[str, float] = field(default_factory=dict)  # of the reward, by name
    turns: list[Span] | None = None  # None: every trained stretch is a turn

    @property
    def counts(self) -> bool:
        """A failure is never a reward: an attempt that nobody could judge is not in the batch at
        all."""
        return self.ending == "unjudged" or self.reward is not None

    @property
    def takes_part(self) -> bool:
        return self.use == "train" and self.counts

    @property
    def learns_from_reward(self) -> bool:
        """A sample that the statistics of estimators count."""
        return self.use == "train" and self.reward is not None

    @property
    def truncated(self) -> bool:
        return self.ending == "truncated"

    @property
    def mask(self) -> list[bool]:
        """The final mask: the only tokens that enter a loss's numerator *and* its denominator."""
        return [bool(t) and self.takes_part for t in self.trained]

    @property
    def steps(self) -> list[int]:
        """The places of the tokens that train, in order: the policy's actions. What lies between
        them is skipped."""
        return [t for t, trains in enumerate(self.mask) if trains]

    @property
    def spans(self) -> list[Span]:
        if self.turns is not None:
            return self.turns
        edges = [t for t in range(1, len(self.trained)) if self.trained[t] != self.trained[t - 1]]
        edges = [0, *edges, len(self.trained)]
        return [Span(a, b) for a, b in itertools.pairwise(edges) if a < b and self.trained[a]]


def in_order(rows: list[Row]) -> list[str]:
    """The group ids in order of appearance."""
    ids: list[str] = []
    for row in rows:
        if row.group not in ids:
            ids.append(row.group)
    return ids


def flat(ragged: list[list]) -> list:
    return [x for row in ragged for x in row]


# --- the means of the papers, each written as its own double sum


def token_mean(rows: list[Row], x: Ragged) -> float:
    """DAPO, arXiv:2503.14476, eq. 8: 1 / sum_i |o_i| * sum_i sum_t x_it, over the whole batch."""
    total, count = [], 0
    for row, x_row in zip(rows, x, strict=True):
        for trains, value in zip(row.mask, x_row, strict=True):
            if trains:
                total.append(value)
                count += 1
    return math.fsum(total) / count if count else 0.0


def sequence_mean(rows: list[Row], x: Ragged) -> float:
    """GRPO, arXiv:2402.03300, eq. 3: 1/G sum_i 1/|o_i| sum_t x_it; a sequence without a trained
    token is not an o_i."""
    means = []
    for row, x_row in zip(rows, x, strict=True):
        kept = [value for trains, value in zip(row.mask, x_row, strict=True) if trains]
        if kept:
            means.append(math.fsum(kept) / len(kept))
    return math.fsum(means) / len(means) if means else 0.0


def prompt_mean(rows: list[Row], x: Ragged) -> float:
    """The mean over groups of the token mean within a group; a group without a trained token is
    left out."""
    means = []
    for group in in_order(rows):
        kept = []
        for row, x_row in zip(rows, x, strict=True):
            if row.group == group:
                kept += [value for trains, value in zip(row.mask, x_row, strict=True) if trains]
        if kept:
            means.append(math.fsum(kept) / len(kept))
    return math.fsum(means) / len(means) if means else 0.0


def fixed_length(rows: list[Row], x: Ragged, length: int) -> float:
    """Dr. GRPO, arXiv:2503.20783: 1/G sum_i sum_t x_it / length, with a constant length in place of
    |o_i|. G counts every sequence that takes part, an empty one too: here, unlike in eq. 3, it
    needs no length to be divided by."""
    total, sequences = [], 0
    for row, x_row in zip(rows, x, strict=True):
        total += [value for trains, value in zip(row.mask, x_row, strict=True) if trains]
        sequences += row.takes_part
    return math.fsum(total) / (sequences * length) if sequences else 0.0


def token_sum(rows: list[Row], x: Ragged) -> float:
    """The mean over the sequences that take part, empty ones too, of their sum: fixed_length with a
    length of 1."""
    return fixed_length(rows, x, 1)


def positive_mean(rows: list[Row], x: Ragged, above: float) -> float:
    """The token mean over the rows that were rewarded with more than `above`."""
    chosen = [
        (row, x_row)
        for row, x_row in zip(rows, x, strict=True)
        if row.reward is not None and row.reward > above
    ]
    return token_mean([row for row, _ in chosen], [x_row for _, x_row in chosen])


def chosen_mean(rows: list[Row], x: Ragged) -> float:
    """The token mean over the first row in the batch of each group (of a pair, the chosen one)."""
    first = {row.group: i for i, row in reversed(list(enumerate(rows))) if row.counts}
    return token_mean([rows[i] for i in first.values()], [x[i] for i in first.values()])


def labelled_turn_mean(rows: list[Row], x: Ragged) -> float:
    """The mean over the ends of turns that were judged themselves (the labelled steps of a process
    reward model)."""
    found = []
    for row, x_row in zip(rows, x, strict=True):
        if row.takes_part:
            found += [x_row[span.end - 1] for span in row.spans if span.reward is not None]
    return math.fsum(found) / len(found) if found else 0.0


def weights_of(mean, rows: list[Row], *options: float) -> Ragged:
    """The weight of every token in a mean, by asking the mean itself: its value at each unit vector
    (means are linear)."""
    weights = [[0.0] * len(row.tokens) for row in rows]
    for i, row in enumerate(rows):
        for t in range(len(row.tokens)):
            unit = [[0.0] * len(other.tokens) for other in rows]
            unit[i][t] = 1.0
            weights[i][t] = mean(rows, unit, *options)
    return weights
