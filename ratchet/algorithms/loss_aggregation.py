"""Loss aggregation: per-token weights that normalise a loss term over one optimizer step.

A loss is the sum of its token values times these weights. The weights of a mean sum to 1 over the
whole mini-batch, or to 0 if no token trains, in which case the step is skipped.

T = tokens, S = sequences, G = groups. `mask` below is 1 on trainable tokens. A sequence or group
counts if it has at least one trainable token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.batch import Batch


def token_mean(batch: Batch) -> Tensor:
    """Return mask / sum(mask): every trainable token counts the same. Sums to 1. float64 [T].

    DAPO (arXiv:2503.14476) eq. 8 over a batch, as in its authors' code; see `prompt_mean`.
    """
    return _mean_over(batch.trainable_T)


def sequence_mean(batch: Batch) -> Tensor:
    """Return mask / (|sequence| * #sequences): the mean over sequences of their token means.

    GRPO (arXiv:2402.03300) eq. 3. Sums to 1.
    """
    mask_T = batch.trainable_T.double()
    count_S = batch.sequence_sum(mask_T)
    return mask_T / count_S.clamp(min=1)[batch.sequence_T] / _count_positive(count_S)


def prompt_mean(batch: Batch) -> Tensor:
    """Return mask / (|group| * #groups): the mean over prompts of their groups' token means.

    Sums to 1. DAPO (arXiv:2503.14476) eq. 8 prompt by prompt, as published.
    """
    mask_T = batch.trainable_T.double()
    count_G = batch.group_sum(batch.sequence_sum(mask_T))
    return mask_T / count_G.clamp(min=1)[batch.group_S][batch.sequence_T] / _count_positive(count_G)


def token_sum(batch: Batch) -> Tensor:
    """Return mask / #sequences: the mean over sequences of the sums over their tokens.

    Sums to the mean number of trainable tokens a sequence: longer answers make larger steps.
    #sequences counts every training row, empty ones too.
    """
    return batch.trainable_T.double() / batch.train_S.sum().clamp(min=1)


def fixed_length(batch: Batch, *, length: int) -> Tensor:
    """Return mask / (#sequences * length): a token's weight does not depend on its answer's length.

    Dr. GRPO (arXiv:2503.20783). Sums to (mean trainable tokens a sequence) / length. #sequences
    counts every training row, so that an empty answer dilutes the others as any other answer does.
    """
    rows = batch.train_S.sum().clamp(min=1)
    return batch.trainable_T.double() / (rows * length)


def positive_mean(batch: Batch, *, above: float = 0.0) -> Tensor:
    """Return the token mean over rows with a reward above a threshold. Sums to 1.

    The reward is the judged one, before any shaping: the likelihood of correct answers of VAPO
    (arXiv:2504.05118, section 4.3).
    """
    return _mean_over(batch.trainable_T & (batch.need("judged_rewards") > above)[batch.sequence_T])


def valued_mean(batch: Batch) -> Tensor:
    """Return the token mean over the steps that have a return, for a critic. Sums to 1.

    Steps that filters removed from the policy's loss still train the critic.
    """
    return _mean_over(batch.need("valued"))


def chosen_mean(batch: Batch) -> Tensor:
    """Return the token mean over the first row of each group, a pair's chosen one. Sums to 1."""
    first_S = torch.ones_like(batch.train_S)
    first_S[1:] = batch.group_S[1:] != batch.group_S[:-1]
    return _mean_over(batch.trainable_T & first_S[batch.sequence_T])


def step_mean(batch: Batch) -> Tensor:
    """Return the mean over labelled ends of steps that train. Sums to 1.

    These are turns with a reward of their own.
    """
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
