"""Read a run's record for the report page: a few columns of every rollout, and all details of the
rollouts that a user opens."""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
from numpy.typing import NDArray

from ratchet.commands.report.media import add_media_names, make_data_url
from ratchet.commands.report.texts import TokenTexts, find_tokenizer
from ratchet.commands.report.wire_format import pack
from ratchet.errors import DataError
from ratchet.observe.records.reader import (
    INDEX,
    ODD_VALUE_ERRORS,
    Record,
    RecordFile,
    read_rows,
)
from ratchet.observe.records.schema import SCALARS, SCHEMA
from ratchet.runs.run_dir import RunDirectory
from ratchet.types import MediaKind

pc: Any = pyarrow.compute  # its functions are created on import, so type checkers see none

# Columns of every rollout. Because a long run has a million rows, words are sent as indices into a
# list of distinct words ("" for none), and integers in the smallest type that holds them.
WORDS = ("stage", "task", "environment", "tag", "use", "outcome", "failure")
INTEGERS = (
    "step",
    "group_index",
    "attempt",
    "length",
    "generated_tokens",
    "trained_tokens",
    "truncated",
)
FLOATS = ("reward", "advantage")  # NaN if missing
NUMBERS = (*INTEGERS, *FLOATS)
# Numbers of each token: name on the page -> column in the record.
TOKEN_NUMBERS = {
    "logprob": "rollout_logprobs",
    "old_logprob": "old_logprobs",
    "ref_logprob": "ref_logprobs",
    "teacher_logprob": "teacher_logprobs",
    "advantage": "advantages",
    "value": "values",
    "return": "returns",
}
# Columns of the record that the page does not show.
HIDDEN_COLUMNS = (
    "routes",
    "routes_shape",
    "log_kept_mass",
    "allowed",
    "allowed_masks",
    "extras",
    "trainable",
    "task_seed",
    "uses",
    "weight",
    "rollout_logprob",
)
DETAIL_COLUMNS = [name for name in SCHEMA.names if name not in HIDDEN_COLUMNS]
ONE = pa.scalar(1, pa.int32())
MAX_CACHED_STEPS = 4  # steps whose tables stay in memory
DIGITS = 5  # significant digits of a token's numbers


