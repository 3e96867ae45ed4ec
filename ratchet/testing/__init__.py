"""Conformance kits, fakes and builders, for tests of your own.

`check_algorithm` loads torch, so it is imported only when it is used.
"""

from typing import TYPE_CHECKING, Any

from ratchet.testing.environments import check_environment
from ratchet.testing.rewards import answered, check_reward, conversation

if TYPE_CHECKING:
    from ratchet.testing.algorithms import check_algorithm

__all__ = ["answered", "check_algorithm", "check_environment", "check_reward", "conversation"]


def __getattr__(name: str) -> Any:
    if name != "check_algorithm":
        raise AttributeError(f"module 'ratchet.testing' has no attribute '{name}'")
    from ratchet.testing.algorithms import check_algorithm

    return check_algorithm
