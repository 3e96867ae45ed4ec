"""Import the optional package websockets."""

from __future__ import annotations

from typing import Any

from ratchet.errors import MissingDependency


def import_websockets(needed_for: str) -> Any:
    """Return the package. Raises MissingDependency if it is not installed.

    Args:
        needed_for: The feature that needs the package, for the error.
    """
    try:
        import websockets
    except ImportError as error:
        raise MissingDependency("websockets", extra="openenv", needed_for=needed_for) from error
    return websockets
