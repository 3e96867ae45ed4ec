"""Files behind an address: s3://bucket/run, gs://, hf://, file://, memory:// and all else that
fsspec knows.

A store's client may raise anything; here it becomes an OSError that names the file. What failed is
asked for again a few times; what is not there, or not allowed, is not. What is fetched goes into
the cache of this machine.
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

# What fsspec needs beside itself, by the beginning of an address, of the extra `stores`. They have
# buckets and no directories.
PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "abfs": "adlfs",
    "az": "adlfs",
}
ATTEMPTS = 3
PAUSE_S = 1.0  # before the second attempt; doubled before each further one
FETCHED = ".fetched.json"  # what a copy of a directory was made of

Found = TypeVar("Found")

_cache: Path | None = None


def is_address(place: str | Path) -> bool:
    return isinstance(place, str) and "://" in place


def keep_as(environment: Mapping[str, str]) -> None:
    """Puts the cache where the user's variables say: RATCHET_CACHE, else in XDG_CACHE_HOME."""
    global _cache
    home = environment.get("XDG_CACHE_HOME")
    own = environment.get("RATCHET_CACHE") or (f"{home}/ratchet" if home else "")
    _cache = Path(own).expanduser() if own else None


def cached(kind: str, address: str) -> Path:
    """Where this machine keeps what belongs to an address: a directory of its own, with the
    address's last name."""
    address = address.rstrip("/")
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    return kept(kind) / digest / (PurePosixPath(address).name or "root")


def kept(kind: str) -> Path:
    """Where this machine keeps what it can get, or make, again. Raises OSError for a user without a
    home."""
    try:
        return (_cache or Path.home() / ".cache" / "ratchet") / kind
    except RuntimeError as error:
        raise OSError(
            "this user has no home directory: set RATCHET_CACHE to a directory"
        ) from error


def unfit(address: str) -> str | None:
    """Why a model or a run can't be at an address, as far as that alone tells; None where it
    may."""
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
    # the second has those that somebody has brought
    from fsspec import available_protocols, registry

    if scheme not in {*available_protocols(), *registry}:
        return (
            f"nothing reads {scheme}://: use s3://, gs://, az://, hf://, file:// or another "
            "that fsspec knows"
        )
    return None


