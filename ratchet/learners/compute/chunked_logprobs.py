"""Compute log-probabilities of target tokens in chunks of rows, with a hand-written backward.

One block of logits exists at a time, and all chunks add to one gradient of the head's matrix.
Autograd would keep the logits of all chunks. With checkpointing it would allocate about five blocks
of logits, and a gradient of the whole matrix for each chunk. The head must be a single matrix.

n = predictions, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def compute_target_logprobs(
    hidden_nd: Tensor,
    matrix_Vd: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    *,
    chunk_rows: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor]:
    """Return (log p of the targets [n], entropies [n]).

    The distributions are `softmax(hidden @ matrix.T / temperature)`.

    chunk_rows: number of predictions in a chunk.
    with_entropy: False leaves the entropies at 0. Entropies never have a gradient.

    All tensors have the same dtype, except the int64 targets.
    """
    return _TargetLogprobs.apply(
        hidden_nd, matrix_Vd, targets_n, temperature_n, chunk_rows, with_entropy
    )


class _TargetLogprobs(Function):
    """The autograd function of `compute_target_logprobs`. Its backward recomputes the logits."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        targets: Tensor,
        temperature: Tensor,
        chunk_rows: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, log_sums = (torch.zeros_like(temperature) for _ in range(3))
        block = hidden.new_empty(min(chunk_rows, len(hidden)), len(matrix))
        for start in range(0, len(hidden), chunk_rows):
            chunk = slice(start, start + chunk_rows)
            scaled = _compute_scaled_logits(hidden[chunk], matrix, temperature[chunk], block)
            maxima = scaled.amax(-1)
            target_logits = scaled.gather(1, targets[chunk, None])[:, 0]
            shifted = scaled.sub_(maxima[:, None])
            exponentials = shifted.exp() if with_entropy else shifted.exp_()
            sums = exponentials.sum(-1)
            log_sums[chunk] = maxima + sums.log()
            logprobs[chunk] = (target_logits - maxima) - sums.log()
            if with_entropy:
                mean = torch.bmm(exponentials[:, None], shifted[:, :, None])[:, 0, 0].div_(sums)
                entropies[chunk] = sums.log() - mean
        ctx.chunk_rows = chunk_rows
        ctx.save_for_backward(hidden, matrix, targets, temperature, log_sums)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """Return the gradients of the hidden states and the matrix.

        With logits z, temperature t and p = softmax(z / t): d log p_y / dz = (onehot_y - p) / t.
        """
        hidden, matrix, targets, temperature, log_sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_matrix = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
        weight = grads[0] / temperature
        block = hidden.new_empty(min(ctx.chunk_rows, len(hidden)), len(matrix))
        for start in range(0, len(hidden), ctx.chunk_rows):
            chunk = slice(start, start + ctx.chunk_rows)
            # The block holds z / t, then log p, then p, then the gradient of z, each in place.
            # `weight` is the gradient of the target's log p, divided by t.
            grad_logits = _compute_scaled_logits(hidden[chunk], matrix, temperature[chunk], block)
            grad_logits.sub_(log_sums[chunk, None]).exp_().mul_(-weight[chunk, None])
            grad_logits.scatter_add_(1, targets[chunk, None], weight[chunk, None])
            if grad_hidden is not None:
                torch.mm(grad_logits, matrix, out=grad_hidden[chunk])
            if grad_matrix is not None:
                grad_matrix.addmm_(grad_logits.T, hidden[chunk])
        return grad_hidden, grad_matrix, None, None, None, None


def _compute_scaled_logits(
    hidden: Tensor, matrix: Tensor, temperature: Tensor, block: Tensor
) -> Tensor:
    """Return a chunk's logits divided by the temperature, written into `block`."""
    return torch.mm(hidden, matrix.T, out=block[: len(hidden)]).div_(temperature[:, None])
