"""Read and fetch a run that is mirrored in an object store.

Files have the same names in the store as in the run directory. `mirror.json` lists the size and
SHA-256 of each file except checkpoints, which have manifests of their own.

A file may be longer than its listed size, for example a log that has grown since. The entry then
describes the beginning of the file.

While a file is being replaced it has two entries, for its old and its new content, and may match
either. A null entry says that the file did not exist.
"""

from __future__ import annotations

import hashlib
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ratchet.checkpoint.manifest import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    Checkpoint,
    read_body,
    require_safe_file_type,
    seal,
    unseal,
    verify_checkpoint,
)
from ratchet.errors import CheckpointError
from ratchet.observe.write_files import open_unshared, sync
from ratchet.runs.checkpoints import STEP, CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.object_store import Store, StoredFile, stays_inside

log = logging.getLogger(__name__)

INDEX = "mirror.json"
FORMAT = 1
CHECKPOINTS = "checkpoints"
RUN_ID_FILE = ".run_id"  # trackers identify the run by it; the only hidden file that is mirrored
# A run can't resume without these. Any other file that is damaged is logged and left out.
ESSENTIAL_FILES = {"config.yaml", "metrics.jsonl", "ledger.jsonl", "base"}


@dataclass(frozen=True)
class FileDigest:
    """The size of a file and the SHA-256 of its contents."""

    size: int
    sha256: str


def _parse_digest(size: object, sha256: object) -> FileDigest:
    if not isinstance(size, int) or size < 0 or not isinstance(sha256, str):
        raise ValueError(f"{size!r}, {sha256!r}")
    return FileDigest(size, sha256)


# The possible contents of a file; None: it does not exist.
FileVersions = tuple[FileDigest | None, ...]


@dataclass(frozen=True)
class MirrorIndex:
    """The content of `mirror.json`: the run's files and the process that wrote it."""

    # Identifies the run; all processes that resume it share it.
    run: str
    # Identifies the process that wrote last.
    writer: str
    # The entries of each file, by name: two while it is being replaced.
    files: Mapping[str, FileVersions]

    def to_bytes(self) -> bytes:
        """Return the sealed JSON text of `mirror.json`."""
        files = {
            name: [version and [version.size, version.sha256] for version in versions]
            for name, versions in self.files.items()
        }
        return seal(
            {"format": FORMAT, "run": self.run, "writer": self.writer, "files": files}
        ).encode()

    @classmethod
    def from_bytes(cls, address: str, content: bytes) -> MirrorIndex:
        """Parse the bytes of `mirror.json`.

        Raises:
            CheckpointError: The content was changed, is malformed, or lists a name that would be
                written outside the run directory.
        """
        try:
            body = unseal(address, INDEX, content)
            if body["format"] != FORMAT:
                raise CheckpointError(
                    f"{address}/{INDEX} has format {body['format']!r}; this version reads {FORMAT}"
                )
            files = {
                name: tuple(
                    None if version is None else _parse_digest(*version) for version in versions
                )
                for name, versions in body["files"].items()
            }
            index = cls(body["run"], body["writer"], files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{address}/{INDEX} is malformed ({error!r})") from error
        for name, versions in index.files.items():
            if not any(versions):
                raise CheckpointError(f"{address}/{INDEX} is malformed (no entry for '{name}')")
            if not is_mirrored(name):
                raise CheckpointError(
                    f"{address}/{INDEX} lists '{name}', which is not a file of a run directory"
                )
        return index


def is_mirrored(name: str) -> bool:
    """True if a file of this name is mirrored with the run. Checkpoints are mirrored separately.

    Args:
        name: The path relative to the run directory.
    """
    parts = PurePosixPath(name).parts
    is_hidden = any(part.startswith(".") for part in parts) and name != RUN_ID_FILE
    return stays_inside(name) and not is_hidden and parts[0] not in (CHECKPOINTS, INDEX)


@dataclass(frozen=True)
class RemoteCheckpoint:
    """A checkpoint in the object store. `manifest` holds the bytes of its manifest."""

    step: int
    manifest: bytes
    body: Mapping[str, Any]

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.step, Path(get_checkpoint_name(self.step)), self.body["meta"])