class Rollouts:
    """The record of one run, which may grow, lose its oldest files, or be absent."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self._stamp = ""
        self._record: Record | None = None
        self._tables: dict[int, pa.Table] = {}
        # Name and media of the file that was read last.
        self._media: tuple[str, Mapping[str, bytes]] = ("", {})

    def read_stamp(self) -> str:
        """Return a text that differs whenever the record differs, without reading the record."""
        try:
            stat = (self.directory.steps / INDEX).stat()
        except OSError:  # absent, or `steps` is not a directory
            return ""
        return f"{stat.st_ino}-{stat.st_size}-{stat.st_mtime_ns}"

    @property
    def record(self) -> Record:
        """Return the record as it is now. Raises DataError if its index was changed by hand."""
        stamp = self.read_stamp()
        if self._record is None or stamp != self._stamp:
            self._record = Record(self.directory.steps)
            self._stamp = stamp
            self._tables = {}
        return self._record

    def pack_columns(self, known: Sequence[str] = (), *, every: int = 1) -> bytes:
        """Return the packed columns of all rows.

        Args:
            known: Hashes of files whose rows the page already has, as in the header's key "files".
                They are omitted if the record still begins with them. The header's key "after" is
                the number of omitted files.
            every: Return only every n-th step.
        """
        record = self.record
        # Another run in the same place has files of the same names.
        hashes = [file.sha256[:16] for file in record.files]
        n_omitted = len(known) if hashes[: len(known)] == list(known) else 0
        table = _read_scalars(record.directory, record.files[n_omitted:])
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
        words, word_indices = _encode_words(table)
        return pack(
            {"files": hashes, "after": n_omitted, "words": words, "steps": steps},
            word_indices | _pack_numbers(table),
        )

    def read_details(self, step: int, positions: Sequence[int]) -> list[dict[str, Any]]:
        """Return the details of a step's rollouts, by their positions in the step.

        Raises DataError for a rollout that is not in the record.
        """
        record = self.record
        if step not in record.steps:
            raise DataError(f"step {step} is not in the record (any more)")
        if step not in self._tables:
            while len(self._tables) >= MAX_CACHED_STEPS:
                self._tables.pop(next(iter(self._tables)))
            self._tables[step] = record.table(DETAIL_COLUMNS, steps=[step])
        table = self._tables[step]
        if any(not 0 <= position < table.num_rows for position in positions):
            raise DataError(f"step {step} has {table.num_rows} rollouts in the record")
        total_gradient_size = float(_compute_gradient_sizes(table).sum())
        rows = table.take(pa.array(positions, pa.int64())).to_pylist()
        details: list[dict[str, Any]] = []
        for position, row in zip(positions, rows, strict=True):
            try:
                details.append(self._make_detail(position, row, total_gradient_size))
            except ODD_VALUE_ERRORS as error:
                raise DataError(
                    f"{record.directory / record.find_file(step).name}, step {step}, rollout "
                    f"{position} has values that no rollout has: {type(error).__name__}: {error}"
                ) from error
        return details

    def make_media_urls(self, step: int, kind_by_name: Mapping[str, MediaKind]) -> dict[str, str]:
        """Return `data:` URLs of a step's media by name.

        Media that are missing, or that browsers do not show, are left out.
        """
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
            name: make_data_url(kind, sources[name])
            for name, kind in kind_by_name.items()
            if name in sources
        }
        return {name: url for name, url in urls.items() if url is not None}

    def search(self, text: str, *, limit: int) -> tuple[list[tuple[int, int]], int | None]:
        """Search the rollouts' messages for a text, the newest files first.

        Return (step, position in the step) of at most `limit` matching rollouts, and the earliest
        step that was searched; None for that step means that all steps were searched.
        """
        matches: list[tuple[int, int]] = []
        record = self.record
        for file in reversed(record.files):
            matches += _find_matches(record.directory, file, text)
            if len(matches) >= limit:
                return matches[:limit], file.steps[0].step
        return matches, None

    def sample(self, max_rollouts: int, max_tokens: int) -> list[dict[str, Any]]:
        """Return the details of a sample of rollouts: whole groups at steps spread over the run.

        At each step the tasks with the lowest hashes are chosen, so that the same tasks are chosen
        at other steps and in other runs.

        Args:
            max_rollouts: Maximum number of rollouts.
            max_tokens: Maximum number of tokens of all these rollouts together.
        """
        table = _read_scalars(self.record.directory, self.record.files).select(
            ["step", "task", "group_index", "length"]
        )
        ranked = _rank_groups(table.to_pydict())
        sizes = [len(positions) for groups in ranked.values() for positions, _ in groups]
        n_groups = max_rollouts // statistics.median_high(sizes) if sizes else 0
        steps = _pick_evenly(list(ranked), n_groups)
        sample: list[dict[str, Any]] = []
        # Take one group of every step, then a second group of every step, and so on.
        for rank in range(math.ceil(n_groups / max(1, len(steps)))):
            for step in steps:
                positions, length = ranked[step][rank] if rank < len(ranked[step]) else ([], 0)
                if len(sample) + len(positions) <= max_rollouts and length <= max_tokens:
                    max_tokens -= length
                    sample += self.read_details(step, positions)
        return sample

    # --- one rollout

    @cached_property
    def _token_texts(self) -> TokenTexts:
        return TokenTexts(find_tokenizer(self.directory))

    def _make_detail(
        self, position: int, row: Mapping[str, Any], total_gradient_size: float
    ) -> dict[str, Any]:
        """Return what the page shows of one rollout: facts, messages, and values of each token."""
        facts = {name: _drop_non_finite(row[name]) for name in SCALARS if name in row}
        numbers = {
            name: _round(row[column])
            for name, column in TOKEN_NUMBERS.items()
            if row[column] is not None
        }
        shares = _compute_shares(row, total_gradient_size)
        if shares is not None:
            numbers["share"] = shares
        rollout_logprobs = row["rollout_logprobs"]
        old_logprobs = row["old_logprobs"]
        # Tokens that the policy did not write have version -1. A row without a token of the policy
        # has no ratio.
        if old_logprobs is not None and max(row["versions"], default=-1) >= 0:
            numbers["ratio"] = _round(
                [
                    math.exp(min(old - rollout, 80.0))
                    for old, rollout in zip(old_logprobs, rollout_logprobs, strict=True)
                ]
            )
        return {
            "row_index": position,
            "facts": facts,
            "reward_parts": {
                name: _drop_non_finite(value) for name, value in row["reward_parts"] or ()
            },
            "metrics": {name: _drop_non_finite(value) for name, value in row["metrics"] or ()},
            "answer": row["answer"],
            "task_meta": row["task_meta"],
            "failure_detail": row["failure_detail"],
            "messages": add_media_names(row["messages"] or row["prompt"] or [], row["media"] or ()),
            "turns": [
                {**turn, "reward": _drop_non_finite(turn["reward"])} for turn in row["turns"] or ()
            ],
            "tokens": {
                "id": row["tokens"],
                "text": self._token_texts(row["tokens"]),
                "special": self._token_texts.find_special(row["tokens"]),
                "owner": row["owner"],
                "trained": row["trained"] or [False] * len(row["tokens"]),
                "version": row["versions"],
                **numbers,
            },
        }


# --- columns


def _read_scalars(directory: Path, files: Sequence[RecordFile]) -> pa.Table:
    """Return the scalar columns. Raises DataError for a file that can't be read."""
    names = [*WORDS, *NUMBERS]
    kinds = {name: pa.dictionary(pa.int32(), pa.string()) for name in WORDS} | {
        name: SCALARS[name] for name in NUMBERS
    }
    parts = [pa.schema(kinds.items()).empty_table()]
    parts += [read_rows(directory, file, names, words=WORDS) for file in files]
    return pa.concat_tables(parts)


