"""Write files so that a crash leaves either the old content or the new, never a part of it."""

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
    """Flush a file, or a directory's entries, to disk (fsync). Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def open_plain(path: Path, flags: int, *, directory: int | None = None) -> int:
    """Open a plain file and return the descriptor; refuse a link, a pipe, a device or a directory.

    A link could lead the writer to a file elsewhere, and a pipe or a device could block it forever.

    Args:
        path: The file.
        flags: The flags of `os.open`. A file that `os.O_CREAT` creates gets the mode 0o644.
        directory: The descriptor of the file's directory, in which `path.name` is then opened, even
            if the directory's path now leads elsewhere.

    Raises:
        OSError: The file can't be opened, or is a link, a pipe, a device or a directory.
    """
    name = path if directory is None else path.name
    try:
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644, dir_fd=directory)
    except OSError as error:
        is_link = error.errno == errno.ELOOP
        reason = "It is a link" if is_link else os.strerror(error.errno or 0)
        raise OSError(error.errno, reason, str(path)) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "It is not a plain file", str(path))
    return descriptor


def open_unshared(path: Path, flags: int, *, directory: int | None = None) -> int:
    """Open a plain file to change it, without changing its other hard links.

    Writing through one hard link would also change a backup made of hard links (`cp -al`). So a
    file with several links is copied first, and the copy takes this name. Don't use it for lock
    files: a lock belongs to the file, not to its name.

    Raises:
        OSError: `open_plain` raises it, or the copy can't be written.
    """
    descriptor = open_plain(path, flags, directory=directory)
    if os.fstat(descriptor).st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    draft = path.with_name(f".{path.name}.partial")
    name, draft_name = (path, draft) if directory is None else (path.name, draft.name)
    with suppress(FileNotFoundError):
        os.unlink(draft_name, dir_fd=directory)  # left by a process that was killed here
    source = os.fdopen(open_plain(path, os.O_RDONLY, directory=directory), "rb")
    with source:
        create_flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with os.fdopen(open_plain(draft, create_flags, directory=directory), "wb") as copy:
            os.fchmod(copy.fileno(), stat.S_IMODE(os.fstat(source.fileno()).st_mode))
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
    os.replace(draft_name, name, src_dir_fd=directory, dst_dir_fd=directory)
    return open_plain(path, flags, directory=directory)


def replace_text(path: Path, text: str) -> None:
    """Replace the file's content as a whole.

    Raises OSError, and then leaves the old content and no draft. A process that is killed meanwhile
    leaves a draft, which the next writer overwrites: a file has one writer at a time.
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

    Another program, such as an editor that saves it, may delete, replace or shorten the file while
    the run has it open. `append` then warns once for each such change, and appends to the file now
    at that path, or to a new one. It never overwrites content, and follows neither a link nor a new
    directory that has taken the old one's path. It is an error if the path is not a plain file.
    Other hard links of the file keep their content.
    """

    def __init__(self, path: Path) -> None:
        """Open `path`, and create it if it is absent. Raises OSError."""
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
            # After a short write, writing the rest either completes it or raises the reason, such
            # as a full disk.
            if written < len(content):
                os.write(self._descriptor, content[written:])
        except OSError:
            os.ftruncate(self._descriptor, self.size)
            raise
        self.size += len(content)

    def sync(self) -> int:
        """Flush to disk (fsync) and return the size in bytes. Raises OSError."""
        self._notice_changes()
        os.fsync(self._descriptor)
        return self.size

    def truncate(self, size: int) -> None:
        """Remove all bytes after `size`, and flush to disk. Raises OSError."""
        os.ftruncate(self._descriptor, size)
        os.fsync(self._descriptor)
        self.size = size

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._directory)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        self._descriptor = open_unshared(self.path, flags, directory=self._directory)
        stat_result = os.fstat(self._descriptor)
        self.size, self._link_count = stat_result.st_size, stat_result.st_nlink

    def _notice_changes(self) -> None:
        """Open the path again, with a warning, if another program changed the file meanwhile.

        A new hard link is not a change: the file is then copied, so that the link keeps its
        content.
        """
        open_stat = os.fstat(self._descriptor)
        try:
            path_stat = os.stat(self.path.name, dir_fd=self._directory, follow_symlinks=False)
        except FileNotFoundError:
            path_stat = None
        if (
            path_stat is not None
            and os.path.samestat(path_stat, open_stat)
            and open_stat.st_size == self.size
        ):
            # A new hard link, such as a backup's, must not change with this file.
            if open_stat.st_nlink > self._link_count:
                old_descriptor = self._descriptor
                self._open()
                os.close(old_descriptor)
            return
        change = (
            "deleted"
            if path_stat is None
            else f"changed from {self.size} to {path_stat.st_size} bytes"
        )
        old_descriptor = self._descriptor
        try:
            self._open()
        # The whole directory is gone, which `RunDirectory.verify` reports.
        except FileNotFoundError:
            return
        os.close(old_descriptor)
        log.warning(
            "%s was %s by another program: lines may be missing, and new ones are appended",
            self.path,
            change,
        )
        if self.size and os.pread(self._descriptor, 1, self.size - 1) != b"\n":
            # End a cut line, so that the next one stays whole.
            self.size += os.write(self._descriptor, b"\n")
