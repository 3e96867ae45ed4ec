"""The environment of tasks from data: files, object stores, the hub, or a published dataset.

Every row is read once before training (unless `scan: false`), so that an unusable row is an error
before anything trains. The scan keeps only the row numbers of each split; a row is read again when
its task is due.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ratchet.data.formats.benchmark_rows import Shaped
from ratchet.data.formats.hf_datasets import HubTable
from ratchet.data.formats.media_columns import COLUMNS, list_media, without_media
from ratchet.data.formats.oasst_trees import Trees
from ratchet.data.jsonl import TYPE_NAMES, DataRow
from ratchet.data.shuffle import Order
from ratchet.data.tables import Table, open_table
from ratchet.environments.datasets.config import DatasetConfig
from ratchet.environments.datasets.dataset_rows import DatasetRowReader, Given
from ratchet.environments.datasets.preference_rows import LabelledSteps
from ratchet.environments.datasets.preferences import GOOD_STEP
from ratchet.environments.single_turn import SingleTurn
from ratchet.errors import DataError
from ratchet.types import READ_FROM, Comparison, Judged, Message, Split, Task

log = logging.getLogger(__name__)


def dataset(config: DatasetConfig) -> Dataset:
    """Return the environment of a config.

    It has `tools` only if rows may have them: the player must then know the policy's call format.
    """
    published = config.published
    has_tools = "tools" in config.columns or (
        published is not None and "tools" in published.columns
    )
    return (DatasetWithTools if has_tools else Dataset)(config)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split of a table."""

    table: Table
    kept: NDArray[np.int64] | None  # ascending row numbers; None: all rows

    def __len__(self) -> int:
        return len(self.table) if self.kept is None else len(self.kept)

    def number(self, index: int) -> int:
        """Return the table's row number of the split's row `index`."""
        return index if self.kept is None else int(self.kept[index])

    @property
    def blocks(self) -> Sequence[int]:
        """Return the number of the split's rows in each block of the table."""
        if self.kept is None:
            return self.table.blocks
        ends = np.cumsum(self.table.blocks)
        return np.diff(np.searchsorted(self.kept, ends), prepend=0).tolist()


