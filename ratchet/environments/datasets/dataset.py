"""The environment of tasks from data: files, object stores, the Hub, or a published dataset.

Unless `scan: false` is set, every row is read once before training, so that an unusable row is an
error at the start. The scan keeps only the row numbers of each split. A row is read again when its
task is used. A test split without a training split needs no scan, because it comes only once: its
rows are checked and filtered as its tasks are read.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from itertools import islice
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from ratchet.data.formats.benchmark_rows import ConvertedTable
from ratchet.data.formats.hf_datasets import HubTable
from ratchet.data.formats.media_columns import MEDIA_COLUMNS, list_media, strip_media
from ratchet.data.formats.oasst_trees import ConversationTrees
from ratchet.data.jsonl import TYPE_NAMES, DataRow
from ratchet.data.shuffle import RowOrder
from ratchet.data.tables import Table, open_table
from ratchet.environments.datasets.config import DatasetConfig
from ratchet.environments.datasets.dataset_rows import DatasetRowReader, RowContents
from ratchet.environments.datasets.preference_rows import LabelledSteps, find_good_answer
from ratchet.environments.datasets.usual_columns import explain_ambiguous, summarize_columns
from ratchet.environments.single_turn import SingleTurn
from ratchet.errors import DataError
from ratchet.types import (
    READ_FROM,
    TEMPLATE_VARIABLES,
    Comparison,
    LabelledAnswer,
    Message,
    Split,
    Task,
)

log = logging.getLogger(__name__)


def dataset(config: DatasetConfig) -> Dataset:
    """Return the environment of a config.

    Only an environment whose rows may have tools gets the method `tools`, because that method
    requires a model whose tool-call format is known.
    """
    preset = config.dataset_preset
    has_tools = "tools" in config.columns or (preset is not None and "tools" in preset.columns)
    return (DatasetWithTools if has_tools else Dataset)(config)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split of a table."""

    table: Table
    row_numbers: NDArray[np.int64] | None  # ascending row numbers in the table; None: all rows

    def __len__(self) -> int:
        return len(self.table) if self.row_numbers is None else len(self.row_numbers)

    def row_number(self, index: int) -> int:
        """Return the row number in the table of row `index` of the split."""
        return index if self.row_numbers is None else int(self.row_numbers[index])

    @property
    def block_sizes(self) -> Sequence[int]:
        """Return the number of the split's rows in each block of the table."""
        if self.row_numbers is None:
            return self.table.block_sizes
        block_ends = np.cumsum(self.table.block_sizes)
        return np.diff(np.searchsorted(self.row_numbers, block_ends), prepend=0).tolist()


class UsableRow(NamedTuple):
    """A row that has been checked and passes the filters."""

    row_number: int  # in the table
    contents: RowContents
    prompt_hash: int


