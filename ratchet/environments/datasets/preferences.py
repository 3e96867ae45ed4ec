"""Read preference data from files: pairs of a better and a worse answer, labelled answers, and
answers in labelled steps.

A file may mix the formats. A row that lacks what an algorithm needs is an error only when that
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
    PreferenceRow,
    RowReader,
)
from ratchet.environments.single_turn import Rows, held_out
from ratchet.errors import DataError
from ratchet.types import Comparison, Judged, Message, Split, Task

GOOD_STEP = 0.5  # a step counts as right if its label is above this


class Preferences(Rows):
    name = "preferences"
    # The labels judge only the file's answers; the policy's need rewards from the recipe.
    judges = False

    def __init__(self, config: PreferencesConfig) -> None:
        self.config = config

    def rows(self, split: Split) -> Sequence[Task]:
        """Return all tasks of a split.

        Raises DataError with file and line for a row that can't be used, and for a prompt in both
        splits.
        """
        return self._tasks[split]

    def comparison(self, task: Task) -> Comparison:
        entry = _entry(task)
        return (
            entry.about
            if isinstance(entry.about, Comparison)
            else self._refuse(entry, "chosen", "two answers to compare")
        )

    def judged(self, task: Task) -> Judged:
        entry = _entry(task)
        return (
            entry.about
            if isinstance(entry.about, Judged)
            else self._refuse(entry, "completion", "one labelled answer")
        )

    def steps(self, task: Task) -> LabelledSteps:
        entry = _entry(task)
        return (
            entry.about
            if isinstance(entry.about, tuple)
            else self._refuse(entry, "completions", "labelled steps")
        )

    def demonstration(self, task: Task) -> Messages:
        """Return the chosen answer, or one that is labelled as good (in all its steps).

        Raises DataError for an answer that is labelled as bad.
        """
        entry = _entry(task)
        match entry.about:
            case Comparison(chosen=chosen):
                return chosen
            case Judged(messages=messages, reward=reward) if reward > 0:
                return messages
            case tuple(steps) if all(label > GOOD_STEP for _, label in steps):
                return (Message("assistant", "".join(text for text, _ in steps)),)
        raise DataError(
            f"{entry.where}: the answer is labelled as bad, so there is none to learn from: drop "
            "such rows"
        )

    def _refuse(self, entry: PreferenceRow, column: str, wanted: str) -> NoReturn:
        has = ", ".join(entry.has)
        raise DataError(
            f"{entry.where}: no column '{self._names[column]}'; the row has {has}, but this "
            f"algorithm learns from {wanted}: "
            "use a file with them, or another algorithm"
        )

    @property
    def _names(self) -> dict[str, str]:
        return {usual: self.config.columns.get(usual, usual) for usual in self.config.usual_columns}

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        """The tasks by split, read on first use: an instance that only plays attempts never reads
        the file."""
        entries = self._read(self.config.train)
        if self.config.test is None:
            test = [entry for entry in entries if held_out(_key(entry))]
            train = [entry for entry in entries if not held_out(_key(entry))]
        else:
            train, test = entries, self._read(self.config.test)
            self._refuse_overlap(train, test)
        return {
            "train": [self._task("train", e) for e in train],
            "test": [self._task("test", e) for e in test],
        }

    def _read(self, path: DataFile) -> list[PreferenceRow]:
        reader = RowReader(self._names, self.config.separator)
        return [reader.read(row, f"{path}, {row.where}") for row in read_rows(path)]

    def _refuse_overlap(self, train: list[PreferenceRow], test: list[PreferenceRow]) -> None:
        seen = {entry.prompt: entry.line for entry in train}
        shared = [entry for entry in test if entry.prompt in seen]
        if shared:
            rows = f"{len(shared)} row{'s' if len(shared) > 1 else ''} of this file"
            raise DataError(
                f"{shared[0].where}: the prompt is also in the training split "
                f"({self.config.train}, line "
                f"{seen[shared[0].prompt]}), so for {rows}: remove them, or drop `test`, and one "
                "prompt in ten is held out"
            )

    def _task(self, split: Split, entry: PreferenceRow) -> Task:
        return Task(
            id=f"{self.name}/{split}/{entry.line}",
            messages=entry.prompt,
            environment=self.name,
            tag=self.name,
            meta={"about": entry.about, "where": entry.where, "line": entry.line, "has": entry.has},
        )


def _entry(task: Task) -> PreferenceRow:
    return PreferenceRow(prompt=task.messages, **task.meta)


def _key(entry: PreferenceRow) -> str:
    """Return the prompt as one text, so that rows with the same prompt get the same split."""
    return json.dumps([[message.role, message.content] for message in entry.prompt])
