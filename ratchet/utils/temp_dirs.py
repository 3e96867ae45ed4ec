"""Create temporary folders, which a later process removes if their owner was killed.

The owner is the process that created the folder. The folder holds a file that its owner has locked,
and the kernel releases the lock however the owner ends. (A process id would not do, because a later
process may get the same one.) A folder without that file is never touched.
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
OWNER_FILE = ".owner"

_swept_parents: set[Path] = set()  # directories in which this process has called `_sweep`


class TemporaryFolder:
    """A folder `PARENT/ratchet-PURPOSE-RANDOM`, removed by `close` or at the end of a `with` block.

    If the process is killed, the folder is removed by a later process that trains, or that creates
    a folder in the same parent. The attribute `path` is the folder's path.
    """

    def __init__(self, purpose: str, parent: str | Path | None = None) -> None:
        """Create the folder in `parent` (default: the folder for temporary files).

        Raises OSError if `parent` can't be written.
        """
        parent_dir = Path(parent or tempfile.gettempdir())
        _sweep_once(parent_dir)
        self.path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=parent_dir))
        # Without `close` the folder is removed when this object is garbage-collected, or when the
        # interpreter ends.
        self._finalizer = weakref.finalize(
            self, _remove, self.path, _lock_folder(self.path), os.getpid()
        )

    def close(self) -> None:
        """Remove the folder and its contents. Later calls do nothing."""
        self._finalizer()

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


def _lock_folder(folder: Path) -> int | None:
    """Lock a folder and return the descriptor that holds the lock; None if locking fails.

    Child programs do not inherit the descriptor.
    """
    draft = folder / f"{OWNER_FILE}-"
    descriptor = os.open(draft, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a disk without locks; its folders are never swept
        os.close(descriptor)
        return None
    draft.rename(folder / OWNER_FILE)  # renamed after locking, so it is never seen unlocked
    return descriptor


def sweep() -> list[Path]:
    """Remove this user's folders of dead processes, and return the paths of these folders.

    The folders for temporary files and for shared memory are searched.
    """
    return [
        path for parent in (Path(tempfile.gettempdir()), SHARED_MEMORY) for path in _sweep(parent)
    ]


def _sweep_once(parent: Path) -> None:
    if parent not in _swept_parents:
        _swept_parents.add(parent)
        _sweep(parent)


def _sweep(parent: Path) -> list[Path]:
    return [path for path in sorted(parent.glob(f"{PREFIX}*")) if _remove_if_orphaned(path)]


def _remove_if_orphaned(folder: Path) -> bool:
    """Remove a folder if its owner is dead. Returns True if it was removed."""
    with suppress(OSError):
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return False
        descriptor = os.open(folder / OWNER_FILE, os.O_RDWR | os.O_NOFOLLOW)
        try:
            # Raises BlockingIOError while the owner is alive.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
            return True
        finally:
            os.close(descriptor)
    return False
