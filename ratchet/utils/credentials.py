"""Secrets that a recipe names by an environment variable, and never holds itself.

The library reads no environment: the command line does, and offers it here; a program of your own
calls `offer(os.environ)` once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.errors import ConfigError

_offered: Mapping[str, str] = {}


def offer(environment: Mapping[str, str]) -> None:
    """Makes its variables available to whatever a recipe lets name one, instead of any offered
    before."""
    global _offered
    _offered = environment


def offered() -> Mapping[str, str]:
    """For a process that this one starts, and that resolves the same recipe."""
    return dict(_offered)


def credential(variable: str) -> str:
    """Raises ConfigError where the variable is not there, or empty."""
    value = _offered.get(variable, "")
    if not value:
        raise ConfigError(
            f"the environment variable {variable} is not set: export it before the run (from a "
            "program of your own, also "
            "call ratchet.utils.credentials.offer(os.environ))"
        )
    return value
