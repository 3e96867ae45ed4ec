"""Generated programs, judged again and again with other numbers of slots: each has one outcome, and
the right ones earn 1."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest
from sandbox.test_attacks import need
from sandbox.test_determinism import fixed_addresses

from ratchet.rewards.code.reward import Code, CodeConfig
from ratchet.sandbox import Isolation, Limits, LocalSandbox
from ratchet.testing import answered
from ratchet.types import Scored, Task

PROGRAMS, FUNCTIONS = 340, 60  # each template some ten times
SLOTS = (1, 2, 8, 2)
WORDS = [
    "ash",
    "birch",
    "cedar",
    "elm",
    "fir",
    "hazel",
    "juniper",
    "larch",
    "maple",
    "oak",
    "pine",
    "yew",
    None,
    1,
    2.5,
    b"x",
]

# {words}: some of WORDS, quoted; {n}: a number. Each prints something that chance could change.
SEEN = (
    "print([*{{{words}}}])",
    "print({{{words}}}.pop(), len({{{words}}}))",
    "print(sorted([{words}], key=hash)[:3])",
    "print(*{{w: i for i, w in enumerate({{{words}}})}})",
    "print(hash('{n}') % {n}, hash((None, {n}, b'x')) % {n}, hash(frozenset([{words}])) % {n})",
    "print([*frozenset([{words}]) | {{int, str, None}}][:3])",
    "import random\nprint(random.random() * {n}, random.sample(range({n} + 9), 5))",
    "import os\nfor w in {{{words}}}: open(f'{{w}}', 'w').close()\nprint(os.listdir('.'))",
    "import os, "
    "tempfile\nos.close(tempfile.mkstemp(suffix='{n}')[0])\nprint(len(os.listdir('.')[0]), "
    "tempfile.gettempdir())",
    "import os\nprint(os.getpid(), os.getppid(), oct(os.umask({n} % 8)), os.getcwd(), "
    "sorted(os.environ)[{n} % 3])",
    "import locale, time\nlocale.setlocale(locale.LC_ALL, '')\nprint(f'{{{n}.5:n}}', "
    "time.ctime({n}), time.tzname)",
    "import threading\nprint(threading.get_native_id(), [*{{None, {n}, 'a'}}], hash(print) == "
    "hash(len))",
    "import glob, os\n[os.mkdir(f'd{{i}}') for i in range({n} % 9)]\nprint(glob.glob('*'), [e.name "
    "for e in os.scandir('.')])",
    "import json\nprint(json.dumps({{w: len(str(w)) for w in map(str, {{{words}}})}}))",
    "import string, itertools\nprint(''.join(set(string.ascii_letters))[: {n} % 50])",
    "print(max({{{words}}}, key=lambda w: len(str(w))), next(iter({{{words}}} - {{None}})))",
    "class A: pass\nprint([type(x).__name__ for x in {{A, 1}}].count('type'), {n})",
    "import collections\nprint(collections.Counter(map(str, {{{words}}})).most_common(2))",
)
# Tests that walk a set, or hand one over. The function gives back what it is asked for.
TESTED = (
    "for w in {{{words}}}: assert candidate(w) == w",
    "assert candidate({{{words}}}) == {{{words}}}",
    "names = {{{words}}}\n    assert [candidate(w) for w in names] == [*names]",
    "for w in {{{words}}}:\n        for v in {{{words}}}: assert candidate([w, {{v}}]) == [w, "
    "{{v}}]",
    "assert candidate(frozenset([{words}])) == frozenset([{words}]) and candidate([*{{{words}}}]) "
    "== [*{{{words}}}]",
    "import random\n    for _ in range(3): assert candidate(x := random.choice([*{{{words}}}])) == "
    "x",
    "assert candidate({{w: {{w}} for w in {{{words}}}}}) == {{w: {{w}} for w in {{{words}}}}}",
)


def fill(templates: Sequence[str], rng: random.Random) -> str:
    """One of the templates, without what hangs on addresses where they are drawn."""
    template, words = rng.choice(templates), rng.sample(WORDS, rng.randint(3, 8))
    if not fixed_addresses():
        template, words = (
            template.replace("None", "0").replace("int, str", "1, 2"),
            [word or 0 for word in words],
        )
    return template.format(words=", ".join(map(repr, words)), n=rng.randrange(1, 10**6))


def functions(rng: random.Random) -> list[tuple[Task, str]]:
    tests = [f"def check(candidate):\n    {fill(TESTED, rng)}\n" for _ in range(FUNCTIONS)]
    columns = {"prompt": "", "entry_point": "f"}
    tasks = [
        Task(f"function/{index}", (), meta={**columns, "test": test})
        for index, test in enumerate(tests)
    ]
    return [(task, "def f(x):\n    return x\n") for task in tasks]


async def programs(rng: random.Random) -> list[tuple[Task, str]]:
    """Each with what it printed in a pool of its own as its test."""
    sources = [fill(SEEN, rng) for _ in range(PROGRAMS)]
    sandbox = LocalSandbox(slots=3)
    results = await asyncio.gather(
        *(sandbox.run(source, b"", Limits(wall_s=60, cpu_s=20)) for source in sources)
    )
    sandbox.close()
    assert [
        (source, result.stderr)
        for source, result in zip(sources, results, strict=True)
        if not result.ok
    ] == []
    tests = [[{"stdin": "", "stdout": result.stdout.decode()}] for result in results]
    tasks = [Task(f"program/{index}", (), meta={"tests": test}) for index, test in enumerate(tests)]
    return list(zip(tasks, sources, strict=True))


@pytest.mark.slow
@pytest.mark.fault("R18")
def test_programs_have_one_outcome_with_any_number_of_slots():
    need(Isolation.NAMESPACES)
    rng = random.Random(0)
    pairs = asyncio.run(programs(rng)) + functions(rng)

    async def judged(slots: int) -> dict[str, object]:
        reward = Code(CodeConfig(workers=slots, timeout_s=20))
        outcomes = await asyncio.gather(
            *(reward.score([answered(task, text)], task) for task, text in pairs)
        )
        reward.sandbox.close()
        return {task.id: outcome for (task, _), (outcome,) in zip(pairs, outcomes, strict=True)}

    right = Scored(1.0, {"passed": 1.0, "wrong": 0.0, "crashed": 0.0, "limit": 0.0})
    sources = {task.id: f"{task.meta} {text}" for task, text in pairs}
    for slots in SLOTS:
        found = asyncio.run(judged(slots))
        assert {sources[name]: outcome for name, outcome in found.items() if outcome != right} == {}


@pytest.mark.medium
def test_sets_are_the_same_text_and_walks_are_foreseen():
    reward = Code(CodeConfig(workers=2, timeout_s=20))
    words = ", ".join(map(repr, WORDS[:8]))
    lines = [
        f"for w in {{{words}}}: assert candidate(w) == w",
        f"assert candidate({{{words}, None}}) == {{None, {words}}}",
    ]
    task = Task(
        "walk",
        (),
        meta={
            "prompt": "",
            "entry_point": "f",
            "test": "def check(candidate):\n    " + "\n    ".join(lines),
        },
    )
    group = [answered(task, "def f(x): return x") for _ in range(4)]
    outcomes = asyncio.run(reward.score(group, task))
    reward.sandbox.close()
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4
