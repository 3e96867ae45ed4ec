"""A question-answering environment with a corpus that the policy can search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

from ratchet.data.files import DataFile
from ratchet.data.tables import read_rows
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.environments.tool_use.environment import ToolEnvironment, ToolEnvironmentConfig
from ratchet.errors import DataError
from ratchet.types import Message, Split, Task


class QAConfig(ToolEnvironmentConfig):
    """Questions from a file with the columns `question` and `answer`, and search tools.

    The policy finds answers with the tools (kind: search). The test split is the file `test`, or
    else a tenth of the questions in `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.qa:QA"

    train: DataFile
    """A file, or an address in an object store."""
    test: DataFile | None = None
    """File of the test split, or an address in an object store; null: a tenth of the questions of
    train."""

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The F1 score of words, which is usual for short answers (arXiv:1606.05250)."""
        return {"kind": "similarity", "measure": "bag", "ignore_case": True}


class QA(ToolEnvironment):
    """The environment of questions with search tools."""

    def __init__(self, config: QAConfig) -> None:
        super().__init__(config)
        self.config = config

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return the tasks of a split.

        Raises DataError, with file and line, for an unusable row or a question in both splits.
        """
        return map(self.add_system_message, self._questions.tasks(split, seed=seed, start=start))

    def task_count(self) -> int:
        return self._questions.task_count()

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError("question answering has no demonstrations of searches: train with rollouts")

    @cached_property
    def _questions(self) -> Questions:
        return Questions(self.config)


class Questions(Rows):
    """The tasks of a question file, without tools."""

    name = "qa"

    def __init__(self, config: QAConfig) -> None:
        train = _read_questions(config.train)
        if config.test is None:
            rows_by_split = {
                "test": [row for row in train if is_held_out(row.question)],
                "train": [row for row in train if not is_held_out(row.question)],
            }
        else:
            rows_by_split = {"train": train, "test": _read_questions(config.test)}
            train_lines = {question: line for line, question, _ in train}
            for line, question, _ in rows_by_split["test"]:
                if question in train_lines:
                    raise DataError(
                        f"{config.test}, line {line}: this question is also in {config.train}, "
                        f"line {train_lines[question]}: remove one of the two"
                    )
        self._rows = {
            split: [_make_task(split, row) for row in rows] for split, rows in rows_by_split.items()
        }

    def rows(self, split: Split) -> Sequence[Task]:
        return self._rows[split]


class _Row(NamedTuple):
    """A row of a question file."""

    line: int
    question: str
    answer: str


def _read_questions(path: DataFile) -> list[_Row]:
    """Return the rows of a file. If rows have the same question, the last is used."""
    row_by_question = {
        row.values["question"]: _Row(row.line, row.values["question"], row.values["answer"])
        for row in read_rows(path, {"question": str, "answer": str})
    }
    return list(row_by_question.values())


def _make_task(split: str, row: _Row) -> Task:
    return Task(
        f"qa/{split}/{row.line}",
        (Message("user", row.question),),
        answer=row.answer,
        environment="qa",
        tag="qa",
    )
