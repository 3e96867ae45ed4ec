"""Complete a user's environment, generator, learner or reward with members of its base class.

Users write plain classes. Each is completed once, where it is built or handed over, so that the
library reads every member as a plain attribute.
"""

from __future__ import annotations

from typing import Any, TypeVar

Base = TypeVar("Base")


def add_missing_members(part: Any, base: type[Base]) -> Base:
    """Add each member of `base` that `part` lacks to the class of `part`, and return `part`.

    The class gets them, so that copies of the object and its other instances are complete
    too. Members that `base` leaves abstract are not added.
    """
    # A built-in type can't be changed. Its objects also lack the abstract members, so they are no
    # valid parts in any case.
    if isinstance(part, base) or type(part).__module__ == "builtins":
        return part
    abstract = base.__dict__.get("__abstractmethods__", frozenset())
    for parent in base.__mro__:
        for name, default in vars(parent).items():
            if not name.startswith("_") and name not in abstract and not hasattr(part, name):
                setattr(type(part), name, default)
    return part