class Dataset(SingleTurn):
    """An environment whose tasks are the rows of a dataset."""

    returns_rewards = False  # so the recipe must name a reward

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self.name = config.preset or "dataset"
        self.reader = DatasetRowReader(config)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return the tasks of a split.

        Raises DataError for an unusable row and for an empty split. Rows that were not scanned
        (with `scan: false`, and a test split without a training split) raise it once they are read.
        """
        if split == "test" and self.config.scan and self._tables.keys() == {"test"}:
            return islice(self._read_test_tasks(), start, None)
        rows = self.rows(split)
        if not rows:
            self._raise_empty(split)
        if split == "test":
            return (self._read_task(split, rows, index) for index in range(start, len(rows)))
        order = RowOrder(
            rows.block_sizes, seed=seed, name=f"{self.name}/train", shuffle=self.config.shuffle
        )
        return self._repeat_rows(rows, order, start)

    def _repeat_rows(self, rows: SplitRows, order: RowOrder, start: int) -> Iterator[Task]:
        position = start
        while True:
            yield self._read_task("train", rows, order.row_at(position))
            position += 1

    def _read_test_tasks(self) -> Iterator[Task]:
        """Yield the tasks of a test split without a training split, reading each row once."""
        is_empty = True
        for row in self._read_usable_rows(self._tables["test"]):
            is_empty = False
            yield self._make_task("test", row.row_number, row.contents)
        if is_empty:
            self._raise_empty("test")

    def task_count(self) -> int:
        return len(self.rows("train"))

    def drops_too_long_rows(self, task: Task) -> bool:
        return self.config.too_long == "drop"

    def rows(self, split: Split) -> SplitRows | tuple[()]:
        return self._splits.get(split, ())

    # --- Training targets of a row.

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return the messages to imitate. Raises DataError if the row has none.

        They are the first of these that the row has: the preferred answer of a comparison; an
        answer labelled good; steps all labelled good; the messages to imitate (`solution`); the
        reference answer.
        """
        contents = self._read_contents(task)
        if contents.judgement is not None:
            if (answer := find_good_answer(contents.judgement)) is not None:
                return answer
            raise DataError(
                f"{contents.where}: the answer is labelled as bad, so there is none to learn from: "
                "drop such rows with `keep`"
            )
        if contents.solution:
            return contents.solution
        if contents.answer is not None:
            return (Message("assistant", contents.answer),)
        if contents.answer_candidates:
            raise DataError(
                f"{contents.where}: {explain_ambiguous('answer', contents.answer_candidates)}"
            )
        return self._raise_missing(contents, "answer", "an answer")

    def comparison(self, task: Task) -> Comparison:
        contents = self._read_contents(task)
        return (
            contents.judgement
            if isinstance(contents.judgement, Comparison)
            else self._raise_missing(contents, "chosen", "two answers to compare")
        )

    def labelled_answer(self, task: Task) -> LabelledAnswer:
        contents = self._read_contents(task)
        return (
            contents.judgement
            if isinstance(contents.judgement, LabelledAnswer)
            else self._raise_missing(
                contents,
                "label" if "completion" in contents.columns else "completion",
                "one labelled answer",
            )
        )

    def steps(self, task: Task) -> LabelledSteps:
        contents = self._read_contents(task)
        return (
            contents.judgement
            if isinstance(contents.judgement, tuple)
            else self._raise_missing(contents, "completions", "labelled steps")
        )

    def _raise_missing(self, contents: RowContents, usual_name: str, needed_data: str) -> NoReturn:
        name = self.reader.column_names.get(usual_name, usual_name)
        problem = f"column '{name}' is null" if name in contents.values else f"no column '{name}'"
        raise DataError(
            f"{contents.where}: {problem}; the row has {summarize_columns(contents.columns)}, "
            f"but this algorithm learns from {needed_data}: "
            f"name yours in `columns`: {{{usual_name}: ...}}, or use another algorithm"
        )

    def _read_contents(self, task: Task) -> RowContents:
        """Return the contents of a task's row, from the values in the task's `meta`."""
        reserved = (READ_FROM, TEMPLATE_VARIABLES)
        values = {name: value for name, value in task.meta.items() if name not in reserved}
        return self.reader.read_again(DataRow(0, values), task.where)

    async def reset(self, task: Task) -> Sequence[Message]:
        """Return the prompt. Raises DataError for a row of plain text, which has none."""
        if not task.messages:
            raise DataError(
                f"{task.where}: the row is plain text without a prompt to answer: name its prompt "
                "in `columns`: {prompt: ...}"
            )
        return task.messages

    # --- Rows and splits.

    def _read_task(self, split: Split, rows: SplitRows, index: int) -> Task:
        row_number = rows.row_number(index)
        contents = self.reader.read(rows.table.row(row_number), rows.table.where(row_number))
        return self._make_task(split, row_number, contents)

    def _make_task(self, split: Split, row_number: int, contents: RowContents) -> Task:
        difficulty = {} if contents.difficulty is None else {"difficulty": contents.difficulty}
        return Task(
            id=f"{self.name}/{split}/{row_number + 1}",
            messages=contents.prompt,
            answer=contents.answer,
            environment=self.name,
            tag=self._find_tag(contents),
            meta={
                **self._make_meta(contents),
                **difficulty,
                **self._make_template_variables(contents),
                READ_FROM: contents.where,
            },
        )

    def _make_template_variables(self, contents: RowContents) -> Mapping[str, Any]:
        """Return the entry of `meta` for the variables of the chat template that the row sets."""
        variables = {}
        for name, column in self.config.chat_template_columns.items():
            if column not in contents.values:
                raise DataError(
                    f"{contents.where}: chat_template_columns names the column '{column}', and "
                    f"the row has {summarize_columns(contents.columns)}"
                )
            if contents.values[column] is not None:
                variables[name] = contents.values[column]
        return {TEMPLATE_VARIABLES: _keep_json_values(variables)} if variables else {}

    def _make_meta(self, contents: RowContents) -> Mapping[str, Any]:
        """Return the row's values without its media, which the task's messages already hold."""
        if not list_media(contents.prompt):
            return _keep_json_values(contents.values)
        media_columns = {self.reader.column_names.get(usual_name) for usual_name in MEDIA_COLUMNS}
        return _keep_json_values(
            {
                name: strip_media(value)
                for name, value in contents.values.items()
                if name not in media_columns
            }
        )

    def _find_tag(self, contents: RowContents) -> str:
        if contents.tag:
            return contents.tag
        preset = self.config.dataset_preset
        domain = contents.values.get(preset.tag) if preset is not None and preset.tag else None
        return self.name if domain is None else str(domain)

    @cached_property
    def _splits(self) -> Mapping[str, SplitRows]:
        """Return the rows of each split.

        They are read on first use, because an instance that only plays attempts never needs them.
        """
        config = self.config
        tables = self._tables
        if not config.scan:
            return {name: SplitRows(table, None) for name, table in tables.items()}
        if "train" not in tables:
            return {name: self._select_rows(table) for name, table in tables.items()}
        train, test = tables["train"], tables.get("test")
        if test is None:
            rows, prompt_hashes, is_test = self._scan(train)
            train_rows = rows[~is_test]
            train_prompt_hashes = prompt_hashes[~is_test]
            return {
                "train": self._drop_overlap(
                    train, train_rows, train_prompt_hashes, prompt_hashes[is_test]
                ),
                "test": SplitRows(train, rows[is_test]),
            }
        return self._separate_splits(train, test)

    @cached_property
    def _tables(self) -> Mapping[Split, Table]:
        """Return the tables of the splits that the recipe names."""
        config = self.config
        tables: dict[Split, Table | None] = {
            "train": self._open_table(config.train, config.train_split_name),
            "test": self._open_table(config.test, config.test_split_name),
        }
        return {split: table for split, table in tables.items() if table is not None}

    def _open_table(self, locations: Sequence[Any], split: str) -> Table | None:
        config = self.config
        if locations:
            table: Table = open_table(*locations)
        elif config.hub_id is None or not split:
            return None
        else:
            subset = config.subset or (
                config.dataset_preset.subset if config.dataset_preset else None
            )
            table = HubTable(config.hub_id, split, subset=subset, revision=config.revision)
        preset = config.dataset_preset
        if preset is not None and preset.convert_row is not None:
            table = ConvertedTable(table, preset.convert_row)
        return ConversationTrees(table) if preset is not None and preset.trees else table

    def _select_rows(self, table: Table) -> SplitRows:
        return SplitRows(table, self._scan(table)[0])

    def _separate_splits(self, train: Table, test: Table) -> Mapping[str, SplitRows]:
        """Return both splits without shared prompts.

        Raises DataError for a shared prompt, unless `overlap: drop` removes its training rows.
        """
        test_rows, test_prompt_hashes, _ = self._scan(test)
        train_rows, train_prompt_hashes, _ = self._scan(train)
        is_shared = np.isin(train_prompt_hashes, test_prompt_hashes)
        if is_shared.any() and self.config.overlap == "refuse":
            train_row = int(train_rows[is_shared][0])
            test_row = int(test_rows[test_prompt_hashes == train_prompt_hashes[is_shared][0]][0])
            raise DataError(
                f"{test.where(test_row)}: the prompt is also in the training split "
                f"({train.where(train_row)}); {int(is_shared.sum())} training rows have a prompt "
                "of the test split: remove them, or set overlap: drop"
            )
        return {
            "train": self._drop_overlap(train, train_rows, train_prompt_hashes, test_prompt_hashes),
            "test": SplitRows(test, test_rows),
        }

    def _drop_overlap(
        self,
        train: Table,
        rows: NDArray[np.int64],
        prompt_hashes: NDArray[np.uint64],
        test_prompt_hashes: NDArray[np.uint64],
    ) -> SplitRows:
        """Return the training rows whose prompt is not in the test split.

        Splits may share prompts even without a test file: of two rows with equal prompts and
        different ids, one may be held out.
        """
        is_shared = np.isin(prompt_hashes, test_prompt_hashes)
        if is_shared.any():
            log.warning(
                "%d training rows have a prompt of the test split and are left out",
                int(is_shared.sum()),
            )
        return SplitRows(train, rows[~is_shared])

    def _scan(
        self, table: Table
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.bool_]]:
        """Return the numbers of the rows that pass the filters, their prompt hashes and a mask.

        The mask is True for rows that are held out: those with a small hash of the id, or of the
        prompt if the row has no id.
        """
        max_test_hash = round(self.config.test_share * 2**64)
        # Arrays take less memory than lists for many millions of rows.
        row_numbers = array("q")
        prompt_hashes = array("Q")
        is_test = array("B")
        for row in self._read_usable_rows(table):
            row_numbers.append(row.row_number)
            prompt_hashes.append(row.prompt_hash)
            row_id = row.contents.id
            is_test.append((_hash(row_id) if row_id else row.prompt_hash) < max_test_hash)
        return (
            np.asarray(row_numbers, np.int64),
            np.asarray(prompt_hashes, np.uint64),
            np.asarray(is_test).astype(np.bool_),
        )

    def _read_usable_rows(self, table: Table) -> Iterator[UsableRow]:
        """Yield the rows that pass the filters, in order. Raises DataError for an unusable row."""
        is_distinct = self.config.is_distinct
        seen_hashes: set[int] = set()
        for index in range(len(table)):
            row, where = table.row(index), table.where(index)
            if not self.reader.passes_filters(row, where):
                continue
            contents = self.reader.read(row, where)
            self.reader.media_placer.check_media(contents.prompt, where)
            # Plain text has no prompt, so it is identified by itself.
            prompt_hash = _hash(
                [
                    [message.role, self.reader.media_placer.make_content_key(message)]
                    for message in contents.prompt or contents.solution
                ]
            )
            if is_distinct and prompt_hash in seen_hashes:
                continue
            if is_distinct:
                seen_hashes.add(prompt_hash)
            yield UsableRow(index, contents, prompt_hash)

    def _raise_empty(self, split: Split) -> NoReturn:
        raise DataError(
            f"environment '{self.name}' has no rows for its {split} split: "
            f"{self._explain_empty(split)}"
        )

    def _explain_empty(self, split: Split) -> str:
        if split not in self._splits:
            alternative = ", or set evaluation.tasks: 0" if split == "test" else ""
            return (
                f"name its files in `{split}`, or the split on the Hub in "
                f"`{split}_split`{alternative}"
            )
        share = self.config.test_share
        has_test_split = bool(self.config.test or self.config.test_split_name)
        holds_out = share and not has_test_split
        if split == "test" and not has_test_split:
            rows = "so few rows" if share else "its rows"
            return (
                f"test_share={share:g} holds out none of {rows}. Raise test_share, name `test`, or "
                "set evaluation.tasks: 0"
            )
        if split == "train" and holds_out and len(self.rows("test")):
            return f"test_share={share:g} holds out all of so few rows: set test_share: 0"
        if split == "train" and len(self.rows("test")) and not self.config.keep:
            return "all its rows have a prompt of the test split"
        return "`keep` filters out all rows: loosen it"


class DatasetWithTools(Dataset):
    """A dataset environment whose tasks may have tools."""

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._read_contents(task).tools


def _keep_json_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values of JSON types, without Arrow's dates, bytes and the like.

    Tasks are sent to other processes and written into records.
    """
    return {
        name: value for name, value in values.items() if value is None or type(value) in TYPE_NAMES
    }


def _hash(value: Any) -> int:
    """Return a 64-bit hash that is equal in all processes, so that a row stays in its split."""
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest(), "big")
