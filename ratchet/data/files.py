"""Files of data, on this machine or in an object store: s3://, gs://, hf://, memory:// and all else
that fsspec knows."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BeforeValidator

from ratchet.errors import DataError
from ratchet.utils import safe_read
from ratchet.utils.object_store import filesystem, is_address

CHUNK_BYTES = 1 << 20
MIN_BOMB_BYTES = 64 << 20
MOST_TIMES = 200  # gzip's limit is about 1,000; conversations come to 10
SUFFIXES = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".parquet",
    ".arrow",
    ".jsonl.gz",
    ".json.gz",
    ".csv.gz",
)


def _place(value: Any) -> Any:
    return Path(value) if isinstance(value, str) and "://" not in value else value


# In a recipe: a path, which is a `Path` so that a checkpoint can hold its fingerprint, or an
# address, which stays text.
DataFile = Annotated[Path | str, BeforeValidator(_place)]


@contextmanager
def reading(path: str | Path) -> Iterator[None]:
    """Whatever goes wrong with the file itself is a DataError that names it."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(f"{path}: can't be read: No such file or directory") from error
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from error
    except OverflowError as error:  # an offset that the file states of itself
        raise DataError(f"{path}: can't be read: {error}") from error


def open_binary(path: str | Path) -> IO[bytes]:
    """Seekable, from its beginning. A file that is packed by gzip is unpacked into a temporary one:
    rows are read in any order.

    Raises DataError where it can't be opened, MissingDependency for an object store whose package
    is not installed.
    """
    with reading(path):
        if not is_address(path):
            file: IO[bytes] = safe_read.open_file(path)
        else:
            system, inside = filesystem(str(path))
            file = system.open(inside, "rb")
        return _unpacked(file) if str(path).endswith(".gz") else file


def _unpacked(packed: IO[bytes]) -> IO[bytes]:
    plain = tempfile.TemporaryFile()  # noqa: SIM115 - closed by whoever reads it
    try:
        with packed, gzip.open(packed) as content:
            _copy_unpacked(content, plain, packed)
    except EOFError as error:
        raise OSError("the gzip file ends too early: copy it again") from error
    except zlib.error as error:
        raise OSError(f"the gzip file is damaged ({error}): copy it again") from error
    plain.seek(0)
    return plain


def _copy_unpacked(content: gzip.GzipFile, plain: IO[bytes], packed: IO[bytes]) -> None:
    """Raises OSError where the content is so much longer than the file that it holds next to
    nothing."""
    size = 0
    while chunk := content.read(CHUNK_BYTES):
        size += len(chunk)
        if size > MIN_BOMB_BYTES and size > MOST_TIMES * packed.tell():
            raise OSError(
                f"it unpacks to more than {MOST_TIMES} times its size, so it holds hardly any "
                "data: unpack it yourself"
            )
        plain.write(chunk)


def expand(places: Sequence[str | Path]) -> list[str | Path]:
    """The files that paths, addresses, patterns (*.parquet) and directories stand for; those of one
    place by name.

    Raises DataError for a pattern or a directory without any.
    """
    return [file for place in places for file in _expanded(place)]


def _expanded(place: str | Path) -> list[str | Path]:
    remote, pattern = is_address(place), any(sign in str(place) for sign in "*?[")
    if remote:
        system, inside = filesystem(str(place))
        with reading(place):
            if not pattern and not system.isdir(inside):
                return [place]
            found = system.glob(inside if pattern else f"{inside.rstrip('/')}/**")
        named = [str(system.unstrip_protocol(name)) for name in sorted(found)]
    else:
        path = Path(place)
        if path.exists() and not path.is_dir():
            return [path]  # whatever signs its name holds
        if not pattern and not path.is_dir():
            return [path]
        under = (
            path.rglob("*")
            if path.is_dir()
            else Path(path.anchor or ".").glob(str(path.relative_to(path.anchor)))
        )
        named = [path for path in sorted(under) if path.is_file()]
    files = [name for name in named if pattern or str(name).endswith(SUFFIXES)]
    if not files:
        what = (
            "no file matches this pattern"
            if pattern
            else f"the directory holds no {', '.join(SUFFIXES)}"
        )
        raise DataError(f"{place}: {what}: name the files")
    return files
