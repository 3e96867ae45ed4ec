"""One attempt at one task: generate, act, observe, until the environment ends it or a budget does. Tokens in, tokens out.

L = tokens of the trajectory so far.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from ratchet.data.renderer import Renderer
from ratchet.errors import DataError
from ratchet.experience.seeds import seed_for
from ratchet.interfaces import Environment, Generator, Step
from ratchet.types import (
    Cancelled,
    Completion,
    Failed,
    Message,
    Outcome,
    Owner,
    Sampling,
    StopReason,
    Task,
    Trajectory,
    Truncated,
    Turn,
)

T = TypeVar("T")


class PromptMemo:
    """The attempts of a group almost always begin with the same messages: their tokens are rendered once."""

    def __init__(self) -> None:
        self.messages: Sequence[Message] | None = None
        self.tokens = np.zeros(0, dtype=np.int64)

    def render(self, renderer: Renderer, messages: Sequence[Message]) -> np.ndarray:
        if messages != self.messages:
            self.messages, self.tokens = list(messages), np.asarray(renderer.prompt(messages), dtype=np.int64)
        return self.tokens


@dataclass
class TokenRecord:
    """Token columns as they grow, piece by piece; each piece knows who wrote it."""

    pieces: list[tuple[Owner, np.ndarray, Completion | None]] = field(default_factory=list)
    length: int = 0

    def add(self, owner: Owner, tokens: Sequence[int] | np.ndarray, completion: Completion | None = None) -> None:
        array = np.asarray(tokens, dtype=np.int64)
        self.pieces.append((owner, array, completion))
        self.length += len(array)

    def tokens(self) -> np.ndarray:
        return np.concatenate([tokens for _, tokens, _ in self.pieces])

    def trajectory(self, **fields: Any) -> Trajectory:
        """`fields`: those of a Trajectory that are no token columns."""
        owner = np.empty(self.length, np.int8)
        logprobs = np.zeros(self.length, np.float32)
        versions = np.full(self.length, -1, np.int32)
        kept_mass = np.zeros(self.length, np.float32)
        start = 0
        for who, tokens, completion in self.pieces:
            piece = slice(start, start + len(tokens))
            owner[piece] = who
            if completion is not None:
                logprobs[piece], versions[piece] = completion.logprobs, completion.versions
                kept_mass[piece] = completion.log_kept_mass
            start = piece.stop
        return Trajectory(
            tokens=self.tokens(),
            owner=owner,
            trainable=owner == Owner.POLICY,
            rollout_logprobs=logprobs,
            versions=versions,
            log_kept_mass=kept_mass,
            **fields,
        )


class UserCodeFailed(Exception):
    """Carries the traceback of what an environment raised, or what is wrong with what it returned."""


async def _guarded(call: Awaitable[T]) -> T:
    try:
        return await call
    except Exception as error:  # the episode boundary: user code may raise anything, and costs only its own attempt
        raise UserCodeFailed(traceback.format_exc()) from error


def _checked(messages: Any, where: str, environment: Environment) -> Sequence[Message]:
    if not isinstance(messages, Sequence) or not all(isinstance(message, Message) for message in messages):
        raise UserCodeFailed(f"{type(environment).__name__}.{where} gave {messages!r:.80}, it must be a sequence of Messages")
    return messages


@dataclass(frozen=True)
class Player:
    """Plays attempts: what is common to all of them.

    max_context: tokens that the model can hold; the last turn is cut to it.
    """

    generator: Generator
    renderer: Renderer
    max_context: int
    max_turns: int = 64

    async def play(
        self, task: Task, environment: Environment, sampling: Sampling, *, attempt: int, memo: PromptMemo | None = None
    ) -> Trajectory:
        """The attempt's trajectory, not yet judged: `outcome` is None, or Truncated, Failed or Cancelled already. What the
        generator raises is no attempt's fault and goes up, DataError apart.

        memo: shared by the attempts of a group.
        """
        record, turns, messages = TokenRecord(), [], list(task.messages)
        outcome: Outcome | None
        try:
            messages = list(_checked(await _guarded(environment.reset(task)), "reset", environment))
            record.add(Owner.PROMPT, (memo or PromptMemo()).render(self.renderer, messages))
            outcome = await self._turns(environment, sampling, record, turns, messages)
        except UserCodeFailed as failure:
            outcome = Failed("environment", str(failure))
        except DataError as error:  # messages that can't be rendered, a prompt that can't be read
            outcome = Failed("data", str(error))
        if not record.length:  # it broke before there was a prompt; a trajectory has at least one token
            record.add(Owner.PROMPT, [0])
        return record.trajectory(
            attempt=attempt,
            temperature=sampling.temperature,
            turns=tuple(turns),
            messages=tuple(messages),
            outcome=outcome,
        )

    async def _turns(
        self, environment: Environment, sampling: Sampling, record: TokenRecord, turns: list[Turn], messages: list[Message]
    ) -> Outcome | None:
        for number in range(self.max_turns):
            room = self.max_context - record.length
            if room <= 0:
                if number:
                    return Truncated()
                detail = f"the prompt has {record.length} tokens, the context {self.max_context}: shorten it or drop the task"
                return Failed("prompt_too_long", detail)
            own = sampling
            if number or room < sampling.max_new_tokens:
                seed = seed_for(sampling.seed, number) if number else sampling.seed
                own = replace(sampling, seed=seed, max_new_tokens=min(sampling.max_new_tokens, room))
            completion = await self.generator.generate(record.tokens(), own)
            start = record.length
            record.add(Owner.POLICY, completion.tokens, completion)
            message = self.renderer.parse(completion.tokens.tolist(), completion.stop)
            history = tuple(messages)
            messages.append(message)
            if completion.stop is StopReason.ABORTED:
                return Cancelled("aborted")
            if not completion.stop.finished:
                turns.append(Turn(start, record.length))
                return Truncated()
            step: Step = await _guarded(environment.step(message))
            if not isinstance(step, Step):
                raise UserCodeFailed(f"{type(environment).__name__}.step returned {step!r:.80}, it must be a Step")
            turns.append(Turn(start, record.length, step.reward, step.state_key, terminated=step.done))
            if step.done:
                return None
            messages.extend(_checked(step.messages, "step", environment))
            record.add(Owner.ENVIRONMENT, self.renderer.extend(completion.tokens.tolist(), step.messages, history=history))
        return Truncated()
