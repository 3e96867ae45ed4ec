"""Read a run from its directory, during training or afterwards.

A reader returns the run's state, recipe, code, data, and the metrics of each step.
"""

from __future__ import annotations

import os
import socket
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ratchet.commands.report.metrics import MetricsFile
from ratchet.commands.report.predicted import predicted
from ratchet.commands.report.rollouts import Rollouts
from ratchet.errors import RunDirectoryError
from ratchet.experience.sources.prompt_ledger import Event
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.safe_read import open_file, read_json
from ratchet.utils.terminal_text import escape_surrogates

MOST_ALARMS = 100  # maximum number of alarms of a run that the page shows
DEPTH = 2  # levels of subdirectories that are searched for runs
BLOCK = 2**20  # bytes of the ledger that are read at once


class RunReader:
    """A reader of one run.

    Args:
        path: The run directory.
        name: The run's name on the page; None for the directory's name.

    Raises:
        RunDirectoryError: The directory holds no run.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.directory = RunDirectory(path)
        self.name = name or path.resolve().name
        if not self.directory.used:
            raise RunDirectoryError(
                f"{path} holds no run (no config.yaml): give the directory that `ratchet train` "
                "named"
            )
        self.rollouts, self.metrics = Rollouts(self.directory), MetricsFile(self.directory.metrics)
        # Counted so far: bytes of the ledger, and its lines by event.
        self._counted, self._prompts = 0, Counter[str]()

    def facts(self) -> dict[str, Any]:
        """Return everything that the page shows of the run besides its curves."""
        summary, plan = _object(self.directory.summary), _object(self.directory.plan)
        return {
            "name": self.name,
            "path": str(self.directory.path),
            "state": self.state(),
            "config": flat(self.directory.read_config()),
            "provenance": _json(self.directory.provenance, []),
            "summary": summary,
            "predicted": self._predicted(plan, summary) if plan else [],
            "prompts": self.prompts(),
            "alarms": self.alarms(),
        }

    def _predicted(
        self, plan: Mapping[str, Any], summary: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        times = self.metrics.times()
        try:
            return predicted(plan, times, summary)
        except (KeyError, TypeError, ValueError):  # the plan is damaged or of another version
            return []

    def state(self) -> str:
        """Return `finished`, `running` or `stopped`.

        A run on another machine counts as running if its status file says so.

        The lock (`RunDirectory.held`) is not tried, because a reader that tries it every few
        seconds could block a run that is starting.
        """
        if self.directory.summary.exists():
            return "finished"
        where = _object(self.directory.status)
        if where is None or type(pid := where.get("pid")) is not int:
            return "stopped"
        return "running" if where.get("host") != socket.gethostname() or _lives(pid) else "stopped"

    def prompts(self) -> dict[str, int]:
        """Return the number of prompts for each event of the ledger, without zeros.

        A long run's ledger has a million lines, so only new lines are read.
        """
        size, _ = _stamp(self.directory.ledger)
        if size < self._counted:  # the run resumed from a checkpoint
            self._counted, self._prompts = 0, Counter()
        if size > self._counted:
            with open_file(self.directory.ledger) as file:
                file.seek(self._counted)
                while lines := b"".join(file.readlines(BLOCK)):
                    lines = lines[: lines.rfind(b"\n") + 1]
                    # JSON escapes quotes inside an id, so this text only occurs at the beginning
                    # of a line.
                    self._prompts.update(
                        {
                            event: lines.count(b'{"event": "%s"' % event.encode())
                            for event in get_args(Event)
                        }
                    )
                    self._counted += len(lines)
        return {event: count for event, count in self._prompts.items() if count}

    def alarms(self) -> list[dict[str, Any]]:
        """Return the latest alarms of sentinels, the newest first."""
        paths = sorted(self.directory.sentinels.glob("step-*.json"), reverse=True)[:MOST_ALARMS]
        alarms = [evidence for path in paths if (evidence := _object(path)) is not None]
        return [
            {name: evidence.get(name) for name in ("step", "sentinel", "message")}
            for evidence in alarms
        ]

    def version(self) -> dict[str, Any]:
        """Return a value that changes whenever the page has new content; this is cheap."""
        size, changed = _stamp(self.directory.metrics)
        return {
            "state": self.state(),
            "metrics": size,
            "changed": changed,
            "record": self.rollouts.stamp(),
        }


def flat(values: Any, where: str = "") -> dict[str, Any]:
    """Return the leaves of a nested configuration by path, such as `stages.0.optimizer.lr`.

    A list item that has a name, such as a stage, has it in the path in place of its index.
    """
    if isinstance(values, Mapping) and values:
        pairs = [(str(key), value) for key, value in values.items()]
    elif (
        isinstance(values, list) and values and all(isinstance(value, Mapping) for value in values)
    ):
        pairs = [(str(value.get("name", index)), value) for index, value in enumerate(values)]
    else:
        return {where: values}
    return {
        path: leaf
        for key, value in pairs
        for path, leaf in flat(value, f"{where}.{key}" if where else key).items()
    }


def find_runs(root: Path) -> list[RunReader]:
    """Return readers of the runs below a directory, or of the directory if it is itself a run.

    They are sorted by name at each level. Raises RunDirectoryError if the directory does not exist.
    """
    if not root.is_dir():
        raise RunDirectoryError(
            f"there is no directory {root}: give a run, or the directory that runs are in (runs/)"
        )
    if _is_run(root):
        return [RunReader(root)]
    paths, runs, seen = [root], list[Path](), {root.resolve()}
    for _ in range(DEPTH):
        below = [child for path in paths for child in _directories(path, seen)]
        runs += [path for path in below if _is_run(path)]
        paths = [path for path in below if path not in runs]
    return [RunReader(path, escape_surrogates(path.relative_to(root).as_posix())) for path in runs]


def _is_run(path: Path) -> bool:
    return os.path.exists(RunDirectory(path).config)


def _directories(path: Path, seen: set[Path]) -> list[Path]:
    """Return the subdirectories that are not in `seen`, and add them to it.

    A directory that can't be read has none. Without `seen`, a link to a parent directory would show
    each run several times.
    """
    try:
        children = sorted(path.iterdir())
    except OSError:  # it belongs to another user, or is being removed
        return []
    directories = []
    for child in children:
        if (
            child.name[0] != "."
            and os.path.isdir(child)
            and (target := child.resolve()) not in seen
        ):
            seen.add(target)
            directories.append(child)
    return directories


def named(paths: Sequence[Path]) -> list[RunReader]:
    """Return a reader of each run. Runs whose directories share a name are named by their paths."""
    count = Counter(path.resolve().name for path in paths)
    return [
        RunReader(path, None if count[path.resolve().name] == 1 else str(path)) for path in paths
    ]


def _json(path: Path, default: Any) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):  # the file is missing, damaged, or being removed
        return default


def _object(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, or None if it has none."""
    value = _json(path, None)
    return value if isinstance(value, dict) else None


def _stamp(path: Path) -> tuple[int, float]:
    """Return the size and the modification time of a file, or zeros if it is no regular file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0.0
    return (status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else (0, 0.0)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
