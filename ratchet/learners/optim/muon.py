"""The Muon optimizer: orthogonalised momentum.

The step of a matrix has singular values of about 1, whatever the singular values of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ratchet.errors import ConfigError
from ratchet.learners.optim.adamw import AdamW, Moments
from ratchet.learners.optim.config import MuonConfig

# Coefficients of the Newton-Schulz quintic. They have the steepest slope at 0 with which singular
# values still end within about 0.3 of 1.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5

MapMatrices = Callable[[str, Tensor, Callable[[Tensor], Tensor]], Tensor]


class Muon(AdamW):
    """Muon with Nesterov's momentum (https://kellerjordan.github.io/posts/muon/).

    The scale and weight decay are those of arXiv:2502.16982. G is the gradient of a matrix W [r, c]
    and NS is `orthogonalise`:

        M <- momentum M + G
        W <- W - lr (0.2 sqrt(max(r, c)) NS(G + momentum M) + weight_decay W)

    The scale gives a step the usual root mean square of an AdamW step, so that Muon and AdamW can
    share one learning rate and one weight decay.

    Args:
        matrices: The numbers of rows of the matrices in a parameter, by the parameter's name.
            Matrices that the decoder stacks in one parameter (queries, keys and values; all experts
            of a layer) are orthogonalised separately. AdamW updates all parameters that are not
            listed here (embeddings, heads, norms, biases).
        to_local: As of `AdamW`.
        map_matrices: Applies a function to each whole matrix of a parameter, given the parameter's
            name and this rank's part, and returns this rank's part of the results. None: this rank
            has the whole parameters, as `matrices` describes them.

    Raises:
        ConfigError: If no matrix trains.
    """

    config: MuonConfig

    def __init__(
        self,
        config: MuonConfig,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        matrices: Mapping[str, Sequence[int]],
        to_local: Callable[[Tensor], Tensor] = lambda whole: whole,
        map_matrices: MapMatrices | None = None,
    ) -> None:
        super().__init__(config, named_parameters, matrices=matrices, to_local=to_local)
        self._map_matrices = map_matrices or self._map_local_matrices
        if not any(name in matrices for name, _ in named_parameters):
            raise ConfigError(
                "optimizer.kind=muon finds no matrices of hidden layers that train. Set "
                "optimizer.kind=adamw."
            )

    def update_parameters(self, parameters: Sequence[tuple[str, nn.Parameter]], lr: float) -> None:
        adamw_parameters = [(name, p) for name, p in parameters if name not in self.matrices]
        super().update_parameters(adamw_parameters, lr)
        for name, p in parameters:
            if name in self.matrices:
                assert p.grad is not None
                self._update_matrices(name, p.detach(), p.grad, lr)

    def _update_matrices(self, name: str, p: Tensor, gradient: Tensor, lr: float) -> None:
        """Take a Muon step for the matrices of one parameter."""
        config = self.config
        weights, gradient = self.to_local(p), self.to_local(gradient)
        momentum = (self.state.get(name) or self.init_state(name, p))["momentum"]
        momentum.mul_(config.momentum).add_(gradient)
        update = gradient.add(momentum, alpha=config.momentum)
        weights.mul_(1 - lr * config.weight_decay)
        weights.add_(self._map_matrices(name, update, compute_direction), alpha=-lr)

    def _map_local_matrices(
        self, name: str, local: Tensor, compute: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Apply a function to the matrices of a parameter that this rank has whole."""
        rows = self.matrices[name]
        result = torch.empty_like(local)
        for matrix, target in zip(_unstack(local, rows), _unstack(result, rows), strict=True):
            target.copy_(compute(matrix))
        return result

    def init_moments(self, name: str, local: Tensor) -> Moments:
        return (
            {"momentum": torch.zeros_like(local)}
            if name in self.matrices
            else super().init_moments(name, local)
        )


def compute_direction(x: Tensor) -> Tensor:
    """Return the direction of a Muon step for x [..., r, c]: orthogonalised, and scaled."""
    return orthogonalise(x) * (0.2 * max(x.shape[-2:]) ** 0.5)


def orthogonalise(x: Tensor) -> Tensor:
    """Return approximately U V^T for each matrix U S V^T of x [..., r, c], in the dtype of x.

    The products are computed in bfloat16 on an accelerator, as in the original Muon, and in the
    dtype of x on a CPU, where bfloat16 may be slower.
    """
    a, b, c = COEFFICIENTS
    is_tall = x.shape[-2] > x.shape[-1]
    wide = x.mT if is_tall else x  # wide @ wide.mT is smaller than wide.mT @ wide
    # The quintic needs singular values of at most 1.
    y = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    y = y if x.device.type == "cpu" else y.bfloat16()
    for _ in range(ITERATIONS):
        product = y @ y.mT
        y = a * y + (b * product + c * product @ product) @ y
    return (y.mT if is_tall else y).to(x.dtype)


def _unstack(x: Tensor, rows: Sequence[int]) -> list[Tensor]:
    """Return views of the matrices stacked in x: a single view [n, r, c] if they have equal shapes.

    Otherwise return one view [r, c] for each.
    """
    x = x.view(-1, x.shape[-1])
    return (
        [x.unflatten(0, (len(rows), rows[0]))] if len(set(rows)) == 1 else list(x.split(list(rows)))
    )
