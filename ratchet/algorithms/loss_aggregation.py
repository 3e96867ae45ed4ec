"""Weightings: the complete normaliser of a term over one optimizer step, as a column. Losses then
only sum.

A mean-type column sums to 1 over the whole mini-batch, or to 0 when nothing trains (the step is
then skipped). T = tokens, S = sequences, G = groups. `mask` below is 1 on trainable tokens; a
sequence or group counts when it has at least one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.batch import Batch


def token_mean(batch: Batch) -> Tensor:
    """mask / sum(mask): every trainable token counts the same. Sums to 1. float64 [T].

    DAPO (arXiv:2503.14476) eq. 8 over a batch, as its authors' code has it; see `prompt_mean`.
    """
    return _mean_over(batch.trainable_T)


def sequence_mean(batch: Batch) -> Tensor:
    """mask / (|sequence| * #sequences): mean over sequences of their token means. GRPO
    (arXiv:2402.03300) eq. 3. Sums to 1."""
    mask_T = batch.trainable_T.double()
    count_S = batch.sequence_sum(mask_T)
    return mask_T / count_S.clamp(min=1)[batch.sequence_T] / _positive(count_S)


def prompt_mean(batch: Batch) -> Tensor:
    """mask / (|group| * #groups): mean over prompts of the token mean within their group. Sums to
    1.

    DAPO (arXiv:2503.14476) eq. 8 prompt by prompt, as it is written.
    """
    mask_T = batch.trainable_T.double()
    count_G = batch.group_sum(batch.sequence_sum(mask_T))
    return mask_T / count_G.clamp(min=1)[batch.group_S][batch.sequence_T] / _positive(count_G)


def token_sum(batch: Batch) -> Tensor:
    """mask / #sequences: mean over sequences of the sums over their tokens. Sums to the mean count
    of trainable tokens a sequence: longer answers make larger steps. #sequences counts every
    training row, empty ones too."""
    return batch.trainable_T.double() / batch.train_S.sum().clamp(min=1)


def fixed_length(batch: Batch, *, length: int) -> Tensor:
    """mask / (#sequences * length): a token's weight does not depend on its answer's length. Dr.
    GRPO (arXiv:2503.20783).

    Sums to (mean trainable tokens a sequence) / length. Here #sequences counts every training row,
    so that an empty answer dilutes the others as any other answer does.
    """
    rows = batch.train_S.sum().clamp(min=1)
    return batch.trainable_T.double() / (rows * length)


def positive_mean(batch: Batch, *, above: float = 0.0) -> Tensor:
    """Token mean over the rows whose reward, as judged and before any shaping, is above a
    threshold: the likelihood of correct answers, as VAPO's (arXiv:2504.05118, section 4.3). Sums to
    1."""
    return _mean_over(batch.trainable_T & (batch.need("judged_rewards") > above)[batch.sequence_T])


def valued_mean(batch: Batch) -> Tensor:
    """Token mean over the steps that have a return, for a critic: those that filters took from the
    policy's loss are as good for it as others. Sums to 1."""
    return _mean_over(batch.need("valued"))


def chosen_mean(batch: Batch) -> Tensor:
    """Token mean over the first row of each group, the chosen one of a pair. Sums to 1."""
    first_S = torch.ones_like(batch.train_S)
    first_S[1:] = batch.group_S[1:] != batch.group_S[:-1]
    return _mean_over(batch.trainable_T & first_S[batch.sequence_T])


def step_mean(batch: Batch) -> Tensor:
    """Mean over the labelled ends of steps (turns with a reward of their own) that train. Sums to
    1."""
    return _mean_over(~batch.turn_rewards_T.isnan() & batch.trainable_T)


def _mean_over(mask_T: Tensor) -> Tensor:
    weights_T = mask_T.double()
    return weights_T / weights_T.sum().clamp(min=1)


def _positive(count: Tensor) -> Tensor:
    return (count > 0).sum().clamp(min=1)


WEIGHTINGS = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "token_sum": token_sum,
}
