"""Read the reward file that a task's tests wrote.

Source: the package harbor 0.25.0, verifier/verifier.py. Whatever Harbor counts as an error is one
here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from ratchet.errors import RatchetError

FOLDER = "logs/verifier"
JSON_FILE, TEXT_FILE = "reward.json", "reward.txt"  # the first one that exists counts
MAX_BYTES = 1 << 16
MAX_VALUES = 100


class VerifierError(RatchetError):
    """The tests of a task gave no reward, so the attempt fails instead of earning 0."""


def read_reward(
    task_id: str, outputs: Mapping[str, bytes], tests: Mapping[str, bytes], name: str
) -> tuple[float, dict[str, float]]:
    """Return the reward, and the other numbers of reward.json as metrics.

    If the tests' source mentions only one of reward.json and reward.txt, the other file is ignored,
    because the tests may run a program that the agent wrote, and that program may have written the
    other file.

    Args:
        outputs: Files of /logs/verifier, by path relative to the root.
        tests: Contents of the tests' files.
        name: Name of the reward if reward.json has several numbers.

    Raises VerifierError if there is no reward file, or if its reward is not a finite number.
    """
    text = b"\n".join(tests.values())
    mentioned = [file for file in (JSON_FILE, TEXT_FILE) if file.encode() in text]
    for file in mentioned or (JSON_FILE, TEXT_FILE):
        data = outputs.get(f"{FOLDER}/{file}")
        if data is None:
            continue
        try:
            values = _read_values(file, data)
            return _choose(values, name)
        except (ValueError, OverflowError) as error:
            raise VerifierError(
                f"the tests of task '{task_id}' wrote {file} as {data[:100]!r}: {error}"
            ) from None
    written = ", ".join(sorted(outputs)) or "nothing"
    output = outputs.get(f"{FOLDER}/test-stdout.txt", b"").decode("utf-8", "replace")
    raise VerifierError(
        f"the tests of task '{task_id}' wrote no reward file, only {written}: {output[-2000:]}"
    )


def _read_values(file: str, data: bytes) -> dict[str, float]:
    """Return the numbers of a reward file by name. Raises ValueError if the file is malformed."""
    if len(data) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        content: Any = float(data) if file == TEXT_FILE else json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if file == TEXT_FILE:
        content = {"reward": content}
    if not isinstance(content, dict) or not content or len(content) > MAX_VALUES:
        raise ValueError(f"it must be an object with 1 to {MAX_VALUES} named numbers")
    for name, value in content.items():
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ValueError(f"'{name}' is not a finite number")
    return {name: float(value) for name, value in content.items()}


def _choose(values: Mapping[str, float], name: str) -> tuple[float, dict[str, float]]:
    """Return the reward, which is the only number or the one named `name`, and the metrics."""
    chosen = next(iter(values)) if len(values) == 1 else name
    if chosen not in values:
        raise ValueError(f"it has {', '.join(values)}. Set environment.reward to one of them")
    others = {f"tests/{key}": value for key, value in values.items() if key != chosen}
    return values[chosen], others
