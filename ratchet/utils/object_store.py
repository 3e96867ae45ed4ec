"""Read and write files behind an address: s3://, gs://, hf://, file://, memory:// and every other
scheme that fsspec supports.

A store's client may raise any exception. This module turns it into an OSError that names the file.
A failed operation is retried a few times, unless the file is missing or access is denied. Fetched
files go into this machine's cache.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from ratchet.errors import DataError, MissingDependency
from ratchet.utils.safe_read import read_json

log = logging.getLogger(__name__)

# The package of the extra `stores` that fsspec needs for each scheme. These stores have buckets,
# not directories.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}
ATTEMPTS = 3
PAUSE_S = 1.0  # pause before the second attempt; it doubles before each further one
FETCHED = ".fetched.json"  # size and version of each file in a fetched directory

Result = TypeVar("Result")

_cache: Path | None = None


def is_address(place: str | Path) -> bool:
    """Return True if `place` is an address with a scheme, not a local path."""
    return isinstance(place, str) and "://" in place


def configure_cache(environment: Mapping[str, str]) -> None:
    """Set the cache directory from RATCHET_CACHE, else from XDG_CACHE_HOME."""
    global _cache
    home = environment.get("XDG_CACHE_HOME")
    directory = environment.get("RATCHET_CACHE") or (f"{home}/ratchet" if home else "")
    _cache = Path(directory).expanduser() if directory else None


def get_cached_path(kind: str, address: str) -> Path:
    """Return the cache path of an address: a unique directory, then the address's last name."""
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    return get_cache_dir(kind) / digest / (PurePosixPath(address).name or "root")


def get_cache_dir(kind: str) -> Path:
    """Return the cache directory for one kind of file that can be fetched or built again.

    Raises OSError for a user without a home directory.
    """
    try:
        return (_cache or Path.home() / ".cache" / "ratchet") / kind
    except RuntimeError as error:
        raise OSError(
            "this user has no home directory: set RATCHET_CACHE to a directory"
        ) from error


def explain_bad_address(address: str) -> str | None:
    """Return why the text of an address can't name a model or a run; None if it can."""
    scheme, _, rest = address.partition("://")
    if "::" in address:
        return "it chains several stores: name the one that holds the files"
    if scheme in ("http", "https"):
        return (
            "a web server lists no directory: name a store, or a copy of the files on this machine"
        )
    if not rest.strip("/"):
        return f"it names no place: write {scheme}://bucket/name"
    if any(sign in rest for sign in "*?[]#\\") or ".." in rest.split("/"):
        return "it is a pattern or leads upwards: write a plain address"
    # `registry` adds the schemes that other packages have registered.
    from fsspec import available_protocols, registry

    if scheme not in {*available_protocols(), *registry}:
        return (
            f"nothing reads {scheme}://: use s3://, gs://, az://, hf://, file:// or another "
            "that fsspec knows"
        )
    return None


