"""Programs that tests run to their end."""

from __future__ import annotations

import subprocess
from typing import Any


def run_program(*words: object, timeout: float | None = 300, **options: Any) -> str:
    """Run a program and return what it prints. Fails with its output if its status is not 0.

    Args:
        timeout: Seconds after which it is killed.
        options: More of `subprocess.run`.
    """
    done = subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
