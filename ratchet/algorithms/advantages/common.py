"""What the estimators share: attempts and their returns, steps of an attempt, sums by index,
spreading over tokens.

T = tokens, S = sequences, A = attempts, G = groups. Statistics are float64 and count *attempts*: an
attempt whose history forked is several sequences, but one draw from the policy. Only scored
training attempts enter them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import DataError

Index = tuple[Tensor, int]  # [n] of 0..size-1, size


@dataclass(frozen=True)
class Attempts:
    """The scored training attempts of a batch.

    row_S: whether a sequence belongs to one; attempt_R: its attempt, for those R rows; group_A;
    rewards_A: as judged.
    """

    batch: Batch
    row_S: Tensor
    attempt_R: Tensor
    group_A: Tensor
    rewards_A: Tensor

    def sum_rows(self, x_S: Tensor) -> Tensor:
        """[S] -> [A]"""
        return sum_by(self.attempt_R, x_S[self.row_S], len(self.group_A))

    def to_rows(self, x_A: Tensor) -> Tensor:
        """[A] -> [S], 0 for other rows."""
        x_S = torch.zeros(self.batch.n_sequences, dtype=x_A.dtype)
        x_S[self.row_S] = x_A[self.attempt_R]
        return x_S

    @cached_property
    def returns_A(self) -> Tensor:
        """The reward, and all token rewards of the attempt's rows."""
        if not self.batch.has("token_rewards"):
            return self.rewards_A
        return self.rewards_A + self.sum_rows(
            self.batch.sequence_sum(self.batch.need("token_rewards"))
        )

    @property
    def groups(self) -> Index:
        return self.group_A, self.batch.n_groups


def attempts_of(batch: Batch) -> Attempts:
    """Raises DataError where the sequences of one attempt carry different rewards: there would be
    no telling its own."""
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
            "rewards; "
            "an attempt has one reward, however many sequences its history forked into"
        )
    return Attempts(batch, row_S, attempt_R, pairs[:, 0], rewards_A)


def attempt_index(batch: Batch) -> Index:
    """The attempt of each sequence: several sequences of one are its stretches, in the batch's
    order."""
    pairs, attempt_S = torch.unique(
        torch.stack([batch.group_S, batch.attempt_S], dim=1), dim=0, return_inverse=True
    )
    return attempt_S, len(pairs)


def sum_by(index: Tensor, x: Tensor, size: int) -> Tensor:
    return torch.zeros(size, dtype=x.dtype).index_add(0, index, x)


def count_by(by: Index) -> Tensor:
    index, size = by
    return sum_by(index, torch.ones(len(index), dtype=torch.float64), size)


def mean_by(by: Index, x: Tensor) -> Tensor:
    """0 for an index that does not occur."""
    index, size = by
    return sum_by(index, x, size) / count_by(by).clamp(min=1)


def equal_by(by: Index, x: Tensor) -> Tensor:
    """Whether all x of an index are the same; true for a lone one, and for an index that does not
    occur."""
    index, size = by
    low = torch.full((size,), torch.inf, dtype=x.dtype).scatter_reduce(0, index, x, "amin")
    high = torch.full((size,), -torch.inf, dtype=x.dtype).scatter_reduce(0, index, x, "amax")
    return high <= low


def std_by(by: Index, x: Tensor) -> Tensor:
    """Sample standard deviation (ddof 1); exactly 0 where all are equal."""
    index, size = by
    squares = sum_by(index, (x - mean_by(by, x)[index]).square(), size)
    return torch.where(equal_by(by, x), 0.0, (squares / (count_by(by) - 1).clamp(min=1)).sqrt())


def normalised_by(by: Index, x: Tensor, *, scale: str, epsilon: float) -> Tensor:
    """(x - mean) / (std + epsilon) within each index, with the sample standard deviation (ddof 1);
    scale="none": x - mean.

    Exactly 0 where all are equal: rounding leaves the mean of equal numbers a hair off, and a
    division by a tiny standard deviation would blow that up into a signal.
    """
    index, _ = by
    centred = x - mean_by(by, x)[index]
    if scale == "std":
        centred = centred / (std_by(by, x) + epsilon)[index]
    return torch.where(equal_by(by, x)[index], 0.0, centred)


def whole(x: Tensor) -> Index:
    """One index for all of x."""
    return torch.zeros(len(x), dtype=torch.int64), 1


def standardised(x: Tensor, *, epsilon: float) -> Tensor:
    """(x - mean) / (std + epsilon) with the population standard deviation (ddof 0); exactly 0 where
    all are equal."""
    if len(x) == 0 or bool((x == x[0]).all()):
        return torch.zeros_like(x)
    return (x - x.mean()) / (x.std(correction=0) + epsilon)


def spread(batch: Batch, advantages_S: Tensor) -> Batch:
    """One advantage a sequence, given to each of its trainable tokens; 0 elsewhere."""
    return batch.fill_tokens(
        advantages=torch.where(batch.trainable_T, advantages_S[batch.sequence_T], 0.0)
    )


# --- along attempts. N = steps, L = most steps of an attempt


def discounted_sums(x_AL: Tensor, factor_A: Tensor) -> Tensor:
    """y_k = x_k + factor y_{k+1} along each attempt."""
    sums_AL = torch.zeros_like(x_AL)
    following_A = torch.zeros_like(factor_A)
    for k in range(x_AL.shape[1] - 1, -1, -1):
        following_A = x_AL[:, k] + factor_A * following_A
        sums_AL[:, k] = following_A
    return sums_AL


@dataclass(frozen=True)
class Steps:
    """The steps of ragged attempts (the trainable tokens of their rows, in order) as a padded
    matrix and back: padding is 0 and comes last, so it adds nothing to earlier steps. Where a
    history forked, the first step of a row follows the last one of the row before it."""

    step_N: Tensor  # flat token index of every step
    attempt_N: Tensor
    place_N: Tensor  # of the step within its attempt
    count_A: Tensor
    n_tokens: int

    @classmethod
    def of(cls, batch: Batch) -> Steps:
        attempt_S, size = attempt_index(batch)
        step_N = batch.trainable_T.nonzero()[:, 0]
        attempt_N, order_N = attempt_S[batch.sequence_T[step_N]].sort(stable=True)
        count_A = torch.bincount(attempt_N, minlength=size)
        place_N = torch.arange(len(step_N)) - (count_A.cumsum(0) - count_A)[attempt_N]
        return cls(step_N[order_N], attempt_N, place_N, count_A, batch.n_tokens)

    def pad(self, x_T: Tensor) -> Tensor:
        width = int(self.count_A.max()) if len(self.count_A) else 0
        x_AL = x_T.new_zeros(len(self.count_A), width)
        x_AL[self.attempt_N, self.place_N] = x_T[self.step_N]
        return x_AL

    def unpad(self, x_AL: Tensor) -> Tensor:
        x_T = x_AL.new_zeros(self.n_tokens)
        x_T[self.step_N] = x_AL[self.attempt_N, self.place_N]
        return x_T

    def shift(self, x_AL: Tensor, end_A: Tensor) -> Tensor:
        """x of the next step; after an attempt's last one, `end_A`."""
        next_AL = torch.zeros_like(x_AL)
        next_AL[:, :-1] = x_AL[:, 1:]
        has_A = self.count_A > 0
        next_AL[has_A, self.count_A[has_A] - 1] = end_A[has_A]
        return next_AL
