"""Attach an adapter to a model of transformers that ranks may divide.

An adapter of fused experts is divided like their parameter. With the experts divided, A and B are
too. With the parameter's outputs divided, B is too, and with its inputs, A is too (tensor
parallelism). Of the other factor each rank then has the whole, and a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product

from torch import nn

from ratchet.models.lora.decoder import Adapter
from ratchet.models.lora.experts import ExpertFactors
from ratchet.models.lora.transformers import attach
from ratchet.models.transformers.expert_parallel import ExpertDivision
from ratchet.models.transformers.tensor_parallel import TPDivision, divide_adapters
from ratchet.models.weights.weight_layout import PEFT_PREFIX, WeightPiece

WeightPieces = tuple[WeightPiece, ...]


def attach_adapter(
    model: nn.Module,
    adapter: Adapter,
    names: Sequence[str],
    targets: Mapping[str, ExpertFactors],
    tensor: TPDivision | None,
    experts: ExpertDivision | None,
    *,
    within: nn.Module,
) -> tuple[TPDivision | None, ExpertDivision | None]:
    """Give a model, or this rank's part of it, an adapter, and return its divisions.

    Args:
        names: Names of the linear layers to adapt.
        targets: The factors of the fused parameters of the whole model that get an adapter.
        tensor: The division by tensor parallelism; None: not divided.
        experts: The division by expert parallelism; None: not divided.
        within: The part of the model that gets the adapter.

    Raises ModelError as `ratchet.models.lora.transformers.attach` does.
    """
    rank = adapter.lora.rank
    tensor, experts = _divide_expert_adapters(model, targets, rank, tensor, experts)
    attach(
        model,
        adapter,
        names,
        targets,
        pieces={
            **({} if tensor is None else tensor.divided_pieces),
            **({} if experts is None else experts.pieces),
        },
        divided=() if experts is None else experts.experts,
        within=within,
    )
    return None if tensor is None else divide_adapters(model, tensor), experts


def _divide_expert_adapters(
    model: nn.Module,
    targets: Mapping[str, ExpertFactors],
    rank: int,
    tensor: TPDivision | None,
    experts: ExpertDivision | None,
) -> tuple[TPDivision | None, ExpertDivision | None]:
    """Return the divisions of a model with the pieces of an adapter that it gets afterwards."""
    parameters = dict(model.named_parameters())
    by_tensor = {} if tensor is None else dict(tensor.divided_pieces)
    by_experts = {} if experts is None else dict(experts.pieces)
    partial_names: set[str] = set()
    for name, factors in targets.items():
        pieces = by_experts.get(name) or by_tensor.get(name)
        if name not in parameters or pieces is None:  # of another stage, or whole
            continue
        local_shape = tuple(parameters[name].shape)
        cut_factors = _cut_factors(pieces, local_shape, factors, rank)
        for factor, (factor_pieces, is_cut) in cut_factors.items():
            factor_name = f"{PEFT_PREFIX}{factors.path}.lora_{factor}.weight"
            named = tuple(replace(piece, name=factor_name) for piece in factor_pieces)
            if name in by_experts:
                by_experts[factor_name] = named
            if is_cut:
                by_tensor[factor_name] = named
            elif name in by_tensor:
                partial_names.add(factor_name)
    if tensor is not None:
        names = tensor.partial_gradients | partial_names
        tensor = replace(tensor, divided_pieces=by_tensor, partial_gradients=names)
    return tensor, None if experts is None else replace(experts, pieces=by_experts)


@dataclass(frozen=True)
class _Dimension:
    """A dimension of a weight that is divided over ranks.

    total: number of entries of the whole weight.
    parts: the entries that this rank has, in their order in its block.
    """

    total: int
    parts: tuple[range, ...]

    @property
    def is_cut(self) -> bool:
        return sum(map(len, self.parts)) < self.total

    @property
    def local_parts(self) -> Iterator[tuple[range, range]]:
        """Yield the entries of each part in the whole weight, and in the block."""
        stops = accumulate(map(len, self.parts))
        for part, stop in zip(self.parts, stops, strict=True):
            yield part, range(stop - len(part), stop)


def _cut_factors(
    pieces: WeightPieces, local_shape: tuple[int, ...], factors: ExpertFactors, rank: int
) -> dict[str, tuple[WeightPieces, bool]]:
    """Return the pieces of A and B, and whether inputs or outputs are divided, by the factor.

    Args:
        pieces: The pieces of the fused parameter, of which only one dimension has several parts.
        local_shape: Shape of this rank's block of the parameter.
    """
    n_experts, *sizes = pieces[0].shape
    n_local, height, width = local_shape
    first, *_ = pieces[0].offsets
    rows, columns = (
        _Dimension(
            sizes[0], tuple(_find_range(piece, 1, piece.columns, height) for piece in pieces)
        ),
        _Dimension(sizes[1], (_find_range(pieces[0], 2, None, width),)),
    )
    inputs, outputs = (rows, columns) if factors.is_transposed else (columns, rows)
    own = range(first, first + n_local)
    of_experts = _Dimension(n_experts * rank, (range(own.start * rank, own.stop * rank),))
    starts = range(0, n_experts * rank, n_experts)
    # B has the columns of all experts for each rank.
    by_rank = tuple(range(start + own.start, start + own.stop) for start in starts)
    return {
        "A": (_cut(of_experts, inputs), inputs.is_cut),
        "B": (_cut(outputs, _Dimension(n_experts * rank, by_rank)), outputs.is_cut),
    }


def _find_range(piece: WeightPiece, dim: int, local: range | None, size: int) -> range:
    """Return the entries of the whole weight that a piece has in a dimension.

    Args:
        local: Its entries in the block; None: all.
        size: Size of the block in the dimension.
    """
    start = piece.offsets[dim]
    return range(start, start + (size if local is None else len(local)))


def _cut(rows: _Dimension, columns: _Dimension) -> WeightPieces:
    """Return the pieces of a matrix, which have no name yet."""
    shape = rows.total, columns.total
    return tuple(
        WeightPiece("", shape, (row.start, column.start), local_rows, local_columns)
        for (row, local_rows), (column, local_columns) in product(
            rows.local_parts, columns.local_parts
        )
    )
