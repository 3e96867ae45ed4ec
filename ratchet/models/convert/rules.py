"""The notation of the conversion tables.

A rule lists the Hugging Face weights in one Megatron parameter, and states how tensor parallelism
divides the parameter. A weight is written as `"self_attn.o_proj.weight [hidden, queries]"`: its
name relative to its layer, and its shape in fields of `Dimensions`. `{expert}` stands for the
number of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.parallel.sharding import ShardIndex
from ratchet.models.weights.weight_layout import WeightPiece

SPEC = re.compile(r"(\S+) \[(\w+(?:, \w+)*)\]")


@dataclass(frozen=True)
class WeightSpec:
    """The name and shape of a Hugging Face weight."""

    name: str  # relative to the layer
    shape: tuple[str, ...]  # names of fields of `Dimensions`

    @classmethod
    def from_text(cls, text: str) -> WeightSpec:
        """Parse the notation `"name [size, size]"`."""
        match = SPEC.fullmatch(text)
        assert match is not None, f"'{text}' is not a weight with its shape"
        return cls(match[1], tuple(match[2].split(", ")))


class ParamDivision(Enum):
    """The way in which tensor parallelism divides a parameter."""

    WHOLE = auto()  # each rank has the whole parameter
    # Each rank has its share of the rows of every weight, one weight after another.
    ROWS = auto()
    # Each rank has its share of the KV groups. The parameter has, group by group, the group's rows
    # of every weight.
    GROUPS = auto()
    COLUMNS = auto()  # each rank has its share of the columns


@dataclass(frozen=True)
class Rule:
    """The weights in one Megatron parameter, and how tensor parallelism divides the parameter."""

    weights: tuple[WeightSpec, ...]
    division: ParamDivision

    def pieces(
        self, prefix: str, dimensions: Dimensions, shard_index: ShardIndex, expert: int = 0
    ) -> Iterator[WeightPiece]:
        """Yield the blocks of weights in a rank's parameter, in the order of its rows.

        Any rows of the parameter after the last block are padding of the vocabulary.

        Args:
            prefix: Prefix of the weights' names.
            shard_index: The rank's index in its tensor-parallel group, and the group's size.
            expert: Number that replaces `{expert}`.
        """
        # (name, shape, name of the first dimension) of each weight
        weights = [
            (
                prefix + weight.name.format(expert=expert),
                tuple(dimensions.size(size_name) for size_name in weight.shape),
                weight.shape[0],
            )
            for weight in self.weights
        ]
        if self.division is ParamDivision.COLUMNS:
            ((name, shape, _),) = weights
            yield WeightPiece(name, shape, (0, shard_index.range(shape[1]).start), range(shape[0]))
            return
        row = 0
        effective_index = ShardIndex() if self.division is ParamDivision.WHOLE else shard_index
        # A share is a KV group (GROUPS), a rank's part (ROWS) or the whole (WHOLE).
        n_shares = (
            dimensions.kv_heads if self.division is ParamDivision.GROUPS else effective_index.count
        )
        for share in effective_index.range(n_shares):
            for name, shape, row_dimension in weights:
                rows = ShardIndex(share, n_shares).range(dimensions.padded_size(row_dimension))
                count = max(0, min(rows.stop, shape[0]) - rows.start)
                if count:
                    yield WeightPiece(
                        name, shape, (rows.start, *(0,) * (len(shape) - 1)), range(row, row + count)
                    )
                row += len(rows)


def whole(weight: str) -> Rule:
    """Return the rule of a parameter that each rank has as a whole."""
    return Rule((WeightSpec.from_text(weight),), ParamDivision.WHOLE)


def rows(*weights: str) -> Rule:
    """Return the rule of weights that are divided by rows."""
    return Rule(tuple(map(WeightSpec.from_text, weights)), ParamDivision.ROWS)


def groups(*weights: str) -> Rule:
    """Return the rule of weights that are divided by KV groups."""
    return Rule(tuple(map(WeightSpec.from_text, weights)), ParamDivision.GROUPS)


def columns(weight: str) -> Rule:
    """Return the rule of a weight that is divided by columns."""
    return Rule((WeightSpec.from_text(weight),), ParamDivision.COLUMNS)
