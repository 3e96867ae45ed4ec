"""Load received weights into a generator of this process: stage them, and apply them at the commit.

Nothing changes before the commit. If received memory lasts beyond the commit and has a parameter's
layout, the commit makes the parameter refer to it (adoption). Nothing is copied then, and the
generators of a host share one copy of the weights. Adopted memory is never written by this module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ratchet.errors import ModelError
from ratchet.models.layers.quantized import QuantizedMatrix
from ratchet.models.lora.decoder import Adapter
from ratchet.protocols import Shard
from ratchet.utils.thread_pool import ThreadPool

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True, slots=True)
class StagedPiece:
    """A received part of the weight `name`, starting at `offsets`."""

    name: str
    offsets: tuple[int, ...]
    tensor: Tensor

    def select_target(self, view: Tensor) -> Tensor:
        """Return the part of the whole weight `view` that this piece fills."""
        for axis, (offset, size) in enumerate(zip(self.offsets, self.tensor.shape, strict=True)):
            view = view.narrow(axis, offset, size)
        return view


class WeightStaging:
    """The receiving end of a weight push: it collects pieces and applies them at the commit.

    Shards of a learner that shares its tensors with the generator already lie in the parameters'
    memory, so they are skipped.

    Args:
        weights: returns (canonical name, tensor that shares the parameter's memory) of each weight.
        parameters: returns all parameters; a commit may move them to other memory.
        quantised: returns the quantised matrices. A push that changes them opens an unquantised
            write buffer for each, until the commit.
    """

    def __init__(
        self,
        weights: Callable[[], Iterable[tuple[str, Tensor]]],
        parameters: Callable[[], Iterable[nn.Parameter]] = tuple,
        quantised: Callable[[], Iterable[QuantizedMatrix]] = tuple,
    ) -> None:
        self._weights = weights
        self._parameters = parameters
        self._quantised = quantised
        self.adapter: Adapter | None = None
        self._adapter_weights: Callable[[], Iterable[tuple[str, Tensor]]] = tuple
        # Views of the weights that the push in progress may change; None between pushes.
        self._open_views: Mapping[str, Tensor] | None = None
        self._is_adapter_only = False  # the push in progress has only adapter weights
        self.pieces: list[StagedPiece] = []
        self.is_stable = False  # received memory keeps its content until the commit
        self.is_lasting = False  # received memory keeps its content until the next commit
        self.is_head_tied = False
        self._adopted_parameters: list[nn.Parameter] = []
        self._threads = ThreadPool(torch.get_num_threads())

    def set_adapter(
        self, adapter: Adapter, adapter_weights: Callable[[], Iterable[tuple[str, Tensor]]]
    ) -> None:
        """Set the model's adapter. adapter_weights: returns (name, tensor) of its weights."""
        self.adapter, self._adapter_weights = adapter, adapter_weights

    @property
    def views(self) -> Mapping[str, Tensor]:
        """Return views of the weights by name.

        During a push of only an adapter, the views are those of the adapter's weights. Between
        pushes the views are rebuilt for every call, so that no stale tensor is kept alive.
        """
        return self._open_views if self._open_views is not None else dict(self.all_weights())

    def _get_current_views(self) -> Mapping[str, Tensor]:
        return dict(self._adapter_weights() if self._is_adapter_only else self.all_weights())

    def all_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view) of every weight, the adapter's included."""
        yield from self._weights()
        yield from self._adapter_weights()

    @property
    def adopted(self) -> bool:
        """True if a parameter adopted the pushed memory instead of copying it."""
        return bool(self._adopted_parameters)

    def prepare(self, manifest: Mapping[str, Any]) -> None:
        """Begin a push.

        manifest:
            "weights": {name: {"shape", "dtype"}} of all weights that will be sent; if absent,
            missing weights are not detected.
            "stable": true if received memory may be copied as late as the commit; default: false.
            "lasting": true if received memory may be adopted instead of copied; default: false.

        A learner that ties the head to the embedding does not send the head. Raises ModelError if
        the names or shapes of the announced weights are not those of the model.
        """
        self.clear()
        weights = manifest.get("weights")
        # The base under an adapter is frozen, so it is sent once; later pushes have no base.
        adapter_weights = dict(self._adapter_weights())
        self._is_adapter_only = (
            weights is not None
            and self.adapter is not None
            and weights.keys() <= adapter_weights.keys()
        )
        for matrix in () if self._is_adapter_only else self._quantised():
            matrix.begin_write()
        self._open_views = self._get_current_views()
        self.is_stable = bool(manifest.get("stable"))
        self.is_lasting = bool(manifest.get("lasting"))
        if weights is None:
            self.is_head_tied = False
            return
        for name, weight in weights.items():
            self._check_and_get_view(name, tuple(weight["shape"]))
        self.is_head_tied = HEAD in self.views and HEAD not in weights
        missing = [name for name in self.views if name not in weights and name != HEAD]
        if missing or (self.is_head_tied and EMBEDDING not in weights):
            raise ModelError(
                f"weight '{(*missing, HEAD)[0]}' of the generator's model is not among the weights "
                "that the learner sends"
            )

    def _check_and_get_view(self, name: str, shape: tuple[int, ...]) -> Tensor:
        view = self.views.get(name)
        if view is None:
            raise ModelError(
                f"weight '{name}' was sent to a generator whose model has none of that name"
            )
        if tuple(view.shape) != shape:
            raise ModelError(
                f"weight '{name}' was sent with shape {shape}, but the model's has the shape "
                f"{tuple(view.shape)}"
            )
        return view

    def receive(self, shards: Iterator[Shard]) -> None:
        """Stage shards. Raises ModelError for a weight with an unknown name or another shape."""
        for shard in shards:
            self._stage(shard.name, shard)
            if self.is_head_tied and shard.name == EMBEDDING:
                self._stage(HEAD, shard)

    def _stage(self, name: str, shard: Shard) -> None:
        view = self._check_and_get_view(name, tuple(shard.shape))
        piece = StagedPiece(name, tuple(shard.offsets), shard.tensor.detach())
        if piece.select_target(view).data_ptr() != piece.tensor.data_ptr():
            tensor = (
                piece.tensor
                if self.is_stable
                else piece.tensor.to(view.device, view.dtype, copy=True)
            )
            self.pieces.append(StagedPiece(name, piece.offsets, tensor))

    def apply(self) -> None:
        """Make the staged pieces the model's weights."""
        pairs = self._adopt()
        self._threads.each(_copy_piece, pairs, [source.nbytes for _, source in pairs])
        # The sender may reuse its memory after this call, so the copies must have ended.
        if self.is_stable and any(target.is_cuda for target, _ in pairs):
            torch.cuda.synchronize()
        for matrix in self._quantised():
            matrix.end_write()
        self.clear()

    def _adopt(self) -> list[tuple[Tensor, Tensor]]:
        """Make parameters refer to received memory where this is possible.

        Returns (target, source) of all other pieces, which must be copied. A parameter that adopted
        memory at the last push, and can't adopt memory now, is first moved to private memory: the
        copy must not write to memory that other generators read.
        """
        parameters = list(self._parameters())
        if not parameters or not (self._adopted_parameters or self.is_lasting):
            return self._copy_pairs(self.pieces)
        opened_matrices = [
            matrix.write_buffer for matrix in self._quantised() if matrix.write_buffer is not None
        ]
        starts = sorted(tensor.data_ptr() for tensor in (*parameters, *opened_matrices))
        # A weight's view may lie inside a fused parameter: find the parameter by its address.
        # The key is the address of a parameter or of an opened matrix.
        pieces_by_address: dict[int, list[StagedPiece]] = {}
        for piece in self.pieces:
            address = starts[bisect_right(starts, self.views[piece.name].data_ptr()) - 1]
            pieces_by_address.setdefault(address, []).append(piece)
        to_copy = [
            piece
            for tensor in opened_matrices
            for piece in pieces_by_address.get(tensor.data_ptr(), [])
        ]
        previously_adopted = {id(parameter) for parameter in self._adopted_parameters}
        self._adopted_parameters = []
        for parameter in parameters:
            pieces = pieces_by_address.get(parameter.data_ptr(), [])
            adopted = None
            if self.is_lasting:
                adopted = _find_adoptable(parameter.data, self._copy_pairs(pieces))
            if adopted is not None:
                parameter.data = adopted
                self._adopted_parameters.append(parameter)
                continue
            if id(parameter) in previously_adopted:
                parameter.data = parameter.data.clone()
            to_copy += pieces
        self._open_views = self._get_current_views()
        return self._copy_pairs(to_copy)

    def _copy_pairs(self, pieces: Iterable[StagedPiece]) -> list[tuple[Tensor, Tensor]]:
        return [(piece.select_target(self.views[piece.name]), piece.tensor) for piece in pieces]

    def clear(self) -> None:
        """End the push and drop its pieces."""
        self.pieces.clear()
        self._open_views = None
        for matrix in self._quantised():
            matrix.write_buffer = None


