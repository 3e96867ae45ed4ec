"""One session on a server of the Open Reward Standard, over HTTP with server-sent events.

Source: the packages openreward 0.1.167 and ors-sdk 0.1.0, server.py and types.py.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ratchet.data.chat.thinking import mark_thought
from ratchet.environments.servers.http_session import (
    SHOWN_CHARACTERS,
    HTTPAnswer,
    HTTPSession,
    ServerFault,
    read_reward,
)
from ratchet.environments.tool_use.base import describe_unknown_tool, make_tool_schema
from ratchet.types import Message, Part, ToolCall

SESSION_HEADER = "X-Session-ID"
PING_S = 10.0  # as the official client: a server ends sessions that it does not hear of
STARTING_WAIT_S = 0.2  # pause between two requests to a session whose setup is running
# Errors of calls that the policy can mend. Servers before 0.1.157 give no reason.
POLICY_ERRORS = ("input_validation", None)


@dataclass(frozen=True)
class ToolResult:
    """The result of a call."""

    content: str | tuple[Part, ...]
    """The text for the policy, or parts if there are images."""
    reward: float = 0.0
    """The reward; 0 if the server gave none."""
    finished: bool = False
    """True if the call ended the episode."""
    is_error: bool = False
    """True if the server refused the call, which is the policy's fault."""


class OpenRewardSession:
    """A session of one task. It is pinged until it is closed.

    Attributes:
        tools: The tools that the policy may call, in the form of chat completions.
        terminal_tool: Name of the hidden tool that takes the policy's first message without a call;
            "" if there is none.
    """

    def __init__(self, url: str, environment: str, timeout_s: float) -> None:
        self.tools: Sequence[Mapping[str, Any]] = ()
        self.terminal_tool = ""
        self._terminal_argument: str | None = None
        self._path = f"/{environment}"
        self._environment = environment
        self._http = HTTPSession(url, timeout_s)
        self._pings: asyncio.Task[None] | None = None

    async def open(self, split: str, index: int) -> tuple[Message, ...]:
        """Create the session, and return the task's first messages. Raises ServerFault."""
        answer = await self._http.post("/create_session")
        events = read_events(answer.require_success())
        session_id = next((data for name, data in events if name == "task_id"), "").strip()
        if not session_id:
            raise answer.make_fault("not a session")
        self._http.headers[SESSION_HEADER] = session_id
        request = {"env_name": self._environment, "split": split, "index": index}
        (await self._http.post("/create", request)).require_success()
        self._pings = asyncio.create_task(self._ping())
        self._read_tools(await self._http.get(f"{self._path}/task_tools"))
        messages = await self._ask_when_ready(lambda: self._http.get(f"{self._path}/messages"))
        if messages.status == 404:  # servers before 0.1.157 have only prompts
            prompt = await self._ask_when_ready(lambda: self._http.get(f"{self._path}/prompt"))
            return (Message("user", _read_blocks(prompt.read_json(), prompt)),)
        return _read_messages(messages)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Return the result of a tool that the policy calls. Raises ServerFault if it fails."""
        names = [tool["function"]["name"] for tool in self.tools]
        if name not in names:  # such as the terminal tool, which is hidden
            return ToolResult(f"Error: {describe_unknown_tool(name, names)}", is_error=True)
        return await self._call(name, arguments)

    async def _call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        request = {"name": name, "input": dict(arguments)}
        answer = await self._ask_when_ready(lambda: self._http.post(f"{self._path}/call", request))
        return _read_result(answer.require_success())

    async def call_terminal_tool(self, text: str) -> ToolResult:
        """Pass the policy's last message to the terminal tool. Raises ServerFault."""
        argument = self._terminal_argument
        return await self._call(self.terminal_tool, {} if argument is None else {argument: text})

    async def close(self) -> None:
        """End the session and its environment."""
        if not self._http.is_alive:
            return
        if self._pings is not None:
            self._pings.cancel()
        with contextlib.suppress(ServerFault):
            if SESSION_HEADER in self._http.headers:
                await self._http.post("/delete")
        await self._http.close()

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_S)
            # If the session is lost, the next request of the attempt tells.
            with contextlib.suppress(ServerFault):
                await self._http.post("/ping")

    async def _ask_when_ready(self, ask: Callable[[], Awaitable[HTTPAnswer]]) -> HTTPAnswer:
        """Return an answer. While the setup of the session runs, ask again for up to timeout_s."""
        deadline = asyncio.get_running_loop().time() + self._http.timeout_s
        while True:
            answer = await ask()
            is_starting = answer.headers.get("x-backend-state") == "starting"
            if not (answer.status == 503 and is_starting):
                return answer
            if asyncio.get_running_loop().time() > deadline:
                return answer.require_success()
            await asyncio.sleep(STARTING_WAIT_S)

    def _read_tools(self, answer: HTTPAnswer) -> None:
        values = answer.read_object()
        try:
            self.tools = tuple(_describe_tool(tool) for tool in values["tools"])
            if terminal_tool := values.get("terminal_tool"):
                self.terminal_tool = str(terminal_tool["name"])
                self._terminal_argument = terminal_tool.get("arg")
        except (LookupError, TypeError, AttributeError):
            raise answer.make_fault("not a list of tools") from None


