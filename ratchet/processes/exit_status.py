"""Describe how a process ended."""

from __future__ import annotations

import signal


def describe_exit(status: int) -> tuple[str, str]:
    """Return a `subprocess` exit status in words, and the name of the signal or ""."""
    if status >= 0:
        return f"exit status {status}", ""
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-status}"
    return (
        f"{name}, sent by another process, or by the kernel because memory ran out"
        if name == "SIGKILL"
        else name,
        name,
    )
