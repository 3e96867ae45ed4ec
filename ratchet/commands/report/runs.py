"""Read a run from its directory, during training or afterwards.

A reader returns the run's state, recipe, code, data, and the metrics of each step.
"""

from __future__ import annotations

import math
import os
import socket
import stat
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from ratchet.commands.report.metrics import MetricsFile
from ratchet.commands.report.predicted import compare_with_plan
from ratchet.commands.report.progress import ProgressReader
from ratchet.commands.report.rollouts import Rollouts
from ratchet.errors import RunNotFound
from ratchet.experience.sources.prompt_ledger import Event
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.safe_read import open_file, read_json
from ratchet.utils.terminal_text import escape_surrogates

MAX_ALARMS = 100  # alarms of a run that the page shows
SEARCH_DEPTH = 2  # levels of subdirectories that are searched for runs
BLOCK_BYTES = 2**20  # the ledger is read in blocks of this size


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
        if not self.directory.is_used:
            raise RunNotFound(
                f"{path} holds no run (no config.yaml): give the directory that `ratchet train` "
                "printed"
            )
        self.recipe_stamp = _get_size_and_mtime(self.directory.config)
        self.rollouts = Rollouts(self.directory)
        self.metrics = MetricsFile(self.directory.metrics)
        self.progress = ProgressReader(self.directory)
        # The number of bytes of the ledger that were read, and the lines counted in them, by event.
        self._ledger_bytes, self._prompts = 0, Counter[str]()

    def read_facts(self) -> dict[str, Any]:
        """Return everything that the page shows of the run besides its curves."""
        summary = _read_object(self.directory.summary)
        plan = _read_object(self.directory.plan)
        facts = {
            "name": self.name,
            "path": str(self.directory.path),
            "state": self.read_state(),
            "progress": self.progress.read(),
            "config": flatten(self.directory.read_config()),
            "provenance": _read_json(self.directory.provenance, []),
            "summary": summary,
            "predicted": self._compare_with_plan(plan, summary) if plan else [],
            "prompts": self.count_prompts(),
            "alarms": self.read_alarms(),
        }
        return replace_non_finite(facts)

    def _compare_with_plan(
        self, plan: Mapping[str, Any], summary: Mapping[str, Any] | None
    ) -> list[dict[str, Any]]:
        times = self.metrics.read_times()
        try:
            return compare_with_plan(plan, times, summary)
        except (KeyError, TypeError, ValueError):  # the plan is damaged or of another version
            return []

    def read_state(self) -> str:
        """Return `finished`, `running` or `stopped`.

        A run on another machine counts as running while it has a status file. The run's lock
        (`RunDirectory.is_locked`) is not tried, because a reader that tries it every few seconds
        could block a run that is starting.
        """
        if self.directory.summary.exists():
            return "finished"
        status = _read_object(self.directory.status)
        if status is None or type(pid := status.get("pid")) is not int:
            return "stopped"
        return (
            "running" if status.get("host") != socket.gethostname() or _is_alive(pid) else "stopped"
        )

    def count_prompts(self) -> dict[str, int]:
        """Return the number of prompts for each event of the ledger, without zeros.

        A long run's ledger has a million lines, so only new lines are read.
        """
        size, _ = _get_size_and_mtime(self.directory.ledger)
        if size < self._ledger_bytes:  # the run resumed from a checkpoint
            self._ledger_bytes, self._prompts = 0, Counter()
        if size > self._ledger_bytes:
            with open_file(self.directory.ledger) as file:
                file.seek(self._ledger_bytes)
                while lines := b"".join(file.readlines(BLOCK_BYTES)):
                    lines = lines[: lines.rfind(b"\n") + 1]
                    # JSON escapes quotes inside an id, so this text only occurs at the beginning
                    # of a line.
                    self._prompts.update(
                        {
                            event: lines.count(b'{"event": "%s"' % event.encode())
                            for event in get_args(Event)
                        }
                    )
                    self._ledger_bytes += len(lines)
        return {event: count for event, count in self._prompts.items() if count}

    def read_alarms(self) -> list[dict[str, Any]]:
        """Return the latest alarms of sentinels, the newest first."""
        paths = sorted(self.directory.sentinels.glob("step-*.json"), reverse=True)[:MAX_ALARMS]
        alarms = [evidence for path in paths if (evidence := _read_object(path)) is not None]
        return [
            {name: evidence.get(name) for name in ("step", "sentinel", "message")}
            for evidence in alarms
        ]

    def read_version(self, *, read_recipe: bool = True) -> dict[str, Any]:
        """Return the run's state and progress, and values that change with its files.

        The result changes whenever the run has new content for the page. Only new lines of the
        metrics are read.
        """
        size, modified_at = _get_size_and_mtime(self.directory.metrics)
        return {
            "state": self.read_state(),
            "metrics": size,
            "changed": modified_at,
            "record": self.rollouts.read_stamp(),
            "progress": replace_non_finite(self.progress.read(read_recipe=read_recipe)),
        }