def open_filesystem(address: str) -> tuple[Any, str]:
    """Return fsspec's file system for an address, and the path in it.

    Raises DataError or MissingDependency.
    """
    # Imported here because runs with only local files do not need it.
    import fsspec
    from fsspec.core import url_to_fs

    scheme = address.partition("://")[0].rpartition("::")[2]
    try:
        return url_to_fs(address)
    except ImportError as error:
        package = PACKAGES.get(scheme, "fsspec")
        raise MissingDependency(
            package, extra="stores", needed_for=f"reading {scheme}://"
        ) from error
    except ValueError as error:
        schemes = ", ".join(sorted(fsspec.available_protocols()))
        raise DataError(f"{address}: nothing reads {scheme}://; there are {schemes}") from error
    # A store's client raises exceptions of its own types, for example without credentials.
    except Exception as error:
        raise DataError(
            f"{address}: its store can't be used: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class StoredFile:
    """The size and version of a file in a store."""

    size: int  # bytes
    version: str  # hash of all that the store reports on the file


class Store:
    """The files below an address; names are relative to it.

    Methods raise OSError: FileNotFoundError for a missing file, and another for a name that could
    lead outside the address.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._system, root = open_filesystem(self.address)
        self._root = root.rstrip("/")
        self._buckets = self.address.partition("://")[0] in {*PACKAGES, "hf"}

    def entries(self, below: str = "") -> dict[str, StoredFile]:
        """Return all files below a directory by name; {} if there are none."""

        def find() -> dict[str, StoredFile]:
            self._system.invalidate_cache()
            try:
                files = self._system.find(self._at(below) if below else self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {
                self._name(path): _entry(info)
                for path, info in files.items()
                if info["type"] == "file"
            }

        return self._retry(f"listing {below}", find)

    def read(self, name: str, max_bytes: int = 2**26) -> bytes:
        """Return the content of a small file. Raises OSError above `max_bytes`."""

        def read() -> bytes:
            with self._system.open(self._at(name), "rb") as file:
                content = file.read(max_bytes + 1)
            if len(content) > max_bytes:
                raise OSError(f"it has more than {max_bytes} bytes")
            return content

        return self._retry(f"reading {name}", read)

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        self._place(name, len(content), lambda path: self._system.pipe_file(path, content))

    def put(self, source: Path, name: str) -> None:
        """Upload a file; it is complete when this returns."""
        self._place(
            name, source.stat().st_size, lambda path: self._system.put_file(str(source), path)
        )

    def get(self, name: str, target: Path) -> None:
        """Download a file; `target` appears only when it is complete."""
        draft = target.with_name(f".{target.name}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._retry(
                f"fetching {name}", lambda: self._system.get_file(self._at(name), str(draft))
            )
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

        def remove() -> None:
            try:
                self._system.rm_file(self._at(name))
            except FileNotFoundError:
                return

        self._retry(f"removing {name}", remove)

    def _place(self, name: str, size: int, send: Callable[[str], object]) -> None:
        """Send a file of `size` bytes to the store and check its size there.

        A file system that writes in place gets the file under a temporary name first: a
        half-written file must not replace a whole one.
        """
        path = self._at(name)
        draft = f"{path}.partial" if getattr(self._system, "local_file", False) else path

        def place() -> None:
            if not self._buckets:
                self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
            send(draft)
            self._system.invalidate_cache()
            if (there := self._system.info(draft)["size"]) < size:
                raise OSError(f"{there} of {size} bytes arrived")
            if draft != path:
                self._system.mv(draft, path)

        self._retry(f"writing {name}", place)

    def _at(self, name: str) -> str:
        if not stays_inside(name):
            raise OSError(f"{self.address}: '{name}' could lead outside")
        return f"{self._root}/{name}"

    def _name(self, path: str) -> str:
        name = path.removeprefix(self._root).lstrip("/")
        return name or PurePosixPath(path).name  # empty if the address itself is a file

    def _retry(self, what: str, do: Callable[[], Result]) -> Result:
        for attempt in range(ATTEMPTS):
            try:
                return do()
            except (FileNotFoundError, PermissionError) as error:
                raise type(error)(f"{self.address}: {what}: {error}") from error
            # A store's client raises exceptions of its own types, and none may end a run.
            except Exception as error:
                reason = f"{self.address}: {what}: {type(error).__name__}: {error}"
                if attempt == ATTEMPTS - 1:
                    raise OSError(reason) from error
                pause_s = PAUSE_S * 2**attempt
                log.warning("%s; once more in %g s", reason, pause_s)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def _entry(info: Mapping[str, Any]) -> StoredFile:
    facts = json.dumps(info, sort_keys=True, default=str)
    return StoredFile(int(info["size"]), hashlib.sha256(facts.encode()).hexdigest())


def stays_inside(name: str) -> bool:
    """Return True if a relative POSIX name can't lead out of its directory."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\\" not in name
        and "\0" not in name
    )


@contextmanager
def lock_cache_dir(directory: Path) -> Iterator[None]:
    """Create a cache directory and hold its lock: only one process at a time may fetch into it."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory.parent / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fetch_directory(address: str, patterns: Sequence[str] = ("*",), *, deep: bool = True) -> Path:
    """Return a local, read-only copy of a directory. Unchanged files are not fetched again.

    Args:
        patterns: file names to fetch.
        deep: True also fetches the files of subdirectories.

    Raises OSError; DataError and MissingDependency for an address that can't be read here.
    """
    store = Store(address)
    target = get_cached_path("directories", address)
    with lock_cache_dir(target):
        fetched = _read_fetched(target)
        listed = store.entries()
        for name, entry in sorted(listed.items()):
            if not any(fnmatch(name, pattern) for pattern in patterns) or not (
                deep or "/" not in name
            ):
                continue
            path, facts = target / name, [entry.size, entry.version]
            if (
                fetched.get(name) != facts
                or not path.is_file()
                or path.stat().st_size != entry.size
            ):
                store.get(name, path)
                if (size := path.stat().st_size) != entry.size:
                    path.unlink()
                    raise OSError(
                        f"{address}/{name} came with {size} bytes instead of {entry.size}: try "
                        "again"
                    )
                fetched[name] = facts
        for name in fetched.keys() - listed.keys():
            (target / name).unlink(missing_ok=True)
            del fetched[name]
        (target / FETCHED).write_text(json.dumps(fetched), encoding="utf-8")
    return target


def _read_fetched(target: Path) -> dict[str, Any]:
    try:
        fetched = read_json(target / FETCHED)
        return {name: facts for name, facts in fetched.items() if stays_inside(name)}
    except (OSError, ValueError, AttributeError):
        return {}


def put_directory(source: Path, address: str, *, last: str) -> None:
    """Upload all files of a directory. Raises OSError, DataError or MissingDependency.

    last: the file to send last. Readers treat a directory without it as incomplete.
    """
    store = Store(address)
    names = sorted(
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    )
    for name in sorted(names, key=lambda name: name == last):
        store.put(source / name, name)


def forget_cached(directory: Path) -> None:
    """Remove the cached copy of an address, given its path from `get_cached_path`."""
    shutil.rmtree(directory.parent, ignore_errors=True)
