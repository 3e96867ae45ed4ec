"""Copy a learner's checkpoint for a run whose learning-rate schedule begins anew."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from ratchet.utils.atomic_files import write_json
from ratchet.utils.safe_read import read_json

# Keys of the step counts: two in the state of a local learner, two in the index of a distributed
# learner.
COUNT_KEYS = ("steps_taken", "bad_steps", "taken", "bad")


def copy_with_fresh_schedule(source: Path, target: Path) -> None:
    """Copy a checkpoint of a local or `dtensor` learner, with its counts of steps set to 0.

    The optimizer's own counts of steps do not change, because they belong to its running means.
    """
    shutil.copytree(source, target)
    for path in target.glob("*.json"):
        content: dict[str, Any] = read_json(path)
        # The index of a distributed learner keeps its counts under "numbers".
        counts = content.get("numbers", content)
        counts.update({name: 0 for name in COUNT_KEYS if name in counts})
        write_json(path, content)
