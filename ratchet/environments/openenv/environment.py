"""Play environments of OpenEnv 0.10 over their servers: actions are texts, or calls of tools.

A task is a seed, which `reset` passes to the server. Each instance has a session of its own. The
server decides on rewards and on the end of an episode. If it reports an error, dies or does not
answer, the attempt fails.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.adapters.seeded_tasks import SeededTasks
from ratchet.environments.openenv.process import ServerProcess
from ratchet.environments.openenv.session import (
    Answer,
    InvalidAction,
    OpenEnvError,
    OpenEnvSession,
    open_episode,
    read_schema,
)
from ratchet.environments.tool_use.base import make_tool_schema
from ratchet.errors import ConfigError
from ratchet.protocols import Step
from ratchet.types import Message, Split, Task, ToolCall

# Types of tool errors that are the server's fault, not the policy's.
SERVER_FAULTS = ("timeout", "transport_error")


class OpenEnvConfig(EnvironmentConfig):
    """An environment of OpenEnv, on a server or in a package (docs/integrations/openenv.md)."""

    builds: ClassVar[str] = "ratchet.environments.openenv.environment:OpenEnv"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    url: str | None = Field(None, pattern="^https?://")
    """Address of a server, such as http://host:8000."""
    path: Path | None = None
    """Directory of a package with openenv.yaml, whose server is started."""
    python: str | None = None
    """With path: interpreter that has openenv and what the package needs; null: the interpreter of
    the run."""
    sessions: int = Field(64, gt=0)
    """With path: maximum number of sessions of the server at once."""
    actions: Literal["text", "tools"] = "text"
    """text: a message is a field of the action; tools: the policy calls the server's (MCP) tools,
    and a message without a call ends the episode."""
    action_field: str | None = None
    """With actions=text: field of the action that a message fills; null: the only required
    field."""
    prompt: str = "{observation}"
    """First message: {observation} is the text of the observation, {name} one of its fields."""
    reply: str = "{observation}"
    """Further messages, with the same placeholders as prompt."""
    reset: dict[str, Any] = Field({})
    """Further arguments of the server's reset."""
    test_tasks: int = Field(100, ge=1)
    """Number of held-out seeds, from 0 on."""
    max_turns: int = Field(100, ge=1)
    """Turns after which an episode is ended."""
    timeout_s: float = Field(60.0, gt=0)
    """Time limit of an answer, in seconds."""
    replayable: bool = True
    """True if the same seed and the same actions give the same episode."""

    def check_keys(self) -> None:
        if (self.url is None) == (self.path is None):
            raise ValueError("must have either url (a running server) or path (a package)")


class OpenEnvServer:
    """The server that all copies of an environment share. It starts when it is needed.

    Attributes:
        url: Address of the server; "" before its start.
        action_field: Field of the action that a message fills; "" if actions are tool calls.
    """

    def __init__(self, config: OpenEnvConfig) -> None:
        self.url, self.action_field = "", ""
        self._config = config
        self._process: ServerProcess | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the server of a package, and read the schema of actions. Blocks.

        Raises ConfigError or DataError; further calls do nothing.
        """
        config = self._config
        with self._lock:
            if self.url:
                return
            url = config.url or ""
            if config.path is not None:
                self._process = ServerProcess(
                    config.path, config.python or sys.executable, config.sessions, config.timeout_s
                )
                url = self._process.url
            if config.actions == "text":
                self.action_field = self._find_field(url)
            self.url = url

    def describe_end(self) -> str:
        """Return how the package's server ended; "" if it has not, or if `url` names the server."""
        return "" if self._process is None else self._process.describe_end()

    def _find_field(self, url: str) -> str:
        """Return the field of the action that messages fill. Raises ConfigError if unclear."""
        schema = read_schema(url, self._config.timeout_s).get("action", {})
        fields = [name for name in schema.get("properties", {}) if name != "metadata"]
        required = schema.get("required", [])
        field = self._config.action_field
        candidates = [field] if field else required or fields
        other_required = set(required) - set(candidates[:1])
        if len(candidates) != 1 or candidates[0] not in fields or other_required:
            raise ConfigError(
                f"environment.action_field={field}: the server's action has the fields "
                f"{', '.join(fields) or 'none'}, and requires {', '.join(required) or 'none'}. "
                "Set action_field to the only required one, or actions=tools."
            )
        return candidates[0]


