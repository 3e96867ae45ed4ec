"""Play rows of NeMo Gym with its resource servers.

A row is a request (`responses_create_params`) with the verifier's further columns. An attempt seeds
a session on the server, calls the row's tools there, and sends the finished answer to `/verify`,
which returns the reward.

Source: the package nemo-gym 0.4.0, responses_api_agents/simple_agent/app.py and
nemo_gym/base_resources_server.py; judge errors as in nemo_gym/judge.py of its repository.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar, Self

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.data.files import DataFile
from ratchet.data.tables import read_rows
from ratchet.environments.servers.http_session import (
    HTTPSession,
    ServerFault,
    ServerUrl,
    read_reward,
)
from ratchet.environments.servers.responses_items import (
    describe_output,
    describe_turn,
    make_response,
    read_function_tools,
    read_input,
)
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.environments.tool_use.base import describe_unknown_tool
from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.types import READ_FROM, Message, Split, Task, ToolCall, is_finite_number

PARAMS = "responses_create_params"
# Endpoints of every resource server, which a tool's name must not reach.
RESERVED_NAMES = frozenset({"verify", "seed_session", "aggregate_metrics", "reverify_mode", "mcp"})
TOOL_NAME = re.compile(r"[\w.-]*\w[\w.-]*", re.ASCII)  # a part of a path, but not "." or ".."
# Keys that mark a reward which does not count: the judge failed, or the row is masked.
FAILURE_KEYS = ("_ng_failure_class", "mask_sample")


class NemoGymConfig(EnvironmentConfig):
    """An environment of NeMo Gym's rows, on a resource server (docs/integrations/nemo-gym.md)."""

    builds: ClassVar[str] = "ratchet.environments.servers.nemo_gym:NemoGym"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    url: ServerUrl
    """Address of the resource server: http://host:8000."""
    train: DataFile
    """JSON Lines file of NeMo Gym, or its address."""
    test: DataFile | None = None
    """File of the test split; null: a tenth of the rows of train."""
    max_turns: int = Field(64, ge=1)
    """Turns with calls after which an attempt is verified as it stands."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of an answer, in seconds."""
    show_tool_failures: bool = False
    """True: the policy reads a tool's answer with status 5xx, as with NeMo Gym's own agent. False:
    such an answer fails the attempt."""
    replayable: bool = True
    """True if the same row and the same calls give the same answers."""


