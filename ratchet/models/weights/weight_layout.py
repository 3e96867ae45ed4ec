"""Which block of which canonical weight lies where in the memory of a rank.

Our decoder fuses matrices, tensor parallelism divides them, FSDP divides what is left by rows. On
disk and on the wire a weight has its Hugging Face name and its whole shape, and a rank's share of
it is a block: an offset and a size in each dimension. So whatever is saved, sent or loaded is
blocks, and no rank ever holds a whole model for that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from ratchet.models.config import FAMILIES, DecoderConfig, Sparse
from ratchet.models.decoder import Decoder
from ratchet.models.lora.layers import LowRank
from ratchet.models.parallel.sharding import Part
from ratchet.protocols import Shard

# what tensor parallelism divides by its outputs ...
BY_ROWS = ("qkv_proj", "gate_up_proj", "embed_tokens", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")  # ... and by its inputs; of all else each rank has the whole
EXPERTS = "experts"
# how the names of adapters begin in peft's files, before the path of what they adapt
PEFT = "base_model.model."


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of a parameter that are one block of a canonical weight. shape: of the whole
    weight. offsets: where the block starts in it."""

    name: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    rows: range

    def cut(self, rows: range) -> Piece | None:
        """What of it lies in these rows of the parameter, counted from the first of them; None for
        nothing."""
        start, stop = max(self.rows.start, rows.start), min(self.rows.stop, rows.stop)
        if start >= stop:
            return None
        offsets = (self.offsets[0] + start - self.rows.start, *self.offsets[1:])
        return replace(self, offsets=offsets, rows=range(start - rows.start, stop - rows.start))


def pieces(decoder: Decoder) -> Mapping[str, tuple[Piece, ...]]:
    """By the name of the parameter, in the order of its rows."""
    found: dict[str, tuple[Piece, ...]] = {}
    adapters = {
        path: module for path, module in decoder.named_modules() if isinstance(module, LowRank)
    }
    for name, parameter in decoder.named_weights():
        path, _, which = name.rpartition(".")
        if path in adapters:  # behind the matrix that it adapts
            found[name] = tuple(
                _of_adapter(adapters[path], which, found[f"{path.removesuffix('.adapter')}.weight"])
            )
        else:
            found[name] = tuple(_pieces(name, tuple(parameter.shape), decoder.config, decoder.part))
    return found


def shards(pieces: tuple[Piece, ...], local: Tensor, rows: range | None = None) -> Iterator[Shard]:
    """The blocks of a tensor that lies as the parameter does: the parameter, its gradient, a moment
    of it. rows: the entries of the parameter's first dimension that `local` holds; None: all."""
    # experts, whose matrices lie one behind the other
    if local.dim() == 3 and len(pieces[0].shape) == 2:
        height = local.shape[1]
        rows = None if rows is None else range(rows.start * height, rows.stop * height)
        local = local.flatten(0, 1)
    for piece in pieces:
        here = piece if rows is None else piece.cut(rows)
        if here is not None:
            yield Shard(
                here.name, here.shape, here.offsets, local[here.rows.start : here.rows.stop]
            )


def divided(name: str) -> bool:
    """Whether tensor parallelism divides the parameter, so that each rank has another block."""
    if name.endswith((".lora_A", ".lora_B")):  # A has the columns of what it adapts, and B the rows
        return _module(name.rpartition(".adapter")[0] + ".weight") in (
            BY_COLUMNS if name.endswith("A") else BY_ROWS
        )
    return _module(name) in (*BY_ROWS, *BY_COLUMNS, EXPERTS)


def _module(name: str) -> str:
    return name.rpartition(".")[0].rpartition(".")[2]


def _of_adapter(adapter: LowRank, which: str, adapted: tuple[Piece, ...]) -> Iterator[Piece]:
    """which: "lora_A" or "lora_B". adapted: the pieces of the map's matrix."""
    start = 0
    for piece in (piece for piece in adapted if piece.rows in adapter.spans):
        found = factor_of(piece, which, adapter.rank, start)
        yield found
        start = found.rows.stop


def factor_of(piece: Piece, which: str, rank: int, start: int = 0) -> Piece:
    """What a block of a matrix needs of the factor (as in `_of_adapter`) that adapts it, from row
    `start` of a parameter on."""
    name = f"{PEFT}{piece.name.removesuffix('.weight')}.{which}.weight"
    (outputs, inputs), (row, column) = piece.shape, piece.offsets
    if which == "lora_A":
        return Piece(name, (rank, inputs), (0, column), range(start, start + rank))
    return Piece(name, (outputs, rank), (row, 0), range(start, start + len(piece.rows)))


def _pieces(
    name: str, shape: tuple[int, ...], config: DecoderConfig, part: Part
) -> Iterator[Piece]:
    path, _, kind = name.rpartition(".")
    above, _, leaf = path.rpartition(".")
    sparse = FAMILIES[config.family].sparse
    if sparse and above.endswith(".mlp") and leaf in ("gate", EXPERTS):
        above = above.removesuffix("mlp") + sparse.block
    prefix = f"model.{above}." if above else "model."
    share, rows, rest = part.tensor, shape[0], shape[1:]
    if sparse and leaf == EXPERTS:
        yield from _experts(f"{prefix}experts", kind, config, part, sparse)
    elif leaf in (fused := fused_rows(config)):
        start = 0
        for piece, total in fused[leaf].items():
            own = share.range(total)
            offsets = (own.start, *(0,) * len(rest))
            yield Piece(
                f"{prefix}{piece}.{kind}", (total, *rest), offsets, range(start, start + len(own))
            )
            start += len(own)
    elif leaf in BY_COLUMNS and rest:
        total = rest[0] * share.of
        yield Piece(
            f"{prefix}{leaf}.{kind}", (rows, total), (0, share.range(total).start), range(rows)
        )
    elif leaf in BY_ROWS:
        own = share.range(config.vocab_size)
        canonical = name if leaf == "lm_head" else f"{prefix}{leaf}.{kind}"
        yield Piece(canonical, (config.vocab_size, *rest), (own.start, 0), range(rows))
    else:
        yield Piece(f"{prefix}{leaf}.{kind}", shape, (0,) * len(shape), range(rows))


def _experts(
    prefix: str, kind: str, config: DecoderConfig, part: Part, sparse: Sparse
) -> Iterator[Piece]:
    """A matrix for each expert, of [E, 2F, d] or [E, d, F] laid out as rows."""
    size, hidden = config.expert_intermediate_size, config.hidden_size
    own = part.tensor.range(size)
    names = sparse.gate_up if kind == "gate_up_proj" else (sparse.down,)
    start = 0
    for expert in part.experts.range(config.n_experts):
        for name in names:
            by_rows = kind == "gate_up_proj"
            shape, offsets = (
                ((size, hidden), (own.start, 0)) if by_rows else ((hidden, size), (0, own.start))
            )
            rows = range(start, start + (len(own) if by_rows else hidden))
            yield Piece(f"{prefix}.{expert}.{name}.weight", shape, offsets, rows)
            start = rows.stop


def fused_rows(config: DecoderConfig) -> Mapping[str, Mapping[str, int]]:
    """Fused matrix -> canonical matrices in order, with their rows."""
    kv = config.n_kv_heads * config.head_dim
    return {
        "qkv_proj": {"q_proj": config.n_heads * config.head_dim, "k_proj": kv, "v_proj": kv},
        "gate_up_proj": {
            "gate_proj": config.intermediate_size,
            "up_proj": config.intermediate_size,
        },
    }
