"""Play attempts with a model behind an OpenAI-compatible endpoint.

Messages go in and messages come out. The endpoint does not show its tokens, so these attempts can
be judged and counted but not trained on.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ratchet.data.chat.renderer import Tools
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import (
    PromptMemo,
    check_messages,
    check_step,
    get_offered_tools,
)
from ratchet.experience.seeds import derive_seed
from ratchet.protocols import Environment
from ratchet.rewards.llm.http_client import Endpoint, EndpointError
from ratchet.types import (
    Failed,
    Message,
    Outcome,
    Owner,
    Sampling,
    Task,
    ToolCall,
    Trajectory,
    Truncated,
    Turn,
)
from ratchet.utils.user_code import UserCodeFailed, run_guarded

# HTTP statuses of a wrong key, address or model: every further request would fail too.
FATAL_STATUSES = (401, 403, 404, 405)
UNKNOWN_TOKEN = -1  # stands for each token, because the server does not show token ids
SEED_LIMIT = 2**31  # servers accept only seeds below this


@dataclass
class _AttemptState:
    """The state of one attempt."""

    messages: list[Message]
    tools: Tools | None = None
    n_tokens: int = 0  # number of tokens that the model wrote
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(
        default_factory=lambda: {"turns": 0.0, "turn_limit": 0.0, "retries": 0.0}
    )

    def make_trajectory(
        self, attempt: int, temperature: float, outcome: Outcome | None
    ) -> Trajectory:
        length = 1 + self.n_tokens
        owner = np.full(length, Owner.POLICY, np.int8)
        owner[0] = Owner.PROMPT
        return Trajectory(
            tokens=np.full(length, UNKNOWN_TOKEN, np.int64),
            owner=owner,
            trainable=np.zeros(length, np.bool_),
            rollout_logprobs=np.zeros(length, np.float32),
            versions=np.full(length, -1, np.int32),
            attempt=attempt,
            temperature=temperature,
            turns=tuple(self.turns),
            messages=tuple(self.messages),
            outcome=outcome,
            metrics=self.metrics,
        )


@dataclass(frozen=True)
class EndpointPlayer:
    """A player, like `EpisodePlayer`, whose policy is a model behind an endpoint.

    Attributes:
        endpoint: The HTTP client.
        model: The model's name at the endpoint.
        body: Further keys of each request; None removes a key.
        max_turns: Number of turns after which an attempt is truncated.
        timeout_s: Seconds for a whole attempt, including the wait for a free slot; None sets no
            limit.
    """

    endpoint: Endpoint
    model: str
    body: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 64
    timeout_s: float | None = None

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        memo: PromptMemo | None = None,
    ) -> list[Trajectory]:
        """Play one attempt, and return its trajectory without a reward.

        The outcome is `Failed("endpoint")` if the endpoint gives no usable answer. Environment
        faults and timeouts fail as with any other player. `memo` has no effect, because nothing is
        tokenized.

        Raises:
            EndpointError: The endpoint would refuse every request.
        """
        state = _AttemptState(list(task.messages))
        time_limit = asyncio.timeout(self.timeout_s)
        outcome: Outcome | None
        try:
            async with time_limit:
                outcome = await self._play_episode(state, task, environment, sampling)
        except TimeoutError:
            outcome = Failed(
                "timeout", f"not over after {self.timeout_s:g} s and {len(state.turns)} turns"
            )
        except UserCodeFailed as failure:
            outcome = Failed("environment", str(failure))
        except DataError as error:
            outcome = Failed("endpoint", str(error))
        except EndpointError as error:
            if error.status in FATAL_STATUSES:
                raise
            outcome = Failed("endpoint", str(error))
        return [state.make_trajectory(attempt, sampling.temperature, outcome)]

    async def _play_episode(
        self, state: _AttemptState, task: Task, environment: Environment, sampling: Sampling
    ) -> Outcome | None:
        state.messages = list(
            check_messages(await run_guarded(lambda: environment.reset(task)), "reset", environment)
        )
        if environment.has_tools:
            state.tools = await get_offered_tools(environment, task) or None
            state.metrics["malformed_tool_calls"] = 0.0
        for turn_index in range(self.max_turns):
            stop_strings = tuple(dict.fromkeys((*sampling.stop, *environment.stop_strings)))
            body = self._build_request(state, sampling, turn_index, stop_strings)
            choice = self._read_choice(state, await self.endpoint.post(body))
            start = state.turns[-1].end if state.turns else 1
            end = 1 + state.n_tokens
            message, n_malformed = read_message(choice["message"])
            state.messages.append(message)
            state.metrics["turns"] += 1
            if state.tools is not None:
                state.metrics["malformed_tool_calls"] += n_malformed
            if choice.get("finish_reason") == "length":
                state.turns.append(Turn(start, end, cut=True))
                return Truncated()
            step = check_step(
                await run_guarded(lambda reply=message: environment.step(reply)), environment
            )
            state.turns.append(
                Turn(start, end, step.reward, step.state_key, terminated=step.done, cut=False)
            )
            for name, value in (step.metrics or {}).items():
                state.metrics[name] = state.metrics.get(name, 0.0) + float(value)
            if step.done:
                return None
            state.messages.extend(step.messages)
        state.metrics["turn_limit"] = 1.0
        return Truncated()

    def _build_request(
        self,
        state: _AttemptState,
        sampling: Sampling,
        turn_index: int,
        stop_strings: tuple[str, ...],
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [format_message(message) for message in state.messages],
            "temperature": sampling.temperature,
            "max_tokens": sampling.max_new_tokens,
            "seed": derive_seed(sampling.seed, turn_index) % SEED_LIMIT,
        }
        defaults = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        body |= {
            key: getattr(sampling, key)
            for key, default in defaults.items()
            if getattr(sampling, key) != default
        }
        if stop_strings:
            body["stop"] = list(stop_strings)
        if state.tools is not None:
            body["tools"] = [dict(tool) for tool in state.tools]
        return {key: value for key, value in {**body, **self.body}.items() if value is not None}

    def _read_choice(self, state: _AttemptState, answer: Any) -> Mapping[str, Any]:
        """Return the first choice of an answer, and count its tokens.

        Raises:
            DataError: The answer has no message, or the server withheld it.
        """
        try:
            choice = answer["choices"][0]
            message, usage = choice["message"], answer.get("usage") or {}
            has_message = message["role"] == "assistant" and isinstance(
                message.get("content") or "", str
            )
            state.n_tokens += int(usage.get("completion_tokens") or 0)
        except (LookupError, TypeError, AttributeError, ValueError):
            choice, has_message = {}, False
        if not has_message:
            raise DataError(
                f"{self.endpoint.url} answered without a message: {json.dumps(answer)[:300]}"
            )
        if choice.get("finish_reason") == "content_filter":
            raise DataError(f"{self.endpoint.url} withheld its answer (content_filter)")
        return choice


def format_message(message: Message) -> dict[str, Any]:
    """Return a message in the format of the API."""
    fields: dict[str, Any] = {"role": message.role, "content": message.text}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments))},
            }
            for call in message.tool_calls
        ]
    return (
        fields if message.tool_call_id is None else {**fields, "tool_call_id": message.tool_call_id}
    )


def read_message(fields: Mapping[str, Any]) -> tuple[Message, int]:
    """Return the assistant message of a choice, and the number of malformed tool calls in it.

    Malformed calls are appended to the message's text as JSON.
    """
    text = fields.get("content") or ""
    calls = []
    n_malformed = 0
    for call in fields.get("tool_calls") or ():
        try:
            name = call["function"]["name"]
            arguments = json.loads(call["function"]["arguments"] or "{}")
            if not isinstance(arguments, dict):
                raise ValueError(arguments)
            calls.append(ToolCall(str(call["id"]), str(name), arguments))
        except (LookupError, TypeError, ValueError):
            n_malformed += 1
            text += json.dumps(call)
    return Message("assistant", text, tuple(calls)), n_malformed


def get_completions_url(url: str) -> str:
    """Return the URL of chat completions under the base URL of an API, such as http://host/v1."""
    return f"{url.rstrip('/')}/chat/completions"


def is_endpoint(target: str) -> bool:
    """True if a target of `ratchet eval` is the URL of an endpoint."""
    return target.startswith(("http://", "https://"))
