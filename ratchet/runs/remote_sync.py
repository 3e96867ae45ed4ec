"""Mirror the directory of a training run to an object store (S3 and others).

The run trains in the local directory, which a failure of the store never changes. After each save
the store gets what is new, in this order:

1. `mirror.json` with old and new entries of the files that change;
2. these files;
3. the checkpoint, its manifest last;
4. `mirror.json` with the new entries alone.

So each file in the store matches one of its entries in `mirror.json` even if an upload is
interrupted. A failed upload is retried after the next save, and at the end.
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

from ratchet.checkpoint.async_writer import BackgroundTask
from ratchet.checkpoint.manifest import MANIFEST, Checkpoint
from ratchet.errors import (
    CheckpointError,
    RunDirectoryError,
    RunDirectoryOccupied,
    RunNotFound,
)
from ratchet.observe.write_files import replace_text
from ratchet.runs.checkpoints import CheckpointStore, sort_by_score
from ratchet.runs.remote_run import (
    INDEX,
    FileDigest,
    FileVersions,
    MirroredRun,
    MirrorIndex,
    RemoteCheckpoint,
    find_newest_step,
    get_checkpoint_name,
    hash_beginning,
    is_mirrored,
)
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils import failpoints
from ratchet.utils.object_store import get_cached_path
from ratchet.utils.summarize import summarize_names

log = logging.getLogger(__name__)

IDENTITY = ".mirror.json"  # in a run directory: identifies the run that it is a copy of
MAX_NAMES = 6  # missing files that the error at the end names


class FileSnapshot(NamedTuple):
    """The size and modification time of a file at a save. The file may be longer later."""

    size: int
    modified_ns: int


def get_mirror_work_dir(address: str) -> Path:
    """Return the local directory in which a run at an address trains."""
    return get_cached_path("runs", address)


class Mirror:
    """The copy in an object store of the run in `directory`.

    The process must hold the directory's lock. The rules of the checkpoint store also decide which
    checkpoints stay at the address.

    Attributes:
        notes: Messages for the user, such as which of two copies is used.
        incomplete_reason: Why the address lacks a part of the run; None if it has the whole run.

    Raises:
        DataError: The address is malformed.
        MissingDependency: The store's client library is not installed.
    """

    def __init__(self, address: str, directory: RunDirectory, store: CheckpointStore) -> None:
        self.remote = MirroredRun(address)
        self.directory = directory
        self.checkpoint_store = store
        self.address = self.remote.address
        self.notes: list[str] = []
        self.incomplete_reason: str | None = None
        self._run_id = uuid.uuid4().hex
        self._writer_id = uuid.uuid4().hex
        self._files: dict[str, FileVersions] = {}  # the entries of `mirror.json` at the address
        self._digests: dict[str, tuple[FileSnapshot, FileDigest]] = {}  # hashed local files
        self._not_uploaded: list[str] = []  # names that the latest attempt left out
        self._has_written = False  # True once this process has written `mirror.json`
        # True once `checkpoint_store` has a stage's retention rules (which checkpoints to keep).
        self._has_retention_rules = False
        self._background = BackgroundTask()

    # --- before the run

    def check_empty(self) -> None:
        """Check that a new run may start at the address.

        Raises:
            RunDirectoryOccupied: The address is not empty.
            RunDirectoryError: The address can't be read.
        """
        try:
            names = self.remote.store.entries()
        except OSError as error:
            raise RunDirectoryError(f"--run-dir {self.address} can't be read: {error}") from error
        if INDEX in names:
            raise RunDirectoryOccupied(
                f"{self.address} holds a run. Continue it with --resume {self.address}, or choose "
                "another --run-dir"
            )
        if names:
            raise RunDirectoryOccupied(
                f"{self.address} holds other files. Choose an empty --run-dir"
            )

    def resume(self) -> None:
        """Fetch the run to resume, unless the local directory has a checkpoint at least as new.

        Raises:
            RunDirectoryError: There is no run at the address.
            CheckpointError: All checkpoints at the address are damaged.
        """
        try:
            self._resume()
        except OSError as error:
            offline_hint = (
                f". To resume without it, use --resume {self.directory.path}"
                if self.directory.is_used
                else ""
            )
            raise RunDirectoryError(
                f"--resume {self.address} can't be fetched: {error}{offline_hint}"
            ) from error

    def _resume(self) -> None:
        """Fetch the run, or keep a newer local copy, and note which of the two continues."""
        index = self.remote.read_index()
        local_step = find_newest_step(self.directory)
        if index is None and local_step is None:
            raise RunNotFound(
                f"{self.address} holds no run (no {INDEX}): give the address that the run was "
                "started with"
            )
        local_run = self._read_identity()
        path = self.directory.path
        if index is None:
            self._run_id = local_run or self._run_id
            self.notes.append(
                f"{self.address} holds nothing of this run: the local copy in {path} continues "
                f"after step {local_step}"
            )
            return
        if self.directory.is_used and local_run != index.run:
            raise RunDirectoryError(
                f"{path}, the local copy for {self.address}, belongs to another run: move it away, "
                f"or continue it without the mirror by --resume {path}"
            )
        self._run_id, self._files = index.run, dict(index.files)
        complete, names_by_step = self.remote.list_checkpoints()
        remote_step = max(complete, default=0)
        if local_step is not None and local_step >= remote_step:
            relation = (
                f"newer than {self.address}"
                if local_step > remote_step
                else f"as new as {self.address}"
            )
            self.notes.append(
                f"the local copy in {path} continues: with step {local_step} it is {relation} "
                f"(step {remote_step})"
            )
            return
        self._write_identity()
        self.remote.fetch_files(index, path)
        self._fetch_checkpoints(complete, any_listed=bool(names_by_step))
        replaced = "" if local_step is None else f", which was older (step {local_step})"
        self.notes.append(
            f"{self.address} continues after step {find_newest_step(self.directory)}: it was "
            f"fetched into {path}{replaced}"
        )

    def _fetch_checkpoints(
        self, complete: Mapping[int, RemoteCheckpoint], *, any_listed: bool
    ) -> None:
        """Fetch the best checkpoints and the newest one that matches its manifest.

        The best checkpoints are needed because a stage may load one of them at its end.

        Args:
            complete: The complete checkpoints by step, newest first.
            any_listed: True if the address has files of any checkpoint, complete or not.

        Raises:
            CheckpointError: The address has checkpoints, and all are damaged or incomplete.
        """
        stages = self.directory.read_config()["stages"]
        keep_best = max(stage["checkpoint"]["keep_best"] for stage in stages)
        best = sort_by_score(
            [remote_checkpoint.checkpoint for remote_checkpoint in complete.values()]
        )[:keep_best]
        for step in sorted(checkpoint.step for checkpoint in best):
            self._try_fetch(complete[step])
        if (
            not any(self._try_fetch(remote_checkpoint) for remote_checkpoint in complete.values())
            and any_listed
        ):
            raise CheckpointError(
                f"all checkpoints at {self.address} are damaged or were not uploaded completely "
                "(each reason is above). "
                "Restore one from a backup, or start anew with another --run-dir"
            )

    def _try_fetch(self, remote_checkpoint: RemoteCheckpoint) -> bool:
        try:
            self.remote.fetch_checkpoint(remote_checkpoint, self.directory.checkpoints)
        except CheckpointError as error:
            log.warning("checkpoint rejected: %s", error)
            return False
        return True

    def begin(self) -> None:
        """Mark the address as written by this process, and upload what the directory has.

        It runs before training, so that an address that can't be written is reported early.

        Raises:
            RunDirectoryError: The address can't be written.
        """
        self._write_identity()
        try:
            self._push(self.take_snapshot())
        except OSError as error:
            offline_hint = (
                f" (or continue without it: --resume {self.directory.path})"
                if self.checkpoint_store.steps()
                else ""
            )
            raise RunDirectoryError(
                f"{self.address} can't be written: {error}; choose another --run-dir{offline_hint}"
            ) from error

    def _read_identity(self) -> str | None:
        """Return the id of the mirrored run that the directory belongs to; None if it has none."""
        try:
            return str(json.loads((self.directory.path / IDENTITY).read_bytes())["run"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def _write_identity(self) -> None:
        replace_text(
            self.directory.path / IDENTITY,
            json.dumps({"run": self._run_id, "address": self.address}),
        )

    # --- during the run

    def take_snapshot(self) -> dict[str, FileSnapshot]:
        """Return size and modification time of all mirrored files except checkpoints."""
        root = self.directory.path
        snapshots = {}
        for folder, subfolders, files in os.walk(root):
            subfolders[:] = [
                name
                for name in subfolders
                if is_mirrored((Path(folder) / name).relative_to(root).as_posix())
            ]
            for path in (Path(folder) / name for name in files):
                # Trackers create and delete files at any time.
                with suppress(FileNotFoundError):
                    status = path.lstat()
                    name = path.relative_to(root).as_posix()
                    if is_mirrored(name) and stat.S_ISREG(status.st_mode):
                        snapshots[name] = FileSnapshot(status.st_size, status.st_mtime_ns)
        return snapshots

    def push(self, snapshots: Mapping[str, FileSnapshot], *, in_background: bool) -> None:
        """Upload what a save has written. Failures of the store are logged, not raised.

        Args:
            snapshots: The files at the time of the save.
            in_background: True uploads in a background thread. If the previous upload still runs,
                this upload is skipped, and the next one includes its files.
        """
        self._has_retention_rules = True
        if not in_background:
            self._background.wait()
            self._try_push(snapshots)
            return
        if self._background.has_finished:
            self._background.wait()
        if self._background.is_running:
            log.info("%s is still being written: this save is uploaded later", self.address)
            return
        # Checkpoints must not be pruned before the thread has read them.
        self.checkpoint_store.protected_steps = frozenset(self.checkpoint_store.steps())
        self._background.begin(lambda: self._try_push(snapshots))

    def finish(self) -> bool:
        """Upload the rest at the end of a run. Return True if the address now has the whole run.

        Otherwise an error is logged that names the missing files.
        """
        self._background.wait()
        if self._has_retention_rules:
            # Prune the checkpoints that were held while the upload thread read them.
            self.checkpoint_store.tidy()
        self._try_push(self.take_snapshot())
        if self.incomplete_reason is None:
            return True
        path = self.directory.path
        log.error(
            "%s lacks a part of the run (%s). Missing: %s. The complete run is in %s; `ratchet "
            "train --resume %s` tries again",
            self.address,
            self.incomplete_reason,
            summarize_names(self._not_uploaded, MAX_NAMES) or "what was written last",
            path,
            self.address,
        )
        return False

    def _try_push(self, snapshots: Mapping[str, FileSnapshot]) -> None:
        try:
            self._push(snapshots)
            self.incomplete_reason = None
        except OSError as error:
            self.incomplete_reason = str(error)
            log.warning(
                "can't upload the save to %s (the upload is tried again after the next save): %s",
                self.address,
                error,
            )
        finally:
            self.checkpoint_store.protected_steps = frozenset()

    def _push(self, snapshots: Mapping[str, FileSnapshot]) -> None:
        """Upload the changed files and checkpoints, in the order of the module's docstring."""
        new_digests = {
            name: digest
            for name, snapshot in snapshots.items()
            if (digest := self._get_digest(name, snapshot))
        }
        changed = [name for name in new_digests if self._files.get(name) != (new_digests[name],)]
        local_checkpoints = {
            checkpoint.step: checkpoint for checkpoint in self.checkpoint_store.list_complete()
        }
        self._not_uploaded = [*changed, *map(get_checkpoint_name, local_checkpoints)]
        self._check_writer()
        deleted = [name for name in self._files if name not in snapshots]
        if changed or deleted or not self._has_written:
            self._write_index(
                self._files
                | {name: (*self._files.get(name, (None,)), new_digests[name]) for name in changed}
            )
            for name in changed:
                failpoints.point("mirror.file")
                self.remote.store.put(self.directory.path / name, name)
                self._not_uploaded.remove(name)
        self._put_checkpoints(local_checkpoints)
        if changed or deleted:
            self._write_index(
                {
                    name: (new_digests[name],) if name in new_digests else self._files[name]
                    for name in snapshots
                    if name in self._files
                }
            )
        for name in deleted:
            self.remote.store.remove(name)
        self._not_uploaded = []

    def _get_digest(self, name: str, snapshot: FileSnapshot) -> FileDigest | None:
        """Return size and hash of a file as it was at its snapshot.

        Return None if the file has become shorter or was deleted since then. The next save handles
        it.
        """
        if name not in self._digests or self._digests[name][0] != snapshot:
            try:
                self._digests[name] = (
                    snapshot,
                    FileDigest(
                        snapshot.size, hash_beginning(self.directory.path / name, snapshot.size)
                    ),
                )
            except OSError as error:
                log.info(
                    "%s was shortened or deleted during this save, so the next save handles it: %s",
                    name,
                    error,
                )
                return None
        return self._digests[name][1]

    def _check_writer(self) -> None:
        """Raise OSError if another process has written to the address after this one.

        Two processes that write in turns would leave a mixture of both.
        """
        if not self._has_written:
            return
        try:
            index = self.remote.read_index()
        except CheckpointError as error:
            log.warning("%s", error)
            index = None
        if index is None:
            # The index was deleted or damaged, so everything is written again.
            self._files = {}
        elif index.writer != self._writer_id:
            raise OSError(
                "another process continues this run there; this process stops writing to it"
            )

    def _write_index(self, files: Mapping[str, FileVersions]) -> None:
        self.remote.store.write(INDEX, MirrorIndex(self._run_id, self._writer_id, files).to_bytes())
        self._files, self._has_written = dict(files), True

    def _put_checkpoints(self, local_checkpoints: Mapping[int, Checkpoint]) -> None:
        """Upload the kept checkpoints that the address lacks, then remove the others from it."""
        complete, names_by_step = self.remote.list_checkpoints()
        checkpoint_by_step = {
            step: remote_checkpoint.checkpoint for step, remote_checkpoint in complete.items()
        } | dict(local_checkpoints)
        kept_steps = (
            self.checkpoint_store.select_kept(
                [checkpoint_by_step[step] for step in sorted(checkpoint_by_step, reverse=True)]
            )
            if self._has_retention_rules
            else set(checkpoint_by_step)
        )
        for step in sorted(kept_steps & local_checkpoints.keys(), reverse=True):
            if (
                step not in complete
                or complete[step].manifest != (local_checkpoints[step].path / MANIFEST).read_bytes()
            ):
                self._put_checkpoint(local_checkpoints[step], names_by_step.get(step, []))
            self._not_uploaded.remove(get_checkpoint_name(step))
        for step in names_by_step.keys() - kept_steps:
            # Damaged checkpoints stay, so that the user can inspect them.
            if step in complete or MANIFEST not in names_by_step[step]:
                self._remove(step, names_by_step[step])

    def _put_checkpoint(self, checkpoint: Checkpoint, remote_names: list[str]) -> None:
        self._remove(checkpoint.step, remote_names)
        files = sorted(path for path in checkpoint.path.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: path == checkpoint.path / MANIFEST):
            failpoints.point("mirror.checkpoint_file")
            name = path.relative_to(checkpoint.path).as_posix()
            self.remote.store.put(path, f"{get_checkpoint_name(checkpoint.step)}/{name}")
        self.remote.damaged_steps.discard(checkpoint.step)

    def _remove(self, step: int, remote_names: list[str]) -> None:
        """Remove a checkpoint, its manifest first, so that a partly removed one is incomplete."""
        for name in sorted(remote_names, key=lambda name: name != MANIFEST):
            self.remote.store.remove(f"{get_checkpoint_name(step)}/{name}")
