"""Find what a correct run never writes to the ledger of its prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

END_EVENTS = ("trained", "filtered")


def find_ledger_faults(
    entries: Iterator[dict[str, Any]], *, max_staleness: int, max_age: int = 0
) -> list[str]:
    """Return the violations in a ledger, as text.

    A prompt must be issued before it is trained on or filtered, and a deferred prompt must be
    issued again. It may be trained on or filtered only once. It may be replayed only after it was
    trained on.

    Args:
        entries: The entries of the ledger, in order.
        max_staleness: Maximum of (step that trains on a group) - (version of the weights when it
            was issued).
        max_age: Maximum of (step that replays a group) - (oldest version of the weights that
            sampled it).
    """
    issued: dict[str, int] = {}
    end_counts: Counter[str] = Counter()
    faults = []
    for entry in entries:
        group_id = entry["id"]
        if entry["event"] == "issued":
            issued[group_id] = entry["version"]
        elif entry["event"] == "deferred":
            issued.pop(group_id, None)
        elif entry["event"] == "replayed":
            if not end_counts[group_id]:
                faults.append(f"{group_id} was replayed before it was trained on")
            if entry["step"] - entry["version"] > max_age:
                faults.append(
                    f"{group_id} was drawn by version {entry['version']} and replayed at step "
                    f"{entry['step']}"
                )
        elif entry["event"] in END_EVENTS:
            end_counts[group_id] += 1
            if group_id not in issued:
                faults.append(f"{group_id} was {entry['event']} and never issued")
            elif entry["event"] == "trained" and entry["step"] - issued[group_id] > max_staleness:
                faults.append(
                    f"{group_id} was issued at version {issued[group_id]} and trained on at step "
                    f"{entry['step']}"
                )
    faults += [
        f"{group_id} ended {count} times" for group_id, count in end_counts.items() if count > 1
    ]
    return faults