class OpenEnv(SeededTasks):
    """An environment whose episodes a server plays. Copies share the server, not its sessions."""

    name = "openenv"

    def __init__(self, config: OpenEnvConfig) -> None:
        self.config = config
        self.n_test_tasks = config.test_tasks
        self.replayable = config.replayable
        self._server = OpenEnvServer(config)
        self._session: OpenEnvSession | None = None
        self._tools: Sequence[Mapping[str, Any]] = ()

    def __copy__(self) -> Self:
        copy = type(self).__new__(type(self))
        vars(copy).update({**vars(self), "_session": None})
        return copy

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return a split's tasks, each a seed. Start the server first, if that has not been done.

        Raises ConfigError if the server does not start, or its action has no field for messages;
        DataError if it does not answer.
        """
        self._server.start()
        return super().tasks(split, seed=seed, start=start)

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._tools

    async def reset(self, task: Task) -> Sequence[Message]:
        """Begin an episode in a new session. Raises OpenEnvError if the server fails."""
        await self.close()
        await asyncio.to_thread(self._server.start)
        config, url = self.config, self._server.url
        self._session, answer = await self._guard(
            open_episode(url, config.timeout_s, task.seed, config.reset)
        )
        if answer.done:
            raise OpenEnvError(f"{url} ended the episode of seed {task.seed} at its reset")
        if config.actions == "tools":
            listed = await self._ask({"type": "list_tools"})
            self._tools = _read_tools(listed.observation, url)
        self._n_turns = 0
        self._state = text = format_observation(config.prompt, answer.observation)
        return (Message("user", text),)

    async def step(self, message: Message) -> Step:
        """Send the message as one action, or each of its tool calls as one.

        Raises OpenEnvError if the server fails.
        """
        self._n_turns += 1
        is_last = self._n_turns >= self.config.max_turns
        if self.config.actions == "tools":
            step = await self._call_tools(message)
        else:
            step = await self._send_text(message)
        if (step.done or is_last) and (session := self._session) is not None:
            self._session = None
            await session.finish()
        return Step((), step.reward, True, step.state_key, step.metrics) if is_last else step

    async def _send_text(self, message: Message) -> Step:
        previous_state, invalid = self._state, 0.0
        try:
            answer = await self._ask({self._server.action_field: message.text})
            text = format_observation(self.config.reply, answer.observation)
            self._state = text
        except InvalidAction as error:
            if error.lacks_fields:
                raise OpenEnvError(
                    f"{error}: {error.detail}. The server's action has other fields now than "
                    f"'{self._server.action_field}'. Start the run again"
                ) from error
            # Otherwise it is the policy's fault, which it can mend.
            answer = Answer({}, 0.0, False)
            text = f"invalid action: {error.detail}"
            invalid = 1.0
        return Step(
            messages=() if answer.done else (Message("user", text),),
            reward=answer.reward,
            done=answer.done,
            state_key=previous_state,
            metrics={"invalid_actions": invalid},
        )

    async def _call_tools(self, message: Message) -> Step:
        answers: list[Message] = []
        reward = 0.0
        done = not message.tool_calls
        n_errors = 0.0
        for call in message.tool_calls:
            answer, text, is_error = await self._call_tool(call)
            answers.append(Message("tool", text, tool_call_id=call.id))
            reward += answer.reward
            done = answer.done
            n_errors += is_error
            if done:
                break
        metrics = {"tool_calls": float(len(answers)), "tool_errors": n_errors}
        return Step(() if done else tuple(answers), reward, done, metrics=metrics)

    async def _call_tool(self, call: ToolCall) -> tuple[Answer, str, bool]:
        """Return the answer, its text, and True if the call failed."""
        action = {"type": "call_tool", "tool_name": call.name, "arguments": dict(call.arguments)}
        try:
            answer = await self._ask(action)
        except InvalidAction as error:
            return Answer({}, 0.0, False), f"invalid call: {error.detail}", True
        error = answer.observation.get("error")
        if isinstance(error, dict):
            if error.get("error_type") in SERVER_FAULTS:
                raise OpenEnvError(f"{self._server.url} failed at tool '{call.name}': {error}")
            return answer, str(error.get("message")), True
        return answer, _format_result(answer.observation.get("result")), False

    async def _ask(self, action: Mapping[str, Any]) -> Answer:
        """Return the server's answer to an action. Raises OpenEnvError."""
        assert self._session is not None, "step before reset"
        return await self._guard(self._session.step(action))

    async def _guard(self, awaitable: Any) -> Any:
        """Return the result of a request. Add to an OpenEnvError how the server's process ended."""
        try:
            return await awaitable
        except InvalidAction:
            raise
        except OpenEnvError as error:
            raise OpenEnvError(f"{error}{self._server.describe_end()}") from error

    async def close(self) -> None:
        """End the session. The server of a package ends with the last copy."""
        if (session := self._session) is not None:
            self._session = None
            await session.close()


def format_observation(template: str, observation: Mapping[str, Any]) -> str:
    """Return the template filled with the fields of an observation, except `metadata`.

    {observation} is the text field if there is exactly one, else all fields as JSON. {name} is the
    field of that name, as JSON unless it is a text.
    """
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    texts = [value for value in fields.values() if isinstance(value, str)]
    observation_text = texts[0] if len(texts) == 1 else json.dumps(fields, ensure_ascii=False)
    values = {
        name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for name, value in fields.items()
    }
    values["observation"] = observation_text
    # One pass, so that braces inside an observation stay as they are.
    return re.sub(r"\{([^{}]*)\}", lambda match: values.get(match[1], match[0]), template)


def _read_tools(observation: Mapping[str, Any], url: str) -> list[Mapping[str, Any]]:
    """Return the definitions of MCP tools in the form of chat completions. Raises OpenEnvError."""
    tools = observation.get("tools")
    if not isinstance(tools, list) or not all(
        isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in tools
    ):
        raise OpenEnvError(f"{url} answered list_tools with no list of tools: {tools!r:.200}")
    return [
        make_tool_schema(tool["name"], tool.get("description"), tool.get("input_schema"))
        for tool in tools
    ]


def _format_result(result: Any) -> str:
    """Return the text of a tool's result: its `data`, else its text parts, else all as JSON."""
    if isinstance(result, dict):
        data = result.get("data")
        parts = [part for part in result.get("content") or () if isinstance(part, dict)]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if data is None and texts:
            return "\n".join(texts)
        result = result if data is None else data
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
