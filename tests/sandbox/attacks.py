"""Programs that mean harm, or mean to pass without solving anything. The task is always: read a
number, print its double.

Each would print the right answer, 42, if what it tries worked (or ends before it): so "passed"
means that it got through. Words in capitals are filled in: CANARY, a world-writable file of the
trainer; PARENT, its process id; PORT, where it listens on loopback; ABSTRACT, the same on an
abstract unix socket; EXPECTED, a file with the answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sandbox import cheat, exhaust, reach

STDIN, ANSWER = b"21\n", b"42\n"


@dataclass(frozen=True)
class Attack:
    """long: meant to run into the wall limit, so it gets a short one. processes: the limit, where
    the attack needs some."""

    name: str
    source: str
    long: bool = False
    processes: int = 1


def parse(text: str) -> tuple[Attack, ...]:
    """`### name [long] [processes=N]`, then the program."""
    found = []
    for part in re.split(r"^### ", text, flags=re.M)[1:]:
        title, _, source = part.partition("\n")
        name, *words = title.split()
        options = dict(word.split("=") for word in words if "=" in word)
        found.append(Attack(name, source, "long" in words, int(options.get("processes", 1))))
    return tuple(found)


HOSTILE_SOURCES = ("print(42)\0", "\ud800", "# coding: nonsense\nprint(42)", "print(4\u0032\u200b)")
ATTACKS = parse(exhaust.TEXT + reach.TEXT + cheat.TEXT) + tuple(
    Attack(f"source_{n}", text) for n, text in enumerate(HOSTILE_SOURCES)
)
