"""How many rows a matrix product needs until each row's bits stop depending on how many others
there are.

BLAS chooses its kernel by shape, and kernels round differently. Measured in float32: with AVX-512
on one thread, products of any number of rows from 16 on agree; with MKL's AVX2 kernels, from 64 on;
two threads need more for wide matrices. It is the machine's property, so it is probed. Where no
candidate will do, results agree within rounding (about 1e-6 nats).
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
WIDEST = 4096  # output columns that are tried: wider products use the same kernels


def stable_rows(decoder: Decoder) -> int:
    """The smallest candidate whose multiples agree for every matrix shape of the model; the largest
    if none does.

    1 where it can't be had: accelerators choose kernels in more ways than padding could fix.
    """
    weight = decoder.head_weight
    if weight.device.type != "cpu":
        return 1
    shapes = {
        (min(p.shape[-2], WIDEST), p.shape[-1])  # of experts, each one's matrix
        for name, p in decoder.named_parameters()
        if p.dim() >= 2 and (p is weight or "embed" not in name)
    }
    generator = torch.Generator().manual_seed(0)
    candidates = list(CANDIDATES)
    for shape in sorted(shapes):
        matrix = torch.randn(shape, generator=generator).to(weight.dtype)
        x = torch.randn(REFERENCE_ROWS, shape[1], generator=generator).to(weight.dtype)
        for product in (linear, F.linear):  # of the layers' maps; of the head, experts and adapters
            reference = product(x, matrix)
            while len(candidates) > 1 and not _agrees(product, x, matrix, reference, candidates[0]):
                candidates.pop(0)
    return candidates[0]


def _agrees(product: Product, x: Tensor, matrix: Tensor, reference: Tensor, multiple: int) -> bool:
    counts = range(multiple, min(9 * multiple, REFERENCE_ROWS), multiple)
    return all(torch.equal(product(x[:n], matrix), reference[:n]) for n in counts)
