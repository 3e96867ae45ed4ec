"""Questions whose answers stand in a corpus that the policy can search."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

from pydantic import Field

from ratchet.data.files import DataFile
from ratchet.data.tables import read_rows
from ratchet.environments.single_turn import Rows, held_out
from ratchet.environments.tool_use.environment import WithTools, WithToolsConfig
from ratchet.errors import DataError
from ratchet.types import Message, Split, Task


class QAConfig(WithToolsConfig):
    """Questions from a file with the columns `question` and `answer`, and tools to look the answer
    up (kind: search).

    The test split is the file `test`, or else one in ten of the questions.
    """

    builds: ClassVar[str] = "ratchet.environments.datasets.qa:QA"

    train: DataFile = Field(description="A file, or an address in an object store.")
    test: DataFile | None = Field(None, description="Likewise.")

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The F1 of words, as usual for short answers (arXiv:1606.05250)."""
        return {"kind": "similarity", "measure": "bag", "ignore_case": True}


class QA(WithTools):
    def __init__(self, config: QAConfig) -> None:
        super().__init__(config)
        self.config = config

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Raises DataError naming file and line for a row that can't be used, and for a question in
        both splits."""
        return map(self.asked, self._questions.tasks(split, seed=seed, start=start))

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError(
            "question answering comes without demonstrations of searches: train with rollouts"
        )

    @cached_property
    def _questions(self) -> Questions:
        return Questions(self.config)


class Questions(Rows):
    name = "qa"

    def __init__(self, config: QAConfig) -> None:
        train = _read(config.train)
        if config.test is None:
            split = {
                "test": [row for row in train if held_out(row[1])],
                "train": [row for row in train if not held_out(row[1])],
            }
        else:
            split = {"train": train, "test": _read(config.test)}
            asked = {question: line for line, question, _ in train}
            for line, question, _ in split["test"]:
                if question in asked:
                    raise DataError(
                        f"{config.test}, line {line}: this question is also in {config.train}, "
                        f"line {asked[question]}"
                    )
        self._rows = {name: [_task(name, row) for row in rows] for name, rows in split.items()}

    def rows(self, split: Split) -> Sequence[Task]:
        return self._rows[split]


def _read(path: DataFile) -> list[tuple[int, str, str]]:
    """(line, question, answer), each question once."""
    passages = {
        row.values["question"]: (row.line, row.values["question"], row.values["answer"])
        for row in read_rows(path, {"question": str, "answer": str})
    }
    return list(passages.values())


def _task(split: str, row: tuple[int, str, str]) -> Task:
    line, question, answer = row
    return Task(
        f"qa/{split}/{line}",
        (Message("user", question),),
        answer=answer,
        environment="qa",
        tag="qa",
    )
