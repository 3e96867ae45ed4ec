"""The directory of a run: its layout, its lock and its recipe."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ratchet.config.yaml_tree import read_file, write_text
from ratchet.errors import (
    ConfigError,
    RunDirectoryError,
    RunDirectoryOccupied,
    RunDirectoryUnusable,
)
from ratchet.observe.write_files import open_plain, replace_text
from ratchet.utils import failpoints
from ratchet.utils.process_settings import restore_settings
from ratchet.utils.safe_read import read_json
from ratchet.utils.summarize import summarize_names

log = logging.getLogger(__name__)

MODEL = "model"  # the trained model, as a Hugging Face directory
ADAPTER = "adapter"  # the LoRA adapter that a stage trained, in peft's format
# Copy of another run's checkpoint, whose weights this run starts from. Other folders in `base` are
# named after stages, and a stage's name can't begin with a digit.
START = "base/0-start"
AVERAGE = "model-ema"  # the running average of the weights, if there is one
READERS_S = 0.5  # time for which readers may hold the lock that a run wants
MAX_NAMED = 8  # differing keys that a message lists


class RunDirectory:
    """The layout of a run directory.

    Constructing it touches no files, so readers use it too. A training run writes only inside
    `locked()`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"  # resolved: what resume and replay read
        self.plan = path / "plan.json"  # the prediction of `ratchet plan`, if there is one
        self.metrics = path / "metrics.jsonl"
        self.ledger = path / "ledger.jsonl"
        self.tensorboard = path / "tensorboard"
        self.steps = path / "steps"  # the recorded rollouts of each step
        self.checkpoints = path / "checkpoints"
        self.evals = path / "evals"  # results of evaluations, by stage and step
        self.log = path / "run.log"
        self.summary = path / "summary.json"
        self.provenance = path / "provenance.json"
        self.profile = path / "profile"
        self.trace = path / "trace.json"  # when each part of a step ran
        self.sentinels = path / "sentinels"  # evidence of alarms
        self.status = path / ".status"  # socket address of the process while a run is under way
        self._lock = path / ".lock"
        # Descriptors of the directory and its lock while this process holds it.
        self._directory_fd = self._lock_fd = -1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create the directory, and hold its lock inside the block.

        The lock is an flock on a file that names the process. The operating system releases it when
        the process ends, so a killed run leaves no lock behind.

        Raises:
            RunDirectoryError: The directory can't be created or written, or another run is in it.
        """
        self._lock_fd = self._open_lock()
        _holders.add(self)
        try:
            self._directory_fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                self._take_lock(self._lock_fd)
                failpoints.point("run.locked")
                try:
                    yield
                finally:
                    # Don't delete the lock file: another run may have just opened it.
                    if self._lock_fd >= 0:  # else this is a forked process
                        os.ftruncate(self._lock_fd, 0)
            finally:
                os.close(self._directory_fd)
        finally:
            _holders.discard(self)
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
            self._directory_fd = self._lock_fd = -1

    def verify(self, config: Mapping[str, Any]) -> None:
        """Check that the path is still the locked directory; restore a deleted lock or recipe.

        A run calls it after every step and before every save, so that it never writes into a
        directory that was deleted, moved away or taken by another run.

        Args:
            config: The resolved recipe as plain JSON-like values. It is written again if
                `config.yaml` was deleted.

        Raises:
            RunDirectoryError: The path is gone or is another directory, another process locked it,
            or a lost file can't be restored.
        """
        restore_settings()  # the path may be relative to the working directory
        if not _is_same_file(self.path, self._directory_fd):
            raise RunDirectoryError(
                f"{self.path} was deleted, moved or replaced while this run was in it, so the run "
                "stops and writes nothing there. Put the directory back and use --resume, or "
                "choose another --run-dir"
            )
        if not _is_same_file(self._lock, self._lock_fd):
            lock_fd = self._open_lock()
            try:
                self._take_lock(lock_fd)
            except RunDirectoryError:
                os.close(lock_fd)
                raise
            os.close(self._lock_fd)
            self._lock_fd = lock_fd
            log.warning("%s was deleted while the run was using it; it is locked again", self._lock)
        if not self.config.is_file():
            self._write_config(config)
            log.warning(
                "%s was deleted while the run was using it; it is written again", self.config
            )

    def write_or_check_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved recipe into a new directory, or compare it with a used directory's.

        Args:
            config: The resolved recipe as plain JSON-like values.

        Raises:
            RunDirectoryOccupied: The recipes differ; the message names the keys.
        """
        if not self.is_used:
            self._write_config(config)
            return
        if changed := _describe_differences(self.read_config(), config):
            raise RunDirectoryOccupied(
                f"{self.path} belongs to a run with another recipe; different: {changed}. "
                "Give this run another --run-dir, or resume with the same recipe"
            )

    def replace_config(self, config: Mapping[str, Any]) -> None:
        """Replace the resolved recipe, and remove the summary that the run wrote when it ended.

        Raises:
            RunDirectoryError: The recipe can't be written.
        """
        self._write_config(config)
        self.summary.unlink(missing_ok=True)

    def check_recipe(self, recipe: Mapping[str, Any]) -> None:
        """Check that the run and the plan in this directory, if any, have the recipe `recipe`.

        Raises:
            RunDirectoryOccupied: The run or the plan has another recipe; the message names the
                keys that differ.
            RunDirectoryError: The plan can't be read.
        """
        try:
            planned_recipe = read_json(self.plan)["recipe"] if self.plan.exists() else recipe
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RunDirectoryError(
                f"{self.plan} is not a plan ({error!r}). Remove this file"
            ) from error
        run_recipe = self.read_config() if self.is_used else recipe
        for kind, present_recipe in (("run", run_recipe), ("plan", planned_recipe)):
            if changed := _describe_differences(present_recipe, recipe):
                raise RunDirectoryOccupied(
                    f"{self.path} has the {kind} of another recipe; different: {changed}. Choose "
                    "another --run-dir, or "
                    + (f"plan {self.config}" if kind == "run" else f"remove {self.plan}")
                )

    @property
    def is_used(self) -> bool:
        """True if a run has written here."""
        return self.config.exists()

    @property
    def is_locked(self) -> bool:
        """True if a running process holds the lock."""
        try:
            descriptor = open_plain(self._lock, os.O_RDONLY)
        except OSError:  # absent, or not a plain file
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    def read_config(self) -> dict[str, Any]:
        """Return the resolved recipe.

        Raises:
            RunDirectoryError: The directory has no recipe, or the recipe is damaged.
        """
        try:
            return read_file(self.config)[0].plain()
        except ConfigError as error:
            raise RunDirectoryError(
                f"{self.path} holds no readable config.yaml, so it is not a run directory: {error}"
            ) from error

    def close_lock_of_parent(self) -> None:
        """Close the descriptor of the lock in a forked process; the parent still holds the lock.

        Otherwise a process that a reward forks, such as a pool's, would hold the lock after the run
        was killed, and the run could not be resumed.
        """
        os.close(self._lock_fd)
        self._lock_fd = -1

    def _write_config(self, config: Mapping[str, Any]) -> None:
        try:
            replace_text(self.config, write_text(dict(config)))
        except OSError as error:
            raise RunDirectoryError(f"{self.config} can't be written: {error}") from error

    @property
    def _place_advice(self) -> str:
        if self.is_used:
            return "let this user write there"
        return "choose another --run-dir"

    def _open_lock(self) -> int:
        """Create the directory, and return a descriptor of its lock file.

        Raises:
            RunDirectoryUnusable: The path is a file, or its directory is not writable.
            RunDirectoryError: The file system reports another error.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = open_plain(self._lock, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            # Other errors, such as those of a file system over a network, may pass.
            is_lasting = isinstance(error, PermissionError | FileExistsError | NotADirectoryError)
            raise (RunDirectoryUnusable if is_lasting else RunDirectoryError)(
                f"the run directory {self.path} can't be used: {error}; {self._place_advice}"
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            os.close(descriptor)
            raise RunDirectoryUnusable(
                f"the run directory {self.path} is read-only; {self._place_advice}"
            )
        return descriptor

    def _take_lock(self, descriptor: int) -> None:
        """Take the lock, and write the id of this process into its file."""
        holder = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        try:
            _lock_exclusively(descriptor)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
        except BlockingIOError as error:
            other = _describe_holder(os.pread(descriptor, 4096, 0))
            raise RunDirectoryError(
                f"{self.path} is in use by {other}: wait for it, end it, or choose another "
                "--run-dir"
            ) from error
        except OSError as error:
            raise RunDirectoryError(
                f"{self.path} can't be locked: {error}; choose another --run-dir"
            ) from error


def _release_in_forked_process() -> None:
    for directory in _holders:
        directory.close_lock_of_parent()
    _holders.clear()


_holders: set[RunDirectory] = set()  # the directories that this process has locked
os.register_at_fork(after_in_child=_release_in_forked_process)


def _lock_exclusively(descriptor: int) -> None:
    """Take the lock, and wait while readers hold it, which try it for a moment (`is_locked`).

    Raises BlockingIOError if it is held for longer, as by a run, and OSError.
    """
    deadline = time.monotonic() + READERS_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(READERS_S / 50)
        else:
            return


def _is_same_file(path: Path, descriptor: int) -> bool:
    """Return True if `path` names the file or directory that `descriptor` has open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:  # absent, a loop of links, or its parent is not a directory any more
        return False