def get_checkpoint_name(step: int) -> str:
    """Return the path of a checkpoint relative to its run directory."""
    return f"{CHECKPOINTS}/step-{step:08d}"


class MirroredRun:
    """A run in an object store.

    The constructor raises MissingDependency and DataError. Methods raise OSError if the store
    fails, and CheckpointError if its content is damaged.
    """

    def __init__(self, address: str) -> None:
        self.store = Store(address)
        self.address = self.store.address
        # Steps of checkpoints whose fetched files did not match their manifest.
        self.damaged_steps: set[int] = set()
        self._manifests: dict[int, tuple[StoredFile, bytes]] = {}

    def read_index(self) -> MirrorIndex | None:
        """Return the index, or None if no run is there."""
        try:
            return MirrorIndex.from_bytes(self.address, self.store.read(INDEX))
        except FileNotFoundError:
            return None

    def list_checkpoints(self) -> tuple[dict[int, RemoteCheckpoint], dict[int, list[str]]]:
        """Return (complete checkpoints by step, newest first; names of all files by step).

        Only the files' sizes are compared with the manifest.
        """
        files_by_step: dict[int, dict[str, StoredFile]] = {}
        for name, stored_file in self.store.entries(CHECKPOINTS).items():
            parts = PurePosixPath(name).parts
            if len(parts) > 2 and (match := STEP.fullmatch(parts[1])):
                files_by_step.setdefault(int(match[1]), {})["/".join(parts[2:])] = stored_file
        complete = {}
        for step in sorted(files_by_step, reverse=True):
            try:
                complete[step] = self._check_complete(step, files_by_step[step])
            except CheckpointError as error:
                log.warning("checkpoint rejected: %s", error)
        return complete, {step: list(files) for step, files in files_by_step.items()}

    def _check_complete(
        self, step: int, stored_files: Mapping[str, StoredFile]
    ) -> RemoteCheckpoint:
        """Return the checkpoint of `step`. Raises CheckpointError unless all file sizes match.

        A manifest that was read before is read again only if its version in the store has changed.
        """
        where = f"{self.address}/{get_checkpoint_name(step)}"
        if step in self.damaged_steps:
            raise CheckpointError(f"{where} did not match its manifest when it was fetched")
        if MANIFEST not in stored_files:
            raise CheckpointError(f"{where} has no {MANIFEST}: its upload did not complete")
        if (cached := self._manifests.get(step)) is None or cached[0] != stored_files[MANIFEST]:
            cached = (
                stored_files[MANIFEST],
                self.store.read(f"{get_checkpoint_name(step)}/{MANIFEST}", MAX_MANIFEST_BYTES),
            )
            self._manifests[step] = cached
        try:
            body = read_body(where, cached[1], step)
            for name, listed_file in body["files"].items():
                require_safe_file_type(where, name)
                if name not in stored_files or stored_files[name].size != listed_file["size"]:
                    size = stored_files[name].size if name in stored_files else "no"
                    raise CheckpointError(
                        f"{where}/{name} has {size} bytes instead of {listed_file['size']}"
                    )
            dict(body["meta"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: the manifest is malformed ({error!r})") from error
        return RemoteCheckpoint(step, cached[1], body)

    def fetch_checkpoint(self, remote_checkpoint: RemoteCheckpoint, root: Path) -> Path:
        """Fetch a checkpoint into `root`, completely or not at all, and return its directory.

        A checkpoint of the same step that is already there stays if it verifies with the same
        manifest. Otherwise it is renamed to `rejected-*`.
        """
        final = root / PurePosixPath(get_checkpoint_name(remote_checkpoint.step)).name
        if final.exists():
            try:
                verify_checkpoint(final, remote_checkpoint.step)
                if (final / MANIFEST).read_bytes() == remote_checkpoint.manifest:
                    return final
            except CheckpointError as error:
                log.warning("checkpoint rejected: %s", error)
            final.rename(root / f"rejected-{remote_checkpoint.step:08d}-{uuid.uuid4().hex[:8]}")
        # If this process is killed, the next save removes the draft.
        draft = root / f".tmp-{remote_checkpoint.step}-{uuid.uuid4().hex[:12]}"
        draft.mkdir(parents=True)
        for name in remote_checkpoint.body["files"]:
            self.store.get(f"{get_checkpoint_name(remote_checkpoint.step)}/{name}", draft / name)
        (draft / MANIFEST).write_bytes(remote_checkpoint.manifest)
        try:
            verify_checkpoint(draft, remote_checkpoint.step)
        except CheckpointError as error:
            self.damaged_steps.add(remote_checkpoint.step)
            raise CheckpointError(
                f"{self.address}/{get_checkpoint_name(remote_checkpoint.step)}, as it was fetched: "
                f"{error}"
            ) from error
        for path in (*draft.rglob("*"), draft):
            sync(path)
        draft.rename(final)
        sync(root)
        return final

    def fetch_files(
        self,
        index: MirrorIndex,
        directory: Path,
        is_selected: Callable[[str], bool] = lambda name: True,
    ) -> None:
        """Fetch the listed files that `directory` lacks, or whose copies there match no entry.

        Args:
            index: The index of the run's files.
            directory: The run directory to update.
            is_selected: A function that returns True for the names of files to fetch.

        Raises:
            CheckpointError: A file that the run can't resume without is damaged. Other damaged
                files are logged and left out.
        """
        for name, versions in index.files.items():
            path = directory / name
            if not is_selected(name) or truncate_to_listed(path, versions):
                continue
            draft = path.with_name(f".{path.name}.fetched")
            try:
                self.store.get(name, draft)
                size = draft.stat().st_size
                if not truncate_to_listed(draft, versions):
                    listed = max(version.size for version in versions if version)
                    damage = (
                        f"{size} bytes instead of {listed}"
                        if size < listed
                        else "another checksum than is listed"
                    )
                    raise CheckpointError(
                        f"{self.address}/{name} is damaged, with {damage}: restore it from a backup"
                    )
                draft.replace(path)
            except (CheckpointError, FileNotFoundError) as error:
                if isinstance(error, FileNotFoundError) and None in versions:
                    continue
                if PurePosixPath(name).parts[0] in ESSENTIAL_FILES:
                    raise CheckpointError(str(error)) from error
                log.warning("%s; it is left out", error)
            finally:
                draft.unlink(missing_ok=True)


def truncate_to_listed(path: Path, versions: FileVersions) -> bool:
    """Truncate a file to the longest listed version that it begins with.

    Return False, and leave the file as it is, if it begins with none of them.
    """
    if path.is_symlink() or not path.is_file():
        return False
    for version in sorted(filter(None, versions), key=lambda version: -version.size):
        if (
            path.stat().st_size >= version.size
            and hash_beginning(path, version.size) == version.sha256
        ):
            if path.stat().st_size > version.size:
                with open(open_unshared(path, os.O_RDWR), "r+b") as file:
                    file.truncate(version.size)
            return True
    return False


def hash_beginning(path: Path, size: int) -> str:
    """Return the SHA-256 of the first `size` bytes of a file.

    Raises:
        OSError: The file is shorter.
    """
    digest = hashlib.sha256()
    remaining = size
    with path.open("rb") as file:
        while remaining:
            chunk = file.read(min(remaining, 2**20))
            if not chunk:
                raise OSError(f"{path} has become shorter than {size} bytes")
            digest.update(chunk)
            remaining -= len(chunk)
    return digest.hexdigest()


def find_newest_step(directory: RunDirectory) -> int | None:
    """Return the step of the newest complete checkpoint of a run.

    It is 0 for a run without checkpoints, and None if there is no run or all checkpoints are
    damaged.
    """
    if not directory.is_used:
        return None
    try:
        checkpoint = CheckpointStore(directory.checkpoints).latest()
    except CheckpointError as error:
        log.warning("%s", error)
        return None
    return 0 if checkpoint is None else checkpoint.step
