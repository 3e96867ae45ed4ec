"""Rollouts of verifiers with their runtime, hooks and tool servers, in this process.

verifiers' own `Agent` runs the task in a local runtime. A chat loop takes the place of the
harness's program, and the policy the place of the model behind verifiers' endpoint.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from ratchet.data.chat.messages import read_messages
from ratchet.errors import DataError
from ratchet.types import Message

if TYPE_CHECKING:
    import verifiers.v1 as vf

PROXY_HINT = "run verifiers' own client against Ratchet's OpenAI-compatible proxy instead"

Tools = Sequence[Mapping[str, Any]]
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


def _hide_tokens(trace: vf.Trace) -> None:
    """Let a trace's counts of tokens raise DataError. verifiers makes the trace itself."""
    from ratchet.environments.adapters.verifiers_harness import PolicyTrace

    trace.__class__ = PolicyTrace


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
        from verifiers.v1 import Agent, HarnessConfig, SubprocessConfig
        from verifiers.v1.interception import InterceptionServer

        from ratchet.environments.adapters.verifiers_harness import ChatHarness

        if self._has_begun:
            raise DataError(
                "the environment requests a second conversation of the policy in one episode, and "
                "only one can be trained on"
            )
        self._has_begun = True
        harness = ChatHarness(HarnessConfig.model_validate({"id": "null"}))
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
