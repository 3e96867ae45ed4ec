"""Check what a user's environment returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.data.chat.renderer import Tools
from ratchet.protocols import Environment, Step
from ratchet.types import Message, Task, is_finite_number
from ratchet.utils.user_code import UserCodeFailed, run_guarded


def check_messages(messages: Any, method: str, environment: Environment) -> Sequence[Message]:
    """Return messages from user code, or raise UserCodeFailed if they are not Messages."""
    if not isinstance(messages, tuple | list | Sequence) or not all(
        isinstance(message, Message) for message in messages
    ):
        raise UserCodeFailed(
            f"{type(environment).__name__}.{method} returned {messages!r:.80}. It must be a "
            "sequence of Messages"
        )
    return messages


def check_step(step: Any, environment: Environment) -> Step:
    """Return a step from user code, or raise UserCodeFailed if it is malformed."""
    name = type(environment).__name__
    if not isinstance(step, Step):
        raise UserCodeFailed(f"{name}.step returned {step!r:.80}. It must be a Step")
    if step.reward is not None and not is_finite_number(step.reward):
        raise UserCodeFailed(
            f"{name}.step returned the reward {step.reward!r:.80}. It must be a finite number or "
            "None"
        )
    metrics = {} if step.metrics is None else step.metrics
    if not isinstance(metrics, dict | Mapping) or not all(map(is_finite_number, metrics.values())):
        raise UserCodeFailed(
            f"{name}.step returned the metrics {metrics!r:.80}. They must be finite numbers by name"
        )
    check_messages(step.messages, "step", environment)
    is_inline = {message.role == "inline" for message in step.messages}
    if is_inline == {True, False} or (True in is_inline and any(m.media for m in step.messages)):
        raise UserCodeFailed(
            f"{name}.step mixed inline text with other messages or media: inline messages stand "
            "alone, and are text"
        )
    if not step.done and not step.messages:
        raise UserCodeFailed(
            f"{name}.step returned neither done=True nor messages, so the policy has nothing to "
            "answer"
        )
    return step


async def get_offered_tools(environment: Environment, task: Task) -> Tools:
    """Return the tools of the environment, or raise UserCodeFailed if they are malformed."""

    async def call() -> Any:
        return environment.tools(task)

    tools = await run_guarded(call)
    if not isinstance(tools, Sequence) or not all(isinstance(tool, Mapping) for tool in tools):
        name = type(environment).__name__
        raise UserCodeFailed(
            f"{name}.tools returned {tools!r:.80}. It must be a sequence of JSON-schema function "
            "descriptions"
        )
    return tuple(tools)
