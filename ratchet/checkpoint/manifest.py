"""Write and verify a checkpoint's `manifest.json`, which lists its files with sizes and hashes.

The content is {"body": {"format", "step", "files": {name: {"size", "sha256"}}, "meta"}, "sha256":
hash of the canonical body}.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from ratchet.errors import CheckpointError
from ratchet.observe.write_files import sync
from ratchet.utils.object_store import stays_inside
from ratchet.utils.safe_read import parse_json

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20
# The allowed formats. None of them executes code when it is read, unlike pickle (.pt, .bin, .pkl).
ALLOWED_SUFFIXES = {".json", ".safetensors", ".jinja", ".txt"}
# The exception: in folders of this name, Megatron's dist_checkpointing writes files with these
# suffixes, and some of them are pickles. Only a Megatron learner reads them.
MEGATRON_FOLDER = "megatron"
MEGATRON_SUFFIXES = {".distcp", ".pt", ""}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified checkpoint."""

    step: int
    path: Path
    meta: Mapping[str, Any]  # as passed to `write_manifest`


def write_manifest(directory: Path, step: int, meta: Mapping[str, Any]) -> None:
    """Write the manifest of all files in a directory."""
    files = {}
    for name in list_files(directory):
        path = directory / name
        files[name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    body = {"format": FORMAT, "step": step, "files": files, "meta": dict(meta)}
    # NaN is allowed, because an accuracy that could not be measured must not prevent saving. Python
    # reads back the `NaN` that it writes.
    (directory / MANIFEST).write_text(seal(body), encoding="utf-8")


def replace_manifest_meta(
    directory: Path, step: int, meta: Mapping[str, Any], draft_directory: Path
) -> None:
    """Replace the metadata in the manifest of `step` atomically; its list of files stays.

    Args:
        draft_directory: An existing directory on the same disk.

    Raises CheckpointError if the manifest is invalid, and OSError if it can't be written.
    """
    body = read_body(directory, _read_manifest(directory), step)
    draft = draft_directory / MANIFEST
    draft.write_text(seal({**body, "meta": dict(meta)}), encoding="utf-8")
    sync(draft)
    draft.replace(directory / MANIFEST)


def is_json_value(value: Any) -> bool:
    """True if writing a value as JSON and reading it back does not change it."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_json_value(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_json_value, value))
    return value is None or isinstance(value, bool | int | float | str)


def list_files(directory: Path) -> list[str]:
    """Return the relative POSIX names of all files in a directory, sorted.

    Raises CheckpointError for links, devices and formats that could execute code.
    """
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{directory}: '{name}' is a link or a device, not a plain file")
        require_safe_file_type(directory, name)
        names.append(name)
    return names


def require_safe_file_type(location: Path | str, name: str) -> None:
    """Raise CheckpointError unless the file has an allowed format, which never executes code."""
    path = PurePosixPath(name)
    if path.suffix not in ALLOWED_SUFFIXES and not (
        path.parent.name == MEGATRON_FOLDER and path.suffix in MEGATRON_SUFFIXES
    ):
        raise CheckpointError(
            f"{location}: '{name}' has none of the allowed formats "
            f"{', '.join(sorted(ALLOWED_SUFFIXES))}"
        )


def verify_checkpoint(path: Path, step: int, *, check_hashes: bool = True) -> Checkpoint:
    """Check a directory against its manifest, and return it as a checkpoint.

    The directory must hold exactly the files that the manifest lists. No file is opened before its
    name, kind and size have been checked.

    Args:
        check_hashes: True to check every file's hash too.

    Raises CheckpointError, which names the first difference.
    """
    if path.is_symlink():
        raise CheckpointError(
            f"{path} is a link, which another program may redirect: put the directory "
            f"{os.readlink(path)} in its place"
        )
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    try:
        body = read_body(path, _read_manifest(path), step)
        _check_files(path, body["files"], check_hashes=check_hashes)
        return Checkpoint(step, path, body["meta"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the manifest is malformed ({error!r})") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _read_manifest(directory: Path) -> bytes:
    """Return the manifest's bytes.

    Raises CheckpointError if it is absent, too large or not a plain file.
    """
    path = directory / MANIFEST
    if not os.path.lexists(path):
        raise CheckpointError(f"{directory} has no {MANIFEST}")
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} is not a plain file of at most {MAX_MANIFEST_BYTES} bytes")
    return path.read_bytes()


def read_body(location: Path | str, manifest: bytes, step: int) -> dict[str, Any]:
    """Return the body of a step's manifest.

    Raises CheckpointError if the manifest was changed or has another step or format; KeyError or
    TypeError if it is malformed.
    """
    body = unseal(location, MANIFEST, manifest)
    if body["format"] != FORMAT:
        raise CheckpointError(
            f"{location} has format {body['format']!r}; this version reads {FORMAT}"
        )
    if body["step"] != step:
        raise CheckpointError(f"{location} has a manifest of step {body['step']!r}")
    for name in body["files"]:
        if not stays_inside(name):
            raise CheckpointError(
                f"{location}: the manifest lists '{name}', which could lead outside"
            )
    return body


def seal(body: Mapping[str, Any]) -> str:
    """Return `body` as JSON with its hash."""
    return json.dumps({"body": body, "sha256": hash_body(body)}, indent=1)


def unseal(location: Path | str, name: str, content: bytes) -> dict[str, Any]:
    """Return the body of sealed JSON.

    Raises CheckpointError if the content was changed or is not JSON; KeyError or TypeError if it
    has no body or hash.
    """
    try:
        sealed = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{location}/{name} is not JSON: {error}") from error
    if sealed["sha256"] != hash_body(sealed["body"]):
        raise CheckpointError(f"{location}/{name} was changed: its own checksum does not match")
    return sealed["body"]


def _check_files(
    directory: Path, listed_files: Mapping[str, Mapping[str, Any]], *, check_hashes: bool
) -> None:
    """Raise CheckpointError if a directory's files differ from those listed in its manifest."""
    present = set(list_files(directory)) - {MANIFEST}
    if missing := sorted(set(listed_files) - present):
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}")
    if unlisted := sorted(present - set(listed_files)):
        raise CheckpointError(
            f"{directory} holds files that its manifest does not list: {', '.join(unlisted)}"
        )
    for name, expected in listed_files.items():
        path = directory / name
        size = path.stat().st_size
        if size != expected["size"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {expected['size']}")
        if check_hashes and hash_file(path) != expected["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")


def hash_body(body: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a body as canonical JSON."""
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def hash_file(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
