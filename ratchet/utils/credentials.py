"""Provide secrets. A recipe names the environment variable of a secret and never contains it.

The library does not read the environment. The command line does, and passes it to
`set_environment`; your own program calls `set_environment(os.environ)` once.
"""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.errors import ConfigError

_environment: Mapping[str, str] = {}


def set_environment(environment: Mapping[str, str]) -> None:
    """Set the variables that `get_credential` reads, and drop those of an earlier call."""
    global _environment
    _environment = environment


def get_environment() -> Mapping[str, str]:
    """Return a copy of the variables, for a child process that resolves the same recipe."""
    return dict(_environment)


def get_credential(variable: str) -> str:
    """Return the value of a variable. Raises ConfigError if it is missing or empty."""
    value = _environment.get(variable, "")
    if not value:
        raise ConfigError(
            f"the environment variable {variable} is not set: export it before the run (your own "
            "program must also call ratchet.utils.credentials.set_environment(os.environ))"
        )
    return value
