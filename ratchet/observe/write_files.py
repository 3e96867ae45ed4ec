"""Write files so that a crash leaves the old content or the new, never a part of it."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ratchet.utils import failpoints

log = logging.getLogger(__name__)


def sync(path: Path) -> None:
    """Flush a file, or a directory's entries, to the disk itself. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path, flags: int, *, directory: int | None = None) -> int:
    """Open a plain file, and nothing else that has its name, and return the descriptor.

    A link could lead the writer to a file elsewhere, and a pipe or a device could make it wait for
    ever.

    Args:
        path: The file.
        flags: As `os.open` takes them. A file that `os.O_CREAT` creates gets the mode 0o644.
        directory: The descriptor of the directory to look in, wherever its path leads by now.

    Raises:
        OSError: The file can't be opened, or is a link, a pipe, a device or a directory.
    """
    name = path if directory is None else path.name
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=directory)
    except OSError as error:
        link = error.errno == errno.ELOOP
        words = "It is a link" if link else os.strerror(error.errno or 0)
        raise OSError(error.errno, words, str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is no plain file", str(path))
    return descriptor


def open_unshared(path: Path, flags: int, *, directory: int | None = None) -> int:
    """Open a plain file to change it, as `open_plain` does, and leave its other names as they are.

    A copy of hard links, as `cp -al` and backups make it, would change along. So a file with
    several names is copied first, and the copy takes this name. Don't use it for locks: they belong
    to the file.

    Raises:
        OSError: As `open_plain`, or the copy can't be written.
    """
    descriptor = open_plain(path, flags, directory=directory)
    if os.fstat(descriptor).st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    draft = path.with_name(f".{path.name}.partial")
    name, draft_name = (path, draft) if directory is None else (path.name, draft.name)
    with suppress(FileNotFoundError):
        os.unlink(draft_name, dir_fd=directory)  # of a process that was killed here
    source = os.fdopen(open_plain(path, os.O_RDONLY, directory=directory), "rb")
    with source:
        create = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_plain(draft, create, directory=directory), "wb") as copy:
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
    os.replace(draft_name, name, src_dir_fd=directory, dst_dir_fd=directory)
    return open_plain(path, flags, directory=directory)


def replace_text(path: Path, text: str) -> None:
    """Replace the file's content as a whole. Raises OSError, and then leaves the old content and no
    other file.

    A process that is killed on the way leaves a draft, which the next writer overwrites: a file has
    one writer at a time.
    """
    draft = path.with_name(f".{path.name}.partial")
    try:
        draft.write_text(text, encoding="utf-8")
        sync(draft)
        failpoints.point("file.drafted")
        draft.replace(path)
        failpoints.point("file.replaced")
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


class AppendFile:
    """A file that a run only appends to, such as `metrics.jsonl` and `ledger.jsonl`.

    Another program may delete, replace or shorten the file while the run has it open: an editor
    that saves it does. `append` notices, warns once for each such change, and goes on at the end of
    the file that is there now, or in a new one. It overwrites nothing, and never follows the path
    into another directory that has taken the name, nor a link. What is no plain file there is an
    error. Other names of the file (hard links) keep the content that they had.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, created if absent. Raises OSError."""
        self.path = path
        self._directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        self._descriptor = -1
        try:
            self._open()
        except OSError:
            os.close(self._directory)
            raise

    def append(self, content: bytes) -> None:
        """Append `content` whole or not at all. Raises OSError, for example if the disk is full."""
        self._notice_changes()
        try:
            written = os.write(self._descriptor, content)
            if written < len(content):  # the disk filled up on the way
                os.write(self._descriptor, content[written:])
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(content)

    def sync(self) -> int:
        """Flush to the disk itself and return the size in bytes. Raises OSError."""
        self._notice_changes()
        os.fsync(self._descriptor)
        return self.size

    def truncate(self, size: int) -> None:
        """Forget all bytes after `size`, and flush. Raises OSError."""
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._directory)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._descriptor = open_unshared(self.path, flags, directory=self._directory)
        opened = os.fstat(self._descriptor)
        self.size, self._names = opened.st_size, opened.st_nlink

    def _notice_changes(self) -> None:
        opened = os.fstat(self._descriptor)
        try:
            present = os.stat(self.path.name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            present = None
        if (
            present is not None
            and os.path.samestat(present, opened)
            and opened.st_size == self.size
        ):
            if opened.st_nlink > self._names:
                outdated = self._descriptor
                self._open()
                os.close(outdated)
            return
        change = (
            "deleted" if present is None else f"changed from {self.size} to {present.st_size} bytes"
        )
        outdated = self._descriptor
        try:
            self._open()
        # the whole directory is gone, which its `RunDirectory.verify` reports
        except FileNotFoundError:
            return
        os.close(outdated)
        log.warning(
            "%s was %s by another program: lines may be missing, and new ones are appended",
            self.path,
            change,
        )
        if self.size and os.pread(self._descriptor, 1, self.size - 1) != b"\n":
            self.size += os.write(self._descriptor, b"\n")  # the next line stays whole
