"""What a checkpoint's `manifest.json` says of its files, and whether these are so.

{"body": {"format", "step", "files": {name: {"size", "sha256"}}, "meta"}, "sha256": of the canonical
body}
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
from ratchet.utils.object_store import stays_inside
from ratchet.utils.safe_read import parse_json

FORMAT = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 16 * 2**20
# Inert formats only: none of these executes anything when it is read, unlike pickle (.pt, .bin,
# .pkl).
SUFFIXES = {".json", ".safetensors", ".jinja", ".txt"}
# But for what Megatron's dist_checkpointing writes, partly pickles, into folders of this name: a
# learner by Megatron reads it, and nothing else does.
MEGATRON, MEGATRON_SUFFIXES = "megatron", {".distcp", ".pt", ""}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A verified one. `meta` is what its save was given."""

    step: int
    path: Path
    meta: Mapping[str, Any]


def write_manifest(directory: Path, step: int, meta: Mapping[str, Any]) -> None:
    files = {}
    for name in list_files(directory):
        path = directory / name
        files[name] = {"size": path.stat().st_size, "sha256": hash_file(path)}
    body = {"format": FORMAT, "step": step, "files": files, "meta": dict(meta)}
    # NaN is let through (Python reads its own spelling back): an accuracy that nobody could measure
    # must not stop a save.
    (directory / MANIFEST).write_text(seal(body), encoding="utf-8")


def survives_json(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and survives_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(survives_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def list_files(directory: Path) -> list[str]:
    """Relative POSIX names of all files, sorted. Raises CheckpointError for links, devices and
    formats that could execute."""
    names = []
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{directory}: '{name}' is a link or a device, not a plain file")
        check_format(directory, name)
        names.append(name)
    return names


def check_format(where: Path | str, name: str) -> None:
    """Raises CheckpointError for a file that is not of an inert format."""
    path = PurePosixPath(name)
    if path.suffix not in SUFFIXES and not (
        path.parent.name == MEGATRON and path.suffix in MEGATRON_SUFFIXES
    ):
        raise CheckpointError(
            f"{where}: '{name}' is of none of the allowed formats {', '.join(sorted(SUFFIXES))}"
        )


def verify(path: Path, step: int, *, contents: bool = True) -> Checkpoint:
    """Checks that the directory holds exactly what its manifest lists, and with `contents` every
    file's hash.

    Raises CheckpointError saying what is wrong. No file is opened before its name, kind and size
    are known to be right.
    """
    if path.is_symlink() or not path.is_dir():
        raise CheckpointError(f"{path} is not a directory")
    try:
        body = read_body(path, _manifest_of(path), step)
        _check_files(path, body["files"], contents=contents)
        return Checkpoint(step, path, body["meta"])
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: the manifest is malformed ({error!r})") from error
    except OSError as error:
        raise CheckpointError(f"{path} can't be read: {error}") from error


def _manifest_of(directory: Path) -> bytes:
    path = directory / MANIFEST
    if not os.path.lexists(path):
        raise CheckpointError(f"{directory} has no {MANIFEST}")
    details = path.lstat()
    if not stat.S_ISREG(details.st_mode) or details.st_size > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path} is no plain file of at most {MAX_MANIFEST_BYTES} bytes")
    return path.read_bytes()


def read_body(where: Path | str, manifest: bytes, step: int) -> dict[str, Any]:
    """What a manifest holds of a step. Raises CheckpointError where it was changed or is of
    another, or of another version; KeyError or TypeError for one that is malformed."""
    body = unseal(where, MANIFEST, manifest)
    if body["format"] != FORMAT:
        raise CheckpointError(f"{where} has format {body['format']!r}; this version reads {FORMAT}")
    if body["step"] != step:
        raise CheckpointError(f"{where} says it is of step {body['step']!r}")
    for name in body["files"]:
        if not stays_inside(name):
            raise CheckpointError(f"{where}: the manifest lists '{name}', which could lead outside")
    return body


def seal(body: Mapping[str, Any]) -> str:
    """JSON that says whether it was changed."""
    return json.dumps({"body": body, "sha256": hash_body(body)}, indent=1)


def unseal(where: Path | str, name: str, content: bytes) -> dict[str, Any]:
    """Raises CheckpointError where it was changed."""
    try:
        sealed = parse_json(content)
    except ValueError as error:
        raise CheckpointError(f"{where}/{name} is not JSON: {error}") from error
    if sealed["sha256"] != hash_body(sealed["body"]):
        raise CheckpointError(f"{where}/{name} was changed: its own checksum does not match")
    return sealed["body"]


def _check_files(
    directory: Path, listed: Mapping[str, Mapping[str, Any]], *, contents: bool
) -> None:
    present = set(list_files(directory)) - {MANIFEST}
    if missing := sorted(set(listed) - present):
        raise CheckpointError(f"{directory} lacks {', '.join(missing)}")
    if extra := sorted(present - set(listed)):
        raise CheckpointError(
            f"{directory} holds what its manifest does not list: {', '.join(extra)}"
        )
    for name, facts in listed.items():
        path = directory / name
        size = path.stat().st_size
        if size != facts["size"]:
            raise CheckpointError(f"{path} has {size} bytes instead of {facts['size']}")
        if contents and hash_file(path) != facts["sha256"]:
            raise CheckpointError(f"{path} is damaged: its checksum does not match")


def hash_body(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(
        json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
