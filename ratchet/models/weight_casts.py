"""Cast the weights of an update to the dtype of autocast once, not in each micro-batch.

Autocast forgets its casts at the end of each forward. A kept cast is a part of every micro-batch's
graph: its gradient is cast back and added to the float32 weight's, as without it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

# Each weight and its cast, by the weight's id; None outside of a context. Autograd's threads, which
# recompute layers, read it too.
_casts: dict[int, tuple[nn.Parameter, Tensor]] | None = None


@contextmanager
def keep_casts() -> Iterator[None]:
    """Keep the casts of weights inside the context, in which no weight may change."""
    global _casts
    assert _casts is None, "contexts that keep casts can't be nested"
    _casts = {}
    try:
        yield
    finally:
        _casts = None


def cast_weight(weight: Tensor) -> Tensor:
    """Return a float32 parameter in autocast's dtype if casts are kept, else the weight itself."""
    device = weight.device.type
    is_cast = weight.dtype is torch.float32 and torch.is_autocast_enabled(device)
    if _casts is None or not is_cast or not isinstance(weight, nn.Parameter):
        return weight
    if id(weight) in _casts:
        return _casts[id(weight)][1]
    cast = weight.to(torch.get_autocast_dtype(device))
    # A cast without gradients has no link to the weight.
    if torch.is_grad_enabled() or not weight.requires_grad:
        _casts[id(weight)] = weight, cast
    return cast
