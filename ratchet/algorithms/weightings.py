"""Weightings: the complete normaliser of a term over one optimizer step, as a column. Losses then only sum.

A mean-type column sums to 1 over the whole mini-batch, or to 0 when nothing trains (the step is then skipped). T = tokens,
S = sequences, G = groups. `mask` below is 1 on trainable tokens; a sequence or group counts when it has at least one.
"""

from __future__ import annotations

from torch import Tensor

from ratchet.batch import Batch


def token_mean(batch: Batch) -> Tensor:
    """mask / sum(mask): every trainable token counts the same. DAPO (arXiv:2503.14476) eq. 8. Sums to 1. float64 [T]."""
    mask_T = batch.trainable_T.double()
    return mask_T / mask_T.sum().clamp(min=1)


def sequence_mean(batch: Batch) -> Tensor:
    """mask / (|sequence| * #sequences): mean over sequences of their token means. GRPO (arXiv:2402.03300) eq. 3. Sums to 1."""
    mask_T = batch.trainable_T.double()
    count_S = batch.sequence_sum(mask_T)
    return mask_T / count_S.clamp(min=1)[batch.sequence_T] / _positive(count_S)


def prompt_mean(batch: Batch) -> Tensor:
    """mask / (|group| * #groups): mean over prompts of the token mean within their group. Sums to 1."""
    mask_T = batch.trainable_T.double()
    count_G = batch.group_sum(batch.sequence_sum(mask_T))
    return mask_T / count_G.clamp(min=1)[batch.group_S][batch.sequence_T] / _positive(count_G)


def fixed_length(batch: Batch, *, length: int) -> Tensor:
    """mask / (#sequences * length): a token's weight does not depend on its answer's length. Dr. GRPO (arXiv:2503.20783).

    Sums to (mean trainable tokens a sequence) / length. Here #sequences counts every training row, so that an empty answer
    dilutes the others as any other answer does.
    """
    rows = batch.train_S.sum().clamp(min=1)
    return batch.trainable_T.double() / (rows * length)


def _positive(count: Tensor) -> Tensor:
    return (count > 0).sum().clamp(min=1)


WEIGHTINGS = {"token_mean": token_mean, "sequence_mean": sequence_mean, "prompt_mean": prompt_mean}
