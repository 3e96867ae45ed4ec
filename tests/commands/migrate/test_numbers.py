"""Numbers of other libraries: exact, or refused by the name of their key."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest

import ratchet.commands.migrate
from ratchet.commands.migrate import numbers
from ratchet.commands.migrate.hydra_overrides import UnreadableOverride, parse
from ratchet.commands.migrate.numbers import InvalidValue

PACKAGE = Path(ratchet.commands.migrate.__file__).parent
CONVERTERS = {"float", "int", "complex", "Decimal", "Fraction", "eval", "literal_eval"}


@pytest.mark.fault("I1")
@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_numbers_are_read_in_one_place(path: Path) -> None:
    """No converter is called or handed on outside of numbers.py; isinstance may name a type."""
    if path.name == "numbers.py":
        return
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            called = (
                node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            )
            handed = (
                []
                if called in ("isinstance", "issubclass")
                else [*node.args, *(word.value for word in node.keywords)]
            )
            names = {called} | {part.id for part in handed if isinstance(part, ast.Name)}
            assert not names & CONVERTERS, f"{path.name}:{node.lineno}"


@pytest.mark.parametrize("value", [3, 3.0, "3", "+3", "03", "3.0", "3e0"])
def test_a_whole_number_in_any_form(value: Any) -> None:
    assert numbers.whole(value, "key") == 3
    assert type(numbers.whole(value, "key")) is int


REFUSED = [
    2.5,
    "2.5",
    True,
    None,
    "",
    " 3",
    "3 ",
    "1_000",
    "0x10",
    "three",
    math.nan,
    math.inf,
    "nan",
    "inf",
    [3],
    {},
    b"3",
    "٣",
]


@pytest.mark.fault("I3")
@pytest.mark.parametrize("value", REFUSED, ids=repr)
def test_no_whole_number_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(InvalidValue, match="some_key"):
        numbers.whole(value, "some_key")


@pytest.mark.parametrize(
    "value",
    [*REFUSED[2:], "0.5_5", "5_0.5", "1e", "1e400", 10**400, "9" * 500, 2**53 + 1],
    ids=lambda v: repr(v)[:20],
)
def test_no_real_number_is_refused_by_its_key(value: Any) -> None:
    with pytest.raises(InvalidValue, match="some_key"):
        numbers.real(value, "some_key")


def test_large_whole_numbers_stay_exact() -> None:
    assert numbers.whole(2**63 + 1) == 2**63 + 1
    assert numbers.number(str(2**63 + 1)) == 2**63 + 1
    assert numbers.whole(1e15) == 10**15
    with pytest.raises(InvalidValue, match="from 1 on"):
        numbers.whole(-4, "key", least=1)


@pytest.mark.parametrize(
    ("value", "truth"),
    [
        (True, True),
        ("true", True),
        ("Yes", True),
        ("1", True),
        (1, True),
        ("no", False),
        (0, False),
    ],
)
def test_truth_values_as_the_peers_parser_reads_them(value: Any, truth: bool) -> None:
    assert numbers.flag(value, "key") is truth


@pytest.mark.parametrize("value", ["maybe", "", 2, 1.0, None, [], "on"])
def test_no_truth_value_is_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="some_key"):
        numbers.flag(value, "some_key")


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (2, (None, 2)),
        ("2.0", (None, 2)),
        ("0.5_5", (0.5, 5)),
        ("0.5_5.0", (0.5, 5)),
        ("1e-1_1e1", (0.1, 10)),
        (" 0.5_2 ", (0.5, 2)),
    ],
)
def test_bounds_are_one_number_or_two(value: Any, limits: tuple[float | None, float]) -> None:
    assert numbers.bounds(value, "key") == limits


@pytest.mark.parametrize(
    "value", ["5_0.5", "0_5", "-1", 0, "a_b", "_5", "5_", "1_2_3", True, None, "", [1, 2]]
)
def test_no_bounds_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="some_key"):
        numbers.bounds(value, "some_key")


def test_a_quotient_is_whole_or_refused() -> None:
    assert numbers.quotient(8, 4, "a over b") == 2
    for total, part in ((1000, 256), (1, 2), (1, 0), (4, -2)):
        with pytest.raises(InvalidValue, match="a over b"):
            numbers.quotient(total, part, "a over b")


# --- Hydra's overrides: expected values are those of hydra-core 1.3.8's own parser


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("1_000", 1000),
        ("0.5_5", 0.55),
        ("'0.5_5'", "0.5_5"),
        (".5", 0.5),
        ("5.", 5.0),
        ("010", "010"),
        ("1__0", "1__0"),
        ("-1", -1),
        ("NULL", None),
        ("TrUe", True),
        ("yes", "yes"),
        ("0x10", "0x10"),
        ("1:30", "1:30"),
        ("", ""),
        ("a b", "a b"),
        ("[1, 2.5,'a,b',[x]]", [1, 2.5, "a,b", ["x"]]),
        ("{a: 1, b: [2]}", {"a": 1, "b": [2]}),
        (r"a\,b", "a,b"),
        ("[]", []),
        ("~/models/x", "~/models/x"),
        ("${x.y}", "${x.y}"),
    ],
)
def test_an_override_is_read_as_hydra_reads_it(text: str, value: Any) -> None:
    assert parse(text) == value
    assert type(parse(text)) is type(value)


def test_infinite_overrides_are_numbers() -> None:
    assert parse("inf") == math.inf
    assert math.isnan(parse("NaN"))


@pytest.mark.parametrize("text", ["1,2", "range(1,3)", "[1", "'a", "{a}", "[" * 40 + "]" * 40])
def test_an_override_that_is_no_one_value(text: str) -> None:
    with pytest.raises(UnreadableOverride):
        parse(text)
