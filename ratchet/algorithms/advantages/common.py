"""What the estimators share: attempts and their returns, steps of a row, sums by index, spreading over tokens.

T = tokens, S = sequences, A = attempts, G = groups. Statistics are float64 and count *attempts*: an attempt whose history
forked is several sequences, but one draw from the policy. Only scored training attempts enter them.
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

    row_S: whether a sequence belongs to one; attempt_R: its attempt, for those R rows; group_A; rewards_A: as judged.
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
        return self.rewards_A + self.sum_rows(self.batch.sequence_sum(self.batch.need("token_rewards")))

    @property
    def groups(self) -> Index:
        return self.group_A, self.batch.n_groups


def attempts_of(batch: Batch) -> Attempts:
    """Raises DataError where the sequences of one attempt carry different rewards: there would be no telling its own."""
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
            f"group {batch.group_ids[group]}: the sequences of attempt {attempt} carry different rewards; "
            "an attempt has one reward, however many sequences its history forked into"
        )
    return Attempts(batch, row_S, attempt_R, pairs[:, 0], rewards_A)


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
    """Whether all x of an index are the same; true for a lone one, and for an index that does not occur."""
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
    """(x - mean) / (std + epsilon) within each index, with the sample standard deviation (ddof 1); scale="none": x - mean.

    Exactly 0 where all are equal: rounding leaves the mean of equal numbers a hair off, and a division by a tiny standard
    deviation would blow that up into a signal.
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
    """(x - mean) / (std + epsilon) with the population standard deviation (ddof 0); exactly 0 where all are equal."""
    if len(x) == 0 or bool((x == x[0]).all()):
        return torch.zeros_like(x)
    return (x - x.mean()) / (x.std(correction=0) + epsilon)


def spread(batch: Batch, advantages_S: Tensor) -> Batch:
    """One advantage a sequence, given to each of its trainable tokens; 0 elsewhere."""
    return batch.fill_tokens(advantages=torch.where(batch.trainable_T, advantages_S[batch.sequence_T], 0.0))


# --- along rows. N = steps, L = most steps of a row


def discounted_sums(x_SL: Tensor, factor_S: Tensor) -> Tensor:
    """y_k = x_k + factor y_{k+1} along each row."""
    sums_SL = torch.zeros_like(x_SL)
    following_S = torch.zeros_like(factor_S)
    for k in range(x_SL.shape[1] - 1, -1, -1):
        following_S = x_SL[:, k] + factor_S * following_S
        sums_SL[:, k] = following_S
    return sums_SL


@dataclass(frozen=True)
class Steps:
    """The steps of ragged rows (their trainable tokens, in order) as a padded matrix and back: padding is 0 and comes last, so
    it adds nothing to earlier steps."""

    step_N: Tensor  # flat token index of every step
    row_N: Tensor
    place_N: Tensor  # of the step within its row
    count_S: Tensor
    n_tokens: int

    @classmethod
    def of(cls, batch: Batch) -> Steps:
        step_N = batch.trainable_T.nonzero()[:, 0]
        row_N = batch.sequence_T[step_N]
        count_S = torch.bincount(row_N, minlength=batch.n_sequences)
        place_N = torch.arange(len(step_N)) - (count_S.cumsum(0) - count_S)[row_N]
        return cls(step_N, row_N, place_N, count_S, batch.n_tokens)

    def pad(self, x_T: Tensor) -> Tensor:
        width = int(self.count_S.max()) if len(self.count_S) else 0
        x_SL = x_T.new_zeros(len(self.count_S), width)
        x_SL[self.row_N, self.place_N] = x_T[self.step_N]
        return x_SL

    def unpad(self, x_SL: Tensor) -> Tensor:
        x_T = x_SL.new_zeros(self.n_tokens)
        x_T[self.step_N] = x_SL[self.row_N, self.place_N]
        return x_T

    def shift(self, x_SL: Tensor, end_S: Tensor) -> Tensor:
        """x of the next step; after a row's last one, `end_S`."""
        next_SL = torch.zeros_like(x_SL)
        next_SL[:, :-1] = x_SL[:, 1:]
        has_S = self.count_S > 0
        next_SL[has_S, self.count_S[has_S] - 1] = end_S[has_S]
        return next_SL
