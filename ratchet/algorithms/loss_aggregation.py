"""Loss aggregation (token mean, sequence mean, ...): the weight of each token in a loss term.

A loss is the sum of its token values times these weights, computed over the mini-batch of one
optimizer step. The weights of a mean sum to 1. If no token trains they sum to 0, and the step is
skipped.

T = tokens, S = sequences, G = groups. `mask` below is 1 on trainable tokens. |sequence| and |group|
are numbers of trainable tokens. #sequences and #groups count those with a trainable token, unless
stated otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.batch import Batch


def token_mean(batch: Batch) -> Tensor:
    """Return mask / sum(mask): every trainable token has the same weight. float64 [T].

    This is DAPO's token-level loss (arXiv:2503.14476, eq. 8) over the whole batch, as in its
    authors' code. The published equation averages within each prompt first: `prompt_mean`.
    """
    return _mean_over(batch.trainable_T)


def sequence_mean(batch: Batch) -> Tensor:
    """Return mask / (|sequence| * #sequences): every sequence has the same weight. float64 [T].

    The loss is the mean over sequences of their token means: GRPO (arXiv:2402.03300) eq. 3.
    """
    mask_T = batch.trainable_T.double()
    count_S = batch.sequence_sum(mask_T)
    return mask_T / count_S.clamp(min=1)[batch.sequence_T] / _count_positive(count_S)


def prompt_mean(batch: Batch) -> Tensor:
    """Return mask / (|group| * #groups): every prompt has the same weight. float64 [T].

    The loss is the mean over prompts of the token means of their groups: DAPO (arXiv:2503.14476)
    eq. 8 as published.
    """
    mask_T = batch.trainable_T.double()
    count_G = batch.group_sum(batch.sequence_sum(mask_T))
    return mask_T / count_G.clamp(min=1)[batch.group_S][batch.sequence_T] / _count_positive(count_G)


def token_sum(batch: Batch) -> Tensor:
    """Return mask / #sequences: every token has the weight 1 / #sequences. float64 [T].

    The loss is the mean over sequences of the sums over their tokens, so longer answers make larger
    steps. #sequences counts all training rows, also those without a trainable token.
    """
    return batch.trainable_T.double() / batch.train_S.sum().clamp(min=1)


def fixed_length(batch: Batch, *, length: int) -> Tensor:
    """Return mask / (#sequences * length): `token_sum` divided by a fixed length. float64 [T].

    A token's weight does not depend on the length of its answer: Dr. GRPO (arXiv:2503.20783).
    #sequences counts all training rows, also those without a trainable token.
    """
    rows = batch.train_S.sum().clamp(min=1)
    return batch.trainable_T.double() / (rows * length)


def positive_mean(batch: Batch, *, above: float = 0.0) -> Tensor:
    """Return equal weights on the tokens of rows with a reward above `above`. float64 [T].

    Rewards before shaping are compared. VAPO (arXiv:2504.05118, section 4.3) gives the NLL of
    correct answers these weights.
    """
    return _mean_over(batch.trainable_T & (batch.need("judged_rewards") > above)[batch.sequence_T])


def valued_mean(batch: Batch) -> Tensor:
    """Return equal weights on the tokens that have a return, which train a critic. float64 [T].

    Tokens that filters removed from the policy's loss still train the critic.
    """
    return _mean_over(batch.need("valued"))


def chosen_mean(batch: Batch) -> Tensor:
    """Return equal weights on the tokens of each group's first row, float64 [T].

    The first row of a pair is the chosen answer.
    """
    first_S = torch.ones_like(batch.train_S)
    first_S[1:] = batch.group_S[1:] != batch.group_S[:-1]
    return _mean_over(batch.trainable_T & first_S[batch.sequence_T])


def labelled_turn_mean(batch: Batch) -> Tensor:
    """Return equal weights on the last token of each turn that has its own reward. float64 [T]."""
    return _mean_over(~batch.turn_rewards_T.isnan() & batch.trainable_T)


def _mean_over(mask_T: Tensor) -> Tensor:
    """Return equal weights on the tokens of a mask, with sum 1; all 0 for an empty mask."""
    weights_T = mask_T.double()
    return weights_T / weights_T.sum().clamp(min=1)


def _count_positive(count: Tensor) -> Tensor:
    """Return the number of entries above 0, at least 1 because callers divide by it."""
    return (count > 0).sum().clamp(min=1)


WEIGHTINGS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "token_sum": token_sum,
}
