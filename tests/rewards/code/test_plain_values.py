"""Values between the sandbox of a program and the sandbox of its tests: text, rebuilt from built-in
types alone."""

from __future__ import annotations

import json
import math
from collections import OrderedDict

import pytest

from ratchet.rewards.code.plain_values import Anything, NotPlainError, decode, encode
from ratchet.rewards.code.program_runner import defines_name

ATOMS = [None, True, 0, -1, 2**53, -(2**200), 0.1, -0.0, math.inf, 1 + 2j, "", "ß\ud800\0", b"\xff"]
NESTED = [
    [],
    [1, [2]],
    (),
    ((1,), "x"),
    set(),
    {1, "a"},
    frozenset({(1, 2)}),
    {},
    {1: 2, (1, "x"): [3]},
    [True, 1, 1.0],
]


@pytest.mark.parametrize("value", [*ATOMS, *NESTED, range(0, 10, 3)])
def test_plain_values_come_back_with_their_types(value):
    there = decode(json.loads(json.dumps(encode(value))))
    assert there == value
    assert type(there) is type(value)
    if not isinstance(value, set):  # a set travels in an order of its own
        assert repr(there) == repr(value)


def test_views_of_a_dict_come_back():
    words = OrderedDict(b=2, a=[1])
    for view in (words.keys(), words.values(), words.items()):
        there = decode(json.loads(json.dumps(encode(view))))
        assert type(there) is type(view).__mro__[1]
        assert list(there) == list(view)
    assert decode(encode({3: 4}.keys())) == {3}


def test_what_overrides_built_in_types_stays_behind():
    class Equal(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    class Pair(list):
        def __iter__(self):
            return iter("lies")

    assert type(decode(encode(Equal(5)))) is int
    assert decode(encode(Equal(5))) != 6
    assert decode(encode(Pair([1, 2]))) == [1, 2]
    assert decode(encode({Equal(1): Pair([3])})) == {1: [3]}
    assert list(decode(encode(x for x in "ab"))) == ["a", "b"]
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("value", [object(), len, int, Anything(), [object()], {1: len}])
def test_other_values_do_not_travel(value):
    with pytest.raises(NotPlainError):
        encode(value)


@pytest.mark.parametrize(
    "said",
    [
        {"__class__": "x"},
        ["eval", "1"],
        ["list"],
        ["int", "zz"],
        ["set", [["list", []]]],
        1.5,
        [1, 2, 3],
    ],
)
def test_forged_values_are_refused(said):
    with pytest.raises((TypeError, ValueError, KeyError)):
        decode(said)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("def f(): pass", True),
        ("async def f(): pass", True),
        ("class f: pass", True),
        ("f = g = len", True),
        ("from x import y as f", True),
        ("def g():\n    def f(): pass", False),
        ("    return 1", False),
        ("def f(:", False),
        ("x = '\0'", False),
    ],
)
def test_whether_a_program_defines_the_function(source, found):
    assert defines_name(source, "f") is found
