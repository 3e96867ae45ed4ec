"""Batch invariance: measure to which multiple the number of rows must be padded.

With this padding, a row's result does not depend on the other rows. BLAS chooses its kernel by
shape, and kernels round differently. In float32, products of different numbers of rows agree from
16 rows on with AVX-512 on one thread, and from 64 rows on with MKL's AVX2 kernels. Two threads need
more rows for wide matrices. The multiple depends on the machine, so it is measured. If no candidate
suffices, results agree within rounding (about 1e-6 nats).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ratchet.models.decoder import Decoder
from ratchet.models.ops import linear

CANDIDATES = (8, 16, 32, 64)
REFERENCE_ROWS = 256
Product = Callable[[Tensor, Tensor], Tensor]
# maximum number of output columns that is tried; wider products use the same kernels
MAX_COLUMNS = 4096


def measure_stable_rows(decoder: Decoder) -> int:
    """Return the smallest candidate whose multiples give the same bits for every matrix shape.

    If no candidate does, the largest one is returned. On accelerators 1 is returned, because their
    choice of kernels depends on more than the number of rows.
    """
    weight = decoder.head_weight
    if weight.device.type != "cpu":
        return 1
    # The last two axes are those of one expert's matrix if the matrices of experts are stacked.
    shapes = {
        (min(parameter.shape[-2], MAX_COLUMNS), parameter.shape[-1])
        for name, parameter in decoder.named_parameters()
        if parameter.dim() >= 2 and (parameter is weight or "embed" not in name)
    }
    generator = torch.Generator().manual_seed(0)
    candidates = list(CANDIDATES)
    for shape in sorted(shapes):
        matrix = torch.randn(shape, generator=generator).to(weight.dtype)
        inputs = torch.randn(REFERENCE_ROWS, shape[1], generator=generator).to(weight.dtype)
        # The linear layers use `linear`; the head, experts and adapters use `F.linear`.
        for product in (linear, F.linear):
            reference = product(inputs, matrix)
            while len(candidates) > 1 and not _has_stable_rows(
                product, inputs, matrix, reference, candidates[0]
            ):
                candidates.pop(0)
    return candidates[0]


def _has_stable_rows(
    product: Product, inputs: Tensor, matrix: Tensor, reference: Tensor, multiple: int
) -> bool:
    """True if products of fewer rows, in multiples of `multiple`, have the bits of `reference`."""
    row_counts = range(multiple, min(9 * multiple, REFERENCE_ROWS), multiple)
    return all(torch.equal(product(inputs[:n], matrix), reference[:n]) for n in row_counts)
