"""Copy a learner's checkpoint for a run whose learning-rate schedule begins anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ratchet.utils.atomic_files import write_json
from ratchet.utils.safe_read import read_json

# The numbers of the schedule in a local learner's state, and in the index of a distributed one.
COUNTS = ("steps_taken", "bad_steps", "taken", "bad")


def copy_with_fresh_schedule(source: Path, target: Path) -> None:
    """Copy a checkpoint of a local or `dtensor` learner, with its counts of steps set to 0.

    The optimizer's own counts of steps stay as they are: they belong to its running means.
    """
    shutil.copytree(source, target)
    for path in target.glob("*.json"):
        content: dict[str, Any] = read_json(path)
        numbers = content.get("numbers", content)
        numbers.update({name: 0 for name in COUNTS if name in numbers})
        write_json(path, content)
