"""Describe failed attempts, and say which of them to retry."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from ratchet.types import Failed, Outcome
from ratchet.utils.user_frames import TRACEBACK_HEADER, describe_user_error

log = logging.getLogger(__name__)

# Kinds of failure that the policy did not cause and that a retry may avoid.
INFRASTRUCTURE = frozenset({"environment", "agent", "reward", "timeout", "sandbox"})


def is_retryable(outcome: Outcome | None) -> bool:
    """True if the attempt failed in a way that a retry may avoid."""
    return isinstance(outcome, Failed) and outcome.kind in INFRASTRUCTURE


def describe_failures(failures: Sequence[Failed]) -> str:
    """Describe the most frequent failure, with counts of all kinds.

    The failure is of the most frequent kind, with the most frequent last line of that kind. The
    description has the last line of the user's own code; the whole traceback is logged at level
    INFO, which a run writes to run.log.

    Args:
        failures: At least one failure.
    """
    kinds = Counter(failure.kind for failure in failures)
    kind, _ = kinds.most_common(1)[0]
    details = [failure.detail.strip() for failure in failures if failure.kind == kind]
    endings = Counter(_get_last_line(detail) for detail in details)
    ending, count = endings.most_common(1)[0]
    example = next(detail for detail in details if _get_last_line(detail) == ending)
    counts = ", ".join(f"{name} {n}" for name, n in kinds.most_common())
    # The text before a traceback says which task failed.
    label, header, trace = example.partition(TRACEBACK_HEADER)
    description = example
    if header:
        log.info("the most frequent failure, %s:\n%s", kind, example)
        description = (
            f"{label}{describe_user_error(header + trace)}; run.log has the whole traceback"
        )
    return f"by kind: {counts}; the most frequent ({count}), {kind}:\n{description}"


def _get_last_line(detail: str) -> str:
    return detail.rpartition("\n")[2]