def _encode_words(table: pa.Table) -> tuple[dict[str, list[str]], dict[str, NDArray[Any]]]:
    """Return each column's distinct words, "" first, and the index of each row's word."""
    words: dict[str, list[str]] = {}
    indices: dict[str, NDArray[Any]] = {}
    for name in WORDS:
        column = table[name].unify_dictionaries()
        chunk = column.chunk(0) if column.num_chunks else None
        words[name] = ["", *(chunk.dictionary.to_pylist() if chunk is not None else [])]
        indices[name] = _shrink_integers(
            pa.chunked_array([pc.add(part.indices, ONE) for part in column.chunks], pa.int32())
        )
    return words, indices


def _pack_numbers(table: pa.Table) -> dict[str, NDArray[Any]]:
    floats = {
        name: pc.fill_null(table[name].cast(pa.float32()), math.nan).to_numpy() for name in FLOATS
    }
    return {name: _shrink_integers(table[name].cast(pa.int32())) for name in INTEGERS} | floats


def _shrink_integers(column: pa.ChunkedArray) -> NDArray[Any]:
    """Return a column in the smallest integer type that holds its values. Nulls become 0."""
    numbers = (pc.fill_null(column, 0) if column.null_count else column).to_numpy()
    return numbers.astype(np.min_scalar_type(max(numbers.max(initial=0), 0)), copy=False)


def _find_matches(directory: Path, file: RecordFile, text: str) -> Iterator[tuple[int, int]]:
    """Yield (step, position in the step) of each row whose messages contain the text."""
    table = read_rows(directory, file, ["step", "messages"])
    messages = table["messages"].combine_chunks()
    flat_messages = pc.list_flatten(messages)
    matches = pc.match_substring(pc.struct_field(flat_messages, "content"), text, ignore_case=True)
    rows = np.unique(
        pc.list_parent_indices(messages).filter(pc.fill_null(matches, False)).to_numpy()
    )
    end_rows = np.cumsum([facts.rows for facts in file.steps])
    for row in rows:
        index = int(np.searchsorted(end_rows, row, side="right"))
        facts = file.steps[index]
        yield facts.step, int(row - (end_rows[index] - facts.rows))


# --- a sample


def _rank_groups(columns: Mapping[str, list[Any]]) -> dict[int, list[tuple[list[int], int]]]:
    """Return each step's groups in the order of their tasks' hashes.

    A group is returned as the positions of its rows in the step, and its number of tokens.
    """
    groups: dict[int, dict[int, tuple[str, list[int], int]]] = {}
    position, previous_step = 0, None
    for step, task, index, length in zip(
        *(columns[name] for name in ("step", "task", "group_index", "length")), strict=True
    ):
        position = position + 1 if step == previous_step else 0
        previous_step = step
        task, positions, n_tokens = groups.setdefault(step, {}).get(index, (task, [], 0))
        groups[step][index] = (task, [*positions, position], n_tokens + length)
    return {
        step: [
            (positions, n_tokens)
            for _, positions, n_tokens in sorted(
                groups_of_step.values(), key=lambda group: (_hash_task(group[0]), group[1])
            )
        ]
        for step, groups_of_step in groups.items()
    }


def _pick_evenly(values: Sequence[int], limit: int) -> list[int]:
    """Return at most `limit` values, evenly spaced, including the first and the last."""
    if len(values) <= limit:
        return list(values)
    return [values[round(i * (len(values) - 1) / max(1, limit - 1))] for i in range(max(0, limit))]


def _hash_task(task: str) -> str:
    return hashlib.sha256(task.encode()).hexdigest()


# --- numbers


def _compute_gradient_sizes(table: pa.Table) -> NDArray[np.float64]:
    """Return |loss weight x advantage| of each token of a step.

    At the first update this is the factor of the token's grad log p in the loss gradient. It is
    |loss weight| alone if not every token has a recorded advantage.
    """
    weights = (
        pc.list_flatten(table["weights"].combine_chunks())
        .to_numpy(zero_copy_only=False)
        .astype(np.float64)
    )
    advantages = pc.list_flatten(table["advantages"].combine_chunks()).to_numpy(
        zero_copy_only=False
    )
    return np.abs(weights * advantages) if len(advantages) == len(weights) else np.abs(weights)


def _compute_shares(
    row: Mapping[str, Any], total_gradient_size: float
) -> list[float | None] | None:
    """Return each token's gradient size as a share of the step's sum; None if it is unknown.

    `_compute_gradient_sizes` defines the size.
    """
    weights, advantages = row["weights"], row["advantages"]
    if weights is None or not total_gradient_size:
        return None
    factors = [1.0] * len(weights) if advantages is None else advantages
    return _round([abs(w * a) / total_gradient_size for w, a in zip(weights, factors, strict=True)])


def _round(values: Sequence[float | None]) -> list[float | None]:
    return [None if v is None or not math.isfinite(v) else float(f"{v:.{DIGITS}g}") for v in values]


def _drop_non_finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