def filesystem(address: str) -> tuple[Any, str]:
    """fsspec's, and the path there. Raises DataError, MissingDependency."""
    import fsspec  # not at the top: who has local files alone pays nothing for it
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
        known = ", ".join(sorted(fsspec.available_protocols()))
        raise DataError(f"{address}: nothing reads {scheme}://; there are {known}") from error
    # a store's client raises errors of its own: without credentials, say
    except Exception as error:
        raise DataError(
            f"{address}: its store can't be used: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True)
class Entry:
    """size: bytes. version: changes with the file, as far as the store tells."""

    size: int
    version: str


class Store:
    """The files below an address, by their names from there on. Its methods raise OSError;
    FileNotFoundError for what is not there. A name that would lead outside is never used."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._system, root = filesystem(self.address)
        self._root = root.rstrip("/")
        self._buckets = self.address.partition("://")[0] in {*PACKAGES, "hf"}

    def entries(self, below: str = "") -> dict[str, Entry]:
        """Of all files below, by name; {} where there is none."""

        def find() -> dict[str, Entry]:
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._at(below) if below else self._root, detail=True)
            except FileNotFoundError:
                return {}
            return {
                self._name(path): _entry(info)
                for path, info in found.items()
                if info["type"] == "file"
            }

        return self._tried(f"listing {below}", find)

    def read(self, name: str, most: int = 2**26) -> bytes:
        """A small file, of at most so many bytes."""

        def read() -> bytes:
            with self._system.open(self._at(name), "rb") as file:
                content = file.read(most + 1)
            if len(content) > most:
                raise OSError(f"it has more than {most} bytes")
            return content

        return self._tried(f"reading {name}", read)

    def write(self, name: str, content: bytes) -> None:
        self._placed(name, len(content), lambda path: self._system.pipe_file(path, content))

    def put(self, source: Path, name: str) -> None:
        """The file is there as a whole when this returns."""
        self._placed(
            name, source.stat().st_size, lambda path: self._system.put_file(str(source), path)
        )

    def get(self, name: str, target: Path) -> None:
        """Takes its name when it is here as a whole."""
        draft = target.with_name(f".{target.name}.partial")
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._tried(
                f"fetching {name}", lambda: self._system.get_file(self._at(name), str(draft))
            )
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)

    def remove(self, name: str) -> None:
        def remove() -> None:
            try:
                self._system.rm_file(self._at(name))
            except FileNotFoundError:
                return

        self._tried(f"removing {name}", remove)

    def _placed(self, name: str, size: int, send: Callable[[str], object]) -> None:
        """Where a file system writes in place, under another name first: a half-written file must
        not replace a whole one."""
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

        self._tried(f"writing {name}", place)

    def _at(self, name: str) -> str:
        if not stays_inside(name):
            raise OSError(f"{self.address}: '{name}' could lead outside")
        return f"{self._root}/{name}"

    def _name(self, path: str) -> str:
        name = path.removeprefix(self._root).lstrip("/")
        return name or PurePosixPath(path).name  # the address is that of a file

    def _tried(self, what: str, do: Callable[[], Found]) -> Found:
        for attempt in range(ATTEMPTS):
            try:
                return do()
            except (FileNotFoundError, PermissionError) as error:
                raise type(error)(f"{self.address}: {what}: {error}") from error
            # a store's client raises errors of its own, and none may cost a run
            except Exception as error:
                reason = f"{self.address}: {what}: {type(error).__name__}: {error}"
                if attempt == ATTEMPTS - 1:
                    raise OSError(reason) from error
                pause_s = PAUSE_S * 2**attempt
                log.warning("%s; once more in %g s", reason, pause_s)
                time.sleep(pause_s)
        raise AssertionError("the last attempt returns or raises")


def _entry(info: Mapping[str, Any]) -> Entry:
    facts = json.dumps(info, sort_keys=True, default=str)
    return Entry(int(info["size"]), hashlib.sha256(facts.encode()).hexdigest())


def stays_inside(name: str) -> bool:
    """Whether a relative POSIX name can't leave the directory that it is in."""
    path = PurePosixPath(name)
    return (
        bool(path.parts)
        and not path.is_absolute()
        and ".." not in path.parts
        and "\\" not in name
        and "\0" not in name
    )


@contextmanager
def alone(directory: Path) -> Iterator[None]:
    """Waits until no other process fetches into a directory of the cache, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(directory.parent / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fetch_directory(address: str, patterns: Sequence[str] = ("*",), *, deep: bool = True) -> Path:
    """A copy of a directory on this machine, to be read: what has not changed since it was fetched
    is not fetched again.

    patterns: of the names of files that are wanted. deep: also those in directories below. Raises
    OSError; DataError and MissingDependency for an address that can't be read here.
    """
    store, target = Store(address), cached("directories", address)
    with alone(target):
        fetched, listed = _fetched_before(target), store.entries()
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


def _fetched_before(target: Path) -> dict[str, Any]:
    try:
        found = read_json(target / FETCHED)
        return {name: facts for name, facts in found.items() if stays_inside(name)}
    except (OSError, ValueError, AttributeError):
        return {}


def put_directory(source: Path, address: str, *, last: str) -> None:
    """All files of a directory; `last`, without which nobody takes the rest for what it is to be,
    comes last. Raises OSError, DataError, MissingDependency."""
    store = Store(address)
    names = sorted(
        path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()
    )
    for name in sorted(names, key=lambda name: name == last):
        store.put(source / name, name)


def forget(directory: Path) -> None:
    """Removes what the cache holds of an address."""
    shutil.rmtree(directory.parent, ignore_errors=True)
