"""The estimators' shared arithmetic: attempts and their returns, steps, and statistics by index.

T = tokens, S = sequences, A = attempts, G = groups. Statistics are float64 and count *attempts*: an
attempt whose history forked has several sequences, but is one draw from the policy. Only scored
training attempts count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import DataError

# (the index of each entry, int64 [n] in 0..size-1; the number of indices, size)
Index = tuple[Tensor, int]


@dataclass(frozen=True)
class Attempts:
    """The scored training attempts of a batch.

    R = rows: the sequences of these attempts.
    """

    batch: Batch
    row_S: Tensor  # bool: True if the sequence is a row
    attempt_R: Tensor  # the attempt of each row
    group_A: Tensor
    rewards_A: Tensor  # as judged, without token rewards

    def sum_rows(self, x_S: Tensor) -> Tensor:
        """Sum a column over the rows of each attempt. [S] -> [A]"""
        return sum_by(self.attempt_R, x_S[self.row_S], len(self.group_A))

    def to_rows(self, x_A: Tensor) -> Tensor:
        """Copy a value of each attempt to its rows, 0 for other rows. [A] -> [S]"""
        x_S = torch.zeros(self.batch.n_sequences, dtype=x_A.dtype)
        x_S[self.row_S] = x_A[self.attempt_R]
        return x_S

    @cached_property
    def returns_A(self) -> Tensor:
        """The reward of each attempt plus all token rewards of its rows."""
        if not self.batch.has("token_rewards"):
            return self.rewards_A
        return self.rewards_A + self.sum_rows(
            self.batch.sequence_sum(self.batch.need("token_rewards"))
        )

    @property
    def groups(self) -> Index:
        return self.group_A, self.batch.n_groups


def collect_attempts(batch: Batch) -> Attempts:
    """Return the scored training attempts of a batch.

    Raises DataError if the sequences of one attempt carry different rewards.
    """
    row_S = batch.train_S & batch.scored_S
    keys = torch.stack([batch.group_S[row_S], batch.attempt_S[row_S]], dim=1)
    pairs, attempt_R = torch.unique(keys, dim=0, return_inverse=True)
    rewards_R = batch.rewards_S[row_S]
    rewards_A = torch.zeros(len(pairs), dtype=torch.float64)
    rewards_A[attempt_R] = rewards_R
    differs = rewards_A[attempt_R] != rewards_R
    if bool(differs.any()):
        group, attempt = keys[differs][0].tolist()
        raise DataError(
            f"group {batch.group_ids[group]}: the sequences of attempt {attempt} carry different "
            "rewards. Give every sequence of an attempt the attempt's one reward."
        )
    return Attempts(batch, row_S, attempt_R, pairs[:, 0], rewards_A)


def index_attempts(batch: Batch) -> Index:
    """Return the attempt of each sequence, as an index.

    An attempt whose history forked has several sequences, in the batch's order.
    """
    pairs, attempt_S = torch.unique(
        torch.stack([batch.group_S, batch.attempt_S], dim=1), dim=0, return_inverse=True
    )
    return attempt_S, len(pairs)


def sum_by(index: Tensor, x: Tensor, size: int) -> Tensor:
    """Sum x over the entries of each index. [n] -> [size]"""
    return torch.zeros(size, dtype=x.dtype).index_add(0, index, x)


def count_by(by: Index) -> Tensor:
    """Count the entries of each index, float64 [size]."""
    index, size = by
    return sum_by(index, torch.ones(len(index), dtype=torch.float64), size)


def mean_by(by: Index, x: Tensor) -> Tensor:
    """Return the mean of x for each index, 0 for an index that does not occur."""
    index, size = by
    return sum_by(index, x, size) / count_by(by).clamp(min=1)


def is_equal_by(by: Index, x: Tensor) -> Tensor:
    """True for each index whose x are all equal, bool [size].

    An index with one entry or none counts as equal.
    """
    index, size = by
    low = torch.full((size,), torch.inf, dtype=x.dtype).scatter_reduce(0, index, x, "amin")
    high = torch.full((size,), -torch.inf, dtype=x.dtype).scatter_reduce(0, index, x, "amax")
    return high <= low


def std_by(by: Index, x: Tensor) -> Tensor:
    """Return the sample standard deviation (ddof 1) for each index, exactly 0 if all are equal."""
    index, size = by
    squares = sum_by(index, (x - mean_by(by, x)[index]).square(), size)
    return torch.where(is_equal_by(by, x), 0.0, (squares / (count_by(by) - 1).clamp(min=1)).sqrt())


def normalise_by(by: Index, x: Tensor, *, scale: str, epsilon: float) -> Tensor:
    """Return (x - mean) / (std + epsilon) within each index.

    std is the sample standard deviation (ddof 1). scale="none" gives x - mean.

    The result is exactly 0 if all x of an index are equal: rounding leaves the mean of equal
    numbers slightly off, and dividing by a tiny standard deviation would turn that into a signal.
    """
    index, _ = by
    centred = x - mean_by(by, x)[index]
    if scale == "std":
        centred = centred / (std_by(by, x) + epsilon)[index]
    return torch.where(is_equal_by(by, x)[index], 0.0, centred)


def index_as_one(x: Tensor) -> Index:
    """Return an index of size 1 that holds all entries of x."""
    return torch.zeros(len(x), dtype=torch.int64), 1


def standardise(x: Tensor, *, epsilon: float) -> Tensor:
    """Return (x - mean) / (std + epsilon) with the population standard deviation (ddof 0).

    The result is exactly 0 if all x are equal.
    """
    if len(x) == 0 or bool((x == x[0]).all()):
        return torch.zeros_like(x)
    return (x - x.mean()) / (x.std(correction=0) + epsilon)


def broadcast_to_tokens(batch: Batch, advantages_S: Tensor) -> Batch:
    """Give each trainable token the advantage of its sequence, and other tokens 0."""
    return batch.fill_tokens(
        advantages=torch.where(batch.trainable_T, advantages_S[batch.sequence_T], 0.0)
    )


# --- Computations along attempts. N = steps, L = largest number of steps of an attempt.


def discounted_sums(x_AL: Tensor, factor_A: Tensor) -> Tensor:
    """Return y_k = x_k + factor y_{k+1} along each attempt. [A, L]"""
    sums_AL = torch.zeros_like(x_AL)
    following_A = torch.zeros_like(factor_A)
    for k in range(x_AL.shape[1] - 1, -1, -1):
        following_A = x_AL[:, k] + factor_A * following_A
        sums_AL[:, k] = following_A
    return sums_AL


@dataclass(frozen=True)
class AttemptSteps:
    """The map between a column of tokens [T] and a padded matrix of steps [A, L].

    The steps of an attempt are the trainable tokens of its rows, in order. Padding is 0 and comes
    last, so it adds nothing to earlier steps. If a history forked, the first step of a row follows
    the last step of the row before it.
    """

    step_N: Tensor  # flat token index of every step
    attempt_N: Tensor
    place_N: Tensor  # position of the step within its attempt
    count_A: Tensor  # number of steps of each attempt
    n_tokens: int

    @classmethod
    def from_batch(cls, batch: Batch) -> AttemptSteps:
        """Collect the steps of all attempts of a batch."""
        attempt_S, size = index_attempts(batch)
        step_N = batch.trainable_T.nonzero()[:, 0]
        attempt_N, order_N = attempt_S[batch.sequence_T[step_N]].sort(stable=True)
        count_A = torch.bincount(attempt_N, minlength=size)
        place_N = torch.arange(len(step_N)) - (count_A.cumsum(0) - count_A)[attempt_N]
        return cls(step_N[order_N], attempt_N, place_N, count_A, batch.n_tokens)

    def pad(self, x_T: Tensor) -> Tensor:
        """Arrange a column of tokens by attempt and step. [T] -> [A, L]"""
        width = int(self.count_A.max()) if len(self.count_A) else 0
        x_AL = x_T.new_zeros(len(self.count_A), width)
        x_AL[self.attempt_N, self.place_N] = x_T[self.step_N]
        return x_AL

    def unpad(self, x_AL: Tensor) -> Tensor:
        """Return the column of tokens for a matrix of steps. [A, L] -> [T]"""
        x_T = x_AL.new_zeros(self.n_tokens)
        x_T[self.step_N] = x_AL[self.attempt_N, self.place_N]
        return x_T

    def shift(self, x_AL: Tensor, end_A: Tensor) -> Tensor:
        """Return x of each next step; an attempt's last step gets `end_A`."""
        next_AL = torch.zeros_like(x_AL)
        next_AL[:, :-1] = x_AL[:, 1:]
        has_A = self.count_A > 0
        next_AL[has_A, self.count_A[has_A] - 1] = end_A[has_A]
        return next_AL
