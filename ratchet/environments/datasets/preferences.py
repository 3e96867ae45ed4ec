"""The environment of preference data from files.

The rows are pairs of a better and a worse answer, labelled answers, or answers with step labels. A
file may mix them. A row without the data that the algorithm needs is an error only when the
algorithm reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

from ratchet.data.files import DataFile
from ratchet.data.tables import read_rows
from ratchet.environments.datasets.config import PreferencesConfig
from ratchet.environments.datasets.preference_rows import (
    LabelledSteps,
    Messages,
    PreferenceReader,
    PreferenceRow,
    find_good_answer,
)
from ratchet.environments.datasets.usual_columns import summarize_columns
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.errors import DataError
from ratchet.types import Comparison, LabelledAnswer, Split, Task


class Preferences(Rows):
    """An environment whose tasks are rows of preference data."""

    name = "preferences"
    # The labels judge only the file's answers. The policy's answers need a reward of the recipe.
    returns_rewards = False

    def __init__(self, config: PreferencesConfig) -> None:
        self.config = config

    def rows(self, split: Split) -> Sequence[Task]:
        """Return all tasks of a split.

        Raises DataError, with file and line, for an unusable row and for a prompt in both splits.
        """
        return self._tasks[split]

    def comparison(self, task: Task) -> Comparison:
        row = _read_row(task)
        return (
            row.judgement
            if isinstance(row.judgement, Comparison)
            else self._raise_missing(row, "chosen", "two answers to compare")
        )

    def labelled_answer(self, task: Task) -> LabelledAnswer:
        row = _read_row(task)
        return (
            row.judgement
            if isinstance(row.judgement, LabelledAnswer)
            else self._raise_missing(row, "completion", "one labelled answer")
        )

    def steps(self, task: Task) -> LabelledSteps:
        row = _read_row(task)
        return (
            row.judgement
            if isinstance(row.judgement, tuple)
            else self._raise_missing(row, "completions", "labelled steps")
        )

    def demonstration(self, task: Task) -> Messages:
        """Return the chosen answer of a pair, or the only answer if it is labelled as good.

        Step labels count as good if all of them do. Raises DataError for an answer labelled as bad.
        """
        row = _read_row(task)
        answer = find_good_answer(row.judgement)
        if answer is None:
            raise DataError(
                f"{row.where}: the answer is labelled as bad, so there is none to learn from: drop "
                "such rows"
            )
        return answer

    def _raise_missing(self, row: PreferenceRow, column: str, needed: str) -> NoReturn:
        columns = summarize_columns(row.columns)
        raise DataError(
            f"{row.where}: no column '{self._names[column]}'; the row has {columns}, but this "
            f"algorithm learns from {needed}: use a file with such rows, or another algorithm"
        )

    @property
    def _names(self) -> dict[str, str]:
        return {usual: self.config.columns.get(usual, usual) for usual in self.config.usual_columns}

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        """The tasks by split.

        The file is read on first use, because an instance that only plays attempts never needs it.
        """
        rows = self._read(self.config.train)
        if self.config.test is None:
            test = [row for row in rows if is_held_out(_make_split_key(row))]
            train = [row for row in rows if not is_held_out(_make_split_key(row))]
        else:
            train, test = rows, self._read(self.config.test)
            self._refuse_overlap(train, test)
        return {
            "train": [self._make_task("train", row) for row in train],
            "test": [self._make_task("test", row) for row in test],
        }

    def _read(self, path: DataFile) -> list[PreferenceRow]:
        reader = PreferenceReader(self._names, self.config.separator)
        return [reader.read(row, f"{path}, {row.where}") for row in read_rows(path)]

    def _refuse_overlap(self, train: list[PreferenceRow], test: list[PreferenceRow]) -> None:
        train_lines = {row.prompt: row.line for row in train}
        shared = [row for row in test if row.prompt in train_lines]
        if shared:
            affected = f"{len(shared)} row{'s' if len(shared) > 1 else ''} of this file"
            raise DataError(
                f"{shared[0].where}: the prompt is also in the training split "
                f"({self.config.train}, line {train_lines[shared[0].prompt]}). Remove the "
                f"{affected} with such prompts, or drop `test` to hold out a tenth of the prompts."
            )

    def _make_task(self, split: Split, row: PreferenceRow) -> Task:
        return Task(
            id=f"{self.name}/{split}/{row.line}",
            messages=row.prompt,
            environment=self.name,
            tag=self.name,
            meta={
                "judgement": row.judgement,
                "where": row.where,
                "line": row.line,
                "columns": row.columns,
            },
        )


def _read_row(task: Task) -> PreferenceRow:
    meta = task.meta
    return PreferenceRow(
        meta["where"], meta["line"], task.messages, meta["judgement"], meta["columns"]
    )


def _make_split_key(row: PreferenceRow) -> str:
    """Return the prompt as one text, so that rows with the same prompt get the same split."""
    return json.dumps([[message.role, message.content] for message in row.prompt])
