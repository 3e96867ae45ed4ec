"""A ledger of every prompt's events: an append-only file with a line of JSON for each event.

A checkpoint holds an offset into the file. A resumed run first removes later events, because they
will happen again. So the file lists exactly the prompts that the weights were trained on, however
often the run was interrupted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ratchet.errors import CheckpointError
from ratchet.observe.write_files import AppendFile
from ratchet.utils import failpoints

Event = Literal[
    "issued",  # its rollouts begin, with the weights of `version`
    "ready",  # its rollouts have ended; it waits to be trained on (asynchronous rollouts only)
    "trained",  # step `step` trained on it for the first time
    "replayed",  # step `step` trained on it again, from the replay buffer
    "filtered",  # it is dropped without training, for `reason`
    "retried",  # it is issued again before new prompts, for `reason`
    "deferred",  # its unfinished rollouts were cut off; a later step issues it again
]


class PromptLedger:
    """The ledger in a file.

    Lines are written at once; a crash of the machine loses at most those after the last `sync`.
    `path=None` keeps no ledger.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._file = None if path is None else AppendFile(path)

    def note(self, event: Event, ids: Sequence[str], **facts: Any) -> None:
        """Append an event for each id.

        Args:
            event: The kind of event.
            ids: The ids of the groups.
            facts: Plain values to store with the event, the same for all ids.

        Raises:
            OSError: The file can't be written.
        """
        if self._file is None or not ids:
            return
        lines = "".join(
            json.dumps({"event": event, "id": group_id, **facts}) + "\n" for group_id in ids
        )
        self._file.append(lines.encode())
        failpoints.point("ledger.noted")

    def sync(self) -> int:
        """Flush the file to disk and return its size in bytes."""
        return 0 if self._file is None else self._file.sync()

    def cut(self, offset: int) -> None:
        """Remove everything after `offset`.

        Raises:
            CheckpointError: The file is shorter, so it belongs to another run or was changed.
        """
        if self._file is None:
            return
        if self._file.size < offset:
            raise CheckpointError(
                f"{self.path} has {self._file.size} bytes, but the checkpoint expects {offset}: "
                "it was changed. Restore it, or start a new run from this run's weights (--from)"
            )
        self._file.truncate(offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of a ledger; a last line that a crash cut off is skipped."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)
