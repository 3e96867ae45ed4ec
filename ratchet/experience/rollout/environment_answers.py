"""Check what a user's environment returns."""

from __future__ import annotations

import asyncio
import copy
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ratchet.data.chat.renderer import Tools
from ratchet.errors import TrainingError
from ratchet.protocols import Environment, Step
from ratchet.types import Group, Message, Part, Task, is_finite_number
from ratchet.utils.user_code import (
    UserCodeFailed,
    await_method,
    is_user_error,
    leave_when_cancelled,
    run_guarded,
)

T = TypeVar("T")
# Metrics that `EpisodeState` counts for an attempt.
ATTEMPT_METRICS = ("turns", "turn_limit", "retries", "forks")

CLOSE_TIMEOUT_S = 30.0  # an environment that hangs in `close` must not delay the run for longer
# Beyond it, sums and variances of rewards overflow, in float32 at 3e38.
MAX_NUMBER = 1e15


def is_computable(number: Any) -> bool:
    """True if the value is a finite number that sums and variances of an attempt can hold."""
    # Only `float` tells what is computed with: `__abs__` may be user code.
    return is_finite_number(number) and abs(float(number)) <= MAX_NUMBER


async def reset_environment(environment: Environment, task: Task) -> list[Message]:
    """Begin an episode and return its first messages.

    Raises:
        UserCodeFailed: The environment raised, or what it returned is malformed.
    """

    async def call() -> list[Message]:
        # What user code returned is checked inside, because its methods are user code too.
        messages = await await_method(environment.reset(task), environment, "reset")
        return check_messages(messages, "reset", environment)

    return await run_guarded(call)


async def step_environment(environment: Environment, message: Message) -> Step:
    """Answer the policy's message.

    Raises:
        UserCodeFailed: The environment raised, or what it returned is malformed.
    """

    async def call() -> Step:
        # The attempt keeps the message, and user code may change a call's arguments in place.
        shown = copy.deepcopy(message) if message.tool_calls else message
        step = await await_method(environment.step(shown), environment, "step")
        return check_step(step, environment)

    return await run_guarded(call)


async def close_environment(environment: Environment) -> None:
    """Close an environment.

    Raises:
        UserCodeFailed: `close` raised, or did not end within CLOSE_TIMEOUT_S.
    """
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            closing = run_guarded(lambda: await_method(environment.close(), environment, "close"))
            await leave_when_cancelled(closing)
    except TimeoutError:
        raise UserCodeFailed(
            f"{type(environment).__name__}.close has not ended after {CLOSE_TIMEOUT_S:g} s"
        ) from None


async def reward_cut_attempt(environment: Environment, messages: Sequence[Message]) -> float | None:
    """Return the environment's reward for an attempt that was cut off.

    Raises:
        UserCodeFailed: The environment raised, or what it returned is no number.
    """

    async def call() -> float | None:
        reward = await await_method(
            environment.reward_cut_attempt(tuple(messages)), environment, "reward_cut_attempt"
        )
        if reward is None:
            return None
        if not is_computable(reward):
            raise UserCodeFailed(
                f"{type(environment).__name__}.reward_cut_attempt returned {show(reward)}. It must "
                f"be a finite number or None, within ±{MAX_NUMBER:g}"
            )
        return float(reward)

    return await run_guarded(call)


def check_messages(messages: Any, method: str, environment: Environment) -> list[Message]:
    """Return messages from user code, or raise UserCodeFailed if they are not Messages."""
    name = f"{type(environment).__name__}.{method}"
    is_sequence = isinstance(messages, tuple | list | Sequence)
    checked: list[Message] = list(messages) if is_sequence else []
    if not (is_sequence and all(isinstance(message, Message) for message in checked)):
        raise UserCodeFailed(f"{name} returned {show(messages)}. It must be a sequence of Messages")
    for message in checked:
        if not _is_content(message.content) or not isinstance(message.tool_call_id, str | None):
            raise UserCodeFailed(
                f"{name} returned {show(message)}. Its content must be text or a sequence of "
                "Parts, and its tool_call_id text or None"
            )
    return checked


def _is_content(content: Any) -> bool:
    return isinstance(content, str) or (
        isinstance(content, Sequence) and all(isinstance(part, Part) for part in content)
    )


