"""Guard rollouts against faults of environments and rewards, which are user code.

User code may raise anything (`ratchet.utils.user_code`), hang, or return wrong values. Only the
attempt that called it is then lost.
"""

from __future__ import annotations

from ratchet.rewards.deadline import Deadline
from ratchet.types import Failed, Outcome

# Kinds of failure that the policy did not cause and that a retry may avoid.
INFRASTRUCTURE = frozenset({"environment", "agent", "reward", "timeout", "sandbox"})


class NoLimit:
    """A deadline that is never reached.

    Entering and leaving it takes a quarter of the time of `asyncio.timeout(None)`.
    """

    async def __aenter__(self) -> NoLimit:
        return self

    async def __aexit__(self, *exception_info: object) -> None:
        return None

    def expired(self) -> bool:
        return False


NO_LIMIT = NoLimit()


def limit_time(seconds: float | None) -> Deadline | NoLimit:
    """Return a timeout that pauses while a judged program runs, or `NO_LIMIT` for None."""
    return NO_LIMIT if seconds is None else Deadline(seconds)


def is_retryable(outcome: Outcome | None) -> bool:
    """True if the attempt failed in a way that a retry may avoid."""
    return isinstance(outcome, Failed) and outcome.kind in INFRASTRUCTURE
