"""Weights on their way into a generator of this process: nothing changes before the commit.

Where what is received lasts, and lies as a parameter does, the commit makes the parameter refer to
it: nothing is copied, and the generators of a host share one copy of the weights. Memory that is
used so is never written from here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.layers.quantized import Quantised
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import Shard
from ratchet.utils.thread_pool import Crew

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the weight `name`, from `offsets` on."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    def place(self, view: Tensor) -> Tensor:
        """Where it belongs in its weight."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            view = view.narrow(axis, offset, size)
        return view


class Staging:
    """weights: gives (canonical name, tensor that shares the parameter's memory) of every weight.
    parameters: all of them; they may be moved to other memory. quantised: the matrices that rest
    so. They are opened for a push that has others for them, and take the memory of plain ones until
    they are shut again.

    A learner that shares its tensors with the generator has nothing to send: such shards are
    recognised and skipped.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        parameters: Callable[[], Iterable[nn.Parameter]] = tuple,
        quantised: Callable[[], Iterable[Quantised]] = tuple,
    ) -> None:
        self._weights, self._parameters, self._quantised = weights, parameters, quantised
        self.adapter: Adapter | None = None
        self._low_rank: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
        # during a push: of all that it may have others for
        self._open: Mapping[str, Tensor] | None = None
        self._base_rests = False  # in this push
        self.pieces: list[Piece] = []
        self.stable = False  # what is received stays as it is until the commit
        self.lasting = False  # and after it, until the next one
        self.head_is_embedding = False
        self._borrowed: list[nn.Parameter] = []
        self._crew = Crew(torch.get_num_threads())

    def carry(self, adapter: Adapter, low_rank: Callable[[], Iterable[tuple[str, Tensor]]]) -> None:
        """The model has got an adapter. low_rank: gives its weights."""
        self.adapter, self._low_rank = adapter, low_rank

    @property
    def views(self) -> Mapping[str, Tensor]:
        """Of every weight; between pushes made anew, as nothing that a learner replaces is to be
        held here."""
        return self._open if self._open is not None else dict(self.shown())

    def _viewed(self) -> Mapping[str, Tensor]:
        return dict(self._low_rank() if self._base_rests else self.shown())

    def shown(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights()
        yield from self._low_rank()

    @property
    def adopted(self) -> bool:
        """Whether some parameter lies in memory that came with the last weights."""
        return bool(self._borrowed)

    def prepare(self, manifest: Mapping[str, Any]) -> None:
        """manifest: "weights", {name: {"shape", "dtype"}} of all that will be sent (absent:
        whatever comes is all); "stable": whether what is received may be copied as late as the
        commit; "lasting": whether it may be used instead of a copy.

        A learner that ties the head to the embedding does not send it. Raises ModelError for a
        model of other weights.
        """
        self.clear()
        weights = manifest.get("weights")
        moving = dict(self._low_rank())  # an adapter's base comes once
        self._base_rests = (
            weights is not None and self.adapter is not None and weights.keys() <= moving.keys()
        )
        for matrix in () if self._base_rests else self._quantised():
            matrix.open()
        self._open = self._viewed()
        self.stable, self.lasting = bool(manifest.get("stable")), bool(manifest.get("lasting"))
        if weights is None:
            self.head_is_embedding = False
            return
        for name, weight in weights.items():
            self._view(name, tuple(weight["shape"]))
        self.head_is_embedding = HEAD in self.views and HEAD not in weights
        missing = [name for name in self.views if name not in weights and name != HEAD]
        if missing or (self.head_is_embedding and EMBEDDING not in weights):
            raise ModelError(
                f"weight '{(*missing, HEAD)[0]}' of the generator's model is none of those that "
                "the learner sends"
            )

    def _view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        view = self.views.get(name)
        if view is None:
            raise ModelError(
                f"weight '{name}' was sent to a generator whose model has none of that name"
            )
        if tuple(view.shape) != shape:
            raise ModelError(
                f"weight '{name}' was sent with shape {shape}, the model has {tuple(view.shape)}"
            )
        return view

    def receive(self, shards: Iterator[Shard]) -> None:
        """Raises ModelError for a weight that the model doesn't have, or of another shape."""
        for shard in shards:
            self._stage(shard.name, shard)
            if self.head_is_embedding and shard.name == EMBEDDING:
                self._stage(HEAD, shard)

    def _stage(self, name: str, shard: Shard) -> None:
        view = self._view(name, tuple(shard.shape))
        piece = Piece(name, tuple(shard.offsets), shard.tensor.detach())
        if piece.place(view).data_ptr() != piece.tensor.data_ptr():
            own = (
                piece.tensor if self.stable else piece.tensor.to(view.device, view.dtype, copy=True)
            )
            self.pieces.append(Piece(name, piece.offsets, own))

    def apply(self) -> None:
        pairs = self._borrow()
        self._crew.each(_copy, pairs, [what.nbytes for _, what in pairs])
        if self.stable and any(place.is_cuda for place, _ in pairs):
            torch.cuda.synchronize()  # whoever sent them may use that memory again
        for matrix in self._quantised():
            matrix.shut()
        self.clear()

    def _borrow(self) -> list[tuple[Tensor, Tensor]]:
        """Lets parameters refer to what was received, where they can. Gives (place, piece) of all
        else, to be copied: that must not change memory which others use too."""
        parameters = list(self._parameters())
        if not parameters or not (self._borrowed or self.lasting):
            return self._placed(self.pieces)
        opened = [matrix.opened for matrix in self._quantised() if matrix.opened is not None]
        starts = sorted(tensor.data_ptr() for tensor in (*parameters, *opened))
        own: dict[int, list[Piece]] = {}  # by the address of the parameter, or of what is opened
        for piece in self.pieces:
            own.setdefault(
                starts[bisect_right(starts, self.views[piece.name].data_ptr()) - 1], []
            ).append(piece)
        left = [piece for tensor in opened for piece in own.get(tensor.data_ptr(), [])]
        before, self._borrowed = {id(parameter) for parameter in self._borrowed}, []
        for parameter in parameters:
            pieces = own.get(parameter.data_ptr(), [])
            found = _laid_alike(parameter.data, self._placed(pieces)) if self.lasting else None
            if found is not None:
                parameter.data = found
                self._borrowed.append(parameter)
                continue
            if id(parameter) in before:
                parameter.data = parameter.data.clone()
            left += pieces
        self._open = self._viewed()
        return self._placed(left)

    def _placed(self, pieces: Iterable[Piece]) -> list[tuple[Tensor, Tensor]]:
        return [(piece.place(self.views[piece.name]), piece.tensor) for piece in pieces]

    def clear(self) -> None:
        self.pieces.clear()
        self._open = None
        for matrix in self._quantised():
            matrix.opened = None


def _laid_alike(parameter: Tensor, pieces: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """The parameter's new values where they lie, if the pieces (place, what) lie there as their
    places do in it; else None."""
    pieces = sorted(pieces, key=lambda pair: pair[0].data_ptr())
    at = parameter.data_ptr()
    if not pieces or parameter.is_cuda or not parameter.is_contiguous():
        return None
    first = pieces[0][1]
    memory = first.untyped_storage().data_ptr()
    for place, what in pieces:
        alike = (
            what.dtype == parameter.dtype
            and place.is_contiguous()
            and what.is_contiguous()
            and not what.is_cuda
        )
        there = what.data_ptr() - first.data_ptr() == at - parameter.data_ptr()
        if not (
            alike
            and there
            and place.data_ptr() == at
            and what.untyped_storage().data_ptr() == memory
        ):
            return None
        at += place.nbytes
    if at != parameter.data_ptr() + parameter.nbytes:
        return None
    return first.as_strided(parameter.shape, parameter.stride(), first.storage_offset())


def _copy(pair: tuple[Tensor, Tensor]) -> None:
    place, what = pair
    with torch.no_grad():
        place.copy_(what)
