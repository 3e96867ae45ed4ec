"""The experiment that finds which keys a conversion used: it runs again with one value hidden.

A key that a conversion could have used, or asked for and left, is not taken over; what says so
is this experiment, not the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.commands.migrate.numbers import Looked, Unseen
from ratchet.commands.migrate.table import Convert, PeerConfig, Sets


def looks_at(how: Convert, key: str, theirs: str, value: Any, config: PeerConfig) -> bool:
    """Return whether the conversion of `theirs` (its value: `value`) depends on what the file says
    of `key`."""
    hidden = Unseen()
    values: Mapping[str, Any] = {**config.values, key: hidden}
    try:
        result = how(hidden if key == theirs else value, PeerConfig(values, config.defaults))
    except Looked:
        return True
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return True  # it fails with any value, or by this one: the account names the failure
    return _holds(result, hidden)


def _holds(content: Any, hidden: Any) -> bool:
    if content is hidden:
        return True
    if type(content) is Sets:
        return _holds(content.values, hidden)
    if type(content) is dict:
        return any(_holds(item, hidden) for item in content.values())
    if type(content) in (list, tuple):
        return any(_holds(item, hidden) for item in content)
    return False


@dataclass
class ConversionRuns:
    """The conversions that made something: by their key, what ran with which value, and the keys
    that each asked for."""

    ran: dict[str, tuple[Convert, Any]] = field(default_factory=dict)
    asked: dict[str, list[str]] = field(default_factory=dict)

    def add(self, theirs: str, how: Convert, value: Any, asked: set[str]) -> None:
        """Keep a conversion, to run it again."""
        self.ran[theirs] = how, value
        for key in asked | {theirs}:
            self.asked.setdefault(key, []).append(theirs)

    def users(self, key: str, config: PeerConfig) -> list[str]:
        """Return the keys whose conversions depend on `key`."""
        return [
            theirs
            for theirs in self.asked.get(key, ())
            if looks_at(self.ran[theirs][0], key, theirs, self.ran[theirs][1], config)
        ]
