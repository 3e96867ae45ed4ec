"""Read a record: the Parquet files in a run's `steps/` that its index lists as complete.

`index.jsonl` has a line for each file: its name, size and SHA-256, and the steps in it
(`StepFacts`). A line is written after its file and has its own checksum. Files without a line were
left by a killed process.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from xxhash import xxh3_64

from ratchet.errors import DataError
from ratchet.observe.records.groups import read_groups
from ratchet.observe.records.media import MEDIA, read_media
from ratchet.observe.records.schema import SCALARS, SCHEMA
from ratchet.types import Group
from ratchet.utils.safe_read import open_file, parse_json, require_file

INDEX = "index.jsonl"
COUNTS = ("step", "rows", "groups", "drawn")
MAX_COUNT = 2**31 - 1  # the columns of a record hold numbers of steps and rows as int32
RESTORE = "copy the run's steps/ again, or restore a backup"
WITHOUT_NULLS = ("step", "group_index", "task", "length", "tokens")
# Errors of a value that a record can't have, in a file of the right types.
ODD_VALUE_ERRORS = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


@dataclass(frozen=True, slots=True)
class StepFacts:
    """The index entry of one step."""

    step: int  # its number in metrics.jsonl
    stage: str
    rows: int  # number of recorded trajectories
    groups: int  # number of recorded groups
    drawn: int  # number of groups in the step's batch; `record.groups` may limit the recorded ones
    # Fingerprints of the weights after the step, by role, if the learner can compute them.
    fingerprints: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return self.groups == self.drawn


# The name of a Parquet file, by the steps of its first and last rows.
RECORD_NAME = re.compile(r"\d{8,}-\d{8,}\.parquet")


@dataclass(frozen=True, slots=True)
class RecordFile:
    """The index entry of one Parquet file, which has the rows of some steps, in order."""

    name: str
    size: int
    sha256: str
    steps: tuple[StepFacts, ...]
    # Size and hash of the file of the same name in `media/`, if the rows have media.
    media_size: int = 0
    media_sha256: str = ""

    def line(self) -> str:
        body = {
            name: value
            for name, value in asdict(self).items()
            if value or not name.startswith("media_")
        }
        return json.dumps({**body, "check": _compute_checksum(body)}) + "\n"


def _compute_checksum(body: Mapping[str, Any]) -> str:
    return xxh3_64(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_index(directory: Path) -> list[RecordFile]:
    """Return the files in the index; [] if there is no index.

    An unfinished last line is ignored. Raises DataError for a changed line, and for an index that
    can't be read, for example because it is not a regular file.
    """
    path = directory / INDEX
    try:
        with open_file(path) as file:
            lines = file.read().splitlines(keepends=True)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror or error}") from error
    return [
        _read_line(path, number, line)
        for number, line in enumerate(lines, 1)
        if line.endswith(b"\n")
    ]


def _read_line(path: Path, number: int, line: bytes) -> RecordFile:
    try:
        body = parse_json(line)
        if body.pop("check") != _compute_checksum(body):
            raise ValueError("its checksum does not match")
        if not RECORD_NAME.fullmatch(body["name"]):
            raise ValueError(f"{body['name']!r} is not a name of a record file")
        steps = tuple(StepFacts(**facts) for facts in body.pop("steps"))
        file = RecordFile(**body, steps=steps)
        _check_facts(file)
        return file
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path}, line {number} was changed: {error}; {RESTORE}") from None


def _check_facts(file: RecordFile) -> None:
    """Raise ValueError for an entry of another type, a negative number, or a file without steps."""
    if not file.steps:
        raise ValueError("it names no step")
    numbers = [("size", file.size), ("media_size", file.media_size)]
    texts = [("sha256", file.sha256), ("media_sha256", file.media_sha256)]
    for facts in file.steps:
        numbers += [(name, getattr(facts, name)) for name in COUNTS]
        texts += [("stage", facts.stage)]
        texts += [("fingerprints", value) for value in facts.fingerprints.values()]
    for name, value in numbers:
        limit = MAX_COUNT if name in COUNTS else math.inf
        if type(value) is not int or not 0 <= value <= limit:
            raise ValueError(f"its {name} is {str(value)[:80]!r}")
    for name, value in texts:
        if not isinstance(value, str):
            raise ValueError(f"its {name} is {str(value)[:80]!r}")


def read_rows(
    directory: Path, file: RecordFile, columns: Sequence[str], *, words: Sequence[str] = ()
) -> pa.Table:
    """Return columns of all rows of a Parquet file.

    Args:
        directory: The run's `steps/`.
        file: The index entry of the file.
        columns: Names of columns of SCHEMA.
        words: The columns of text to read as dictionaries.

    Raises:
        DataError: The file can't be read, lacks a column, has one of another type than SCHEMA, or
            has not the number of rows that the index says.
    """
    path = directory / file.name
    try:
        require_file(path)
        with pq.ParquetFile(path, read_dictionary=list(words)) as parquet:
            missing = {*columns} - {*parquet.schema_arrow.names}
            if missing:
                raise DataError(f"{path} lacks column {min(missing)}: {RESTORE}")
            table = parquet.read(list(columns)).replace_schema_metadata(None)
        table = table.select(list(columns))
    except KeyError as error:  # one of `words`: pyarrow gives its name as bytes
        raise DataError(f"{path} lacks column {error.args[0].decode()}: {RESTORE}") from error
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} can't be read: {error}") from error
    for column in table.schema:
        expected = SCHEMA.field(column.name).type
        kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
        if kind != expected:
            raise DataError(
                f"{path}, column {column.name} has type {column.type}, and a record has {expected} "
                f"there: {RESTORE}"
            )
        if column.name in WITHOUT_NULLS and table[column.name].null_count:
            raise DataError(f"{path}, column {column.name} lacks a value: {RESTORE}")
    n_rows = sum(facts.rows for facts in file.steps)
    if table.num_rows != n_rows:
        raise DataError(f"{path} has {table.num_rows} rows, and {INDEX} says {n_rows}: {RESTORE}")
    return table


class Record:
    """The contents of a run's `steps/`. Opening it reads only the index."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = read_index(directory)

    @cached_property
    def steps(self) -> dict[int, StepFacts]:
        return {facts.step: facts for file in self.files for facts in file.steps}

    def table(
        self, columns: Sequence[str] = tuple(SCALARS), *, steps: Iterable[int] | None = None
    ) -> pa.Table:
        """Return `columns` of all rows, or of the rows of `steps`, in order.

        The default columns have one number or word per trajectory, so that reading them is fast
        even for long trajectories. Raises DataError for a file that can't be read.
        """
        chosen_steps = None if steps is None else frozenset(steps)
        fields = pa.schema([SCHEMA.field(name) for name in columns])
        return pa.concat_tables(
            [fields.empty_table(), *self._read_tables(list(columns), chosen_steps)]
        )

    def _read_tables(
        self, columns: list[str], chosen_steps: frozenset[int] | None
    ) -> Iterator[pa.Table]:
        """Yield the rows of each step in `chosen_steps` as one table; None: of every step."""
        for file in self.files:
            is_chosen = [chosen_steps is None or facts.step in chosen_steps for facts in file.steps]
            if not any(is_chosen):
                continue
            table = read_rows(self.directory, file, columns)
            end_rows = itertools.accumulate(facts.rows for facts in file.steps)
            for facts, end_row, chosen in zip(file.steps, end_rows, is_chosen, strict=True):
                if chosen:
                    yield table.slice(end_row - facts.rows, facts.rows)

    def step(self, step: int) -> pa.Table:
        """Return all columns of one step's rows, after checking the file's checksum.

        Raises DataError if the step is missing or its file was changed.
        """
        self.verify(self.find_file(step))
        return self.table(SCHEMA.names, steps=[step])

    def find_file(self, step: int) -> RecordFile:
        """Return the index entry of the file with a step. Raise DataError if there is none."""
        file = next(
            (file for file in self.files for facts in file.steps if facts.step == step), None
        )
        if file is None:
            raise DataError(
                f"step {step} is not in the record in {self.directory}: it has "
                f"{_format_ranges(self.steps)}"
            )
        return file

    def media(self, step: int) -> dict[str, bytes]:
        """Return the encoded media of a step and of the other steps in its file, by name.

        Raises DataError if the media can't be read or were changed.
        """
        file = self.find_file(step)
        if not file.media_size:
            return {}
        path = self.directory / MEDIA / file.name
        _verify(path, file.media_sha256)
        return read_media(path)

    def groups(self, step: int) -> list[Group]:
        """Return all groups of a step's batch.

        `Medium.inputs` are empty, because the processor computes them again (see `read_groups`).
        Raises DataError like `step` and `media`, and if only a sample of the groups was recorded.
        """
        table = self.step(step)
        facts = self.steps[step]
        if not facts.is_complete:
            raise DataError(
                f"step {step} has only {facts.groups} of its {facts.drawn} groups in the record "
                "(record.groups), so it can be inspected but not recomputed"
            )
        media = self.media(step)
        try:
            return read_groups(table, media)
        except (*ODD_VALUE_ERRORS, AssertionError, pa.ArrowException) as error:
            path = self.directory / self.find_file(step).name
            raise DataError(
                f"{path}, step {step} has values that no rollout has: {type(error).__name__}: "
                f"{error}"
            ) from error

    def verify(self, file: RecordFile) -> None:
        """Raise DataError if a file differs from what was written."""
        _verify(self.directory / file.name, file.sha256)


def hash_file(path: Path) -> str:
    require_file(path)
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _verify(path: Path, sha256: str) -> None:
    try:
        digest = hash_file(path)
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from error
    if digest != sha256:
        raise DataError(f"{path} was changed since it was recorded: its checksum does not match")


def _format_ranges(steps: Iterable[int]) -> str:
    """Format steps as ranges, such as `1-8, 12`."""
    ranges: list[list[int]] = []
    for step in sorted(steps):
        if ranges and step == ranges[-1][1] + 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in ranges) or "none"
