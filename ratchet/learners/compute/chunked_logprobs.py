"""Log-probabilities of given tokens by a head that is one matrix, in chunks of rows, with the
backward written out.

Autograd's own route would keep the logits of all chunks, or make some five blocks of their size for
each, and a gradient of the whole matrix for each. Here one block of logits exists at a time, and
one gradient, to which every chunk adds.

n = predictions, d = hidden size, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def picked_logprobs(
    hidden_nd: Tensor,
    matrix_Vd: Tensor,
    targets_n: Tensor,
    temperature_n: Tensor,
    *,
    rows: int,
    entropy: bool,
) -> tuple[Tensor, Tensor]:
    """(log p of the targets [n], entropies [n] without a gradient, or zeros unless they are asked
    for) under `softmax(hidden @ matrix.T / temperature)`. All of one dtype but the int64 targets.
    rows: of a chunk."""
    return _Picked.apply(hidden_nd, matrix_Vd, targets_n, temperature_n, rows, entropy)


class _Picked(Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        matrix: Tensor,
        targets: Tensor,
        temperature: Tensor,
        rows: int,
        entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, log_sums = (torch.zeros_like(temperature) for _ in range(3))
        block = hidden.new_empty(min(rows, len(hidden)), len(matrix))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            z = _logits(hidden[part], matrix, temperature[part], block)
            most = z.amax(-1)
            picked = z.gather(1, targets[part, None])[:, 0]
            below = z.sub_(most[:, None])
            e = below.exp() if entropy else below.exp_()
            total = e.sum(-1)
            log_sums[part] = most + total.log()
            logprobs[part] = (picked - most) - total.log()
            if entropy:
                mean = torch.bmm(e[:, None], below[:, :, None])[:, 0, 0].div_(total)
                entropies[part] = total.log() - mean
        ctx.rows = rows
        ctx.save_for_backward(hidden, matrix, targets, temperature, log_sums)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    def backward(
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        """With p = softmax(z / t): d log p_y / dz = (onehot_y - p) / t."""
        hidden, matrix, targets, temperature, log_sums = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_matrix = torch.zeros_like(matrix) if ctx.needs_input_grad[1] else None
        weight = grads[0] / temperature
        block = hidden.new_empty(min(ctx.rows, len(hidden)), len(matrix))
        for start in range(0, len(hidden), ctx.rows):
            part = slice(start, start + ctx.rows)
            z = _logits(hidden[part], matrix, temperature[part], block)
            z.sub_(log_sums[part, None]).exp_().mul_(-weight[part, None])
            z.scatter_add_(1, targets[part, None], weight[part, None])
            if grad_hidden is not None:
                torch.mm(z, matrix, out=grad_hidden[part])
            if grad_matrix is not None:
                grad_matrix.addmm_(z.T, hidden[part])
        return grad_hidden, grad_matrix, None, None, None, None


def _logits(hidden: Tensor, matrix: Tensor, temperature: Tensor, block: Tensor) -> Tensor:
    return torch.mm(hidden, matrix.T, out=block[: len(hidden)]).div_(temperature[:, None])