class Dataset(SingleTurn):
    """An environment whose tasks are the rows of a dataset."""

    judges = False  # answers need a reward of the recipe

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self.name = config.preset or "dataset"
        self.reader = DatasetRowReader(config)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return the tasks of a split.

        Raises DataError, before iterating, for an unusable row (unless `scan: false`) and for an
        empty split.
        """
        rows = self.rows(split)
        if not rows:
            raise DataError(
                f"environment '{self.name}' has no rows for its {split} split: "
                f"{self._explain_empty(split)}"
            )
        if split == "test":
            return (self._task(split, rows, index) for index in range(start, len(rows)))
        order = Order(
            rows.blocks, seed=seed, name=f"{self.name}/train", shuffle=self.config.shuffle
        )
        return self._repeat(rows, order, start)

    def _repeat(self, rows: SplitRows, order: Order, start: int) -> Iterator[Task]:
        position = start
        while True:
            yield self._task("train", rows, order.at(position))
            position += 1

    def rows(self, split: Split) -> SplitRows | tuple[()]:
        return self._splits.get(split, ())

    # --- Training targets of a row.

    def demonstration(self, task: Task) -> Sequence[Message]:
        """Return the messages to imitate.

        They are the better of two answers, an answer labelled as good, the solution (such as the
        end of a conversation), or else the task's answer. Raises DataError if the row has none.
        """
        contents = self._read_contents(task)
        match contents.about:
            case Comparison(chosen=chosen):
                return chosen
            case Judged(messages=messages, reward=reward) if reward > 0:
                return messages
            case tuple(steps) if all(label > GOOD_STEP for _, label in steps):
                return (Message("assistant", "".join(text for text, _ in steps)),)
            case None if contents.solution:
                return contents.solution
            case None if contents.answer is not None:
                return (Message("assistant", contents.answer),)
            case None:
                self._raise_missing(contents, "solution", "an answer")
        raise DataError(
            f"{contents.where}: the answer is labelled as bad, so there is none to learn from: "
            "drop "
            "such rows by `keep`"
        )

    def comparison(self, task: Task) -> Comparison:
        contents = self._read_contents(task)
        return (
            contents.about
            if isinstance(contents.about, Comparison)
            else self._raise_missing(contents, "chosen", "two answers to compare")
        )

    def judged(self, task: Task) -> Judged:
        contents = self._read_contents(task)
        return (
            contents.about
            if isinstance(contents.about, Judged)
            else self._raise_missing(contents, "completion", "one labelled answer")
        )

    def steps(self, task: Task) -> LabelledSteps:
        contents = self._read_contents(task)
        return (
            contents.about
            if isinstance(contents.about, tuple)
            else self._raise_missing(contents, "completions", "labelled steps")
        )

    def _raise_missing(self, contents: Given, usual: str, wanted: str) -> NoReturn:
        name = self.reader.names.get(usual, usual)
        raise DataError(
            f"{contents.where}: no column '{name}'; the row has {', '.join(contents.has)}, but "
            f"this algorithm learns from {wanted}: "
            f"name yours in `columns`: {{{usual}: ...}}, or use another algorithm"
        )

    def _read_contents(self, task: Task) -> Given:
        """Return the contents of a task's row, read again from the plain values in `meta`."""
        values = {name: value for name, value in task.meta.items() if name != READ_FROM}
        return self.reader.read_again(DataRow(0, values), task.where)

    # --- Rows and splits.

    def _task(self, split: Split, rows: SplitRows, index: int) -> Task:
        number = rows.number(index)
        contents = self.reader.read(rows.table.row(number), rows.table.where(number))
        difficulty = {} if contents.difficulty is None else {"difficulty": contents.difficulty}
        return Task(
            id=f"{self.name}/{split}/{number + 1}",
            messages=contents.prompt,
            answer=contents.answer,
            environment=self.name,
            tag=self._tag(contents),
            meta={**self._meta(contents), **difficulty, READ_FROM: contents.where},
        )

    def _meta(self, contents: Given) -> Mapping[str, Any]:
        """Return the row's values without its media, which the task's messages already hold."""
        if not list_media(contents.prompt):
            return _plain(contents.values)
        media_columns = {self.reader.names.get(usual) for usual in COLUMNS}
        return _plain(
            {
                name: without_media(value)
                for name, value in contents.values.items()
                if name not in media_columns
            }
        )

    def _tag(self, contents: Given) -> str:
        published = self.config.published
        domain = (
            contents.values.get(published.tag) if published is not None and published.tag else None
        )
        return self.name if domain is None else str(domain)

    @cached_property
    def _splits(self) -> Mapping[str, SplitRows]:
        """Return the rows of each split, read on first use: an instance that only plays attempts
        reads nothing."""
        config = self.config
        train = self._table(config.train, config.train_name)
        test = self._table(config.test, config.test_name)
        tables = {
            name: table for name, table in (("train", train), ("test", test)) if table is not None
        }
        if not config.scan:
            return {name: SplitRows(table, None) for name, table in tables.items()}
        if train is None:
            return {name: self._select(table) for name, table in tables.items()}
        if test is None:
            kept, prompts, is_test = self._scan(train)
            train_rows, train_prompts = kept[~is_test], prompts[~is_test]
            return {
                "train": self._drop_overlap(train, train_rows, train_prompts, prompts[is_test]),
                "test": SplitRows(train, kept[is_test]),
            }
        return self._separate(train, test)

    def _table(self, places: Sequence[Any], split: str) -> Table | None:
        config = self.config
        if places:
            table: Table = open_table(*places)
        elif config.hub_id is None or not split:
            return None
        else:
            subset = config.subset or (config.published.subset if config.published else None)
            table = HubTable(config.hub_id, split, subset=subset, revision=config.revision)
        published = config.published
        if published is not None and published.shape is not None:
            table = Shaped(table, published.shape)
        return Trees(table) if published is not None and published.trees else table

    def _select(self, table: Table) -> SplitRows:
        return SplitRows(table, self._scan(table)[0])

    def _separate(self, train: Table, test: Table) -> Mapping[str, SplitRows]:
        """Return both splits without shared prompts.

        Raises DataError for a shared prompt, unless `overlap: drop` removes its training rows.
        """
        test_rows, test_prompts, _ = self._scan(test)
        train_rows, train_prompts, _ = self._scan(train)
        is_shared = np.isin(train_prompts, test_prompts)
        if is_shared.any() and self.config.overlap == "refuse":
            train_row = int(train_rows[is_shared][0])
            test_row = int(test_rows[test_prompts == train_prompts[is_shared][0]][0])
            raise DataError(
                f"{test.where(test_row)}: the prompt is also in the training split "
                f"({train.where(train_row)}), so for {int(is_shared.sum())} "
                "rows there: remove them, or set overlap: drop"
            )
        return {
            "train": self._drop_overlap(train, train_rows, train_prompts, test_prompts),
            "test": SplitRows(test, test_rows),
        }

    def _drop_overlap(
        self,
        train: Table,
        rows: NDArray[np.int64],
        prompts: NDArray[np.uint64],
        test_prompts: NDArray[np.uint64],
    ) -> SplitRows:
        """Return the training rows without those that have a prompt of the test split.

        Even one file can have them: rows with equal prompts but different ids are split apart.
        """
        is_shared = np.isin(prompts, test_prompts)
        if is_shared.any():
            log.warning(
                "%d rows for training have a prompt of the test split and are left out",
                int(is_shared.sum()),
            )
        return SplitRows(train, rows[~is_shared])

    def _scan(
        self, table: Table
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.bool_]]:
        """Return (numbers of the kept rows, hash of each one's prompt, True for held-out rows).

        A row is held out by the hash of its id, or of its prompt if it has no id.
        """
        test_limit = round(self.config.test_share * 2**64)
        is_distinct = self.config.is_distinct
        # Arrays, not lists: rows may be many millions.
        kept, prompts, is_test = array("q"), array("Q"), array("B")
        seen: set[int] = set()
        for index in range(len(table)):
            row, where = table.row(index), table.where(index)
            if not self.reader.keeps(row, where):
                continue
            contents = self.reader.read(row, where)
            self.reader.placing.check(contents.prompt, where)
            prompt = _hash(
                [[message.role, self.reader.placing.key(message)] for message in contents.prompt]
            )
            if is_distinct and prompt in seen:
                continue
            if is_distinct:
                seen.add(prompt)
            kept.append(index)
            prompts.append(prompt)
            is_test.append((_hash(contents.id) if contents.id else prompt) < test_limit)
        return (
            np.asarray(kept, np.int64),
            np.asarray(prompts, np.uint64),
            np.asarray(is_test).astype(np.bool_),
        )

    def _explain_empty(self, split: Split) -> str:
        other = "test" if split == "train" else "train"
        if split not in self._splits:
            alternative = ", or set evaluation.tasks: 0" if split == "test" else ""
            return (
                f"name its files in `{split}`, or the hub's split in `{split}_split`{alternative}"
            )
        return f"`keep` leaves none of them, or all are in the {other} split: loosen it"


class DatasetWithTools(Dataset):
    """A dataset environment whose tasks may have tools."""

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._read_contents(task).tools


def _plain(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values that are plain data, so without Arrow's dates, bytes and the like.

    Tasks are sent to other processes and written into records.
    """
    return {
        name: value for name, value in values.items() if value is None or type(value) in TYPE_NAMES
    }


def _hash(value: Any) -> int:
    """Return a 64-bit hash of the value alone, so that a row always stays in its split."""
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest(), "big")
