"""Rollouts of verifiers with their runtime, hooks and tool servers, in this process.

verifiers' own `Agent` runs the task in a local runtime. A chat loop takes the place of the
harness's program, and the policy the place of the model behind verifiers' endpoint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from ratchet.data.chat.messages import read_messages
from ratchet.environments.tool_use.base import describe_unknown_tool
from ratchet.errors import DataError
from ratchet.types import Message

if TYPE_CHECKING:
    import verifiers.v1 as vf

PROXY_HINT = "run verifiers' own client against Ratchet's OpenAI-compatible proxy instead"

Tools = Sequence[Mapping[str, Any]]
# Properties of a trace that count tokens.
TOKEN_COUNTS = ("usage", "num_input_tokens", "num_output_tokens", "num_total_tokens")
RequestTurn = Callable[[Sequence[Message], Tools], Awaitable[Message | None]]


def needs_rollout(task: vf.Task) -> bool:
    """True if the task has tools, intercepts requests, or has functions that take a runtime."""
    from verifiers.v1 import Task as Base
    from verifiers.v1 import Trace
    from verifiers.v1.session import hook_boundary
    from verifiers.v1.utils.decorators import discover_decorated

    task_type = type(task)
    return (
        bool(task_type.toolsets(task.config))
        or task_type.setup is not Base.setup
        or task_type.finalize is not Base.finalize
        or bool(discover_decorated(task, "intercept"))
        or any(hook_boundary(stop, allow_trace=True) is not Trace for stop in task.hooks("stop"))
        or any(
            "runtime" in inspect.signature(function).parameters
            for function in (*task.hooks("reward"), *task.hooks("metric"))
        )
        or any(
            "runtime" in inspect.signature(judge.score).parameters
            for judge in task.plugged_judges()
        )
    )


@cache
def get_trace_type() -> type[vf.Trace]:
    """Return a subclass of `vf.Trace` whose counts of tokens raise DataError.

    Environments don't see the policy's tokens, and a reward must not be computed with 0 instead.
    """
    from verifiers.v1 import Trace

    def refuse(_: Any) -> Any:
        raise DataError(
            "a function of the environment reads the number of tokens (trace.usage, "
            "trace.num_output_tokens), which environments of Ratchet don't see. Count characters "
            f"or turns, or {PROXY_HINT}"
        )

    return type("PolicyTrace", (Trace,), dict.fromkeys(TOKEN_COUNTS, property(refuse)))


def _hide_tokens(trace: vf.Trace) -> None:
    """Let a trace's counts of tokens raise DataError. verifiers makes the trace itself."""
    trace.__class__ = get_trace_type()


class RolloutSeat:
    """A replacement of `vf.Agent` that the policy plays in a rollout of verifiers.

    Args:
        config: The seat's agent, of which the limits and timeouts hold.
        episode: Gets the trace of the rollout.
        request_turn: Passes messages and tools to the policy, and returns its reply.
        max_turns: Maximum number of replies.
    """

    trainable = True

    def __init__(
        self, config: Any, episode: vf.Episode, request_turn: RequestTurn, max_turns: int
    ) -> None:
        self.config = config
        self.episode = episode
        self.max_turns = max_turns
        self.client: Any = PolicyClient(request_turn)
        self._has_begun = False

    async def run(self, task: vf.Task) -> vf.Trace:
        async with self._make_agent() as agent:
            trace = await agent.run(task, on_trace=_hide_tokens)
        self.episode.traces.append(trace)
        return trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task) -> AsyncIterator[vf.Interaction]:
        async with self._make_agent() as agent:
            async with agent.interaction(task, on_trace=_hide_tokens) as interaction:
                yield interaction
            self.episode.traces.append(interaction.trace)

    @asynccontextmanager
    async def _make_agent(self) -> AsyncIterator[vf.Agent]:
        from verifiers.v1 import Agent, SubprocessConfig
        from verifiers.v1.interception import InterceptionServer

        if self._has_begun:
            raise DataError(
                "the environment requests a second conversation of the policy in one episode, and "
                "only one can be trained on"
            )
        self._has_begun = True
        harness = make_chat_harness()
        changes = {
            "harness": harness.config,
            "runtime": SubprocessConfig(),
            "model": "policy",
            "max_turns": self.max_turns,
        }
        async with InterceptionServer() as server:
            agent = Agent(self.config.model_copy(update=changes), interception=server)
            agent.harness = harness
            server.clients[agent.ctx.client.model_dump_json()] = self.client
            yield agent


