"""Muon: momentum, orthogonalised. A matrix's step has singular values of about 1, whatever those of
its gradient are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ratchet.errors import ConfigError
from ratchet.learners.optim.adamw import AdamW, Moments
from ratchet.learners.optim.config import MuonConfig

# of a quintic that is as steep at 0 as can be while 1 stays within about 0.3 of 1
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ROUNDS = 5


class Muon(AdamW):
    """https://kellerjordan.github.io/posts/muon/, with Nesterov's momentum, and the scale and
    weight decay of arXiv:2502.16982: with G the gradient of a matrix W of [r, c],

        M <- momentum M + G        W <- W - lr (0.2 sqrt(max(r, c)) NS(G + momentum M) + weight_decay W)

    The scale gives a step the root mean square that AdamW's usually have, so that both share one
    rate and one weight decay.

    matrices: of the parameters that take such steps, the rows of each matrix, as they lie one below
    the other: those that our decoder fuses (queries, keys and values; all experts of a layer) are
    orthogonalised each for itself. All others (embeddings, heads, norms, biases) take those of
    AdamW. Raises ConfigError where there is no matrix.
    """

    config: MuonConfig

    def __init__(
        self,
        config: MuonConfig,
        named: Sequence[tuple[str, nn.Parameter]],
        *,
        matrices: Mapping[str, Sequence[int]],
    ) -> None:
        super().__init__(config, named, matrices=matrices)
        if not matrices:
            raise ConfigError(
                "optimizer.kind=muon finds no matrices of hidden layers in this model: set "
                "optimizer.kind=adamw"
            )

    def change(self, given: Sequence[tuple[str, nn.Parameter]], lr: float) -> None:
        super().change([(name, p) for name, p in given if name not in self.matrices], lr)
        for name, p in given:
            if name in self.matrices:
                assert p.grad is not None
                self._turn(name, p.detach(), p.grad, lr)

    def _turn(self, name: str, p: Tensor, gradient: Tensor, lr: float) -> None:
        config, rows = self.config, self.matrices[name]
        momentum = (self.state.get(name) or self.begin(name, p))["momentum"]
        momentum.mul_(config.momentum).add_(gradient)
        update = gradient.add(momentum, alpha=config.momentum)
        p.mul_(1 - lr * config.weight_decay)
        for own, turned in zip(_stacks(p, rows), _stacks(update, rows), strict=True):
            own.add_(orthogonalised(turned), alpha=-lr * 0.2 * max(own.shape[-2:]) ** 0.5)

    def moments(self, name: str, own: Tensor) -> Moments:
        return (
            {"momentum": torch.zeros_like(own)}
            if name in self.matrices
            else super().moments(name, own)
        )


def orthogonalised(x: Tensor) -> Tensor:
    """[..., r, c]: of each matrix U S V^T about U V^T, in its dtype. The products are in bfloat16
    on an accelerator, as the source has them, and in the matrix's own dtype on a CPU, where
    bfloat16 may be the slower one."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if tall else x  # the smaller product
    # no singular value is above 1 then
    y = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    y = y if x.device.type == "cpu" else y.bfloat16()
    for _ in range(ROUNDS):
        product = y @ y.mT
        y = a * y + (b * product + c * product @ product) @ y
    return (y.mT if tall else y).to(x.dtype)


def _stacks(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Views of the matrices: all at once, [n, r, c], where they are alike."""
    x = x.view(-1, x.shape[-1])
    return (
        [x.unflatten(0, (len(rows), rows[0]))] if len(set(rows)) == 1 else list(x.split(list(rows)))
    )