def _find_adoptable(parameter: Tensor, pieces: list[tuple[Tensor, Tensor]]) -> Tensor | None:
    """Return the received memory as a tensor of the parameter's shape; None if it can't be adopted.

    pieces: pairs (target, source). For adoption the sources must lie in one storage exactly as the
      targets lie in the parameter, and the targets must fill the parameter.
    """
    pieces = sorted(pieces, key=lambda pair: pair[0].data_ptr())
    address = parameter.data_ptr()
    if not pieces or parameter.is_cuda or not parameter.is_contiguous():
        return None
    first_source = pieces[0][1]
    storage_address = first_source.untyped_storage().data_ptr()
    for target, source in pieces:
        has_same_form = (
            source.dtype == parameter.dtype
            and target.is_contiguous()
            and source.is_contiguous()
            and not source.is_cuda
        )
        has_same_offset = (
            source.data_ptr() - first_source.data_ptr() == address - parameter.data_ptr()
        )
        if not (
            has_same_form
            and has_same_offset
            and target.data_ptr() == address
            and source.untyped_storage().data_ptr() == storage_address
        ):
            return None
        address += target.nbytes
    if address != parameter.data_ptr() + parameter.nbytes:
        return None
    return first_source.as_strided(
        parameter.shape, parameter.stride(), first_source.storage_offset()
    )


def _copy_piece(pair: tuple[Tensor, Tensor]) -> None:
    target, source = pair
    with torch.no_grad():
        target.copy_(source)