class PolicyClient:
    """A replacement of `vf.Client` that passes the messages of each request to the policy."""

    def __init__(self, request_turn: RequestTurn) -> None:
        self._request_turn = request_turn
        self._conversation: tuple[Message, ...] = ()

    async def get_response(
        self, dialect: Any, body: Mapping[str, Any], *_: Any, **__: Any
    ) -> vf.Response:
        """Return the policy's reply to the messages that it has not seen yet.

        Raises DataError for a request that does not extend the conversation.
        """
        messages = read_messages(body["messages"], "a request of verifiers")
        n_seen = len(self._conversation)
        if messages[:n_seen] != self._conversation:
            raise DataError(f"the environment rewrote what the policy has seen: {PROXY_HINT}")
        reply = await self._request_turn(messages[n_seen:], body.get("tools") or ())
        if reply is None:
            raise DataError("the attempt has ended")
        self._conversation = (*messages, reply)
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in reply.tool_calls
        ]
        message = {"role": "assistant", "content": reply.text, "tool_calls": calls or None}
        finish_reason = "tool_calls" if calls else "stop"
        completion = {
            "id": "policy",
            "object": "chat.completion",
            "created": 0,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": finish_reason}],
        }
        response = dialect.parse_response(dialect.validate_response(completion))
        response.raw = completion
        return response


def make_chat_harness() -> vf.Harness[Any]:
    """Return a harness that plays a task as a chat with its tools, like verifiers' `null`."""
    from verifiers.v1 import Harness, HarnessConfig
    from verifiers.v1.dialects.chat import message_to_wire
    from verifiers.v1.runtimes import ProgramResult

    class ChatHarness(Harness[HarnessConfig]):
        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_MCP = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: vf.TaskData,
        ) -> ProgramResult:
            system, prompt = self.resolve_prompt(data)
            messages: list[Any] = [{"role": "system", "content": system}] if system else []
            if isinstance(prompt, str):
                messages.append({"role": "user", "content": prompt})
            else:
                messages += [message_to_wire(message) for message in prompt or ()]
            await _chat(endpoint, secret, messages, mcp_urls)
            return ProgramResult(0, "", "")

    return ChatHarness(HarnessConfig.model_validate({"id": "null"}))


async def _chat(
    endpoint: str, secret: str, messages: list[Any], mcp_urls: Mapping[str, str]
) -> None:
    """Continue a conversation, and call tools, until a reply has no call."""
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient, omit
    from verifiers.v1.harnesses.utils.mcp import call_mcp, connect_mcp

    async with AsyncExitStack() as stack:
        urls = {"mcpServers": {name: {"url": url} for name, url in mcp_urls.items()}}
        tools, dispatch, servers = await connect_mcp(urls, stack)
        transport = DefaultAsyncHttpxClient(trust_env=False, timeout=None)
        client = AsyncOpenAI(
            base_url=endpoint, api_key=secret, max_retries=0, http_client=transport
        )
        stack.push_async_callback(client.close)
        offered: Any = tools or omit
        while True:
            completion = await client.chat.completions.create(
                model="policy", messages=messages, tools=offered
            )
            reply = completion.choices[0].message.model_dump(exclude_none=True)
            messages.append(reply)
            if not reply.get("tool_calls"):
                return
            for call in reply["tool_calls"]:
                name = call["function"]["name"]
                if name in dispatch:
                    arguments = json.loads(call["function"]["arguments"])
                    content = await call_mcp(servers, dispatch, name, arguments)
                else:
                    content = f"Error: {describe_unknown_tool(name, dispatch)}"
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
