"""Batch invariance: measure the row multiple at which a row's bits do not depend on other rows.

BLAS chooses its kernel by shape, and kernels round differently. Measured in float32: with AVX-512
on one thread, products of any number of rows from 16 on agree; with MKL's AVX2 kernels, from 64 on;
two threads need more for wide matrices. The multiple depends on the machine, so it is measured. If
no candidate suffices, results agree within rounding (about 1e-6 nats).
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

    If none does, the largest candidate is returned. On accelerators 1 is returned: they choose
    kernels in more ways than padding could fix.
    """
    weight = decoder.head_weight
    if weight.device.type != "cpu":
        return 1
    shapes = {
        (min(p.shape[-2], MAX_COLUMNS), p.shape[-1])  # one expert's matrix if they are stacked
        for name, p in decoder.named_parameters()
        if p.dim() >= 2 and (p is weight or "embed" not in name)
    }
    generator = torch.Generator().manual_seed(0)
    candidates = list(CANDIDATES)
    for shape in sorted(shapes):
        matrix = torch.randn(shape, generator=generator).to(weight.dtype)
        x = torch.randn(REFERENCE_ROWS, shape[1], generator=generator).to(weight.dtype)
        # The layers' maps use `linear`; the head, experts and adapters use `F.linear`.
        for product in (linear, F.linear):
            reference = product(x, matrix)
            while len(candidates) > 1 and not _agrees(product, x, matrix, reference, candidates[0]):
                candidates.pop(0)
    return candidates[0]


def _agrees(product: Product, x: Tensor, matrix: Tensor, reference: Tensor, multiple: int) -> bool:
    counts = range(multiple, min(9 * multiple, REFERENCE_ROWS), multiple)
    return all(torch.equal(product(x[:n], matrix), reference[:n]) for n in counts)
