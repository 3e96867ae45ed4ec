"""Helpers of the advantage estimators: returns of attempts, statistics per bin, matrices of steps.

Statistics are float64 and count *attempts*: an attempt whose history forked has several sequences,
but is one sample of the policy. Only scored training attempts count.

T = tokens, S = sequences, A = attempts, G = groups.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.errors import DataError

# The assignment of n entries to bins: (index of each entry's bin, int64 [n]; number of bins).
Bins = tuple[Tensor, int]


@dataclass(frozen=True)
class Attempts:
    """The scored training attempts of a batch, over which advantages are computed.

    R = the sequences of these attempts.
    """

    batch: Batch
    is_counted_S: Tensor  # bool: True for a sequence of one of these attempts
    attempt_R: Tensor  # index in A of each sequence's attempt
    group_A: Tensor  # index in G of each attempt's group
    rewards_A: Tensor  # without token rewards

    def sum_sequences(self, x_S: Tensor) -> Tensor:
        """Sum a column over the sequences of each attempt. [S] -> [A]"""
        return sum_by(self.attempt_R, x_S[self.is_counted_S], len(self.group_A))

    def to_sequences(self, x_A: Tensor) -> Tensor:
        """Give each sequence its attempt's value, and 0 to uncounted sequences. [A] -> [S]"""
        x_S = torch.zeros(self.batch.n_sequences, dtype=x_A.dtype)
        x_S[self.is_counted_S] = x_A[self.attempt_R]
        return x_S

    @cached_property
    def returns_A(self) -> Tensor:
        """The reward of each attempt plus the sum of the token rewards of its sequences."""
        if not self.batch.has("token_rewards"):
            return self.rewards_A
        return self.rewards_A + self.sum_sequences(
            self.batch.sequence_sum(self.batch.need("token_rewards"))
        )

    @property
    def groups(self) -> Bins:
        return self.group_A, self.batch.n_groups


def collect_attempts(batch: Batch) -> Attempts:
    """Return the scored training attempts of a batch.

    Raises DataError if the sequences of one attempt carry different rewards.
    """
    is_counted_S = batch.train_S & batch.scored_S
    keys = torch.stack([batch.group_S[is_counted_S], batch.attempt_S[is_counted_S]], dim=1)
    pairs, attempt_R = torch.unique(keys, dim=0, return_inverse=True)
    rewards_R = batch.rewards_S[is_counted_S]
    rewards_A = torch.zeros(len(pairs), dtype=torch.float64)
    rewards_A[attempt_R] = rewards_R
    is_different_R = rewards_A[attempt_R] != rewards_R
    if bool(is_different_R.any()):
        group, attempt = keys[is_different_R][0].tolist()
        raise DataError(
            f"group {batch.group_ids[group]}: the sequences of attempt {attempt} carry different "
            "rewards. Give all sequences of an attempt the same reward."
        )
    return Attempts(batch, is_counted_S, attempt_R, pairs[:, 0], rewards_A)


def index_attempts(batch: Batch) -> Bins:
    """Divide the sequences into bins, one for each attempt of the batch.

    The bins are sorted by group. They include attempts without a reward.
    """
    pairs, attempt_S = torch.unique(
        torch.stack([batch.group_S, batch.attempt_S], dim=1), dim=0, return_inverse=True
    )
    return attempt_S, len(pairs)


def sum_by(bin_n: Tensor, x: Tensor, size: int) -> Tensor:
    """Sum x over the entries of each bin. [n] -> [size]"""
    return torch.zeros(size, dtype=x.dtype).index_add(0, bin_n, x)


def count_by(bins: Bins) -> Tensor:
    """Count the entries of each bin, float64 [size]."""
    bin_n, size = bins
    return sum_by(bin_n, torch.ones(len(bin_n), dtype=torch.float64), size)


def mean_by(bins: Bins, x: Tensor) -> Tensor:
    """Return the mean of x in each bin, and 0 for an empty bin."""
    bin_n, size = bins
    return sum_by(bin_n, x, size) / count_by(bins).clamp(min=1)


def is_equal_by(bins: Bins, x: Tensor) -> Tensor:
    """True for each bin whose x are all equal, bool [size].

    A bin with one entry or none counts as equal.
    """
    bin_n, size = bins
    minimum = torch.full((size,), torch.inf, dtype=x.dtype).scatter_reduce(0, bin_n, x, "amin")
    maximum = torch.full((size,), -torch.inf, dtype=x.dtype).scatter_reduce(0, bin_n, x, "amax")
    return maximum <= minimum


