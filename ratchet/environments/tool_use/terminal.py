"""An environment of goals to reach with shell commands.

The check runs in a new session, with a copy of the final files of the agent's session. The agent
never sees the check, and no process that it started can reach the check.

The agent's files are in the directory $WORK, and the check starts in the directory $CHECK with its
own files. Programs also load files that no command names (csv.py, conftest.py, GNUmakefile,
node_modules, .git), from the directories in which they start and in which their source is. Both
directories hold only the check's files, so a file of the agent is used only if the check names it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from ratchet.data.files import DataFile
from ratchet.data.jsonl import DataRow
from ratchet.data.tables import read_rows
from ratchet.environments.single_turn import is_held_out
from ratchet.environments.tool_use.shell import Attempt, ShellConfig, ShellEnvironment, move_below
from ratchet.errors import DataError
from ratchet.sandbox.base import TooLarge, check_relative_path
from ratchet.sandbox.compare_output import output_matches
from ratchet.types import Message, Split, Task


class TerminalConfig(ShellConfig):
    """An environment of goals to reach with commands in a sandbox (docs/sandbox.md).

    A check that the agent never sees judges the result: the last step's reward is 1 or 0. Rows have
    `goal` and `check`, and optionally `id`, `image`, `files`, `check_files`, `expected` and
    `solution`. The test split is the file `test`, or else a tenth of the goals in `train`.
    """

    builds: ClassVar[str] = "ratchet.environments.tool_use.terminal:Terminal"

    train: DataFile
    """A file, or an address in an object store."""
    test: DataFile | None = None
    """File of the test split, or an address in an object store."""
    check_timeout_s: float = Field(60.0, gt=0)
    """Wall time limit of the check, in seconds."""


# The names of two directories. In capitals, they name the variables with the directories' paths.
WORK, CHECK = "work", "check"
WORK_REFERENCE = re.compile(rf"\b{WORK.upper()}\b|\.\./{WORK}\b")
# Commands that run before the check, in its session. The Python variables are for a check that does
# `cd "$WORK"`, where Python would import the agent's files. The git variables are for a check that
# uses a repository of the agent: they keep `git status` and `git fetch` from running commands in
# its configuration.
SETUP_COMMANDS = f"""
export {WORK.upper()}="$PWD/{WORK}" {CHECK.upper()}="$PWD/{CHECK}"
export HOME="$CHECK"
export PYTHONPATH="$CHECK" PYTHONSAFEPATH=1 PYTHONNOUSERSITE=1 PYTHONDONTWRITEBYTECODE=1
export GIT_CONFIG_COUNT=2 GIT_CONFIG_KEY_0=core.fsmonitor GIT_CONFIG_VALUE_0=false
export GIT_CONFIG_KEY_1=core.hooksPath GIT_CONFIG_VALUE_1=/dev/null
export GIT_ALLOW_PROTOCOL=file GIT_NO_LAZY_FETCH=1
mkdir -p "$WORK" "$CHECK" && cd "$CHECK" || exit 125
"""
# Optional columns of a row: (type, default).
OPTIONAL_COLUMNS: Mapping[str, tuple[type, Any]] = {
    "id": (str, ""),
    "image": (str, ""),
    "files": (dict, {}),
    "check_files": (dict, {}),
    "expected": (str, None),
    "solution": (list, []),
}


class Terminal(ShellEnvironment):
    """An environment in which an agent reaches goals with shell commands."""

    name = "terminal"

    def __init__(self, config: TerminalConfig) -> None:
        super().__init__(config, config.sandbox)
        self.config = config

    def rows(self, split: Split) -> Sequence[Task]:
        """Return a split's tasks. Raises DataError, with file and line, for an unusable row."""
        return self._tasks[split]

    @cached_property
    def _tasks(self) -> dict[Split, list[Task]]:
        train = [
            self._read_task(self.config.train, row)
            for row in read_rows(self.config.train, {"goal": str, "check": str})
        ]
        if self.config.test is None:
            return {
                "train": [task for task in train if not is_held_out(task.meta["goal"])],
                "test": [task for task in train if is_held_out(task.meta["goal"])],
            }
        test = [
            self._read_task(self.config.test, row)
            for row in read_rows(self.config.test, {"goal": str, "check": str})
        ]
        return {"train": train, "test": test}

    def _read_task(self, path: DataFile, row: DataRow) -> Task:
        where = f"{path}, {row.where}"
        meta = {"goal": row.values["goal"], "check": row.values["check"]}
        for name, (expected, default) in OPTIONAL_COLUMNS.items():
            meta[name] = row.values.get(name, default)
            if meta[name] is not default and not isinstance(meta[name], expected):
                raise DataError(
                    f"{where}: column '{name}' is {meta[name]!r:.60}, must be of type "
                    f"{expected.__name__}"
                )
        for name in ("files", "check_files"):
            for file, text in meta[name].items():
                check_relative_path(file)
                if not isinstance(text, str):
                    raise DataError(
                        f"{where}: column '{name}' must map each file name to its text, and "
                        f"{file!r} has {text!r:.60}"
                    )
        if not any(
            WORK_REFERENCE.search(text) for text in (meta["check"], *meta["check_files"].values())
        ):
            raise DataError(
                f"{where}: the check never names the agent's files, which are in $WORK, so it "
                "judges every attempt equally. Write \"$WORK/FILE\" for FILE in 'check', or read "
                "the variable WORK in a file of 'check_files'."
            )
        task_id = meta.pop("id") or f"{Path(path).stem}/{row.line}"
        prompt = Message("user", row.values["goal"] + self.config.instructions)
        return Task(
            f"{self.name}/{task_id}", (prompt,), environment=self.name, tag=self.name, meta=meta
        )

    def demonstration(self, task: Task) -> Sequence[Message]:
        if not task.meta["solution"]:
            raise DataError(f"task '{task.id}' has no solution")
        return (
            *(Message("assistant", f"```sh\n{command}\n```") for command in task.meta["solution"]),
            Message("assistant", "Done."),
        )

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        session = await self.sandbox.open(task.meta["image"], self.limits)
        self._attempt = Attempt(task, session)
        await session.put(_encode_files(task.meta["files"]))
        return task.messages

    async def judge(self, attempt: Attempt) -> tuple[float, Mapping[str, float]]:
        """Return 1 if the check passes, else 0.

        It passes if it prints `expected` or, without that column, exits with code 0.
        """
        meta = attempt.task.meta
        try:
            files = await attempt.session.get()
        except TooLarge:  # the agent wrote too much, so its files can't be judged
            return 0.0, {}
        await self.close()
        session = await self.sandbox.open(meta["image"], self.limits)
        try:
            await session.put(move_below(CHECK, _encode_files(meta["check_files"])))
            try:
                await session.put(move_below(WORK, files))
            # The agent's files leave too little space for the check's. The reward is 0, because the
            # agent could otherwise avoid a low reward with large files.
            except TooLarge:
                return 0.0, {}
            result = await session.run(SETUP_COMMANDS + meta["check"], self.config.check_timeout_s)
        finally:
            await session.close()
        passes = result.ok if meta["expected"] is None else output_matches(result, meta["expected"])
        return float(passes), {}


def _encode_files(texts: Mapping[str, str]) -> dict[str, bytes]:
    return {name: text.encode("utf-8", "surrogatepass") for name, text in texts.items()}
