"""Create temporary folders, which a later process removes if their owner was killed.

A folder holds a file that its owner has locked. The kernel releases the lock however the owner
ends; unlike a process id, a lock can't be mistaken for another owner's. A folder without that file
is never touched.
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

_swept: set[Path] = set()  # parents that this process has swept


class TemporaryFolder:
    """A folder `PARENT/ratchet-WHAT-RANDOM`, removed by `close` or at the end of a `with` block.

    If the process is killed, a later process that creates a folder in the same parent, or trains,
    removes it. The attribute `path` is the folder's path.
    """

    def __init__(self, what: str, parent: str | Path | None = None) -> None:
        """Create the folder in `parent` (default: the folder for temporary files).

        Raises OSError if `parent` can't be written.
        """
        place = Path(parent or tempfile.gettempdir())
        _sweep_once(place)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{what}-", dir=place))
        # Also without `close`: when this object is collected, and at the interpreter's end.
        self._end = weakref.finalize(self, _remove, self.path, _lock(self.path), os.getpid())

    def close(self) -> None:
        """Remove the folder and its contents. Later calls do nothing."""
        self._end()

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_: object) -> None:
        self.close()


def _remove(folder: Path, lock: int | None, owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not remove it
        return
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder and return the descriptor that holds the lock; None if locking fails.

    Child programs do not inherit the descriptor.
    """
    draft = folder / f"{OWNER}-"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a disk without locks; its folders are never swept
        os.close(descriptor)
        return None
    draft.rename(folder / OWNER)  # renamed after locking, so it is never seen unlocked
    return descriptor


def sweep() -> list[Path]:
    """Remove this user's folders of dead processes, and return the paths of these folders.

    The folders for temporary files and for shared memory are searched.
    """
    return [
        path for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY) for path in _sweep(parent)
    ]


def _sweep_once(parent: Path) -> None:
    if parent not in _swept:
        _swept.add(parent)
        _sweep(parent)


def _sweep(parent: Path) -> list[Path]:
    return [path for path in sorted(parent.glob(f"{PREFIX}*")) if _remove_if_orphaned(path)]


def _remove_if_orphaned(folder: Path) -> bool:
    """Remove a folder if its owner is dead. Returns True if it was removed."""
    with suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW)
        try:
            # Raises BlockingIOError while the owner is alive.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            return True
        finally:
            os.close(descriptor)
    return False
