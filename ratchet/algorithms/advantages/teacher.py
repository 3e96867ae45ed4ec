"""The advantage estimator of on-policy distillation. T = tokens."""

from __future__ import annotations

import torch

from ratchet.algorithms.advantages.common import sum_by
from ratchet.algorithms.base import AlgoState
from ratchet.batch import Batch


def on_policy_distillation(batch: Batch, state: AlgoState) -> Batch:
    """Fill on-policy distillation's advantages: A_t = log p_teacher(t) - log p_policy(t).

    The policy gradient with A_t is the gradient of the reverse KL(policy || teacher) at each
    sampled token, without the effect that a token has on later ones
    (https://thinkingmachines.ai/blog/on-policy-distillation). No reward is needed, so rows without
    a reward train too.

    If the teacher has another tokenizer, the batch has a column `teacher_spans`. Then a span of
    text is one action: all of its tokens get the span's log p_teacher - log p_policy. Tokens
    outside every span get 0, and their share is reported as "teacher/uncovered_share".
    """
    gap_T = batch.need("teacher_logprobs").double() - batch.need("old_logprobs").double()
    gap_T = torch.where(batch.trainable_T, gap_T, 0.0)
    if batch.has("teacher_spans"):
        span_T = batch.need("teacher_spans")
        # Span numbers start from 0 for each teacher, so a key needs the row too.
        keys_T = torch.stack([batch.sequence_T, span_T], dim=1)
        keys, key_T = torch.unique(keys_T, dim=0, return_inverse=True)
        span_gap_T = sum_by(key_T, gap_T, len(keys))[key_T]
        covered_T = (span_T >= 0) & batch.trainable_T
        gap_T = torch.where(covered_T, span_gap_T, 0.0)
        batch = batch.with_metrics(
            **{
                "teacher/uncovered_share": 1
                - float(covered_T.sum() / batch.trainable_T.sum().clamp(min=1))
            }
        )
    return batch.fill_tokens(advantages=gap_T)
