"""A copy of a decoder's layers in bfloat16, from which the engine generates.

An accelerator multiplies bfloat16 matrices many times faster than float32 ones, and a decoding step
takes as long as reading all matrices does. Casting them in each step would read the float32
matrices too.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ratchet.models.decoder import Decoder


class CastDecoder:
    """A decoder with cast copies of the matrices of another decoder's layers.

    All other tensors are the source's own: embedding and head, which the learner too multiplies in
    float32; norms and biases, which are small; quantised matrices.

    Args:
        source: The decoder with the current weights, for example the learner's.
        dtype: Dtype of the copies.
    """

    def __init__(self, source: Decoder, dtype: torch.dtype) -> None:
        self.source = source
        self.dtype = dtype
        self.decoder = source
        self._matrices: list[nn.Parameter] = []
        self._copies: list[Tensor] = []

    def count_later_bytes(self) -> int:
        """Return the bytes that the first `renew` will allocate; 0 after it."""
        if self._copies:
            return 0
        return sum(matrix.numel() for matrix in self._list_matrices()) * self.dtype.itemsize

    def _list_matrices(self) -> list[nn.Parameter]:
        """Return the source's matrices that have copies."""
        return [
            parameter
            for name, parameter in self.source.named_parameters()
            if name.startswith("layers.") and parameter.dim() >= 2
        ]

    @torch.inference_mode()
    def renew(self) -> bool:
        """Copy the source's current weights.

        The copies keep their memory unless the source has other parameters than before, for
        example those of a new adapter. Returns True if they have new memory.
        """
        matrices = self._list_matrices()
        is_known = len(matrices) == len(self._matrices) and all(
            known is matrix for known, matrix in zip(self._matrices, matrices, strict=True)
        )
        if is_known:
            torch._foreach_copy_(self._copies, list[Tensor](matrices))
            return False
        self._matrices = matrices
        self._copies = [matrix.detach().to(self.dtype, copy=True) for matrix in matrices]
        # `deepcopy` takes the objects in this memo instead of copying them.
        shared: dict[int, object] = {
            id(tensor): tensor for tensor in (*self.source.parameters(), *self.source.buffers())
        }
        for matrix, cast in zip(matrices, self._copies, strict=True):
            shared[id(matrix)] = nn.Parameter(cast, requires_grad=False)
        self.decoder = copy.deepcopy(self.source, shared)
        return True
