"""HumanEval's own solutions pass, and each mutant of them that must fail does. A sample; all of it
among the slow tests."""

from __future__ import annotations

import ast
import asyncio
import json
import sys

import pytest
from support.rotation import count_days, runs_all

from ratchet.rewards.code.reward import Code, CodeConfig
from ratchet.testing import answered
from ratchet.types import Scored, Task

# None as an answer, helpers of the prompt, calls by name, random arguments
SAMPLE = (0, 8, 12, 22, 32, 33, 38, 53)
FORGED = b'{"end": "passed", "why": "", "held": 1, "broken": 0}'
EQUAL = """
class Equal:
    __class__ = int
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __gt__(self, other): return True
    def __abs__(self): return self
    def __sub__(self, other): return self
    def __mul__(self, other): return self
    __add__ = __radd__ = __rmul__ = __rsub__ = __pow__ = __sub__
    def __iter__(self): return iter(())
    def __float__(self): return 0.0
    def __bool__(self): return True
    def __hash__(self): return 0
"""


@pytest.fixture(scope="module")
def rows(shared_data):
    files = sorted(shared_data("humaneval").glob("*.jsonl"))
    return [
        json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()
    ]


@pytest.fixture(scope="module")
def reward():
    made = Code(CodeConfig(timeout_s=3))
    yield made
    made.sandbox.close()


def mutants(row):
    """Programs that no tests of this function can be right to pass."""
    prompt, name, right = (
        row["prompt"],
        row["entry_point"],
        row["prompt"] + row["canonical_solution"],
    )
    return {
        "raises": "    raise ValueError('no')\n",
        "an object of its own": "    return object()\n",
        "equal to everything": f"{prompt}    return Equal()\n{EQUAL}",
        "equal int": f"{prompt}    return "
        f"Equal(7)\n{EQUAL.replace('class Equal:', 'class Equal(int):')}",
        "itself": f"    return {name}\n",
        "exits in the call": "    import sys\n    sys.exit(0)\n",
        "exits hard in the call": "    import os\n    os._exit(0)\n",
        "exits before": f"import sys\nsys.exit(0)\n{right}",
        "exits hard before": f"import os\nos._exit(0)\n{right}",
        "exits after": f"{right}\nimport os\nos._exit(0)\n",
        "another name": f"{right}\n{name} = None\n",
        "raises at the top": f"{right}\nraise RuntimeError\n",
        "no Python": f"{right}\n    )",
        "prose": "I would use a loop.",
        "a generator of a generator": "    yield (yield)\n",
        "a coroutine": f"import asyncio\n{right}".replace(f"def {name}(", f"async def {name}("),
        "forged verdict": f"    import os\n    os.write(1, {FORGED!r})\n    os._exit(0)\n",
    }


WRONG_TYPES = (
    "None",
    "Ellipsis",
    "'\\0 no answer'",
    "[None, 'no']",
    "{'no': None}",
    "float('nan')",
)


def may_be_right(row, value):
    """A test that takes any true, or any false, value would rightly be content with some of them;
    so would one that expects None only. Told by trying: the prompt and the tests are the data's
    own, and the function is a constant here."""
    names = {"__name__": "oracle"}
    exec(row["prompt"] + f"    return {value}\n" + row["test"], names)
    try:
        names["check"](names[row["entry_point"]])
    except Exception:
        return False
    return True


async def judged(reward, pairs):
    """The outcomes of (row, answer)."""

    async def one(row, text):
        task = Task(row["task_id"], (), meta=row)
        (outcome,) = await reward.score([answered(task, text)], task)
        return outcome

    return await asyncio.gather(*(one(row, text) for row, text in pairs))


def check_all(reward, rows, every=1):
    """every: each row has one of so many of its mutants, in turn, and another one tomorrow."""
    today = count_days() % every
    right = [(row, row["canonical_solution"]) for row in rows]
    whole = [
        (row, f"Here it is.\n```python\n{row['prompt']}{row['canonical_solution']}```\n")
        for row in rows
    ]
    outcomes = asyncio.run(judged(reward, right + whole))
    failed = [
        (row["task_id"], o)
        for (row, _), o in zip(right + whole, outcomes, strict=True)
        if o != PASSED
    ]
    assert failed == []

    named = [
        (row, name, text)
        for index, row in enumerate(rows)
        for number, (name, text) in enumerate(mutants(row).items())
        if (index + number) % every == today
    ]
    named += [
        (row, f"returns {value}", f"    return {value}\n")
        for row in rows
        for value in WRONG_TYPES
        if not may_be_right(row, value)
    ]
    outcomes = asyncio.run(judged(reward, [(row, text) for row, _, text in named]))
    passed = [
        (row["task_id"], name, o)
        for (row, name, _), o in zip(named, outcomes, strict=True)
        if not isinstance(o, Scored) or o.reward != 0.0
    ]
    assert passed == []
    return len(named)


