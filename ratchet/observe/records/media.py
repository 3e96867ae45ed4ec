"""Images, audio clips and videos of a record: `media/` has one file for each file of steps, with
each medium once.

They are kept encoded, as they came, and named by a hash of their bytes. What a model reads of one
is a hundred times larger, and its processor computes it again with the same bits.
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

MEDIA = "media"  # the directory, in that of the record
SCHEMA = pa.schema([pa.field("name", pa.string()), pa.field("source", pa.large_binary())])
INLINE = re.compile(r"data:([\w.+-]+/[\w.+-]+);base64,(.*)", re.DOTALL)
SHORT = re.compile(r"media:(\w+);([\w.+-]+/[\w.+-]+)")


def content_name(source: bytes) -> str:
    return xxh3_128_hexdigest(source)


@lru_cache(64)  # the attempts of a group have the same
def _taken_out(url: str) -> tuple[str, bytes] | None:
    """Return the placeholder for a `data:` URL and the bytes it holds; None if it could not be
    restored exactly."""
    match = INLINE.fullmatch(url)
    if match is None:
        return None
    form, text = match.groups()
    try:
        source = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    whole = base64.b64encode(source).decode() == text
    return (f"media:{content_name(source)};{form}", source) if whole else None


def shortened(part: Part) -> str:
    """Return a part's value with the names of media in place of the media that it holds."""
    taken = (
        _taken_out(part.value) if part.type != "text" and part.value.startswith("data:") else None
    )
    return part.value if taken is None else taken[0]


def name_in(value: str) -> str | None:
    """Return the name of the medium in a shortened value, or None."""
    match = SHORT.fullmatch(value)
    return None if match is None else match[1]


def restored(kind: str, value: str, sources: Mapping[str, bytes]) -> str:
    """Return the value before it was shortened. Raises DataError for a missing medium."""
    match = SHORT.fullmatch(value) if kind != "text" else None
    if match is None:
        return value
    return f"data:{match[2]};base64,{base64.b64encode(find_source(match[1], sources)).decode()}"


def find_source(name: str, sources: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a medium. Raises DataError if it is missing."""
    if name not in sources:
        raise DataError(f"medium {name} is not in the record: copy the run's steps/{MEDIA}/ too")
    return sources[name]


def collect_sources(groups: Sequence[Group], chosen: Iterable[int]) -> dict[str, bytes]:
    """Return all media of the chosen groups, by name."""
    sources: dict[str, bytes] = {}
    for at in chosen:
        group = groups[at]
        sources |= _inline(group.task.messages)
        for trajectory in group.trajectories:
            sources |= _of(trajectory)
    return sources


def _of(trajectory: Trajectory) -> dict[str, bytes]:
    return _inline(trajectory.messages) | {
        content_name(medium.source): medium.source for _, medium in trajectory.media
    }


def _inline(messages: Sequence[Message]) -> dict[str, bytes]:
    return {name: source for part in _parts(messages) for name, source in _held(part)}


def _held(part: Part) -> Iterator[tuple[str, bytes]]:
    sources = (
        _taken_out(part.value) if part.type != "text" and part.value.startswith("data:") else None
    )
    if sources is not None:
        yield content_name(sources[1]), sources[1]


def _parts(messages: Sequence[Message]) -> Iterator[Part]:
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
        with pq.ParquetFile(path) as file:
            table = file.read()
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path}, which holds images and other media of the record, can't be read: {error}"
        ) from error
    return dict(
        zip(table.column("name").to_pylist(), table.column("source").to_pylist(), strict=True)
    )
