"""Read a run's record for the report page: a few columns of every rollout, and the details of those
that are opened."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from numpy.typing import NDArray

from ratchet.commands.report.media import data_url, named_parts
from ratchet.commands.report.schema import pack
from ratchet.commands.report.texts import TokenTexts, find_tokenizer
from ratchet.errors import DataError
from ratchet.observe.records.reader import INDEX, Record, RecordFile
from ratchet.observe.records.schema import SCALARS, SCHEMA
from ratchet.runs.run_dir import RunDirectory
from ratchet.types import MediaKind

pc: Any = pyarrow.compute  # its functions are created on import, so type checkers see none

# Columns of every rollout. Words are sent as indices into a list of distinct words, "" for none,
# and whole numbers in the smallest type that holds them, because a long run has a million rows.
WORDS = ("stage", "task", "environment", "tag", "use", "outcome", "failure")
WHOLE = (
    "step",
    "group_index",
    "attempt",
    "length",
    "generated_tokens",
    "trained_tokens",
    "truncated",
)
FLOATS = ("reward", "advantage")  # NaN if absent
NUMBERS = (*WHOLE, *FLOATS)
# Numbers of each token: their name on the page, and their column in the record.
TOKEN_NUMBERS = {
    "logprob": "rollout_logprobs",
    "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "advantage": "advantages",
    "value": "values",
    "return": "returns",
}
NOT_SHOWN = (
    "routes",
    "routes_shape",
    "log_kept_mass",
    "extras",
    "trainable",
    "task_seed",
    "uses",
    "weight",
    "rollout_logprob",
)
DETAILS = [name for name in SCHEMA.names if name not in NOT_SHOWN]
ONE = pa.scalar(1, pa.int32())
HELD = 4  # maximum number of steps whose tables stay in memory
DIGITS = 5  # significant digits of a token's numbers


class Rollouts:
    """The record of one run, which may grow, lose its oldest files, or be absent."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._stamp = ""
        self._record: Record | None = None
        self._tables: dict[int, pa.Table] = {}
        # name and media of the file that was read last
        self._media: tuple[str, Mapping[str, bytes]] = ("", {})

    def stamp(self) -> str:
        """Return a value that changes with the record, without reading the record."""
        try:
            stat = (self.directory.steps / INDEX).stat()
        except FileNotFoundError:
            return ""
        return f"{stat.st_ino}-{stat.st_size}"

    @property
    def record(self) -> Record:
        """Return the record as it is now. Raises DataError if its index was changed by hand."""
        stamp = self.stamp()
        if self._record is None or stamp != self._stamp:
            self._record, self._stamp, self._tables = Record(self.directory.steps), stamp, {}
        return self._record

    def columns(self, known: Sequence[str] = (), *, every: int = 1) -> bytes:
        """Return the packed columns of all rows, without the files in `known` if the record still
        begins with them.

        "after" in the header is the number of files left out.

        Args:
            known: Names of files whose rows the page already has.
            every: Take one step in this many.
        """
        record = self.record
        names = [file.name for file in record.files]
        after = len(known) if names[: len(known)] == list(known) else 0
        table = _scalars(record.directory, record.files[after:])
        if every > 1:
            table = table.filter(
                pc.is_in(
                    table["step"], value_set=pa.array(sorted(record.steps)[::every], pa.int32())
                )
            )
        steps = {
            str(step): [facts.rows, facts.groups, facts.drawn, facts.fingerprints]
            for step, facts in record.steps.items()
        }
        words, codes = _coded(table)
        return pack(
            {"files": names, "after": after, "words": words, "steps": steps},
            codes | _numbers(table),
        )

    def details(self, step: int, places: Sequence[int]) -> list[dict[str, Any]]:
        """Return the details of a step's rollouts at `places`. Raises DataError for one that is not
        in the record."""
        record = self.record
        if step not in record.steps:
            raise DataError(f"step {step} is not in the record (any more)")
        if step not in self._tables:
            while len(self._tables) >= HELD:
                self._tables.pop(next(iter(self._tables)))
            self._tables[step] = record.table(DETAILS, steps=[step])
        table = self._tables[step]
        if any(not 0 <= place < table.num_rows for place in places):
            raise DataError(f"step {step} has {table.num_rows} rollouts in the record")
        total = float(_loss_shares(table).sum())
        rows = table.take(pa.array(places, pa.int64())).to_pylist()
        return [self._detail(place, row, total) for place, row in zip(places, rows, strict=True)]

    def media(self, step: int, kinds: Mapping[str, MediaKind]) -> dict[str, str]:
        """Return `data:` URLs of a step's media by name, except missing ones and those that no
        browser shows."""
        record = self.record
        file = next(
            (file for file in record.files if any(facts.step == step for facts in file.steps)), None
        )
        if file is None:
            return {}
        if self._media[0] != file.name:
            try:
                self._media = (file.name, record.media(step))
            except DataError:  # the steps were copied without their media
                self._media = (file.name, {})
        sources = self._media[1]
        urls = {
            name: data_url(kind, sources[name]) for name, kind in kinds.items() if name in sources
        }
        return {name: url for name, url in urls.items() if url is not None}

    def search(self, text: str, *, most: int) -> tuple[list[tuple[int, int]], int | None]:
        """Return (step, place in the step) of at most `most` rollouts whose messages contain the
        text, and the earliest step searched.

        The newest files are searched first. The step is None if all were searched.
        """
        matches: list[tuple[int, int]] = []
        record = self.record
        for file in reversed(record.files):
            matches += _matches(record.directory, file, text)
            if len(matches) >= most:
                return matches[:most], file.steps[0].step
        return matches, None

    def sample(self, rollouts: int, tokens: int) -> list[dict[str, Any]]:
        """Return details of at most `rollouts` rollouts with at most `tokens` tokens: whole groups
        at steps spread evenly over the run.

        At each step the tasks whose names hash lowest are chosen, so that a repeated task is chosen
        again, in other runs too.
        """
        table = _scalars(self.record.directory, self.record.files).select(
            ["step", "task", "group_index", "length"]
        )
        ranked = _ranked(table.to_pydict())
        sizes = sorted(len(places) for groups in ranked.values() for places, _ in groups)
        steps_wanted = rollouts // sizes[len(sizes) // 2] if sizes else 0
        steps = _spread(list(ranked), steps_wanted)
        chosen: list[dict[str, Any]] = []
        # Take one group of every step, then a second group of every step, and so on.
        for turn in range(-(-steps_wanted // max(1, len(steps)))):
            for step in steps:
                places, length = ranked[step][turn] if turn < len(ranked[step]) else ([], 0)
                if len(chosen) + len(places) <= rollouts and length <= tokens:
                    tokens -= length
                    chosen += self.details(step, places)
        return chosen

    # --- one rollout

    @cached_property
    def _texts(self) -> TokenTexts:
        return TokenTexts(find_tokenizer(self.directory))

    def _detail(self, place: int, row: Mapping[str, Any], total: float) -> dict[str, Any]:
        facts = {name: _finite(row[name]) for name in SCALARS if name in row}
        numbers = {
            name: _rounded(row[column])
            for name, column in TOKEN_NUMBERS.items()
            if row[column] is not None
        }
        share = _share(row, total)
        if share is not None:
            numbers["share"] = share
        sampled, learned = row["rollout_logprobs"], row["old_logprobs"]
        # Only if the policy wrote tokens: the version of any other token is -1.
        if learned is not None and max(row["versions"], default=-1) >= 0:
            numbers["ratio"] = _rounded(
                [math.exp(min(a - b, 80.0)) for a, b in zip(learned, sampled, strict=True)]
            )
        return {
            "place": place,
            "facts": facts,
            "reward_parts": {name: _finite(value) for name, value in row["reward_parts"] or ()},
            "metrics": {name: _finite(value) for name, value in row["metrics"] or ()},
            "answer": row["answer"],
            "task_meta": row["task_meta"],
            "failure_detail": row["failure_detail"],
            "messages": named_parts(row["messages"] or row["prompt"] or [], row["media"] or ()),
            "turns": [{**turn, "reward": _finite(turn["reward"])} for turn in row["turns"] or ()],
            "tokens": {
                "id": row["tokens"],
                "text": self._texts(row["tokens"]),
                "owner": row["owner"],
                "trained": row["trained"] or [False] * len(row["tokens"]),
                "version": row["versions"],
                **numbers,
            },
        }


# --- columns


def _scalars(directory: Path, files: Sequence[RecordFile]) -> pa.Table:
    """Return the scalar columns. Raises DataError for a file that can't be read."""
    names = [*WORDS, *NUMBERS]
    kinds = {name: pa.dictionary(pa.int32(), pa.string()) for name in WORDS} | {
        name: SCALARS[name] for name in NUMBERS
    }
    parts = [pa.schema(kinds.items()).empty_table()]
    for file in files:
        path = directory / file.name
        try:
            with pq.ParquetFile(path, read_dictionary=list(WORDS)) as parquet:
                parts.append(parquet.read(names).replace_schema_metadata(None))
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} can't be read: {error}") from error
    return pa.concat_tables(parts)


def _coded(table: pa.Table) -> tuple[dict[str, list[str]], dict[str, NDArray[Any]]]:
    """Return each column's distinct words, "" first, and the index of each row's word."""
    words: dict[str, list[str]] = {}
    codes: dict[str, NDArray[Any]] = {}
    for name in WORDS:
        column = table[name].unify_dictionaries()
        chunk = column.chunk(0) if column.num_chunks else None
        words[name] = ["", *(chunk.dictionary.to_pylist() if chunk is not None else [])]
        codes[name] = _whole(
            pa.chunked_array([pc.add(part.indices, ONE) for part in column.chunks], pa.int32())
        )
    return words, codes


def _numbers(table: pa.Table) -> dict[str, NDArray[Any]]:
    floats = {
        name: pc.fill_null(table[name].cast(pa.float32()), math.nan).to_numpy() for name in FLOATS
    }
    return {name: _whole(table[name].cast(pa.int32())) for name in WHOLE} | floats


def _whole(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column in the smallest integer type that holds it; 0 for nulls."""
    numbers = (pc.fill_null(column, 0) if column.null_count else column).to_numpy()
    return numbers.astype(np.min_scalar_type(max(numbers.max(initial=0), 0)), copy=False)


def _matches(directory: Path, file: RecordFile, text: str) -> Iterator[tuple[int, int]]:
    try:
        with pq.ParquetFile(directory / file.name) as parquet:
            table = parquet.read(["step", "messages"])
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{directory / file.name} can't be read: {error}") from error
    messages = table["messages"].combine_chunks()
    flat = pc.list_flatten(messages)
    hits = pc.match_substring(pc.struct_field(flat, "content"), text, ignore_case=True)
    rows = np.unique(pc.list_parent_indices(messages).filter(pc.fill_null(hits, False)).to_numpy())
    ends = np.cumsum([facts.rows for facts in file.steps])
    for row in rows:
        at = int(np.searchsorted(ends, row, side="right"))
        yield file.steps[at].step, int(row - (ends[at] - file.steps[at].rows))


# --- a sample


def _ranked(columns: Mapping[str, list[Any]]) -> dict[int, list[tuple[list[int], int]]]:
    """Return each step's groups in the order of their tasks' hashes.

    A group is the places of its rows in the step, and its number of tokens.
    """
    groups: dict[int, dict[int, tuple[str, list[int], int]]] = {}
    place, before = 0, None
    for step, task, index, length in zip(
        *(columns[name] for name in ("step", "task", "group_index", "length")), strict=True
    ):
        place = place + 1 if step == before else 0
        before = step
        task, places, total = groups.setdefault(step, {}).get(index, (task, [], 0))
        groups[step][index] = (task, [*places, place], total + length)
    return {
        step: [
            (places, length)
            for _, places, length in sorted(
                found.values(), key=lambda group: (_rank(group[0]), group[1])
            )
        ]
        for step, found in groups.items()
    }


def _spread(values: Sequence[int], most: int) -> list[int]:
    """Return at most `most` values, evenly chosen, with the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / max(1, most - 1))] for i in range(max(0, most))]


def _rank(task: str) -> str:
    return hashlib.sha256(task.encode()).hexdigest()


# --- numbers


def _loss_shares(table: pa.Table) -> NDArray[np.float64]:
    """Return each token's unnormalised share of the loss gradient at the first update."""
    weights = (
        pc.list_flatten(table["weights"].combine_chunks())
        .to_numpy(zero_copy_only=False)
        .astype(np.float64)
    )
    advantages = pc.list_flatten(table["advantages"].combine_chunks()).to_numpy(
        zero_copy_only=False
    )
    return np.abs(weights * advantages) if len(advantages) == len(weights) else np.abs(weights)


def _share(row: Mapping[str, Any], total: float) -> list[float | None] | None:
    weights, advantages = row["weights"], row["advantages"]
    if weights is None or not total:
        return None
    factors = [1.0] * len(weights) if advantages is None else advantages
    return _rounded([abs(w * a) / total for w, a in zip(weights, factors, strict=True)])


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{DIGITS}g}") for v in values]


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
