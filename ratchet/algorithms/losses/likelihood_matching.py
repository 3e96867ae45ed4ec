"""The loss of distillation across tokenizers: likelihoods of common text spans are matched.

T = tokens, N = spans.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ratchet.algorithms.losses.common import Metrics
from ratchet.batch import Batch
from ratchet.protocols import Outputs

# Log-likelihoods are kept this far below 0 (in nats), because the divergence from a span that the
# student is certain of can be infinite.
GAP = 1e-6


def match_likelihoods(
    out: Outputs, batch: Batch, *, temperature: float = 1.0, ending: str = ""
) -> tuple[Tensor, Metrics]:
    """Return the divergence between teacher and student on text spans. Token level.

    A span is text that both tokenize into whole tokens. With its likelihoods p (teacher) and q
    (student), each to the power of 1 / temperature, the loss of a span is

        p log(p / q) + (1 - p) log((1 - p) / (1 - q))

    divided evenly over its tokens, so that a sum over tokens counts each span once: approximate
    likelihood matching with the KL divergence (ALM, arXiv:2503.20083, section 3), over the shortest
    spans and without its debiasing. Tokens outside every span add nothing. Metric `uncovered`: 1
    for such tokens.

    `teacher_logprobs` and `teacher_spans` of the batch (both with `ending`) are the columns of an
    `AlignedTeacher`.
    """
    span_T = batch.need(f"teacher_spans{ending}")
    covered_T = (span_T >= 0) & batch.trainable_T
    # Span numbers start from 0 for each teacher of a tag, so a key needs the row too.
    keys, key_T = torch.unique(
        torch.stack([batch.sequence_T, span_T], dim=1), dim=0, return_inverse=True
    )

    def sum_spans(x_T: Tensor) -> Tensor:
        return x_T.new_zeros(len(keys)).index_add(0, key_T, torch.where(covered_T, x_T, 0.0))

    student_T = out.need("logprobs")
    teacher_T = batch.need(f"teacher_logprobs{ending}").to(student_T.dtype)
    size_N = sum_spans(torch.ones_like(student_T)).clamp(min=1)
    x_N = compute_binary_kl(sum_spans(teacher_T) / temperature, sum_spans(student_T) / temperature)
    x_T = torch.where(covered_T, (x_N / size_N)[key_T], 0.0)
    return x_T, {"uncovered": (batch.trainable_T & ~covered_T).to(student_T.dtype)}


def compute_binary_kl(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    """Return KL(p || q) of two outcomes, from the log-probabilities of the first one."""
    log_p_N, log_q_N = log_p_N.clamp(max=-GAP), log_q_N.clamp(max=-GAP)
    p_N = log_p_N.exp()
    log_rest_p_N, log_rest_q_N = (torch.log(-torch.expm1(x)) for x in (log_p_N, log_q_N))
    return p_N * (log_p_N - log_q_N) + (1 - p_N) * (log_rest_p_N - log_rest_q_N)
