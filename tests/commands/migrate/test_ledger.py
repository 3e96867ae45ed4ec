"""Every key of the peers' newest files has one fate, and a key that is told to be taken over is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import pytest

from ratchet.commands.migrate.importer import PEERS, ImportResult, convert
from ratchet.commands.migrate.read_config import FlatConfig
from ratchet.commands.migrate.table import KeyRow
from tests.commands.migrate.facts import KEYS, flat
from tests.commands.migrate.profiles import EXEMPT, PROFILES


@dataclass
class Case:
    """It holds one set of values of a method."""

    peer: str
    method: str
    values: dict[str, Any]

    def result(self, **changed: Any) -> ImportResult:
        return convert(PEERS[self.peer], self.method, FlatConfig({**self.values, **changed}))

    def row(self, key: str) -> KeyRow | None:
        return PEERS[self.peer].methods[self.method].find_row(key)

    def converting(self) -> Case:
        """Return the same without the keys that no conversion reads."""
        rows = {key: self.row(key) for key in self.values}
        return replace(
            self,
            values={
                key: self.values[key]
                for key, row in rows.items()
                if row and (row.recipe_key or row.covered_by)
            },
        )


def cases() -> Iterator[Case]:
    """Yield every method of every peer, with each of its profiles."""
    for peer in PEERS:
        for method, nested in json.loads((KEYS / f"{peer}.json").read_text()).items():
            neutral = dict(flat(nested))
            for profile in PROFILES.get(peer, {}).get(method, [{}]):
                named = {key: value for key, value in profile.items() if "*" not in key}
                wide = {
                    key: value
                    for key in neutral
                    for pattern, value in profile.items()
                    if fnmatchcase(key, pattern)
                }
                values = neutral | wide | named
                yield Case(
                    peer, method, {key: value for key, value in values.items() if value is not ...}
                )


CASES = list(cases())
NAMES = [f"{case.peer}-{case.method}-{number}" for number, case in enumerate(CASES)]


def other(value: Any) -> Any:
    """Return another value of the same type."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2
    if isinstance(value, str):
        return f"{value}-other"
    if isinstance(value, list):
        return [
            item * (2 + place) if isinstance(item, float) else other(item)
            for place, item in enumerate(value)
        ]
    if isinstance(value, dict):
        return {key: other(item) for key, item in value.items()}
    return value


def told(result: ImportResult) -> dict[str, Any]:
    """Return what the report says of each key, but for the key's value."""
    return {
        item.peer_key: (item.status, item.note, item.covered_by, dict(item.recipe_keys))
        for item in result.items
    }


@pytest.mark.fault("I5")
@pytest.mark.parametrize("case", CASES, ids=NAMES)
def test_every_key_has_one_fate(case: Case) -> None:
    result = case.result()
    accounted = [item.peer_key for item in result.items if not item.is_default] + result.null_keys
    assert sorted(accounted) == sorted(case.values)
    assert "" not in result.flat
    assert all(item.recipe_keys or item.note or item.covered_by for item in result.items)


def shown(case: Case) -> set[str]:
    """Return the rows whose keys change the recipe.

    Each key that is told to be taken over must change it, or its own account.
    """
    case = case.converting()
    before = case.result()
    rows = set()
    for item in before.items:
        if item.is_default or item.status not in ("same", "different"):
            continue
        after = case.result(**{item.peer_key: other(item.value)})
        assert after.flat != before.flat or told(after) != told(before), (
            f"{item.peer_key}={item.value} changes nothing"
        )
        if after.flat != before.flat:
            row = case.row(item.peer_key)
            assert row is not None
            rows.add(row.peer_key)
    return rows


@pytest.mark.fault("I2")
@pytest.mark.slow
@pytest.mark.parametrize("peer", PEERS)
def test_a_key_taken_over_changes_the_recipe(peer: str) -> None:
    """For every key that is told to be taken over; and every row that converts is seen to do so in
    one of the cases."""
    seen: set[str] = set()
    for case in CASES:
        if case.peer == peer:
            seen |= shown(case)
    converting = {
        row.peer_key
        for method in PEERS[peer].methods.values()
        for row in method.rows
        if row.recipe_key or row.covered_by
    }
    assert converting - seen == set(EXEMPT.get(peer, {}))