def flatten(values: Any, parent: str = "") -> dict[str, Any]:
    """Return the leaves of a nested configuration by path, such as `stages.0.optimizer.lr`.

    If a list item has a name, as a stage has, the path contains the name instead of the index.
    """
    if isinstance(values, Mapping) and values:
        pairs = [(str(key), value) for key, value in values.items()]
    elif (
        isinstance(values, list) and values and all(isinstance(value, Mapping) for value in values)
    ):
        pairs = [(str(value.get("name", index)), value) for index, value in enumerate(values)]
    else:
        return {parent: values}
    return {
        path: leaf
        for key, value in pairs
        for path, leaf in flatten(value, f"{parent}.{key}" if parent else key).items()
    }


def replace_non_finite(value: Any) -> Any:
    """Return a value in which NaN and infinities are text, because JSON has no such numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: replace_non_finite(item) for key, item in value.items()}
    return (
        [replace_non_finite(item) for item in value] if isinstance(value, list | tuple) else value
    )


def find_runs(root: Path) -> list[RunReader]:
    """Return readers of the runs below a directory, or of the directory if it is itself a run.

    The runs are sorted by level, and by name within a level. Raises RunNotFound if the directory
    does not exist.
    """
    if not root.is_dir():
        raise RunNotFound(
            f"there is no directory {root}: give a run, or a directory that contains runs (runs/)"
        )
    if _is_run(root):
        return [RunReader(root)]
    paths = [root]
    runs = list[Path]()
    visited = {root.resolve()}
    for _ in range(SEARCH_DEPTH):
        children = [child for path in paths for child in _list_directories(path, visited)]
        runs += [path for path in children if _is_run(path)]
        paths = [path for path in children if path not in runs]
    return [RunReader(path, escape_surrogates(path.relative_to(root).as_posix())) for path in runs]


def _is_run(path: Path) -> bool:
    return os.path.exists(RunDirectory(path).config)


def _list_directories(path: Path, visited: set[Path]) -> list[Path]:
    """Return the subdirectories that are not in `visited`, and add them to `visited`.

    Return [] for a directory that can't be read. Without `visited`, a link to a parent directory
    would list each run several times.
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
            and (target := child.resolve()) not in visited
        ):
            visited.add(target)
            directories.append(child)
    return directories


def open_runs(paths: Sequence[Path]) -> list[RunReader]:
    """Return a reader of each run.

    If several directories have the same name, their runs are named by their paths.
    """
    name_counts = Counter(path.resolve().name for path in paths)
    return [
        RunReader(path, None if name_counts[path.resolve().name] == 1 else str(path))
        for path in paths
    ]


def _read_json(path: Path, default: Any) -> Any:
    try:
        return read_json(path)
    except (OSError, ValueError):  # the file is missing, damaged, or being removed
        return default


def _read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file holds none."""
    value = _read_json(path, None)
    return value if isinstance(value, dict) else None


def _get_size_and_mtime(path: Path) -> tuple[int, float]:
    """Return the size and the modification time of a file, or zeros if it is not a regular file."""
    try:
        status = path.stat()
    except OSError:
        return 0, 0.0
    return (status.st_size, status.st_mtime) if stat.S_ISREG(status.st_mode) else (0, 0.0)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
