"""Play attempts with a policy that gives messages, and no tokens.

Such attempts can be judged and counted, but not trained on.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ratchet.data.chat.renderer import Tools
from ratchet.errors import DataError, RatchetError
from ratchet.experience.rollout.environment_answers import (
    get_offered_tools,
    reset_environment,
    step_environment,
)
from ratchet.experience.rollout.episode_state import PromptCache
from ratchet.experience.rollout.history import observe
from ratchet.protocols import Environment
from ratchet.types import (
    Failed,
    Message,
    Outcome,
    Owner,
    Sampling,
    Task,
    Trajectory,
    Truncated,
    Turn,
)
from ratchet.utils.user_code import UserCodeFailed

UNKNOWN_TOKEN = -1  # the id of every token in a trajectory, because only messages are known


class AttemptFailed(RatchetError):
    """The policy gave no usable answer. `kind` is the kind of the `Failed` outcome."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


class Reply(NamedTuple):
    """A turn of the policy."""

    message: Message
    """The message of the turn."""
    n_malformed: int = 0
    """Number of tool calls that can't be read."""
    is_cut: bool = False
    """True if the message ended at the length limit."""


@dataclass
class AttemptState:
    """The state of one attempt."""

    task: Task
    environment: Environment
    messages: list[Message]
    prompt: list[Message] = field(default_factory=list)  # the messages that the policy answers
    tools: Tools | None = None
    n_tokens: int = 0  # number of tokens that the model wrote
    turns: list[Turn] = field(default_factory=list)
    metrics: dict[str, float] = field(
        default_factory=lambda: {"turns": 0.0, "turn_limit": 0.0, "retries": 0.0}
    )

    def make_trajectory(
        self, attempt: int, temperature: float, outcome: Outcome | None
    ) -> Trajectory:
        """Return the trajectory so far. Its first position stands for the whole prompt.

        Each further position stands for one token that the model wrote.
        """
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


class MessagePlayer(ABC):
    """Base class of players like `EpisodePlayer` whose policy gives messages."""

    max_turns: int
    """Number of turns after which an attempt is truncated."""
    history_window: int | None = None
    """Number of past turns in a turn's prompt; None: all turns."""
    timeout_s: float | None
    """Seconds for a whole attempt; None sets no limit."""

    @abstractmethod
    async def answer(
        self,
        state: AttemptState,
        sampling: Sampling,
        turn_index: int,
        stop_strings: tuple[str, ...],
    ) -> Reply | None:
        """Return the policy's turn after the prompt of `state`; None truncates the attempt.

        A subclass that knows the number of tokens of the turn adds it to `state.n_tokens`. Raises
        AttemptFailed if the policy gives no usable answer.

        Args:
            state: The attempt so far.
            sampling: The sampling settings.
            turn_index: Number of earlier turns of the policy.
            stop_strings: Strings that end an answer, from `sampling` and the environment.
        """

    async def play(
        self,
        task: Task,
        environment: Environment,
        sampling: Sampling,
        *,
        attempt: int,
        prompt_cache: PromptCache | None = None,
    ) -> list[Trajectory]:
        """Play one attempt, and return its trajectory without a reward.

        The attempt fails if the policy gives no usable answer, if the environment has a fault, or
        after `timeout_s`. `prompt_cache` has no effect, because nothing is tokenized.
        """
        state = AttemptState(task, environment, list(task.messages))
        time_limit = asyncio.timeout(self.timeout_s)
        outcome: Outcome | None
        try:
            async with time_limit:
                outcome = await self._play_episode(state, sampling)
        except TimeoutError:
            # If the limit has not expired, the policy itself raised the error.
            if not time_limit.expired():
                raise
            outcome = Failed(
                "timeout", f"not over after {self.timeout_s:g} s and {len(state.turns)} turns"
            )
        except AttemptFailed as failure:
            outcome = Failed(failure.kind, str(failure))
        except (UserCodeFailed, DataError) as failure:
            outcome = Failed("environment", str(failure))
        return [state.make_trajectory(attempt, sampling.temperature, outcome)]

    async def _play_episode(self, state: AttemptState, sampling: Sampling) -> Outcome | None:
        task, environment = state.task, state.environment
        state.messages = await reset_environment(environment, task)
        if environment.has_tools:
            state.tools = await get_offered_tools(environment, task) or None
            state.metrics["malformed_tool_calls"] = 0.0
        turn_starts: list[int] = []
        for turn_index in range(self.max_turns):
            turn_starts.append(len(state.messages))
            stop_strings = tuple(dict.fromkeys((*sampling.stop, *environment.stop_strings)))
            start = 1 + state.n_tokens
            state.prompt = await self._observe(state, turn_starts)
            reply = await self.answer(state, sampling, turn_index, stop_strings)
            if reply is None:
                return Truncated()
            end = 1 + state.n_tokens
            state.messages.append(reply.message)
            state.metrics["turns"] += 1
            if state.tools is not None:
                state.metrics["malformed_tool_calls"] += reply.n_malformed
            if reply.is_cut:
                state.turns.append(Turn(start, end, cut=True))
                return Truncated()
            step = await step_environment(environment, reply.message)
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

    async def _observe(self, state: AttemptState, turn_starts: Sequence[int]) -> list[Message]:
        """Return the prompt of the next turn, which begins at the last of `turn_starts`."""
        if self.history_window is None or len(turn_starts) == 1:
            return state.messages
        return await observe(
            state.environment,
            state.task,
            state.messages,
            turn_starts[:-1],
            self.history_window,
        )
