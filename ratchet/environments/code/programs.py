"""An environment of programming tasks judged by tests.

Tasks are generated, or read from a file.

A generated prompt and its solution: "*3+2" -> "def f(x):\\n x*=3\\n x+=2\\n return x".
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.files import DataFile
from ratchet.data.tables import read_rows
from ratchet.environments.single_turn import Problem, Procedural, Rows, is_held_out
from ratchet.errors import DataError
from ratchet.types import Message, Split, Task


class ProgramsConfig(EnvironmentConfig):
    """Programs judged by tests: generated small functions, or the rows of a file.

    Each row has `prompt`, and its tests in one of three forms: `tests` ([{"stdin", "stdout"}]);
    `entry_point` with `test` (HumanEval); or `case_type` with `test_cases` (ROLL). A
    `canonical_solution` becomes the demonstration. The test split is the file `test`, or else a
    tenth of the prompts.
    """

    builds: ClassVar[str] = "ratchet.environments.code.programs:programs"
    default_reward: ClassVar[str] = "code"

    train: DataFile | None = None
    """File of tasks; null: tasks are generated, such as *3+2 -> def f(x): return x*3+2."""
    test: DataFile | None = None
    """File of the test split; null: a tenth of the prompts."""
    operations: int = Field(2, ge=1, le=6)
    """Number of operations of a generated function."""

    def check_keys(self) -> None:
        if self.test is not None and self.train is None:
            raise ValueError("test has no effect without train: set train, or remove test")
        if self.train is not None and "operations" in self.changed:
            raise ValueError(
                f"operations={self.operations} is for generated functions: remove operations or "
                "train"
            )


OPERATIONS = {"+": lambda x, n: x + n, "-": lambda x, n: x - n, "*": lambda x, n: x * n}
ARGUMENTS = (0, 1, 7, -12)  # enough to tell any two different functions apart
TEST_COLUMNS = ("tests", "test", "entry_point", "case_type")


def programs(config: ProgramsConfig) -> GeneratedPrograms | ProgramRows:
    """Return the environment of a config."""
    return GeneratedPrograms(config) if config.train is None else ProgramRows(config)


class GeneratedPrograms(Procedural):
    """Tasks to write a function that applies the prompt's operations to a number in order."""

    name = "programs"

    def __init__(self, config: ProgramsConfig) -> None:
        self.config = config

    def sample(self, rng: random.Random) -> Problem:
        steps = [(rng.choice("+-*"), rng.randint(1, 9)) for _ in range(self.config.operations)]
        lines = [f"assert candidate({x}) == {_apply_steps(x, steps)}" for x in ARGUMENTS]
        test = "def check(candidate):\n" + "".join(f"    {line}\n" for line in lines)
        body = "".join(f" x{sign}={n}\n" for sign, n in steps)
        prompt = "".join(f"{sign}{n}" for sign, n in steps) + "\n"
        return Problem(
            prompt, f"def f(x):\n{body} return x", {"prompt": "", "entry_point": "f", "test": test}
        )


def _apply_steps(x: int, steps: Sequence[tuple[str, int]]) -> int:
    for sign, n in steps:
        x = OPERATIONS[sign](x, n)
    return x


class ProgramRows(Rows):
    """Tasks to write a program, from the rows of a file."""

    name = "programs"

    def __init__(self, config: ProgramsConfig) -> None:
        self.config = config

    def rows(self, split: Split) -> Sequence[Task]:
        """Return all tasks of a split.

        Raises DataError, with the file, for a row without tests and for a prompt in both splits.
        """
        return self._rows[split]

    def demonstration(self, task: Task) -> Sequence[Message]:
        solution = task.meta.get("canonical_solution")
        if not isinstance(solution, str):
            raise DataError(f"task '{task.id}' has no canonical_solution to learn from")
        return (Message("assistant", solution),)

    @cached_property
    def _rows(self) -> dict[Split, list[Task]]:
        """Return the tasks of both splits.

        The file is read on first use, because an instance that only plays attempts never needs it.
        """
        assert self.config.train is not None
        rows = _read_tasks("train", self.config.train)
        if self.config.test is None:
            splits: dict[Split, list[Task]] = {"train": [], "test": []}
            for task in rows:
                splits["test" if is_held_out(task.messages[0].text) else "train"].append(task)
            return splits
        prompts = {task.messages for task in rows}
        test = _read_tasks("test", self.config.test)
        shared = next((task for task in test if task.messages in prompts), None)
        if shared is not None:
            raise DataError(
                f"{self.config.test}: the prompt of '{shared.id}' is also in {self.config.train}: "
                "remove it from one of the files"
            )
        return {"train": rows, "test": test}


def _read_tasks(split: Split, path: DataFile) -> list[Task]:
    """Return the tasks of a file. Raises DataError for a row without tests."""
    tasks: list[Task] = []
    for row in read_rows(path, {"prompt": str}):
        if not any(column in row.values for column in TEST_COLUMNS):
            raise DataError(
                f"{path}, {row.where}: a row needs tests, or entry_point and test, or "
                "case_type and test_cases"
            )
        prompt = Message("user", row.values["prompt"])
        tasks.append(
            Task(
                f"programs/{split}/{row.line}",
                (prompt,),
                environment="programs",
                tag="programs",
                meta=dict(row.values),
            )
        )
    return tasks
