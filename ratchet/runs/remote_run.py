"""A run at an address: what is whole there, and fetching it.

Its files have the names that they have in a run directory. `mirror.json` lists size and SHA-256 of
all but the checkpoints, whose manifests do so. A file may be longer than it is listed (a log that
has grown since): what is listed is its beginning. While a file is being replaced there are two
lines for it, and one of them holds; null is that of a file that was not there.
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
    check_format,
    read_body,
    seal,
    unseal,
    verify,
)
from ratchet.errors import CheckpointError
from ratchet.observe.write_files import open_unshared, sync
from ratchet.runs.checkpoints import STEP, CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.object_store import Entry, Store, stays_inside

log = logging.getLogger(__name__)

INDEX = "mirror.json"
FORMAT = 1
CHECKPOINTS = "checkpoints"
HIDDEN = ".run_id"  # the only hidden file that belongs to a run: by it trackers know it again
# Without these a run can't go on as if nothing had been; all else is told where it is damaged, and
# left out.
ESSENTIAL = {"config.yaml", "metrics.jsonl", "ledger.jsonl", "base"}


@dataclass(frozen=True)
class Facts:
    size: int
    sha256: str


def _facts(size: object, sha256: object) -> Facts:
    if not isinstance(size, int) or size < 0 or not isinstance(sha256, str):
        raise ValueError(f"{size!r}, {sha256!r}")
    return Facts(size, sha256)


Lines = tuple[Facts | None, ...]


@dataclass(frozen=True)
class Index:
    """run: the same for all who go on with it. writer: of them, the one who wrote last."""

    run: str
    writer: str
    files: Mapping[str, Lines]

    def content(self) -> bytes:
        files = {
            name: [one and [one.size, one.sha256] for one in lines]
            for name, lines in self.files.items()
        }
        return seal(
            {"format": FORMAT, "run": self.run, "writer": self.writer, "files": files}
        ).encode()

    @classmethod
    def of(cls, address: str, content: bytes) -> Index:
        """Raises CheckpointError where it was changed, or could make its reader write elsewhere."""
        try:
            body = unseal(address, INDEX, content)
            if body["format"] != FORMAT:
                raise CheckpointError(
                    f"{address}/{INDEX} has format {body['format']!r}; this version reads {FORMAT}"
                )
            files = {
                name: tuple(None if one is None else _facts(*one) for one in lines)
                for name, lines in body["files"].items()
            }
            index = cls(body["run"], body["writer"], files)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{address}/{INDEX} is malformed ({error!r})") from error
        for name, lines in index.files.items():
            if not any(lines):
                raise CheckpointError(f"{address}/{INDEX} is malformed (no line for '{name}')")
            if not belongs(name):
                raise CheckpointError(
                    f"{address}/{INDEX} lists '{name}', which is no file of a run's directory"
                )
        return index


def belongs(name: str) -> bool:
    """Whether a file of this name, relative to the run directory, is mirrored with it, apart from
    checkpoints."""
    parts = PurePosixPath(name).parts
    hidden = any(part.startswith(".") for part in parts) and name != HIDDEN
    return stays_inside(name) and not hidden and parts[0] not in (CHECKPOINTS, INDEX)


@dataclass(frozen=True)
class Stored:
    """A checkpoint there. manifest: the bytes of its own."""

    step: int
    manifest: bytes
    body: Mapping[str, Any]

    @property
    def checkpoint(self) -> Checkpoint:
        return Checkpoint(self.step, Path(name_of(self.step)), self.body["meta"])


def name_of(step: int) -> str:
    return f"{CHECKPOINTS}/step-{step:08d}"


class MirroredRun:
    """Its methods raise OSError where the store fails, CheckpointError where what it has is
    damaged; the constructor MissingDependency and DataError."""

    def __init__(self, address: str) -> None:
        self.store = Store(address)
        self.address = self.store.address
        # steps of checkpoints that came otherwise than their manifest says
        self.damaged: set[int] = set()
        self._read: dict[int, tuple[Entry, bytes]] = {}

    def index(self) -> Index | None:
        """None where no run is there."""
        try:
            return Index.of(self.address, self.store.read(INDEX))
        except FileNotFoundError:
            return None

    def checkpoints(self) -> tuple[dict[int, Stored], dict[int, list[str]]]:
        """(those that are whole by the sizes of their files, the newest first; the names of all
        files there, by step)."""
        entries: dict[int, dict[str, Entry]] = {}
        for name, entry in self.store.entries(CHECKPOINTS).items():
            parts = PurePosixPath(name).parts
            if len(parts) > 2 and (match := STEP.fullmatch(parts[1])):
                entries.setdefault(int(match[1]), {})["/".join(parts[2:])] = entry
        whole = {}
        for step in sorted(entries, reverse=True):
            try:
                whole[step] = self._whole(step, entries[step])
            except CheckpointError as error:
                log.warning("checkpoint rejected: %s", error)
        return whole, {step: list(files) for step, files in entries.items()}

    def _whole(self, step: int, entries: Mapping[str, Entry]) -> Stored:
        where = f"{self.address}/{name_of(step)}"
        if step in self.damaged:
            raise CheckpointError(f"{where} came otherwise than its manifest says")
        if MANIFEST not in entries:
            raise CheckpointError(f"{where} has no {MANIFEST}: it was not uploaded to its end")
        if (seen := self._read.get(step)) is None or seen[0] != entries[MANIFEST]:
            seen = (
                entries[MANIFEST],
                self.store.read(f"{name_of(step)}/{MANIFEST}", MAX_MANIFEST_BYTES),
            )
            self._read[step] = seen
        try:
            body = read_body(where, seen[1], step)
            for name, facts in body["files"].items():
                check_format(where, name)
                if name not in entries or entries[name].size != facts["size"]:
                    size = entries[name].size if name in entries else "no"
                    raise CheckpointError(
                        f"{where}/{name} has {size} bytes instead of {facts['size']}"
                    )
            dict(body["meta"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"{where}: the manifest is malformed ({error!r})") from error
        return Stored(step, seen[1], body)

    def fetch_checkpoint(self, stored: Stored, root: Path) -> Path:
        """Into a directory of checkpoints, where it is as a whole or not at all. One of its step
        that is there already, and verifies with the same manifest, is left as it is; any other is
        set aside."""
        final = root / PurePosixPath(name_of(stored.step)).name
        if final.exists():
            try:
                verify(final, stored.step)
                if (final / MANIFEST).read_bytes() == stored.manifest:
                    return final
            except CheckpointError as error:
                log.warning("checkpoint rejected: %s", error)
            final.rename(root / f"rejected-{stored.step:08d}-{uuid.uuid4().hex[:8]}")
        draft = root / f".tmp-{stored.step}-{uuid.uuid4().hex[:12]}"  # swept by whoever saves next
        draft.mkdir(parents=True)
        for name in stored.body["files"]:
            self.store.get(f"{name_of(stored.step)}/{name}", draft / name)
        (draft / MANIFEST).write_bytes(stored.manifest)
        try:
            verify(draft, stored.step)
        except CheckpointError as error:
            self.damaged.add(stored.step)
            raise CheckpointError(
                f"{self.address}/{name_of(stored.step)}, as it was fetched: {error}"
            ) from error
        for path in (*draft.rglob("*"), draft):
            sync(path)
        draft.rename(final)
        sync(root)
        return final

    def fetch_files(
        self, index: Index, directory: Path, wanted: Callable[[str], bool] = lambda name: True
    ) -> None:
        """Replaces those of a directory, as far as they are others. Raises CheckpointError where
        one is damaged without which the run can't be what it was; another is told and left out."""
        for name, lines in index.files.items():
            path = directory / name
            if not wanted(name) or agrees(path, lines):
                continue
            draft = path.with_name(f".{path.name}.fetched")
            try:
                self.store.get(name, draft)
                size = draft.stat().st_size
                if not agrees(draft, lines):
                    listed = max(one.size for one in lines if one)
                    what = (
                        f"{size} bytes instead of {listed}"
                        if size < listed
                        else "another checksum than is listed"
                    )
                    raise CheckpointError(
                        f"{self.address}/{name} is damaged, with {what}: restore it from a backup"
                    )
                draft.replace(path)
            except (CheckpointError, FileNotFoundError) as error:
                if isinstance(error, FileNotFoundError) and None in lines:
                    continue
                if PurePosixPath(name).parts[0] in ESSENTIAL:
                    raise CheckpointError(str(error)) from error
                log.warning("%s; it is left out", error)
            finally:
                draft.unlink(missing_ok=True)


