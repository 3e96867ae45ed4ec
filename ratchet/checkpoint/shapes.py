"""Compare the shapes of a checkpoint's tensors with those of the model that loads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ratchet.errors import CheckpointError

Shapes = Mapping[str, Sequence[int]]  # by the name of the tensor


def check_shapes(directory: Path, stored: Shapes, expected: Shapes) -> None:
    """Raise CheckpointError unless a checkpoint has the names and shapes that a model expects."""
    for name in [*expected, *stored]:
        shapes = [
            "x".join(map(str, by_name[name])) if name in by_name else "absent"
            for by_name in (stored, expected)
        ]
        if shapes[0] != shapes[1]:
            raise CheckpointError(
                f"{directory} was saved with a model of another shape: '{name}' is {shapes[0]} "
                f"there, and {shapes[1]} in this model. Resume with the model that the run began "
                "with."
            )
