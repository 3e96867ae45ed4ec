"""Map the parameters of a rank to blocks of canonical weights.

The built-in decoder fuses matrices, tensor parallelism divides them, and FSDP divides each rank's
parameters by rows. On disk and in a weight sync, weights are canonical: they have their Hugging
Face names and whole shapes. A rank has blocks of canonical weights, each with an offset and a size
per dimension. Only blocks are saved, sent and loaded, so no rank ever holds a whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import Tensor

from ratchet.config.model_shape.decoder_config import FAMILIES, DecoderConfig, MoEFormat
from ratchet.models.decoder import Decoder
from ratchet.models.lora.layers import FusedLoRA
from ratchet.models.parallel.sharding import ModelShard
from ratchet.protocols import Shard

# Tensor parallelism divides the matrices in BY_ROWS by their outputs, and those in BY_COLUMNS by
# their inputs. It also divides experts. Each rank has all other parameters as a whole.
BY_ROWS = ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")
EXPERTS = "experts"
# The prefix of adapter names in peft's files, before the path of the adapted module.
PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class WeightPiece:
    """Consecutive rows of a parameter, or a part of each, that are one block of a canonical weight.

    name: name of the canonical weight.
    shape: shape of the whole weight.
    offsets: where the block begins in the weight.
    rows: the block's rows in the parameter.
    columns: the block's entries in the parameter's second dimension; None: all.
    """

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: range
    columns: range | None = None

    def cut(self, rows: range) -> WeightPiece | None:
        """Return the part of the piece that is in `rows` of the parameter; None if no part is.

        The rows of the result are counted from the start of `rows`.
        """
        start = max(self.rows.start, rows.start)
        stop = min(self.rows.stop, rows.stop)
        if start >= stop:
            return None
        offsets = (self.offsets[0] + start - self.rows.start, *self.offsets[1:])
        return replace(self, offsets=offsets, rows=range(start - rows.start, stop - rows.start))


def make_whole_piece(name: str, weight: Tensor) -> WeightPiece:
    """Return the piece that is a whole weight."""
    shape = tuple(weight.shape)
    return WeightPiece(name, shape, (0,) * len(shape), range(shape[0]))


def list_pieces(decoder: Decoder) -> Mapping[str, tuple[WeightPiece, ...]]:
    """Return the pieces of a decoder's parameters, by parameter name, in the order of the rows."""
    layout: dict[str, tuple[WeightPiece, ...]] = {}
    adapters = {
        path: module for path, module in decoder.named_modules() if isinstance(module, FusedLoRA)
    }
    for name, parameter in decoder.named_weights():
        path, _, factor = name.rpartition(".")
        # An adapter comes after the matrix that it adapts, whose pieces are already known.
        if path in adapters:
            layout[name] = tuple(
                _make_adapter_pieces(adapters[path], factor, layout[_get_adapted_name(path)])
            )
        else:
            layout[name] = tuple(
                _make_decoder_pieces(name, tuple(parameter.shape), decoder.config, decoder.shard)
            )
    return layout


def cut_blocks(
    pieces: tuple[WeightPiece, ...], local: Tensor, rows: range | None = None
) -> Iterator[Shard]:
    """Yield the blocks of a tensor that has the layout of a parameter, such as its gradient.

    Args:
        pieces: Pieces of the parameter.
        local: The parameter, its gradient, or one of its optimizer moments.
        rows: The entries of the parameter's first dimension that `local` has; None: all.
    """
    # Pieces of an experts parameter number the rows of all its matrices consecutively.
    if local.dim() == 3 and len(pieces[0].shape) == 2:
        height = local.shape[1]
        rows = None if rows is None else range(rows.start * height, rows.stop * height)
        local = local.flatten(0, 1)
    for piece in pieces:
        local_piece = piece if rows is None else piece.cut(rows)
        if local_piece is not None:
            block = local[local_piece.rows.start : local_piece.rows.stop]
            if (columns := local_piece.columns) is not None:
                block = block[:, columns.start : columns.stop]
            yield Shard(local_piece.name, local_piece.shape, local_piece.offsets, block)


def is_selected(name: str, patterns: Sequence[str]) -> bool:
    """True if patterns of `PolicyModel.freeze` select a weight, by its canonical name."""
    return any(
        fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns
    )


def is_tensor_parallel(name: str) -> bool:
    """True if tensor parallelism divides the parameter."""
    # A is divided with the columns of the adapted matrix, B with its rows.
    if name.endswith((".lora_A", ".lora_B")):
        adapted = _get_adapted_name(name.rpartition(".")[0])
        module = adapted.removesuffix(".weight").rpartition(".")[2]
        return module in (BY_COLUMNS if name.endswith("A") else BY_ROWS)
    return _get_module_name(name) in (*BY_ROWS, *BY_COLUMNS, EXPERTS)


