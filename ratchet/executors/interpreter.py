"""The Python interpreters of roles whose packages clash with those of the driver."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ratchet.errors import DISTRIBUTION, ConfigError

IMPORT_TIMEOUT_S = 60.0
# Prints the interpreter's Python version, or fails if it lacks Ratchet.
PROBE = (
    "import sys, importlib.util; sys.path += sys.argv[1:]; "
    "importlib.util.find_spec('ratchet') or sys.exit(3); "
    "print('.'.join(map(str, sys.version_info[:2])))"
)


def check_interpreter(path: str) -> None:
    """Check that a Python interpreter of this machine can run workers.

    Raises:
        ConfigError: It can't be run, lacks Ratchet, or is of another Python version than this one,
            which would not read what the driver sends.
    """
    version = ".".join(map(str, sys.version_info[:2]))
    try:
        done = subprocess.run(
            [path, "-c", PROBE, *list_own_paths()],
            capture_output=True,
            text=True,
            timeout=IMPORT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(
            f"generator.interpreter={path} can't be run: {error}. Name the Python of an "
            "environment, such as .venv-vllm/bin/python"
        ) from error
    if done.returncode != 0:
        raise ConfigError(
            f"generator.interpreter={path} has no Ratchet: {path} -m pip install {DISTRIBUTION}"
        )
    if done.stdout.strip() != version:
        raise ConfigError(
            f"generator.interpreter={path} is Python {done.stdout.strip()}, and the run's is "
            f"{version}: make its environment with Python {version}"
        )


def list_own_paths() -> list[str]:
    """Return the entries of `sys.path` that are not this interpreter's: folders of the user."""
    prefixes = [Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()]
    return [
        entry
        for entry in sys.path
        if entry and not any(Path(entry).resolve().is_relative_to(prefix) for prefix in prefixes)
    ]
