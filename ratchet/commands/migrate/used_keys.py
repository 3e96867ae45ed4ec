"""Find the keys that a conversion used, by running it again with one value hidden.

A key counts as taken over only if the result of a conversion depends on it. A conversion may read a
key and ignore it, so the conversion table (`table.py`) alone does not say which keys were used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.commands.migrate.numbers import HiddenValue, HiddenValueUsed
from ratchet.commands.migrate.table import Conversion, PeerConfig, Values


def uses_key(
    convert: Conversion, tested_key: str, converted_key: str, value: Any, config: PeerConfig
) -> bool:
    """True if the conversion of a key depends on the file's value of `tested_key`.

    Args:
        convert: The conversion.
        tested_key: The key whose use is tested.
        converted_key: The key that is converted.
        value: The value of `converted_key`.
        config: The peer's configuration.
    """
    hidden = HiddenValue()
    values: Mapping[str, Any] = {**config.values, tested_key: hidden}
    try:
        result = convert(
            hidden if tested_key == converted_key else value, PeerConfig(values, config.defaults)
        )
    except HiddenValueUsed:
        return True
    except (ArithmeticError, AttributeError, IndexError, KeyError, TypeError, ValueError):
        # The use of a hidden value raises HiddenValueUsed, so another value made the conversion
        # fail. The conversion report lists this failure already. Counting the key as used keeps it
        # from being listed a second time, as unused.
        return True
    return _contains(result, hidden)


def _contains(content: Any, hidden: Any) -> bool:
    if content is hidden:
        return True
    if type(content) is Values:
        return _contains(content.values, hidden)
    if type(content) is dict:
        return any(_contains(item, hidden) for item in content.values())
    if type(content) in (list, tuple):
        return any(_contains(item, hidden) for item in content)
    return False


@dataclass
class ConversionLog:
    """A log of the conversions that set a key of the recipe, to run them again."""

    conversion_by_key: dict[str, tuple[Conversion, Any]] = field(default_factory=dict)
    """Each conversion and the value that it converted, by the converted key."""
    readers_by_key: dict[str, list[str]] = field(default_factory=dict)
    """For each key, the converted keys whose conversions read it."""

    def add(self, converted_key: str, convert: Conversion, value: Any, read_keys: set[str]) -> None:
        """Add a conversion of `converted_key` that read the keys `read_keys`."""
        self.conversion_by_key[converted_key] = convert, value
        for key in read_keys | {converted_key}:
            self.readers_by_key.setdefault(key, []).append(converted_key)

    def find_users(self, key: str, config: PeerConfig) -> list[str]:
        """Return the keys whose conversions depend on `key`."""
        return [
            converted_key
            for converted_key in self.readers_by_key.get(key, ())
            if uses_key(
                self.conversion_by_key[converted_key][0],
                key,
                converted_key,
                self.conversion_by_key[converted_key][1],
                config,
            )
        ]
