"""Build the prompt of a turn from a window of history (`rollouts.history_window`)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ratchet.experience.rollout.environment_answers import check_messages
from ratchet.protocols import Environment
from ratchet.types import Message, Task
from ratchet.utils.user_code import UserCodeFailed, run_guarded


async def observe(
    environment: Environment,
    task: Task,
    messages: Sequence[Message],
    turn_starts: Sequence[int],
    window: int,
) -> list[Message]:
    """Return the prompt that the environment makes of a conversation.

    Args:
        messages: The whole conversation, which ends with an observation.
        turn_starts: The index of each answer of the policy; the first is the number of messages
            that `reset` returned.
        window: Number of turns that the environment gets.

    Raises:
        UserCodeFailed: `observe` raised, or returned no messages.
    """
    turns = [messages[start:end] for start, end in pairwise([*turn_starts, len(messages)])]
    first = messages[: turn_starts[0]]

    async def call() -> list[Message]:
        messages = environment.observe(task, first, turns[-window:])
        return check_messages(messages, "observe", environment)

    prompt = await run_guarded(call)
    if not prompt or prompt[-1].role in ("assistant", "inline"):
        raise UserCodeFailed(
            f"{type(environment).__name__}.observe returned a prompt that the policy can't answer. "
            "Its last message must be an observation"
        )
    return prompt


def split_turns(answer: Sequence[Message]) -> list[Sequence[Message]]:
    """Return the turns of a demonstration: each is an answer with the messages that follow it.

    An answer that inline text continues is one turn.
    """
    starts = [
        i
        for i, message in enumerate(answer)
        if message.role == "assistant" and not (i and answer[i - 1].role == "inline")
    ]
    return [answer[start:end] for start, end in pairwise([*starts, len(answer)])]