class NemoGym(Rows):
    """An environment whose tools and verifier are on a resource server of NeMo Gym."""

    name = "nemo_gym"

    def __init__(self, config: NemoGymConfig) -> None:
        self.config, self.replayable = config, config.replayable
        self._session: HTTPSession | None = None

    def __copy__(self) -> Self:
        copy = type(self).__new__(type(self))
        vars(copy).update({**vars(self), "_session": None})
        return copy

    def rows(self, split: Split) -> Sequence[Task]:
        """Return the tasks of a split. Raises DataError, with file and line, for a wrong row."""
        return self._rows[split]

    @cached_property
    def _rows(self) -> dict[Split, list[Task]]:
        train = _read_tasks(self.config.train, "train")
        if self.config.test is not None:
            test = _read_tasks(self.config.test, "test")
            _check_no_overlap(train, test)
            return {"train": train, "test": test}
        held_out = [is_held_out(_get_prompt(task)) for task in train]
        return {
            "train": [task for task, is_test in zip(train, held_out, strict=True) if not is_test],
            "test": [task for task, is_test in zip(train, held_out, strict=True) if is_test],
        }

    @property
    def has_tools(self) -> bool:
        """True if a row has tools."""
        return self._has_tools

    @cached_property
    def _has_tools(self) -> bool:
        return any(self.tools(task) for tasks in self._rows.values() for task in tasks)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return read_function_tools(task.meta["row"][PARAMS], task.where)

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError("rows of NeMo Gym have no demonstrations: train with rollouts")

    async def reset(self, task: Task) -> Sequence[Message]:
        """Seed a session on the server. Raises ServerFault if that fails."""
        await self.close()
        self._row: Mapping[str, Any] = task.meta["row"]
        self._tool_names = [tool["function"]["name"] for tool in self.tools(task)]
        self._output: list[dict[str, Any]] = []
        self._n_turns = 0
        self._session = HTTPSession(self.config.url, self.config.timeout_s)
        (await self._session.post("/seed_session", self._row)).require_success()
        return task.messages

    async def step(self, message: Message) -> Step:
        """Call the tools of a message; without a call, or after the last turn, verify the attempt.

        Raises ServerFault if the server fails.
        """
        self._output += describe_turn(message, self._n_turns)
        if not message.tool_calls:
            return await self._verify()
        self._n_turns += 1
        answers, n_errors = [], 0.0
        for call in message.tool_calls:
            text, is_error = await self._call_tool(call)
            self._output.append(describe_output(call, text))
            answers.append(Message("tool", text, tool_call_id=call.id))
            n_errors += is_error
        metrics = {"tool_calls": float(len(answers)), "tool_errors": n_errors}
        if self._n_turns < self.config.max_turns:
            return Step(tuple(answers), metrics=metrics)
        verdict = await self._verify()
        return Step((), verdict.reward, True, metrics={**(verdict.metrics or {}), **metrics})

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        """Return the verifier's reward of an attempt that a limit of tokens or turns cut off."""
        if messages[-1].role == "assistant":
            self._output += describe_turn(messages[-1], self._n_turns, cut=True)
        return (await self._verify(cut=True)).reward

    async def close(self) -> None:
        """Close the connections. The protocol has no request that ends a session."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _call_tool(self, call: ToolCall) -> tuple[str, bool]:
        """Return the answer to a call, and True if the call failed."""
        # The policy chooses the path, so only the row's tools may be reached.
        if call.name not in self._tool_names:
            return f"Error: {describe_unknown_tool(call.name, self._tool_names)}", True
        assert self._session is not None, "step before reset"
        answer = await self._session.post(f"/{call.name}", dict(call.arguments))
        if answer.status >= 500 and not self.config.show_tool_failures:
            answer.require_success()
        return answer.text, not answer.is_success

    async def _verify(self, *, cut: bool = False) -> Step:
        """Return the last step of an attempt, with the verifier's reward."""
        assert self._session is not None, "step before reset"
        response = make_response(self._output, self._row[PARAMS], cut=cut)
        answer = await self._session.post("/verify", {**self._row, "response": response})
        verdict = answer.read_object()
        failure = next((key for key in FAILURE_KEYS if verdict.get(key)), None)
        if failure is not None:
            details = {key: value for key, value in verdict.items() if key.startswith("_ng_")}
            raise ServerFault(f"{answer.url} gave no verdict: {failure} is set {details or ''}")
        metrics = {
            name: float(value)
            for name, value in verdict.items()
            if name not in self._row and name != "reward" and is_finite_number(value)
        }
        return Step((), read_reward(verdict.get("reward"), answer.url), True, metrics=metrics)


def _read_tasks(path: DataFile, split: Split) -> list[Task]:
    tasks: list[Task] = []
    for row in read_rows(path, {PARAMS: dict}):
        where = f"{path}, {row.where}"
        params = row.values[PARAMS]
        for tool in read_function_tools(params, where):
            name = tool["function"]["name"]
            if name in RESERVED_NAMES or not TOOL_NAME.fullmatch(name):
                raise DataError(f"{where}: a tool can't be called '{name}'. Rename it.")
        tasks.append(
            Task(
                f"nemo_gym/{split}/{row.line}",
                read_input(params, where),
                environment="nemo_gym",
                tag="nemo_gym",
                meta={"row": row.values, READ_FROM: where},
            )
        )
    return tasks


def _get_prompt(task: Task) -> str:
    """Return the text by which a task is held out. Rows with equal requests share a split."""
    return json.dumps(task.meta["row"][PARAMS].get("input"), sort_keys=True)


def _check_no_overlap(train: Sequence[Task], test: Sequence[Task]) -> None:
    """Raise DataError if a prompt is in both splits."""
    places = {_get_prompt(task): task.where for task in train}
    for task in test:
        place = places.get(_get_prompt(task))
        if place is not None:
            raise DataError(f"{task.where}: this input is also in {place}: remove one of the two")
