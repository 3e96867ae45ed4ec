"""Keeps a run that trains in a directory of this machine at an address too, as far as the store
there lets it.

The directory is the run; nothing that a store does can change that. After each save the address
gets what is new: first `mirror.json` with old and new lines of the files that change, then these,
then the checkpoint, its manifest last, then `mirror.json` with the new lines alone. So whatever
interrupts it, what is there is whole by some line. What failed is tried again after the next save,
and at the end.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import uuid
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ratchet.checkpoint.async_writer import Background
from ratchet.checkpoint.manifest import MANIFEST, Checkpoint
from ratchet.errors import CheckpointError, RunDirectoryError
from ratchet.observe.write_files import replace_text
from ratchet.runs.checkpoints import CheckpointStore, best_first
from ratchet.runs.remote_run import (
    INDEX,
    Facts,
    Index,
    Lines,
    MirroredRun,
    Stored,
    belongs,
    hash_beginning,
    name_of,
    newest,
)
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils import failpoints
from ratchet.utils.object_store import cached

log = logging.getLogger(__name__)

IDENTITY = ".mirror.json"  # in the directory: of which run it is a copy
MAX_NAMED = 6


class Noted(NamedTuple):
    """A file as it was at a save: later it may be longer."""

    size: int
    modified_ns: int


def work_copy(address: str) -> Path:
    """Where a run at an address trains."""
    return cached("runs", address)


class Mirror:
    """Of the run in `directory`, whose lock its holder has. store: its checkpoints, by whose rules
    those at the address stay.

    notes: what its user should know, such as which of two copies was taken. Raises DataError and
    MissingDependency."""

    def __init__(self, address: str, directory: RunDirectory, store: CheckpointStore) -> None:
        self.there, self.directory, self.store = MirroredRun(address), directory, store
        self.address = self.there.address
        self.notes: list[str] = []
        self.behind: str | None = None  # why not all of it is there
        self._run, self._writer = uuid.uuid4().hex, uuid.uuid4().hex
        self._files: dict[str, Lines] = {}  # there
        self._facts: dict[str, tuple[Noted, Facts]] = {}  # here
        self._left: list[str] = []  # what the latest attempt did not come to
        self._wrote = False
        self._settled = False  # whether the store knows the rules of a stage
        self._work = Background()

    # --- before the run

    def expect_nothing(self) -> None:
        """For a run that begins. Raises RunDirectoryError where something is there already, or it
        can't be read."""
        try:
            names = self.there.store.entries()
        except OSError as error:
            raise RunDirectoryError(f"--run-dir {self.address} can't be read: {error}") from error
        if INDEX in names:
            raise RunDirectoryError(
                f"{self.address} holds a run: continue it with --resume {self.address}, or choose "
                "another --run-dir"
            )
        if names:
            raise RunDirectoryError(
                f"{self.address} holds other files: choose a --run-dir where nothing is"
            )

    def take_up(self) -> None:
        """For a run that goes on: the directory gets what the address has of it, unless it has more
        itself. Raises RunDirectoryError where there is no such run, CheckpointError where all that
        is there is damaged."""
        try:
            self._take_up()
        except OSError as error:
            alone = (
                f"; to go on without it: --resume {self.directory.path}"
                if self.directory.used
                else ""
            )
            raise RunDirectoryError(
                f"--resume {self.address} can't be fetched: {error}{alone}"
            ) from error

    def _take_up(self) -> None:
        index, mine = self.there.index(), newest(self.directory)
        if index is None and mine is None:
            raise RunDirectoryError(
                f"{self.address} holds no run (no {INDEX}): give the address that a run was begun "
                "with"
            )
        known = self._identity()
        path = self.directory.path
        if index is None:
            self._run = known or self._run
            self.notes.append(
                f"{self.address} holds nothing of this run: its local copy in {path} goes on, "
                f"after step {mine}"
            )
            return
        if self.directory.used and known != index.run:
            raise RunDirectoryError(
                f"{path}, the local copy for {self.address}, is of another run than the one there: "
                f"move it away, or go on with it alone by --resume {path}"
            )
        self._run, self._files = index.run, dict(index.files)
        whole, listed = self.there.checkpoints()
        theirs = max(whole, default=0)
        if mine is not None and mine >= theirs:
            which = f"newer than {self.address}" if mine > theirs else f"as new as {self.address}"
            self.notes.append(
                f"the local copy in {path} goes on: with step {mine} it is {which} (step {theirs})"
            )
            return
        self._note_identity()
        self.there.fetch_files(index, path)
        self._fetch_checkpoints(whole, any_listed=bool(listed))
        local = "" if mine is None else f", which was older (step {mine})"
        self.notes.append(
            f"{self.address} goes on, after step {newest(self.directory)}: it was fetched into "
            f"{path}{local}"
        )

    def _fetch_checkpoints(self, whole: Mapping[int, Stored], *, any_listed: bool) -> None:
        """The best ones, which the end of a stage may want, and then the newest that comes as its
        manifest says."""
        stages = self.directory.read_config()["stages"]
        keep_best = max(stage["checkpoint"]["keep_best"] for stage in stages)
        best = best_first([stored.checkpoint for stored in whole.values()])[:keep_best]
        for step in sorted(checkpoint.step for checkpoint in best):
            self._fetched(whole[step])
        if not any(self._fetched(stored) for stored in whole.values()) and any_listed:
            raise CheckpointError(
                f"all checkpoints at {self.address} are damaged or were not uploaded to their end "
                "(each reason is above): "
                "restore one from a backup, or start anew with another --run-dir"
            )

    def _fetched(self, stored: Stored) -> bool:
        try:
            self.there.fetch_checkpoint(stored, self.directory.checkpoints)
        except CheckpointError as error:
            log.warning("checkpoint rejected: %s", error)
            return False
        return True

    def begin(self) -> None:
        """The address is this process's from now on, and has what the directory has. Raises
        RunDirectoryError where it can't be written: before anything is trained that is better
        known."""
        self._note_identity()
        try:
            self._push(self.note())
        except OSError as error:
            alone = (
                f" (or go on without it: --resume {self.directory.path})"
                if self.store.steps()
                else ""
            )
            raise RunDirectoryError(
                f"{self.address} can't be written: {error}; choose another --run-dir{alone}"
            ) from error

    def _identity(self) -> str | None:
        try:
            return str(json.loads((self.directory.path / IDENTITY).read_bytes())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _note_identity(self) -> None:
        replace_text(
            self.directory.path / IDENTITY, json.dumps({"run": self._run, "address": self.address})
        )

    # --- during the run

    def note(self) -> dict[str, Noted]:
        """The files that are mirrored, but for checkpoints, as they are now."""
        root, found = self.directory.path, {}
        for where, below, files in os.walk(root):
            below[:] = [
                name for name in below if belongs((Path(where) / name).relative_to(root).as_posix())
            ]
            for path in (Path(where) / name for name in files):
                with suppress(FileNotFoundError):  # trackers come and go with files of theirs
                    status, name = path.lstat(), path.relative_to(root).as_posix()
                    if belongs(name) and stat.S_ISREG(status.st_mode):
                        found[name] = Noted(status.st_size, status.st_mtime_ns)
        return found

    def push(self, noted: Mapping[str, Noted], *, beside: bool) -> None:
        """After a save. beside: in a thread; where the one before is still at it, this one is left
        out, and the next makes up for it. A store that fails is only logged."""
        self._settled = True
        if not beside:
            self._work.settle()
            self._attempt(noted)
            return
        if self._work.ended:
            self._work.settle()
        if self._work.busy:
            log.info("%s is still being written: what was saved now follows later", self.address)
            return
        self.store.held = frozenset(self.store.steps())  # until they are read
        self._work.begin(lambda: self._attempt(noted))

    def finish(self) -> bool:
        """At the end, however it ended. Returns whether all of the run is there, and says so where
        it is not."""
        self._work.settle()
        if self._settled:
            self.store.tidy()  # what was held until it was read
        self._attempt(self.note())
        if self.behind is None:
            return True
        named = ", ".join(self._left[:MAX_NAMED]) + (
            " and more" if len(self._left) > MAX_NAMED else ""
        )
        path = self.directory.path
        log.error(
            "%s is not what the run is: %s. Not there: %s. All of it lies in %s; `ratchet train "
            "--resume %s` tries again",
            *(self.address, self.behind, named or "what was written last", path, self.address),
        )
        return False

    def _attempt(self, noted: Mapping[str, Noted]) -> None:
        try:
            self._push(noted)
            self.behind = None
        except OSError as error:
            self.behind = str(error)
            log.warning(
                "%s did not take what was saved, which is tried again after the next save: %s",
                self.address,
                error,
            )
        finally:
            self.store.held = frozenset()

    def _push(self, noted: Mapping[str, Noted]) -> None:
        new = {name: facts for name, one in noted.items() if (facts := self._facts_of(name, one))}
        changed = [name for name in new if self._files.get(name) != (new[name],)]
        here = {checkpoint.step: checkpoint for checkpoint in self.store.whole()}
        self._left = [*changed, *map(name_of, here)]
        self._check_writer()
        gone = [name for name in self._files if name not in noted]
        if changed or gone or not self._wrote:
            self._write_index(
                self._files
                | {name: (*self._files.get(name, (None,)), new[name]) for name in changed}
            )
            for name in changed:
                failpoints.point("mirror.file")
                self.there.store.put(self.directory.path / name, name)
                self._left.remove(name)
        self._put_checkpoints(here)
        if changed or gone:
            self._write_index(
                {
                    name: (new[name],) if name in new else self._files[name]
                    for name in noted
                    if name in self._files
                }
            )
        for name in gone:
            self.there.store.remove(name)
        self._left = []

    def _facts_of(self, name: str, noted: Noted) -> Facts | None:
        """None where it has become shorter since, or is gone: the next save sees what became of
        it."""
        if name not in self._facts or self._facts[name][0] != noted:
            try:
                self._facts[name] = (
                    noted,
                    Facts(noted.size, hash_beginning(self.directory.path / name, noted.size)),
                )
            except OSError as error:
                log.info("%s changed since it was noted: %s", name, error)
                return None
        return self._facts[name][1]

    def _check_writer(self) -> None:
        """Two that write by turns would leave a mixture of both."""
        if not self._wrote:
            return
        try:
            index = self.there.index()
        except CheckpointError as error:
            log.warning("%s", error)
            index = None
        if index is None:
            self._files = {}  # somebody has removed or broken it: all of it is written again
        elif index.writer != self._writer:
            raise OSError(
                "another process goes on with this run there; this one stops writing to it"
            )

    def _write_index(self, files: Mapping[str, Lines]) -> None:
        self.there.store.write(INDEX, Index(self._run, self._writer, files).content())
        self._files, self._wrote = dict(files), True

    def _put_checkpoints(self, here: Mapping[int, Checkpoint]) -> None:
        """Those that should stay and are not there; then those go that should not."""
        whole, listed = self.there.checkpoints()
        known = {step: stored.checkpoint for step, stored in whole.items()} | dict(here)
        kept = (
            self.store.kept([known[step] for step in sorted(known, reverse=True)])
            if self._settled
            else set(known)
        )
        for step in sorted(kept & here.keys(), reverse=True):
            if (
                step not in whole
                or whole[step].manifest != (here[step].path / MANIFEST).read_bytes()
            ):
                self._put_checkpoint(here[step], listed.get(step, []))
            self._left.remove(name_of(step))
        for step in listed.keys() - kept:
            # not what is damaged: somebody may want to look at it
            if step in whole or MANIFEST not in listed[step]:
                self._remove(step, listed[step])

    def _put_checkpoint(self, checkpoint: Checkpoint, listed: list[str]) -> None:
        self._remove(checkpoint.step, listed)
        files = sorted(path for path in checkpoint.path.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path == checkpoint.path / MANIFEST):
            failpoints.point("mirror.checkpoint_file")
            self.there.store.put(
                path, f"{name_of(checkpoint.step)}/{path.relative_to(checkpoint.path).as_posix()}"
            )
        self.there.damaged.discard(checkpoint.step)

    def _remove(self, step: int, listed: list[str]) -> None:
        """The manifest first: what is half removed is none."""
        for name in sorted(listed, key=lambda name: name != MANIFEST):
            self.there.store.remove(f"{name_of(step)}/{name}")