def show(value: Any) -> str:
    """Return the start of a value's repr, which user code may have broken."""
    try:
        return f"{value!r:.80}"
    except BaseException as error:
        if not is_user_error(error):
            raise
        return f"a {type(value).__name__}, whose __repr__ fails"


def check_step(step: Any, environment: Environment) -> Step:
    """Return a step from user code, its numbers as Python's own.

    Raises:
        UserCodeFailed: The step is malformed.
    """
    name = f"{type(environment).__name__}.step"
    if not isinstance(step, Step):
        raise UserCodeFailed(f"{name} returned {show(step)}. It must be a Step")
    if step.reward is not None and not is_computable(step.reward):
        raise UserCodeFailed(
            f"{name} returned the reward {show(step.reward)}. It must be a finite number or None, "
            f"within ±{MAX_NUMBER:g}"
        )
    metrics = {} if step.metrics is None else step.metrics
    if not isinstance(metrics, dict | Mapping) or not all(
        isinstance(key, str) and is_computable(value) for key, value in metrics.items()
    ):
        raise UserCodeFailed(
            f"{name} returned the metrics {show(metrics)}. They must be finite numbers by name, "
            f"within ±{MAX_NUMBER:g}"
        )
    if not isinstance(step.state_key, str | None):
        raise UserCodeFailed(
            f"{name} returned the state_key {show(step.state_key)}. It must be text or None"
        )
    if not isinstance(step.done, int | np.bool_ | None):
        raise UserCodeFailed(f"{name} returned done={show(step.done)}. It must be True or False")
    messages = check_messages(step.messages, "step", environment)
    is_inline = {message.role == "inline" for message in messages}
    if is_inline == {True, False} or (True in is_inline and any(m.media for m in messages)):
        raise UserCodeFailed(
            f"{name} mixed inline text with other messages or media: inline messages stand alone, "
            "and are text"
        )
    if not step.done and not messages:
        raise UserCodeFailed(
            f"{name} returned neither done=True nor messages, so the policy has nothing to answer"
        )
    return replace(
        step,
        messages=tuple(messages),
        reward=None if step.reward is None else float(step.reward),
        done=bool(step.done),
        metrics={
            f"environment_{key}" if key in ATTEMPT_METRICS else key: float(value)
            for key, value in metrics.items()
        },
    )


def guard_post_process(environment: Environment) -> Callable[[Sequence[Group]], list[Group]]:
    """Return `post_process` of an environment, which raises TrainingError where that fails."""
    name = f"{type(environment).__name__}.post_process"
    return _guard(environment.post_process, name, list, "a sequence of Groups", _is_group_list)


def guard_measure(environment: Environment) -> Callable[[Sequence[Group]], dict[str, float]]:
    """Return `measure` of an environment, which raises TrainingError where that fails."""
    name = f"{type(environment).__name__}.measure"
    return _guard(environment.measure, name, dict, "a dict of numbers by name", _is_metric_dict)


def _guard(
    method: Callable[[Sequence[Group]], Any],
    name: str,
    convert: Callable[[Any], T],
    expected: str,
    is_expected: Callable[[T], bool],
) -> Callable[[Sequence[Group]], T]:
    def call(groups: Sequence[Group]) -> T:
        try:
            result = convert(method(groups))
        except BaseException as error:
            if not is_user_error(error):
                raise
            raise TrainingError(
                f"{name} must return {expected}, but raised:\n{traceback.format_exc()}"
            ) from error
        if not is_expected(result):
            raise TrainingError(f"{name} returned {show(result)}. It must return {expected}")
        return result

    return call


def _is_group_list(groups: list[Group]) -> bool:
    return all(isinstance(group, Group) for group in groups)


def _is_metric_dict(metrics: dict[str, Any]) -> bool:
    """True for values by name that are no text; `MetricStore` takes all numbers, and lists."""
    return all(
        isinstance(name, str) and not isinstance(value, str) for name, value in metrics.items()
    )


async def get_offered_tools(environment: Environment, task: Task) -> Tools:
    """Return the tools of the environment, or raise UserCodeFailed if they are malformed."""

    async def call() -> Tools:
        tools: Any = environment.tools(task)
        if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
            name = type(environment).__name__
            raise UserCodeFailed(
                f"{name}.tools returned {show(tools)}. It must be a sequence of JSON-schema "
                "function descriptions"
            )
        return tuple(tools)

    return await run_guarded(call)
