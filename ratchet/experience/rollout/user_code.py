"""The episode boundary: environments and rewards are anybody's code. They may raise anything,
sys.exit too, hang, or return what they should not, and cost only the attempt that they were to
serve.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from typing import TypeVar

from ratchet.rewards.deadline import Deadline
from ratchet.types import Failed, Outcome

T = TypeVar("T")

# Kinds of failure that are no fault of the policy's, and may be gone when the same is tried again.
INFRASTRUCTURE = frozenset({"environment", "agent", "reward", "timeout", "sandbox"})


class UserCodeFailed(Exception):
    """Carries the traceback of what was raised, or what is wrong with what was returned."""


class NoLimit:
    """A deadline that is never reached, in a quarter of the time that `asyncio.timeout(None)` takes
    to enter and to leave."""

    async def __aenter__(self) -> NoLimit:
        return self

    async def __aexit__(self, *raised: object) -> None:
        return None

    def expired(self) -> bool:
        return False


NO_LIMIT = NoLimit()


def limited(seconds: float | None) -> Deadline | NoLimit:
    """Like `asyncio.timeout`, but it stands still while a judged program runs."""
    return NO_LIMIT if seconds is None else Deadline(seconds)


async def guarded(call: Callable[[], Awaitable[T]]) -> T:
    """Raises UserCodeFailed for whatever `call` raises, but for the cancellation of the task
    itself."""
    try:
        return await call()
    except (Exception, SystemExit) as error:
        raise UserCodeFailed(traceback.format_exc()) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise UserCodeFailed(traceback.format_exc()) from error


def may_pass(outcome: Outcome | None) -> bool:
    """Whether another try is worth it."""
    return isinstance(outcome, Failed) and outcome.kind in INFRASTRUCTURE
