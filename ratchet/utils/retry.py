"""Retry calls that failed for a temporary reason."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

# The system's source has no state, so forked processes do not share it, and the user's generators
# are not advanced.
draw = random.SystemRandom().random


def get_retry_wait_s(
    retry: int, first_s: float, *, at_least_s: float = 0.0, max_s: float = math.inf
) -> float:
    """Return the seconds to wait before retry number `retry`, which counts from 0.

    The wait doubles with each retry. Up to half of it is added at random, so that callers which a
    service refused together do not return together.

    Args:
        first_s: Wait before the first retry, in seconds.
        at_least_s: Seconds that the service asked to wait.
        max_s: Limit of the wait without its random part, in seconds.
    """
    return min(max_s, max(first_s * 2**retry, at_least_s)) * (1 + draw() / 2)


def call_with_retries(
    call: Callable[[], T],
    *,
    retries: int,
    first_wait_s: float,
    retry_on: type[Exception],
    wait: Callable[[Exception, float], object] = lambda error, wait_s: time.sleep(wait_s),
) -> T:
    """Return the result of `call`, which blocks; see `get_retry_wait_s`.

    Args:
        retries: Number of further tries after an error of the type `retry_on`.
        wait: Called with the error and the seconds to wait; if it returns True, no further try
            follows.

    Raises what the last try raises.
    """
    for retry in range(retries):
        try:
            return call()
        except retry_on as error:
            if wait(error, get_retry_wait_s(retry, first_wait_s)):
                raise
    return call()
