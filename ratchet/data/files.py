"""Find and open data files, on this machine or in an object store.

Object stores are s3://, gs://, hf://, memory:// and all others that fsspec supports.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import IO, Annotated, Any

from pydantic import BeforeValidator

from ratchet.errors import DataError
from ratchet.utils import safe_read
from ratchet.utils.object_store import expand_home, is_address, open_filesystem

CHUNK_BYTES = 1 << 20
# Unpacked size up to which every compression ratio is allowed: even 4 MiB of line ends are read in
# a second.
MIN_BOMB_BYTES = 4 << 20
# Maximum compression ratio. gzip's own maximum is about 1,000. Conversations have a ratio of 10, or
# of 110 if all rows share a text of 20 KB.
MAX_COMPRESSION_RATIO = 200
SUFFIXES = (
    ".jsonl",
    ".ndjson",
    ".json",
    ".csv",
    ".tsv",
    ".parquet",
    ".arrow",
    ".jsonl.gz",
    ".json.gz",
    ".csv.gz",
    ".tsv.gz",
)


def _to_path(value: Any) -> Any:
    is_path = isinstance(value, str) and "://" not in value
    return expand_home(value) if is_path else value


# A path or address in a recipe. A path becomes a `Path`, so that checkpoints save the file's
# fingerprint. An address stays text.
DataFile = Annotated[Path | str, BeforeValidator(_to_path)]


@contextmanager
def convert_read_errors(path: str | Path) -> Iterator[None]:
    """Convert errors of the file system to a DataError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: can't be read: No such file or directory{_say_start(path)}"
        ) from error
    except OSError as error:
        failed_directory = (
            error.filename
            if isinstance(error.filename, str) and error.filename != str(path)
            else None
        )
        # `failed_directory` lies below `path`.
        where = f"{path}: {failed_directory}" if failed_directory else path
        raise DataError(f"{where}: can't be read: {error.strerror or error}") from error
    except OverflowError as error:  # from a wrong offset in the file
        raise DataError(f"{path}: can't be read: {error}") from error


def _say_start(path: str | Path) -> str:
    """Return where a relative path starts, as the end of a sentence."""
    is_relative = "://" not in str(path) and not Path(path).is_absolute()
    return f". Its path starts at the working directory, {Path.cwd()}" if is_relative else ""


def open_binary(path: str | Path) -> IO[bytes]:
    """Return a file opened for reading, seekable and at its beginning.

    A gzip file is unpacked into a temporary file, because rows are read in any order.

    Raises DataError if the file can't be opened, or MissingDependency if the object store's package
    is not installed.
    """
    with convert_read_errors(path):
        if not is_address(path):
            file: IO[bytes] = safe_read.open_file(path)
        else:
            system, inside = open_filesystem(str(path))
            file = system.open(inside, "rb")
        return _unpack(file) if str(path).endswith(".gz") else file


class FileVersion:
    """The size and modification time of an open file, to notice that it is overwritten in place.

    Files of an object store are not watched, and an unpacked gzip file is a copy of its own.

    Args:
        path: The path or address of the file.
        file: The file itself, as `open_binary` or `pyarrow.memory_map` returns it.
    """

    def __init__(self, path: str | Path, file: Any) -> None:
        self.path = path
        self._file = file  # keeps the descriptor open
        self._descriptor: int | None = None if is_address(path) else file.fileno()
        self._original = self._read()

    def check(self) -> None:
        """Raise DataError if the file was written to. Raises OSError if it can't be examined."""
        if self._read() != self._original:
            raise make_change_error(self.path)

    def _read(self) -> tuple[int, int]:
        if self._descriptor is None:
            return 0, 0
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns


def make_change_error(path: str | Path) -> DataError:
    """Return the error of a file that was written to after its rows were indexed."""
    return DataError(
        f"{path}: it changed while it was read. Begin again, or --resume the run with the old "
        "content, or with the new one and --changed-data"
    )


def _unpack(packed: IO[bytes]) -> IO[bytes]:
    """Return a temporary file with the unpacked content of a gzip file."""
    unpacked = tempfile.TemporaryFile()  # noqa: SIM115 - the caller closes it
    try:
        with packed, gzip.open(packed) as content:
            _copy_unpacked(content, unpacked, packed)
    except EOFError as error:
        raise OSError("the gzip file ends too early: copy it again") from error
    except zlib.error as error:
        raise OSError(f"the gzip file is damaged ({error}): copy it again") from error
    unpacked.seek(0)
    return unpacked


def _copy_unpacked(content: gzip.GzipFile, unpacked: IO[bytes], packed: IO[bytes]) -> None:
    """Copy the unpacked content. Raises OSError above MAX_COMPRESSION_RATIO."""
    size = 0
    while chunk := content.read(CHUNK_BYTES):
        size += len(chunk)
        if size > MIN_BOMB_BYTES and size > MAX_COMPRESSION_RATIO * packed.tell():
            raise OSError(
                f"it unpacks to more than {MAX_COMPRESSION_RATIO} times its size, so it may be a "
                "decompression bomb: unpack it yourself"
            )
        unpacked.write(chunk)


