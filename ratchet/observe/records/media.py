"""The images, audio clips and videos of a record: `media/` has a file beside each file of steps,
with each of them once.

They are kept encoded, as they came, and named by a hash of that: what a model reads of one is a
hundred times larger, and its processor computes it again, bit for bit.
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


def name_of(source: bytes) -> str:
    return xxh3_128_hexdigest(source)


@lru_cache(64)  # the attempts of a group have the same
def _taken_out(url: str) -> tuple[str, bytes] | None:
    """What stands for a `data:` URL in a record, and what it holds; None for one that could not be
    put back as it was."""
    found = INLINE.fullmatch(url)
    if found is None:
        return None
    form, text = found.groups()
    try:
        source = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    whole = base64.b64encode(source).decode() == text
    return (f"media:{name_of(source)};{form}", source) if whole else None


def shortened(part: Part) -> str:
    """A part's value with the name of a medium in place of one that it holds."""
    found = (
        _taken_out(part.value) if part.type != "text" and part.value.startswith("data:") else None
    )
    return part.value if found is None else found[0]


def name_in(value: str) -> str | None:
    """The medium that a shortened value names."""
    found = SHORT.fullmatch(value)
    return None if found is None else found[1]


def restored(kind: str, value: str, sources: Mapping[str, bytes]) -> str:
    """The value before it was shortened. Raises DataError for a medium that is gone."""
    found = SHORT.fullmatch(value) if kind != "text" else None
    if found is None:
        return value
    return f"data:{found[2]};base64,{base64.b64encode(source_of(found[1], sources)).decode()}"


def source_of(name: str, sources: Mapping[str, bytes]) -> bytes:
    """Raises DataError for a medium that is gone."""
    if name not in sources:
        raise DataError(f"medium {name} is not in the record: copy the run's steps/{MEDIA}/ too")
    return sources[name]


def sources_of(groups: Sequence[Group], chosen: Iterable[int]) -> dict[str, bytes]:
    """All media of some of the groups, by name."""
    found: dict[str, bytes] = {}
    for at in chosen:
        group = groups[at]
        found |= _inline(group.task.messages)
        for trajectory in group.trajectories:
            found |= _of(trajectory)
    return found


def _of(trajectory: Trajectory) -> dict[str, bytes]:
    return _inline(trajectory.messages) | {
        name_of(medium.source): medium.source for _, medium in trajectory.media
    }


def _inline(messages: Sequence[Message]) -> dict[str, bytes]:
    return {name: source for part in _parts(messages) for name, source in _held(part)}


def _held(part: Part) -> Iterator[tuple[str, bytes]]:
    found = (
        _taken_out(part.value) if part.type != "text" and part.value.startswith("data:") else None
    )
    if found is not None:
        yield name_of(found[1]), found[1]


def _parts(messages: Sequence[Message]) -> Iterator[Part]:
    for message in messages:
        if not isinstance(message.content, str):
            yield from message.content


def write_media(path: Path, sources: Mapping[str, bytes]) -> None:
    """In the order of their names, so that equal media are equal bytes."""
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
    """By name. Raises DataError for a file that can't be read."""
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
