"""Build an algorithm's part: bind the function that its section names to the section's values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ratchet.config.resolve import import_object


def bind(section: Any) -> Callable[..., Any]:
    """Return the section's `function` with the section's keys as keyword arguments.

    Keys that the function has no parameter for are left out.
    """
    function = import_object(section.function)
    names = (
        name
        for name in inspect.signature(function).parameters
        if name in type(section).model_fields
    )
    return partial(function, **{name: getattr(section, name) for name in names})