def agrees(path: Path, lines: Lines) -> bool:
    """Whether a file begins with what is listed; what comes after that is then cut off."""
    if path.is_symlink() or not path.is_file():
        return False
    for one in sorted(filter(None, lines), key=lambda one: -one.size):
        if path.stat().st_size >= one.size and hash_beginning(path, one.size) == one.sha256:
            if path.stat().st_size > one.size:
                with open(open_unshared(path, os.O_RDWR), "r+b") as file:
                    file.truncate(one.size)
            return True
    return False


def hash_beginning(path: Path, size: int) -> str:
    """SHA-256 of its first bytes. Raises OSError where it has fewer."""
    digest, left = hashlib.sha256(), size
    with path.open("rb") as file:
        while left:
            part = file.read(min(left, 2**20))
            if not part:
                raise OSError(f"{path} has become shorter than {size} bytes")
            digest.update(part)
            left -= len(part)
    return digest.hexdigest()


def newest(directory: RunDirectory) -> int | None:
    """The step of its newest whole checkpoint; 0: a run that has none yet; None: no run, or all are
    damaged."""
    if not directory.used:
        return None
    try:
        checkpoint = CheckpointStore(directory.checkpoints).latest()
    except CheckpointError as error:
        log.warning("%s", error)
        return None
    return 0 if checkpoint is None else checkpoint.step
