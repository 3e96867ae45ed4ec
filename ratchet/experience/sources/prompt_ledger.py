"""What became of every prompt, in the order in which it happened: a line of JSON each, appended and
never changed.

A checkpoint holds an offset into it. A run that goes on from there first cuts off what came later,
which will happen again; so what the file says is what the weights have seen, however often the run
was interrupted.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from ratchet.errors import CheckpointError
from ratchet.observe.write_files import AppendFile
from ratchet.utils import failpoints

Event = Literal["issued", "ready", "trained", "replayed", "filtered", "again", "deferred"]
ENDS = ("trained", "filtered")


class Ledger:
    """path: None keeps none. Lines are written at once, and are safe from a crash of the machine
    from `offset` on."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self._file = None if path is None else AppendFile(path)

    def note(self, event: Event, ids: Sequence[str], **facts: Any) -> None:
        """facts: plain values, the same for all of them. Raises OSError where the disk is full,
        say."""
        if self._file is None or not ids:
            return
        lines = "".join(json.dumps({"event": event, "id": name, **facts}) + "\n" for name in ids)
        self._file.append(lines.encode())
        failpoints.point("ledger.noted")

    def offset(self) -> int:
        """Bytes of all that was noted, which are on the disk when this returns."""
        return 0 if self._file is None else self._file.sync()

    def cut(self, offset: int) -> None:
        """Forgets what came after it. Raises CheckpointError where the file is shorter: it is
        another run's, or was changed."""
        if self._file is None:
            return
        if self._file.size < offset:
            raise CheckpointError(
                f"{self.path} has {self._file.size} bytes, and the checkpoint counts on {offset}: "
                "it was changed"
            )
        self._file.truncate(offset)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_ledger(path: Path) -> Iterator[dict[str, Any]]:
    """Its lines; a last one that a crash cut off is none."""
    with path.open("rb") as file:
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


def faults_of(
    lines: Iterator[dict[str, Any]], *, max_staleness: int, max_age: int = 0
) -> list[str]:
    """What a ledger must not say: a prompt trained on twice, or without having been issued (since
    it was deferred, where it was); weights too old. Trained on again by `replay` is no fault, once
    it was trained on, and within `max_age`."""
    issued: dict[str, int] = {}
    ends: Counter[str] = Counter()
    found = []
    for line in lines:
        name = line["id"]
        if line["event"] == "issued":
            issued[name] = line["version"]
        elif line["event"] == "deferred":
            issued.pop(name, None)
        elif line["event"] == "replayed":
            if not ends[name]:
                found.append(f"{name} was replayed before it was trained on")
            if line["step"] - line["version"] > max_age:
                found.append(
                    f"{name} was drawn by version {line['version']} and replayed at step "
                    f"{line['step']}"
                )
        elif line["event"] in ENDS:
            ends[name] += 1
            if name not in issued:
                found.append(f"{name} was {line['event']} and never issued")
            elif line["event"] == "trained" and line["step"] - issued[name] > max_staleness:
                found.append(
                    f"{name} was issued at version {issued[name]} and trained on at step "
                    f"{line['step']}"
                )
    found += [f"{name} ended {count} times" for name, count in ends.items() if count > 1]
    return found
