"""Store images, audio clips and videos of a record: one file in `media/` for each file of steps.

A file holds each medium once, in its original encoding, named by a hash of its bytes. The model's
input tensors are not stored: they are a hundred times larger, and the processor recomputes them
exactly.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_128_hexdigest

from ratchet.errors import DataError
from ratchet.types import Group, Message, Part, Trajectory
from ratchet.utils.safe_read import require_file

MEDIA = "media"  # directory name, inside the record's directory
SCHEMA = pa.schema([pa.field("name", pa.string()), pa.field("source", pa.large_binary())])
DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)
PLACEHOLDER = re.compile(r"media:(\w+);([\w.+-]+/[\w.+-]+)")


def hash_content(source: bytes) -> str:
    return xxh3_128_hexdigest(source)


# Cached because the attempts of a group have the same media.
@lru_cache(64)
def _extract_from_url(url: str) -> tuple[str, bytes] | None:
    """Return the placeholder for a `data:` URL, and the bytes that the URL holds.

    Return None if it is no such URL, or if it could not be restored exactly.
    """
    match = DATA_URL.fullmatch(url)
    if match is None:
        return None
    content_type, text = match.groups()
    try:
        source = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    is_restorable = base64.b64encode(source).decode() == text
    placeholder = f"media:{hash_content(source)};{content_type}"
    return (placeholder, source) if is_restorable else None


def shorten_value(part: Part) -> str:
    """Return a part's value. A medium in a `data:` URL is replaced by a placeholder."""
    extracted = _extract_from_part(part)
    return part.value if extracted is None else extracted[0]


def parse_placeholder(value: str) -> str | None:
    """Return the name of the medium in a placeholder; None if the value is not a placeholder."""
    match = PLACEHOLDER.fullmatch(value)
    return None if match is None else match[1]


def restore_value(kind: str, value: str, sources: Mapping[str, bytes]) -> str:
    """Return the value that `shorten_value` shortened. Raises DataError for a missing medium."""
    match = PLACEHOLDER.fullmatch(value) if kind != "text" else None
    if match is None:
        return value
    return f"data:{match[2]};base64,{base64.b64encode(find_source(match[1], sources)).decode()}"


def find_source(name: str, sources: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a medium. Raises DataError if it is missing."""
    if name not in sources:
        raise DataError(f"medium {name} is not in the record: copy the run's steps/{MEDIA}/ too")
    return sources[name]


def collect_sources(groups: Sequence[Group], group_indices: Iterable[int]) -> dict[str, bytes]:
    """Return all media of the groups at `group_indices`, by name."""
    sources: dict[str, bytes] = {}
    for index in group_indices:
        group = groups[index]
        sources |= _collect_inline(group.task.messages)
        for trajectory in group.trajectories:
            sources |= _collect_from_trajectory(trajectory)
    return sources


def _collect_from_trajectory(trajectory: Trajectory) -> dict[str, bytes]:
    return _collect_inline(trajectory.messages) | {
        hash_content(medium.source): medium.source for _, medium in trajectory.media
    }


def _collect_inline(messages: Sequence[Message]) -> dict[str, bytes]:
    extracted = (_extract_from_part(part) for part in _iterate_parts(messages))
    return {hash_content(medium[1]): medium[1] for medium in extracted if medium is not None}


def _extract_from_part(part: Part) -> tuple[str, bytes] | None:
    if part.type == "text" or not part.value.startswith("data:"):
        return None
    return _extract_from_url(part.value)


def _iterate_parts(messages: Sequence[Message]) -> Iterator[Part]:
    for message in messages:
        if not isinstance(message.content, str):
            yield from message.content


def write_media(path: Path, sources: Mapping[str, bytes]) -> None:
    """Write media in the order of their names, so that equal media give equal bytes."""
    names = sorted(sources)
    table = pa.Table.from_arrays(
        [
            pa.array(names, pa.string()),
            pa.array([sources[name] for name in names], pa.large_binary()),
        ],
        schema=SCHEMA,
    )
    pq.write_table(table, path, compression="none", use_dictionary=False, write_statistics=False)


def read_media(path: Path) -> dict[str, bytes]:
    """Return media by name. Raises DataError for a file that can't be read."""
    try:
        require_file(path)
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}, which holds images and other media of the record, can't be read: {error}"
        ) from error
    return dict(
        zip(table.column("name").to_pylist(), table.column("source").to_pylist(), strict=True)
    )