def _get_module_name(name: str) -> str:
    """Return the name of a parameter's module: the second-to-last part of its path."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _get_adapted_name(path: str) -> str:
    """Return the name of the matrix that the adapter at a path adapts."""
    if path.endswith(".adapter"):
        return f"{path.removesuffix('.adapter')}.weight"
    return path.replace(f".{EXPERTS}.adapters.", f".{EXPERTS}.")


def _make_adapter_pieces(
    adapter: FusedLoRA, factor: str, adapted: tuple[WeightPiece, ...]
) -> Iterator[WeightPiece]:
    """Yield the pieces of one factor of an adapter.

    Args:
        factor: "lora_A" or "lora_B".
        adapted: Pieces of the adapted matrix.
    """
    start = 0
    for piece in adapted:
        # Pieces of experts number the rows of all experts' matrices consecutively.
        first = piece.rows.start % adapter.outputs
        if range(first, first + len(piece.rows)) not in adapter.spans:
            continue
        factor_piece = make_factor_piece(piece, factor, adapter.rank, start)
        yield factor_piece
        start = factor_piece.rows.stop


def make_factor_piece(piece: WeightPiece, factor: str, rank: int, start: int = 0) -> WeightPiece:
    """Return the piece of an adapter's factor that belongs to a piece of the adapted matrix.

    Args:
        factor: "lora_A" or "lora_B".
        start: The factor's first row in its parameter.
    """
    name = f"{PEFT_PREFIX}{piece.name.removesuffix('.weight')}.{factor}.weight"
    (outputs, inputs), (row, column) = piece.shape, piece.offsets
    if factor == "lora_A":
        return WeightPiece(name, (rank, inputs), (0, column), range(start, start + rank))
    return WeightPiece(name, (outputs, rank), (row, 0), range(start, start + len(piece.rows)))


def _make_decoder_pieces(
    name: str, shape: tuple[int, ...], config: DecoderConfig, shard: ModelShard
) -> Iterator[WeightPiece]:
    """Yield the pieces of one parameter of the decoder."""
    # name = parent.module.kind, such as layers.0.self_attn.qkv_proj.weight
    path, _, kind = name.rpartition(".")
    parent, _, module = path.rpartition(".")
    moe_format = FAMILIES[config.family].moe
    if moe_format and parent.endswith(".mlp") and module in ("gate", EXPERTS):
        parent = parent.removesuffix("mlp") + moe_format.block
    prefix = f"model.{parent}." if parent else "model."
    tensor_index = shard.tensor
    rows = shape[0]
    columns = shape[1:]  # () for a vector
    if moe_format and module == EXPERTS:
        yield from _make_expert_pieces(f"{prefix}experts", kind, config, shard, moe_format)
    elif module in (fused := fused_rows(config)):
        start = 0
        for matrix, total in fused[module].items():
            local_rows = tensor_index.range(total)
            offsets = (local_rows.start, *(0,) * len(columns))
            yield WeightPiece(
                f"{prefix}{matrix}.{kind}",
                (total, *columns),
                offsets,
                range(start, start + len(local_rows)),
            )
            start += len(local_rows)
    elif module in BY_COLUMNS and columns:
        total = columns[0] * tensor_index.count
        yield WeightPiece(
            f"{prefix}{module}.{kind}",
            (rows, total),
            (0, tensor_index.range(total).start),
            range(rows),
        )
    elif module in BY_ROWS:
        local_rows = tensor_index.range(config.vocab_size)
        canonical = name if module == "lm_head" else f"{prefix}{module}.{kind}"
        yield WeightPiece(
            canonical, (config.vocab_size, *columns), (local_rows.start, 0), range(rows)
        )
    else:
        yield WeightPiece(f"{prefix}{module}.{kind}", shape, (0,) * len(shape), range(rows))


def _make_expert_pieces(
    prefix: str, kind: str, config: DecoderConfig, shard: ModelShard, moe_format: MoEFormat
) -> Iterator[WeightPiece]:
    """Yield the pieces of an experts parameter [E, 2F, d] or [E, d, F], one for each matrix.

    Rows are numbered consecutively over all experts.
    """
    size = config.expert_intermediate_size
    hidden = config.hidden_size
    local_range = shard.tensor.range(size)  # this rank's part of the intermediate size F
    is_gate_up = kind == "gate_up_proj"
    names = moe_format.gate_up if is_gate_up else (moe_format.down,)
    start = 0
    for expert in shard.experts.range(config.n_experts):
        for name in names:
            shape, offsets = (
                ((size, hidden), (local_range.start, 0))
                if is_gate_up
                else ((hidden, size), (0, local_range.start))
            )
            rows = range(start, start + (len(local_range) if is_gate_up else hidden))
            yield WeightPiece(f"{prefix}.{expert}.{name}.weight", shape, offsets, rows)
            start = rows.stop


def fused_rows(config: DecoderConfig) -> Mapping[str, Mapping[str, int]]:
    """Return the canonical matrices of each fused matrix, in order, with their number of rows."""
    kv_rows = config.n_kv_heads * config.head_dim
    return {
        "qkv_proj": {
            "q_proj": config.n_heads * config.head_dim,
            "k_proj": kv_rows,
            "v_proj": kv_rows,
        },
        "gate_up_proj": {
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        },
    }
