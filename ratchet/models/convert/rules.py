"""The words of the tables: what one parameter of Megatron-core is made of, and how tensor
parallelism divides it.

A weight is written as `"self_attn.o_proj.weight [hidden, queries]"`: its name below the layer, and
its shape in words of `Dimensions`. `{expert}` in a name stands for the number of an expert.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from ratchet.models.convert.dimensions import Dimensions
from ratchet.models.parallel.sharding import Share
from ratchet.models.weights.weight_layout import Piece

WRITTEN = re.compile(r"(\S+) \[(\w+(?:, \w+)*)\]")


@dataclass(frozen=True)
class Weight:
    """Of Hugging Face. shape: names of `Dimensions`."""

    name: str
    shape: tuple[str, ...]

    @classmethod
    def read(cls, text: str) -> Weight:
        found = WRITTEN.fullmatch(text)
        assert found is not None, f"'{text}' is no weight with its shape"
        return cls(found[1], tuple(found[2].split(", ")))


class Division(Enum):
    """Over the ranks of tensor parallelism."""

    WHOLE = auto()  # each has all of it
    ROWS = auto()  # each has its rows of every weight, one weight below the other
    # each has its KV groups; of each group its rows of every weight, one below the other
    GROUPS = auto()
    COLUMNS = auto()


@dataclass(frozen=True)
class Rule:
    weights: tuple[Weight, ...]
    division: Division

    def pieces(
        self, prefix: str, dimensions: Dimensions, share: Share, expert: int = 0
    ) -> Iterator[Piece]:
        """The blocks in the parameter of a rank, in the order of its rows. share: the rank's, of
        tensor parallelism. Rows behind the last piece, if any, pad the vocabulary."""
        weights = [
            (
                prefix + weight.name.format(expert=expert),
                tuple(dimensions.size(word) for word in weight.shape),
                weight.shape[0],
            )
            for weight in self.weights
        ]
        if self.division is Division.COLUMNS:
            ((name, shape, _),) = weights
            yield Piece(name, shape, (0, share.range(shape[1]).start), range(shape[0]))
            return
        row = 0
        turns = Share() if self.division is Division.WHOLE else share
        groups = dimensions.kv_heads if self.division is Division.GROUPS else turns.of
        for group in turns.range(groups):
            for name, shape, word in weights:
                own = Share(group, groups).range(dimensions.divided(word))
                count = max(0, min(own.stop, shape[0]) - own.start)
                if count:
                    yield Piece(
                        name, shape, (own.start, *(0,) * (len(shape) - 1)), range(row, row + count)
                    )
                row += len(own)


def whole(weight: str) -> Rule:
    return Rule((Weight.read(weight),), Division.WHOLE)


def rows(*weights: str) -> Rule:
    return Rule(tuple(map(Weight.read, weights)), Division.ROWS)


def groups(*weights: str) -> Rule:
    return Rule(tuple(map(Weight.read, weights)), Division.GROUPS)


def columns(weight: str) -> Rule:
    return Rule((Weight.read(weight),), Division.COLUMNS)
