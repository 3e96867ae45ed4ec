"""Temporary folders that outlive no killed process for long: the next one removes what a dead owner
has left.

A folder holds a file that its owner has locked. The kernel lets go of the lock when the owner ends,
however it ends, and no process number can be mistaken for another's. A folder without that file is
not one of these, and is never touched.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from contextlib import suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "ratchet-"
OWNER = ".owner"

_swept: set[Path] = set()  # parents, once for each process


class TemporaryFolder:
    """A folder `PARENT/ratchet-WHAT-RANDOM` of this process, removed by `close` or at the end of a
    `with` block.

    Where the process is killed, a later one that makes a folder in the same parent, or trains,
    removes it.

    path: of the folder.
    """

    def __init__(self, what: str, parent: str | Path | None = None) -> None:
        """Make the folder in `parent` (default: the folder for temporary files). Raises OSError
        where that can't be written."""
        place = Path(parent or tempfile.gettempdir())
        _sweep_once(place)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-", dir=place))
        # Also without `close`: when this object is collected, and at the interpreter's end.
        self._end = weakref.finalize(self, _remove, self.path, _lock(self.path), os.getpid())

    def close(self) -> None:
        """Remove the folder with all that is in it. Another call does nothing."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(folder: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child that ends
        return
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Return the descriptor that holds the lock, which programs that are started do not inherit;
    None where locks fail."""
    draft = folder / f"{OWNER}-"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a disk without locks: then nothing may be swept there
        os.close(descriptor)
        return None
    draft.rename(folder / OWNER)  # only now: it is never seen unlocked
    return descriptor


def sweep() -> list[Path]:
    """Remove this user's folders of dead processes, among temporary files and in shared memory.
    Returns which those were."""
    return [
        path for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY) for path in _sweep(parent)
    ]


def _sweep_once(parent: Path) -> None:
    if parent not in _swept:
        _swept.add(parent)
        _sweep(parent)


def _sweep(parent: Path) -> list[Path]:
    return [path for path in sorted(parent.glob(f"{PREFIX}*")) if _removed_if_left(path)]


def _removed_if_left(folder: Path) -> bool:
    """Remove a folder whose owner is dead. Returns True if it was one."""
    with suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        try:
            # BlockingIOError: its owner lives
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            return True
        finally:
            os.close(descriptor)
    return False