def find_files(locations: Sequence[str | Path]) -> list[str | Path]:
    """Return the files of paths, addresses, patterns (*.parquet) and directories.

    The files of one pattern or directory are sorted by name.

    Raises DataError for a pattern or directory without files.
    """
    return [file for location in locations for file in _find_files_at(location)]


def _find_files_at(location: str | Path) -> list[str | Path]:
    has_pattern = any(sign in str(location) for sign in "*?[")
    if is_address(location):
        system, inside = open_filesystem(str(location))
        with convert_read_errors(location):
            if not has_pattern and not system.isdir(inside):
                return [location]
            paths = system.glob(inside if has_pattern else f"{inside.rstrip('/')}/**")
        names = [str(system.unstrip_protocol(name)) for name in sorted(paths)]
    else:
        path = Path(location)
        if path.exists() and not path.is_dir():
            return [path]  # even if its name contains *, ? or [
        if not has_pattern and not path.is_dir():
            return [path]
        with convert_read_errors(location):
            names = (
                _list_matches(path)
                if has_pattern and not path.is_dir()
                else _list_files_below(path)
            )
    files: Sequence[str | Path] = [
        name for name in names if has_pattern or str(name).endswith(SUFFIXES)
    ]
    if not has_pattern:
        files = _select_saved_rows(location, files)
    if not files:
        reason = (
            "no file matches this pattern"
            if has_pattern
            else f"the directory holds no {', '.join(SUFFIXES)}"
        )
        raise DataError(f"{location}: {reason}: name the files")
    return list(files)


def _select_saved_rows(location: str | Path, files: Sequence[str | Path]) -> Sequence[str | Path]:
    """Leave out what `save_to_disk` of the package `datasets` writes beside the files with rows.

    Its state.json names the files that count: those of an earlier save with more files stay there.

    Raises DataError for several splits, because one location is one split.
    """
    names = set(map(str, files))
    parents = {_get_parent(name) for name in names}
    for parent in parents:
        if f"{parent}dataset_dict.json" in names:
            splits = sorted(
                other.rstrip("/")
                for other in parents
                if other != parent and other.startswith(parent)
            )
            raise DataError(
                f"{location}: a saved DatasetDict of several splits: name the directory of one: "
                f"{', '.join(splits)}"
            )
        state = f"{parent}state.json"
        if {state, f"{parent}dataset_info.json"} <= names:
            kept = {f"{parent}{name}" for name in _read_saved_names(state)}
            files = [f for f in files if _get_parent(str(f)) != parent or str(f) in kept]
    return files


def _get_parent(name: str) -> str:
    """Return the directory of a file, with its slash; "" for a file in the working directory."""
    return name[: name.rfind("/") + 1]


def _read_saved_names(state: str) -> list[str]:
    """Return the names of files with rows that a saved dataset's state.json lists."""
    with open_binary(state) as file:
        try:
            return [str(entry["filename"]) for entry in json.load(file)["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{state}: lists no `_data_files`: save the dataset again, or name its .arrow files"
            ) from error


def _list_files_below(directory: Path) -> list[Path]:
    """Return the files below a directory. A broken link is among them, so that reading it fails.

    Raises OSError for a directory that can't be listed.
    """

    def refuse(error: OSError) -> None:
        raise error

    locations = (
        Path(root, name) for root, _, names in os.walk(directory, onerror=refuse) for name in names
    )
    return sorted(locations)


def _list_matches(pattern: Path) -> list[Path]:
    """Return the files that match a pattern. A broken link is among them, so that reading it fails.

    Raises OSError if a directory that can hold matches can't be listed.
    """
    parts = pattern.parts
    n_fixed_parts = next(i for i, part in enumerate(parts) if any(sign in part for sign in "*?["))
    base = Path(*parts[:n_fixed_parts])
    if base.is_dir():
        _require_listable(base, parts[n_fixed_parts:])
    matches = sorted(base.glob(str(Path(*parts[n_fixed_parts:]))))
    return [path for path in matches if not path.is_dir()]


def _require_listable(directory: str | Path, parts: Sequence[str]) -> None:
    """Raise OSError for a directory that can't be listed, because `glob` would skip it silently."""
    with os.scandir(directory) as entries:
        directories = [entry for entry in entries if entry.is_dir(follow_symlinks=parts[0] != "**")]
    for entry in directories:
        if parts[0] == "**":
            _require_listable(entry.path, parts)
        elif parts[1:] and fnmatch(entry.name, parts[0]):
            _require_listable(entry.path, parts[1:])
