"""Find the keys that a conversion used, by running it again with one value hidden.

A key counts as taken over only if the result of a conversion depends on it. A conversion may read a
key and ignore it, so the table alone does not say which keys were used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.commands.migrate.numbers import HiddenValue, HiddenValueUsed
from ratchet.commands.migrate.table import Convert, PeerConfig, Sets


def uses_key(convert: Convert, key: str, peer_key: str, value: Any, config: PeerConfig) -> bool:
    """Return True if the conversion of a key depends on the file's value of `key`.

    Args:
        convert: the conversion.
        key: the key whose use is tested.
        peer_key: the key that is converted.
        value: the value of `peer_key`.
    """
    hidden = HiddenValue()
    values: Mapping[str, Any] = {**config.values, key: hidden}
    try:
        result = convert(hidden if key == peer_key else value, PeerConfig(values, config.defaults))
    except HiddenValueUsed:
        return True
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        return True  # the conversion fails, and the item's note says so
    return _contains(result, hidden)


def _contains(content: Any, hidden: Any) -> bool:
    if content is hidden:
        return True
    if type(content) is Sets:
        return _contains(content.values, hidden)
    if type(content) is dict:
        return any(_contains(item, hidden) for item in content.values())
    if type(content) in (list, tuple):
        return any(_contains(item, hidden) for item in content)
    return False


@dataclass
class ConversionRuns:
    """The conversions that set a key of the recipe, kept to be run again.

    conversions: each conversion and its value, by the converted key.
    readers: for each key, the converted keys whose conversions read it.
    """

    conversions: dict[str, tuple[Convert, Any]] = field(default_factory=dict)
    readers: dict[str, list[str]] = field(default_factory=dict)

    def add(self, peer_key: str, convert: Convert, value: Any, read_keys: set[str]) -> None:
        """Keep a conversion of `peer_key` that read the keys `read_keys`."""
        self.conversions[peer_key] = convert, value
        for key in read_keys | {peer_key}:
            self.readers.setdefault(key, []).append(peer_key)

    def users(self, key: str, config: PeerConfig) -> list[str]:
        """Return the keys whose conversions depend on `key`."""
        return [
            peer_key
            for peer_key in self.readers.get(key, ())
            if uses_key(
                self.conversions[peer_key][0], key, peer_key, self.conversions[peer_key][1], config
            )
        ]