def read_events(answer: HTTPAnswer) -> list[tuple[str, str]]:
    """Return the name and the data of each server-sent event in an answer."""
    events: list[tuple[str, str]] = []
    name, lines = "", list[str]()
    for line in answer.text.replace("\r\n", "\n").split("\n"):
        field, _, value = line.partition(":")
        if not line and name:
            events.append((name, "\n".join(lines)))
            name, lines = "", []
        elif field == "event":
            name = value.strip()
        elif field == "data":
            lines.append(value.removeprefix(" "))
    return events


def _read_result(answer: HTTPAnswer) -> ToolResult:
    """Return the result in the events of a call. Raises ServerFault."""
    events = read_events(answer)
    error = next((data for name, data in events if name == "error"), None)
    if error is not None:
        raise ServerFault(f"{answer.url} failed: {error[:SHOWN_CHARACTERS]}")
    if not events or events[-1][0] != "end":
        raise answer.make_fault("a stream of events without an end")
    data = "".join(data for name, data in events if name in ("chunk", "end"))
    answer = HTTPAnswer(answer.status, answer.headers, data.encode(), answer.url)
    values = answer.read_object()
    if values.get("ok") is False and values.get("reason") in POLICY_ERRORS:
        return ToolResult(f"Error: {values.get('error')}", is_error=True)
    if values.get("ok") is not True:
        raise answer.make_fault("a call that failed")
    output = values.get("output")
    if not isinstance(output, dict) or not isinstance(output.get("finished", False), bool):
        raise answer.make_fault("not a result of a tool")
    reward = output.get("reward")
    return ToolResult(
        _read_blocks(output.get("blocks"), answer),
        0.0 if reward is None else read_reward(reward, answer.url),
        output.get("finished", False),
    )


def _read_messages(answer: HTTPAnswer) -> tuple[Message, ...]:
    """Return the messages of a conversation. Raises ServerFault."""
    try:
        messages = [
            message for value in answer.read_json() for message in _read_message(value, answer)
        ]
    except (LookupError, TypeError, AttributeError):
        messages = []
    if not messages:
        raise answer.make_fault("not a conversation")
    return tuple(messages)


def _read_message(value: Mapping[str, Any], answer: HTTPAnswer) -> Iterator[Message]:
    """Yield the messages in one of the server's, which holds results of tools with other blocks."""
    blocks = {kind: [] for kind in ("text", "reasoning", "tool_call", "tool_result")}
    for block in value["blocks"]:
        blocks["text" if block["type"] == "image" else block["type"]].append(block)
    for block in blocks["tool_result"]:
        content = _read_blocks(block["blocks"], answer)
        yield Message("tool", content, tool_call_id=block["tool_call_id"])
    content = _read_blocks(blocks["text"], answer)
    thought = "".join(block["text"] for block in blocks["reasoning"])
    if thought and isinstance(content, str):
        content = mark_thought(thought) + content
    calls = [ToolCall(block["id"], block["name"], block["input"]) for block in blocks["tool_call"]]
    if content or calls:
        yield Message(value["role"], content, tuple(calls))


def _read_blocks(blocks: Any, answer: HTTPAnswer) -> str | tuple[Part, ...]:
    """Return the text of blocks, or parts if some blocks are images. Raises ServerFault."""
    try:
        parts = tuple(
            Part("text", block["text"])
            if block["type"] == "text"
            else Part("image", f"data:{block['mimeType']};base64,{block['data']}")
            for block in blocks
        )
        if any(part.type == "image" for part in parts):
            return parts
        return "\n".join(part.value for part in parts)
    except (LookupError, TypeError, AttributeError):
        raise answer.make_fault("not a list of blocks") from None


def _describe_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    return make_tool_schema(str(tool["name"]), tool.get("description"), tool.get("input_schema"))
