"""Tasks from data: files of any form, object stores, the hub; published datasets by name.

Rows are read when their task is due. Before, every row is read once (unless `scan: false`): what
can't be used is an error before anything trains, and which rows each split has is then a list of
numbers.
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
    """Build the environment. It offers tools if its rows may have them, since the player must then
    know how the policy calls them."""
    published = config.published
    tools = "tools" in config.columns or (published is not None and "tools" in published.columns)
    return (DatasetWithTools if tools else Dataset)(config)


@dataclass(frozen=True, slots=True)
class SplitRows:
    """The rows of one split: numbers in its table, in order; None: all of them."""

    table: Table
    kept: NDArray[np.int64] | None

    def __len__(self) -> int:
        return len(self.table) if self.kept is None else len(self.kept)

    def number(self, index: int) -> int:
        return index if self.kept is None else int(self.kept[index])

    @property
    def blocks(self) -> Sequence[int]:
        """Return how many of the rows lie in each of the table's blocks."""
        if self.kept is None:
            return self.table.blocks
        ends = np.cumsum(self.table.blocks)
        return np.diff(np.searchsorted(self.kept, ends), prepend=0).tolist()


class Dataset(SingleTurn):
    judges = False  # what the policy says, a reward must judge

    def __init__(self, config: DatasetConfig) -> None:
        self.config = config
        self.name = config.preset or "dataset"
        self.reader = DatasetRowReader(config)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Raises DataError, before iterating, for rows that can't be used (unless `scan: false`)
        and for an empty split."""
        rows = self.rows(split)
        if not rows:
            raise DataError(
                f"environment '{self.name}' has no rows for its {split} split: "
                f"{self._why_none(split)}"
            )
        if split == "test":
            return (self._task(split, rows, index) for index in range(start, len(rows)))
        order = Order(
            rows.blocks, seed=seed, name=f"{self.name}/train", shuffle=self.config.shuffle
        )
        return self._endless(rows, order, start)

    def _endless(self, rows: SplitRows, order: Order, start: int) -> Iterator[Task]:
        position = start
        while True:
            yield self._task("train", rows, order.at(position))
            position += 1

    def rows(self, split: Split) -> SplitRows | tuple[()]:
        return self._splits.get(split, ())

    # --- what an algorithm learns from

    def demonstration(self, task: Task) -> Sequence[Message]:
        """The solution; the last message of a conversation; the better of two answers, one labelled
        as good; or the answer."""
        contents = self._given(task)
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
                self._refuse(contents, "solution", "an answer")
        raise DataError(
            f"{contents.where}: the answer is labelled as bad, so there is none to learn from: "
            "drop "
            "such rows by `keep`"
        )

    def comparison(self, task: Task) -> Comparison:
        contents = self._given(task)
        return (
            contents.about
            if isinstance(contents.about, Comparison)
            else self._refuse(contents, "chosen", "two answers to compare")
        )

    def judged(self, task: Task) -> Judged:
        contents = self._given(task)
        return (
            contents.about
            if isinstance(contents.about, Judged)
            else self._refuse(contents, "completion", "one labelled answer")
        )

    def steps(self, task: Task) -> LabelledSteps:
        contents = self._given(task)
        return (
            contents.about
            if isinstance(contents.about, tuple)
            else self._refuse(contents, "completions", "labelled steps")
        )

    def _refuse(self, given: Given, usual: str, wanted: str) -> NoReturn:
        name = self.reader.names.get(usual, usual)
        raise DataError(
            f"{given.where}: no column '{name}'; the row has {', '.join(given.has)}, but this "
            f"algorithm learns from {wanted}: "
            f"name yours in `columns`: {{{usual}: ...}}, or use another algorithm"
        )

    def _given(self, task: Task) -> Given:
        """Read again: a task holds its row, and travels as plain data."""
        values = {name: value for name, value in task.meta.items() if name != READ_FROM}
        return self.reader.read_again(DataRow(0, values), task.where)

    # --- rows

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

    def _meta(self, given: Given) -> Mapping[str, Any]:
        """The row, whose images and clips are in the task's messages and need not be there
        twice."""
        if not list_media(given.prompt):
            return _plain(given.values)
        held = {self.reader.names.get(usual) for usual in COLUMNS}
        return _plain(
            {name: without_media(value) for name, value in given.values.items() if name not in held}
        )

    def _tag(self, given: Given) -> str:
        published = self.config.published
        domain = (
            given.values.get(published.tag) if published is not None and published.tag else None
        )
        return self.name if domain is None else str(domain)

    @cached_property
    def _splits(self) -> Mapping[str, SplitRows]:
        """Opened when tasks are first asked for: an instance that only plays attempts reads
        nothing."""
        config = self.config
        train = self._table(config.train, config.train_name)
        test = self._table(config.test, config.test_name)
        tables = {
            name: table for name, table in (("train", train), ("test", test)) if table is not None
        }
        if not config.scan:
            return {name: SplitRows(table, None) for name, table in tables.items()}
        if train is None:
            return {name: self._selected(table) for name, table in tables.items()}
        if test is None:
            kept, prompts, out = self._scanned(train)
            return {
                "train": self._without(train, kept[~out], prompts[~out], prompts[out]),
                "test": SplitRows(train, kept[out]),
            }
        return self._apart(train, test)

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

    def _selected(self, table: Table) -> SplitRows:
        return SplitRows(table, self._scanned(table)[0])

    def _apart(self, train: Table, test: Table) -> Mapping[str, SplitRows]:
        """Raises DataError for a prompt that is in both, unless those are to be left out of what
        trains."""
        held, asked, _ = self._scanned(test)
        kept, prompts, _ = self._scanned(train)
        both = np.isin(prompts, asked)
        if both.any() and self.config.overlap == "refuse":
            one = int(kept[both][0])
            other = int(held[asked == prompts[both][0]][0])
            raise DataError(
                f"{test.where(other)}: the prompt is also in the training split "
                f"({train.where(one)}), so for {int(both.sum())} "
                "rows there: remove them, or set overlap: drop"
            )
        return {"train": self._without(train, kept, prompts, asked), "test": SplitRows(test, held)}

    def _without(
        self,
        train: Table,
        kept: NDArray[np.int64],
        prompts: NDArray[np.uint64],
        asked: NDArray[np.uint64],
    ) -> SplitRows:
        """Rows with a prompt of the test split don't train: with other ids they may be on either
        side of one file."""
        both = np.isin(prompts, asked)
        if both.any():
            log.warning(
                "%d rows for training have a prompt of the test split and are left out",
                int(both.sum()),
            )
        return SplitRows(train, kept[~both])

    def _scanned(
        self, table: Table
    ) -> tuple[NDArray[np.int64], NDArray[np.uint64], NDArray[np.bool_]]:
        """(numbers of the rows that are kept, a hash of the prompt of each, whether its own hash
        holds it out)."""
        share, distinct = round(self.config.test_share * 2**64), self.config.is_distinct
        kept, prompts, out = array("q"), array("Q"), array("B")  # rows may be many millions
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
            if distinct and prompt in seen:
                continue
            if distinct:
                seen.add(prompt)
            kept.append(index)
            prompts.append(prompt)
            out.append((_hash(contents.id) if contents.id else prompt) < share)
        return (
            np.asarray(kept, np.int64),
            np.asarray(prompts, np.uint64),
            np.asarray(out).astype(np.bool_),
        )

    def _why_none(self, split: Split) -> str:
        other = "test" if split == "train" else "train"
        if split not in self._splits:
            alternative = ", or set evaluation.tasks: 0" if split == "test" else ""
            return (
                f"name its files in `{split}`, or the hub's split in `{split}_split`{alternative}"
            )
        return f"`keep` leaves none of them, or all are in the {other} split: loosen it"


class DatasetWithTools(Dataset):
    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._given(task).tools


def _plain(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the values without dates, bytes and the like, which Arrow has: tasks go to other
    processes, and into records."""
    return {
        name: value for name, value in values.items() if value is None or type(value) in TYPE_NAMES
    }


def _hash(value: Any) -> int:
    """No seed, no position and no size of the data enters: a row never changes sides."""
    return int.from_bytes(blake2b(json.dumps(value).encode(), digest_size=8).digest(), "big")