def std_by(bins: Bins, x: Tensor) -> Tensor:
    """Return the sample standard deviation (ddof 1) of each bin, exactly 0 if all x are equal."""
    bin_n, size = bins
    squares = sum_by(bin_n, (x - mean_by(bins, x)[bin_n]).square(), size)
    return torch.where(
        is_equal_by(bins, x), 0.0, (squares / (count_by(bins) - 1).clamp(min=1)).sqrt()
    )


def normalise_by(bins: Bins, x: Tensor, *, scale: str, epsilon: float) -> Tensor:
    """Normalise x within each bin: return (x - mean) / (std + epsilon).

    std is the sample standard deviation (ddof 1). scale="none" gives x - mean.

    The result is exactly 0 if all x of a bin are equal. Without this rule, the rounding error of
    the mean divided by a tiny standard deviation would become a signal.
    """
    bin_n, _ = bins
    centred = x - mean_by(bins, x)[bin_n]
    if scale == "std":
        centred = centred / (std_by(bins, x) + epsilon)[bin_n]
    return torch.where(is_equal_by(bins, x)[bin_n], 0.0, centred)


def put_all_in_one_bin(x: Tensor) -> Bins:
    """Return the division of the entries of x into a single bin."""
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


# --- Computations along attempts. A step is a trainable token here, not an optimizer step.
# N = steps, L = largest number of steps of an attempt.


def discounted_sums(x_AL: Tensor, factor_A: Tensor) -> Tensor:
    """Return y_k = x_k + factor y_{k+1} over the steps k of each attempt. [A, L]"""
    sums_AL = torch.zeros_like(x_AL)
    sum_A = torch.zeros_like(factor_A)
    for k in range(x_AL.shape[1] - 1, -1, -1):
        sum_A = x_AL[:, k] + factor_A * sum_A
        sums_AL[:, k] = sum_A
    return sums_AL


@dataclass(frozen=True)
class AttemptSteps:
    """The map between a column of tokens [T] and a padded matrix of steps [A, L].

    The steps of an attempt are the trainable tokens of its rows, in order. Padding is 0 and comes
    last, so it adds nothing to earlier steps. If an attempt has several rows, the first step of a
    row follows the last step of the row before it.
    """

    token_N: Tensor  # index of each step's token in the batch
    attempt_N: Tensor
    position_N: Tensor  # position of the step within its attempt
    count_A: Tensor  # number of steps of each attempt
    n_tokens: int

    @classmethod
    def from_batch(cls, batch: Batch) -> AttemptSteps:
        """Collect the steps of all attempts of a batch."""
        attempt_S, size = index_attempts(batch)
        token_N = batch.trainable_T.nonzero()[:, 0]
        attempt_N, order_N = attempt_S[batch.sequence_T[token_N]].sort(stable=True)
        count_A = torch.bincount(attempt_N, minlength=size)
        position_N = torch.arange(len(token_N)) - (count_A.cumsum(0) - count_A)[attempt_N]
        return cls(token_N[order_N], attempt_N, position_N, count_A, batch.n_tokens)

    def pad(self, x_T: Tensor) -> Tensor:
        """Arrange a column of tokens by attempt and step. [T] -> [A, L]"""
        width = int(self.count_A.max()) if len(self.count_A) else 0
        x_AL = x_T.new_zeros(len(self.count_A), width)
        x_AL[self.attempt_N, self.position_N] = x_T[self.token_N]
        return x_AL

    def unpad(self, x_AL: Tensor) -> Tensor:
        """Return the column of tokens for a matrix of steps. [A, L] -> [T]"""
        x_T = x_AL.new_zeros(self.n_tokens)
        x_T[self.token_N] = x_AL[self.attempt_N, self.position_N]
        return x_T

    def shift(self, x_AL: Tensor, end_A: Tensor) -> Tensor:
        """Return x of the step after each step. An attempt's last step gets `end_A`. [A, L]"""
        next_AL = torch.zeros_like(x_AL)
        next_AL[:, :-1] = x_AL[:, 1:]
        has_steps_A = self.count_A > 0
        next_AL[has_steps_A, self.count_A[has_steps_A] - 1] = end_A[has_steps_A]
        return next_AL