PASSED = Scored(1.0, {"passed": 1.0, "wrong": 0.0, "crashed": 0.0, "limit": 0.0})


def test_solutions_of_a_sample_pass_and_their_mutants_fail(reward, rows):
    assert check_all(reward, [rows[index] for index in SAMPLE]) > 20 * len(SAMPLE)


def test_helpers_of_the_prompt_that_the_tests_use_are_not_the_programs_to_redefine(reward, rows):
    cheats = {
        32: "def poly(xs, x):\n    return 0.0\n\ndef find_zero(xs):\n    return 0.0\n",
        38: "def encode_cyclic(s):\n    return s\n\ndef decode_cyclic(s):\n    return s\n",
    }
    pairs = [(rows[index], text) for index, text in cheats.items()]
    assert [in_process(row, row["prompt"] + "    pass\n" + text) for row, text in pairs] == [
        True,
        True,
    ]
    assert [outcome.reward for outcome in asyncio.run(judged(reward, pairs))] == [0.0, 0.0]


@pytest.mark.slow
def test_all_solutions_pass_and_their_mutants_fail(reward, rows):
    """Each solution with a third of its mutants, so that three days show all."""
    assert check_all(reward, rows, every=1 if runs_all() else 3) > 8 * len(rows)


FLIPS = {
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


class Changed(ast.NodeTransformer):
    """The `target`th comparison or constant of a function is another: < for >=, n + 1 for n."""

    def __init__(self, target):
        self.target, self.seen = target, 0

    def _here(self):
        self.seen += 1
        return self.seen - 1 == self.target

    def visit_Compare(self, node):
        flip = FLIPS.get(type(node.ops[0]))
        if flip and self._here():
            node.ops[0] = flip()
        return self.generic_visit(node)

    def visit_Constant(self, node):
        if type(node.value) is int and self._here():
            node.value += 1
        return node


def variants(row, most):
    """Sources with one change each in the function that is asked for. (A helper of the prompt is
    the tests' own here, and the program's in one process: there a program may weaken the tests by
    redefining it.)"""
    for target in range(most):
        tree = ast.parse(row["prompt"] + row["canonical_solution"])
        change = Changed(target)
        for index, statement in enumerate(tree.body):
            if getattr(statement, "name", "") == row["entry_point"]:
                tree.body[index] = change.visit(statement)
        if change.seen <= target:
            return
        yield ast.unparse(ast.fix_missing_locations(tree))


def in_process(row, source):
    """What HumanEval's own way of judging says, all in one process (the data's own code but for one
    change). None where that takes too long."""
    steps = 0

    def trace(frame, event, arg):
        nonlocal steps
        steps += 1
        if steps > 200_000:
            raise KeyboardInterrupt
        return trace

    names = {"__name__": "oracle"}
    before = sys.gettrace()
    try:
        exec(source + "\n" + row["test"], names)
        sys.settrace(trace)
        names["check"](names[row["entry_point"]])
    except KeyboardInterrupt:  # from `trace`
        return None
    except Exception:
        return False
    finally:
        sys.settrace(before)
    return True


@pytest.mark.slow
def test_small_changes_are_judged_as_by_the_tests_in_one_process(reward, rows):
    """Constants off by one and flipped comparisons: the verdict through two sandboxes is that of a
    plain call of the tests."""
    pairs = [(row, source, in_process(row, source)) for row in rows for source in variants(row, 6)]
    known = [(row, source, verdict) for row, source, verdict in pairs if verdict is not None]
    assert sum(verdict is False for _, _, verdict in known) > len(rows)
    outcomes = asyncio.run(judged(reward, [(row, source) for row, source, _ in known]))
    differ = [
        (row["task_id"], source, verdict, o)
        for (row, source, verdict), o in zip(known, outcomes, strict=True)
        if o.reward != float(verdict)
    ]
    assert differ == []
