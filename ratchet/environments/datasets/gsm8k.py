"""GSM8K: grade school maths word problems (arXiv:2110.14168), from files in the published form.

The answer column holds the worked solution, then "#### " and the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.files import DataFile
from ratchet.data.jsonl import DataRow
from ratchet.data.tables import read_rows
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.errors import DataError
from ratchet.rewards.answers.numeric import read_number
from ratchet.types import Message, Split, Task


class GSM8KConfig(EnvironmentConfig):
    """Grade school maths word problems (arXiv:2110.14168).

    Files have the columns `question` and `answer`. The test split is the file `test`, or the rows
    of `train` with "test" in `split_column`, or else a tenth of the rows of `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.gsm8k:GSM8K"
    default_reward: ClassVar[str] = "numeric_answer"

    train: DataFile
    """A file, or an address in an object store."""
    test: DataFile | None = None
    """File of the test split, or an address in an object store; null: the rows marked in
    split_column, or else a tenth."""
    split_column: str | None = Field(None, min_length=1)
    """Column of `train` with the split of each row: "train" or "test"; null: none."""
    suffix: str = '\nEnd with "#### " and the answer as a number.'
    """Text appended to each question."""
    shots: int = Field(0, ge=0, le=64)
    """Number of few-shot examples before each question. The first training rows are the
    examples."""

    def check_keys(self) -> None:
        if self.test is not None and self.split_column is not None:
            raise ValueError("`test` and `split_column` both define the test split: remove one")


class Example(NamedTuple):
    """One problem: a row of the file."""

    line: int
    question: str
    solution: str
    result: str  # the number after "####"
    other_values: Mapping[str, Any]  # columns besides question and answer


class GSM8K(Rows):
    """The environment of GSM8K's problems."""

    name = "gsm8k"

    def __init__(self, config: GSM8KConfig) -> None:
        self.config = config

    def rows(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split.

        Raises DataError, with file and line, for an unusable row or a question in both splits.
        """
        return self._tasks[split]

    def demonstration(self, task: Task) -> Sequence[Message]:
        return (Message("assistant", task.meta["solution"]),)

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        """The tasks of both splits, read on first use.

        An instance that only plays attempts never reads the files.
        """
        train, test = self._read_splits()
        self._refuse_overlap(train, test)
        n_shots = self.config.shots
        if n_shots >= len(train):
            raise DataError(
                f"{self.config.train}: {len(train)} training rows are too few for shots={n_shots}: "
                "lower shots"
            )
        # The few-shot examples are not trained on, because their answers are in every prompt.
        context = tuple(
            message
            for shot in train[:n_shots]
            for message in (self._make_question(shot), Message("assistant", shot.solution))
        )
        return {
            "train": [self._make_task("train", example, context) for example in train[n_shots:]],
            "test": [self._make_task("test", example, context) for example in test],
        }

    def _read_splits(self) -> tuple[list[Example], list[Example]]:
        path, column = self.config.train, self.config.split_column
        columns = {"question": str, "answer": str} | ({column: str} if column else {})
        train: list[Example] = []
        test: list[Example] = []
        for row in read_rows(path, columns):
            example = _read_example(path, row)
            (test if self._is_test(row) else train).append(example)
        if self.config.test:
            test = [
                _read_example(self.config.test, row) for row in read_rows(self.config.test, columns)
            ]
        return train, test

    def _is_test(self, row: DataRow) -> bool:
        if self.config.test:
            return False
        column = self.config.split_column
        if column is None:
            return is_held_out(row.values["question"])
        if row.values[column] not in ("train", "test"):
            where = f"{self.config.train}, {row.where}"
            raise DataError(
                f"{where}: column '{column}' is '{row.values[column]}', must be 'train' or 'test'"
            )
        return row.values[column] == "test"

    def _refuse_overlap(self, train: list[Example], test: list[Example]) -> None:
        train_lines = {example.question: example.line for example in train}
        for example in test:
            if example.question in train_lines:
                raise DataError(
                    f"{self.config.test or self.config.train}, line {example.line}: the question "
                    f"is also in the training split ({self.config.train}, line "
                    f"{train_lines[example.question]}): remove one of the two"
                )

    def _make_question(self, example: Example) -> Message:
        return Message("user", example.question + self.config.suffix)

    def _make_task(self, split: Split, example: Example, context: tuple[Message, ...]) -> Task:
        return Task(
            id=f"{self.name}/{split}/{example.line}",
            messages=(*context, self._make_question(example)),
            answer=example.result,
            environment=self.name,
            tag=self.name,
            meta={**example.other_values, "solution": example.solution},
        )


def _read_example(path: DataFile, row: DataRow) -> Example:
    solution = row.values["answer"]
    _, mark, result = solution.rpartition("####")
    if not mark or read_number(result) is None:
        raise DataError(f"{path}, {row.where}: column 'answer' must end with '#### ' and a number")
    other_values = {
        name: value for name, value in row.values.items() if name not in ("question", "answer")
    }
    return Example(row.line, row.values["question"], solution, result.strip(), other_values)
