"""Recognise and remove runs that never finished a step, such as those of a mistyped recipe."""

from __future__ import annotations

import shutil
from pathlib import Path

from ratchet.errors import RunDirectoryError
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.run_dir import ADAPTER, AVERAGE, MODEL, START, RunDirectory


def has_no_finished_step(directory: RunDirectory) -> bool:
    """True if a run began here and finished no step, and no process holds its lock.

    False for a directory with files that no run writes, so that no file of the user is removed.
    """
    if not directory.begun or directory.is_locked:
        return False
    run_paths = {path for path in vars(directory).values() if isinstance(path, Path)}
    names = {path.name for path in run_paths} | {START.partition("/")[0]}
    foreign_entries = [
        entry
        for entry in directory.path.iterdir()
        if entry.name not in names and not entry.name.startswith(".")
    ]
    return not foreign_entries and not _has_results(directory)


def _has_results(directory: RunDirectory) -> bool:
    results = [directory.path / name for name in (MODEL, AVERAGE, ADAPTER)]
    if any(path.exists() for path in (directory.summary, *results)):
        return True
    if any(directory.checkpoints.glob("*")) or any(directory.steps.glob("*.parquet")):
        return True
    return any(row.get("step", 0) > 0 for row in read_jsonl(directory.metrics))


def clear_run_without_steps(directory: RunDirectory) -> None:
    """Remove all files of a run without steps, except its plan and its lock.

    The process must hold the lock.

    Raises:
        RunDirectoryError: A file can't be removed.
    """
    try:
        for entry in directory.path.iterdir():
            if entry.name in (".lock", directory.plan.name):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    except OSError as error:
        raise RunDirectoryError(f"{directory.path} can't be cleared: {error}") from error
