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
from ratchet.utils.retry import call_with_retries
from ratchet.utils.safe_read import read_json

log = logging.getLogger(__name__)

# The package that fsspec needs for each scheme; the extra `stores` installs it. These stores have
# buckets and no directories.
PACKAGE_BY_SCHEME = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}
RETRIES = 2
RETRY_WAIT_S = 1.0  # wait before the first retry, in seconds
FETCHED_INDEX = ".fetched.json"  # size and version of each file in a fetched directory

Result = TypeVar("Result")


class StoreUnavailable(OSError):
    """An operation of a store failed; a retry may help."""


_cache: Path | None = None


def is_address(location: str | Path) -> bool:
    """Return True if `location` is an address with a scheme, not a local path."""
    return isinstance(location, str) and "://" in location


def expand_home(path: str | Path) -> Path:
    """Return a path whose leading ~ is replaced by the home directory.

    Unlike `Path.expanduser`, this keeps the path if there is no such user.
    """
    return Path(os.path.expanduser(path))


def configure_cache(environment: Mapping[str, str]) -> None:
    """Set the cache directory from RATCHET_CACHE, else from XDG_CACHE_HOME."""
    global _cache
    home = environment.get("XDG_CACHE_HOME")
    directory = environment.get("RATCHET_CACHE") or (f"{home}/ratchet" if home else "")
    _cache = expand_home(directory) if directory else None


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
    scheme, _, path = address.partition("://")
    if "::" in address:
        return "it chains several stores: name the one that holds the files"
    if scheme in ("http", "https"):
        return "a web server can't list a directory: name a store, or a local copy of the files"
    if not path.strip("/"):
        return f"it names no bucket or directory: write {scheme}://bucket/name"
    if any(character in path for character in "*?[]#\\") or ".." in path.split("/"):
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
        package = PACKAGE_BY_SCHEME.get(scheme, "fsspec")
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

    Methods raise FileNotFoundError for a missing file, and another OSError for a failed operation
    or for a name that could lead outside the address.
    """

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._filesystem, root = open_filesystem(self.address)
        self._root = root.rstrip("/")
        self._has_buckets = self.address.partition("://")[0] in {*PACKAGE_BY_SCHEME, "hf"}

    def entries(self, below: str = "") -> dict[str, StoredFile]:
        """Return all files below a directory by name; {} if there are none."""

        def find() -> dict[str, StoredFile]:
            self._filesystem.invalidate_cache()
            try:
                files = self._filesystem.find(
                    self._get_path(below) if below else self._root, detail=True
                )
            except FileNotFoundError:
                return {}
            return {
                self._get_name(path): _parse_info(info)
                for path, info in files.items()
                if info["type"] == "file"
            }

        return self._retry(f"listing {below}", find)

    def read(self, name: str, max_bytes: int = 2**26) -> bytes:
        """Return the content of a small file. Raises OSError above `max_bytes`."""

        def read() -> bytes:
            with self._filesystem.open(self._get_path(name), "rb") as file:
                content = file.read(max_bytes + 1)
            if len(content) > max_bytes:
                raise OSError(f"it has more than {max_bytes} bytes")
            return content

        return self._retry(f"reading {name}", read)

    def write(self, name: str, content: bytes) -> None:
        """Write a whole file."""
        self._write_checked(
            name, len(content), lambda path: self._filesystem.pipe_file(path, content)
        )

    def put(self, source: Path, name: str) -> None:
        """Upload a file; it is complete when this returns."""
        self._write_checked(
            name, source.stat().st_size, lambda path: self._filesystem.put_file(str(source), path)
        )

    def get(self, name: str, target: Path) -> None:
        """Download a file; `target` appears only when it is complete."""
        draft = target.with_name(f".{target.name}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._retry(
                f"fetching {name}",
                lambda: self._filesystem.get_file(self._get_path(name), str(draft)),
            )
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""

        def remove() -> None:
            try:
                self._filesystem.rm_file(self._get_path(name))
            except FileNotFoundError:
                return

        self._retry(f"removing {name}", remove)

    def _write_checked(self, name: str, size: int, upload: Callable[[str], object]) -> None:
        """Write a file of `size` bytes with `upload(path)` and check its size in the store.

        A file system that writes in place gets the file under a temporary name first, because a
        half-written file must not replace a whole one.
        """
        path = self._get_path(name)
        # fsspec sets `local_file` for local file systems only.
        draft = f"{path}.partial" if getattr(self._filesystem, "local_file", False) else path

        def write() -> None:
            if not self._has_buckets:
                self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
            upload(draft)
            self._filesystem.invalidate_cache()
            if (stored_size := self._filesystem.info(draft)["size"]) < size:
                raise OSError(f"{stored_size} of {size} bytes arrived")
            if draft != path:
                self._filesystem.mv(draft, path)

        self._retry(f"writing {name}", write)

    def _get_path(self, name: str) -> str:
        if not stays_inside(name):
            raise OSError(f"{self.address}: '{name}' could lead outside")
        return f"{self._root}/{name}"

    def _get_name(self, path: str) -> str:
        name = path.removeprefix(self._root).lstrip("/")
        return name or PurePosixPath(path).name  # empty if the address itself is a file

    def _retry(self, action: str, operation: Callable[[], Result]) -> Result:
        """Return the result of an operation; see RETRIES.

        action: description of the operation, for messages.
        """

        def attempt() -> Result:
            try:
                return operation()
            except (FileNotFoundError, PermissionError) as error:
                raise type(error)(f"{self.address}: {action}: {error}") from error
            # A store's client raises exceptions of its own types. None of them may end a run.
            except Exception as error:
                reason = f"{self.address}: {action}: {type(error).__name__}: {error}"
                raise StoreUnavailable(reason) from error

        def wait(error: Exception, wait_s: float) -> None:
            log.warning("%s; trying again in %.1f s", error, wait_s)
            time.sleep(wait_s)

        return call_with_retries(
            attempt,
            retries=RETRIES,
            first_wait_s=RETRY_WAIT_S,
            retry_on=StoreUnavailable,
            wait=wait,
        )


def _parse_info(info: Mapping[str, Any]) -> StoredFile:
    info_json = json.dumps(info, sort_keys=True, default=str)
    return StoredFile(int(info["size"]), hashlib.sha256(info_json.encode()).hexdigest())


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
        patterns: patterns of the file names to fetch, such as `*.json`.
        deep: True also fetches the files of subdirectories.

    Raises OSError if fetching fails; DataError or MissingDependency if the address can't be read on
    this machine.
    """
    store = Store(address)
    target = get_cached_path("directories", address)
    with lock_cache_dir(target):
        fetched_files = _read_fetched_index(target)
        stored_files = store.entries()
        for name, file in sorted(stored_files.items()):
            if not any(fnmatch(name, pattern) for pattern in patterns) or not (
                deep or "/" not in name
            ):
                continue
            path, size_and_version = target / name, [file.size, file.version]
            if (
                fetched_files.get(name) != size_and_version
                or not path.is_file()
                or path.stat().st_size != file.size
            ):
                store.get(name, path)
                if (size := path.stat().st_size) != file.size:
                    path.unlink()
                    raise OSError(
                        f"{address}/{name} came with {size} bytes instead of {file.size}: try again"
                    )
                fetched_files[name] = size_and_version
        for name in fetched_files.keys() - stored_files.keys():
            (target / name).unlink(missing_ok=True)
            del fetched_files[name]
        (target / FETCHED_INDEX).write_text(json.dumps(fetched_files), encoding="utf-8")
    return target


def _read_fetched_index(target: Path) -> dict[str, Any]:
    """Return [size, version] of each fetched file by name; {} if the index can't be read."""
    try:
        index = read_json(target / FETCHED_INDEX)
        return {name: entry for name, entry in index.items() if stays_inside(name)}
    except (OSError, ValueError, AttributeError):
        return {}


def put_directory(source: Path, address: str, *, last: str) -> None:
    """Upload all files of a directory. Raises OSError, DataError or MissingDependency.

    last: name of the file to upload last. Readers treat a directory without it as incomplete.
    """
    store = Store(address)
    names = sorted(
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    )
    for name in sorted(names, key=lambda name: name == last):
        store.put(source / name, name)


def remove_cached_copy(directory: Path) -> None:
    """Remove the cached copy of an address, given its path from `get_cached_path`."""
    shutil.rmtree(directory.parent, ignore_errors=True)
