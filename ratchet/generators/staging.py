"""Weights on their way into a generator of this process: nothing changes before the commit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.interfaces import Shard


class Staging:
    """views: (canonical name, tensor that shares the parameter's memory) of every weight.

    A learner that shares its tensors with the generator has nothing to send: such shards are recognised and skipped.
    """

    def __init__(self, views: Iterable[tuple[str, Tensor]]) -> None:
        self.views: Mapping[str, Tensor] = dict(views)
        self.pieces: list[tuple[Tensor, Tensor]] = []  # (where to, what)

    def receive(self, shards: Iterator[Shard]) -> None:
        """Raises ModelError for a weight that the model doesn't have, or of another shape."""
        for shard in shards:
            view = self.views.get(shard.name)
            if view is None:
                raise ModelError(f"weight '{shard.name}' was sent to a generator whose model has none of that name")
            if tuple(view.shape) != shard.shape:
                raise ModelError(f"weight '{shard.name}' was sent with shape {shard.shape}, the model has {tuple(view.shape)}")
            for axis, (offset, size) in enumerate(zip(shard.offsets, shard.tensor.shape, strict=True)):
                view = view.narrow(axis, offset, size)
            if view.data_ptr() != shard.tensor.data_ptr():
                self.pieces.append((view, shard.tensor.detach().to(view.device, view.dtype, copy=True)))

    def apply(self) -> None:
        with torch.no_grad():
            for view, piece in self.pieces:
                view.copy_(piece)
        self.clear()

    def clear(self) -> None:
        self.pieces.clear()
