"""Find the keys that a conversion used, by running it again with one value hidden.

A key that a conversion could have used, or read and ignored, is not taken over. The table does not
say which keys these are; only this test finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.commands.migrate.numbers import Looked, Unseen
from ratchet.commands.migrate.table import Convert, PeerConfig, Sets


def looks_at(how: Convert, key: str, theirs: str, value: Any, config: PeerConfig) -> bool:
    """Return True if the conversion of a key depends on the file's value of `key`.

    Args:
        how: the conversion.
        theirs: the key that is converted.
        value: its value.
    """
    hidden = Unseen()
    values: Mapping[str, Any] = {**config.values, key: hidden}
    try:
        result = how(hidden if key == theirs else value, PeerConfig(values, config.defaults))
    except Looked:
        return True
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return True  # it fails always, or because of the hidden value; the item's note says so
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
    """The conversions that set a key of the recipe, kept to be run again.

    ran: each conversion and its value, by the converted key.
    asked: the converted keys whose conversions read a key, by that key.
    """

    ran: dict[str, tuple[Convert, Any]] = field(default_factory=dict)
    asked: dict[str, list[str]] = field(default_factory=dict)

    def add(self, theirs: str, how: Convert, value: Any, asked: set[str]) -> None:
        """Keep a conversion of `theirs` that read the keys `asked`."""
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
