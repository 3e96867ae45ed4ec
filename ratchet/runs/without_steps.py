"""Recognise and remove runs that never finished a step, such as those of a mistyped recipe.

Only files that a run writes are removed, one by one, because a repository or another project of the
user may hold a `config.yaml` too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ratchet.config.schema import RunConfig
from ratchet.errors import RunDirectoryError
from ratchet.observe.sinks import iter_jsonl
from ratchet.runs.run_dir import ADAPTER, AVERAGE, MODEL, START, RunDirectory

LOCK = ".lock"
TOP_FILES = (
    "config.yaml",
    "ledger.jsonl",
    "metrics.jsonl",
    "plan.json",
    "provenance.json",
    "run.log",
    "trace.json",
)
# The files of a run without steps. A run may also have left empty directories.
RUN_FILES = (
    LOCK,
    ".status",
    *TOP_FILES,
    *(f".{name}.partial" for name in TOP_FILES),  # drafts of a killed process
    "evals/*/step-*/report.md",
    "evals/*/step-*/results.json",
    "steps/index.jsonl",
    "tensorboard/events.out.tfevents.*",
)
# A copy of another run's checkpoint, and its draft.
START_COPIES = (Path(START), Path(START).with_name(f".{Path(START).name}"))


def has_no_finished_step(directory: RunDirectory) -> bool:
    """True if a run began here and finished no step, and no process holds its lock.

    Also False if the directory has files that no run writes. Hidden files at its top, such as
    `.git`, do not count, because nothing removes them.
    """
    return not directory.is_locked and _list_files(directory) is not None


def clear_run_without_steps(directory: RunDirectory, *, keep_plan: bool = True) -> None:
    """Remove all files of a run without steps, except its lock.

    The process must hold the lock.

    Args:
        directory: The run.
        keep_plan: True keeps the run's plan.

    Raises:
        RunDirectoryError: The run has finished a step meanwhile, or a file can't be removed.
    """
    files = _list_files(directory)
    if files is None:
        raise RunDirectoryError(
            f"{directory.path} has changed and is not removed: it has steps or other files now"
        )
    kept_names = {LOCK, directory.plan.name} if keep_plan else {LOCK}
    try:
        for path in files:
            if path.name not in kept_names:
                path.unlink()
        _remove_empty_directories(directory)
    except OSError as error:
        raise RunDirectoryError(f"{directory.path} can't be cleared: {error}") from error


def remove_run_without_steps(directory: RunDirectory) -> None:
    """Remove a run without steps, and its directory unless that holds hidden files of the user.

    Raises:
        RunDirectoryError: The run has finished a step meanwhile, is in use, or can't be removed.
    """
    with directory.locked():
        clear_run_without_steps(directory, keep_plan=False)
        (directory.path / LOCK).unlink(missing_ok=True)
    with suppress(OSError):  # it holds hidden files, or is a link
        directory.path.rmdir()


def find_free_run_dir(name: str) -> Path:
    """Return `runs/<name>`, or the first of `runs/<name>-2`, `runs/<name>-3`, ... that is free.

    Free are directories that do not exist or hold a run that never finished a step, which a new run
    may replace.
    """
    candidate = Path("runs") / name
    number = 1
    while candidate.exists() and not has_no_finished_step(RunDirectory(candidate)):
        number += 1
        candidate = candidate.with_name(f"{name}-{number}")
    return candidate


def _list_files(directory: RunDirectory) -> list[Path] | None:
    """Return all files of a run without steps.

    Return None if the directory holds no such run, or has files that no run writes.
    """
    if not (directory.path / LOCK).is_file() or not _has_run_config(directory):
        return None
    if _has_results(directory):
        return None
    run_files = {path for pattern in RUN_FILES for path in directory.path.glob(pattern)}
    run_directories = {
        path
        for path in (*vars(directory).values(), directory.path / Path(START).parent)
        if isinstance(path, Path) and path.is_dir() and not path.is_symlink()
    }
    files = []
    for path in _walk(directory.path):
        relative = path.relative_to(directory.path)
        is_file = path.is_file() and not path.is_symlink()
        is_start = any(relative.is_relative_to(copy) for copy in START_COPIES)
        if is_file and (path in run_files or is_start):
            files.append(path)
        elif len(relative.parts) == 1 and relative.name.startswith("."):
            continue
        elif path not in run_directories and not _is_nested_directory(path, relative):
            return None
    return files


def _is_nested_directory(path: Path, relative: Path) -> bool:
    return len(relative.parts) > 1 and path.is_dir() and not path.is_symlink()


def _walk(directory: Path) -> Iterator[Path]:
    """Yield all paths below a directory, except those below hidden directories at its top."""
    for entry in directory.iterdir():
        yield entry
        if entry.is_dir() and not entry.is_symlink() and not entry.name.startswith("."):
            for parent, directories, files in os.walk(entry):
                yield from (Path(parent) / name for name in (*directories, *files))


def _has_run_config(directory: RunDirectory) -> bool:
    """True if `config.yaml` is absent or is a resolved recipe, which has every top-level key."""
    if not directory.is_used:
        return True
    try:
        return set(RunConfig.model_fields) <= set(directory.read_config())
    except RunDirectoryError:
        return False


def _has_results(directory: RunDirectory) -> bool:
    """True if the run has a finished step, a checkpoint, a model or a summary."""
    results = [directory.path / name for name in (MODEL, AVERAGE, ADAPTER)]
    if any(path.exists() for path in (directory.summary, *results)):
        return True
    if any(directory.checkpoints.glob("*")) or any(directory.steps.glob("*.parquet")):
        return True
    return any(row.get("step", 0) > 0 for row in iter_jsonl(directory.metrics))


def _remove_empty_directories(directory: RunDirectory) -> None:
    paths = [path for path in _walk(directory.path) if path.is_dir() and not path.is_symlink()]
    for path in sorted(paths, key=lambda path: len(path.parts), reverse=True):
        if not path.relative_to(directory.path).parts[0].startswith("."):
            path.rmdir()