def _describe_holder(content: bytes) -> str:
    try:
        holder = json.loads(content)
        return f"process {holder['pid']} on {holder['host']} since {holder['since']}"
    # The holder has taken the lock, but has not written its id yet.
    except (ValueError, KeyError, TypeError):
        return "another process"


def _describe_differences(old: Any, new: Any) -> str:
    """Return the first differences as text, empty if there are none."""
    return summarize_names(list_config_differences(old, new), MAX_NAMED, separator="; ")


def list_config_differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Return the leaves in which two nested configurations differ, as `path: old -> new`."""
    entries: list[tuple[Any, Any, Any]]
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        keys = dict.fromkeys([*old, *new])
        entries = [(key, old.get(key, ABSENT), new.get(key, ABSENT)) for key in keys]
    elif _is_list(old) and _is_list(new) and len(old) == len(new):
        entries = [(index, *items) for index, items in enumerate(zip(old, new, strict=True))]
    else:
        return [] if old == new and type(old) is type(new) else [f"{path}: {old!r} -> {new!r}"]
    return [
        line
        for key, a, b in entries
        for line in list_config_differences(a, b, f"{path}.{key}" if path else str(key))
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


class _Absent:
    def __repr__(self) -> str:
        return "absent"


ABSENT = _Absent()
