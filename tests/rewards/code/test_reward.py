"""The reward `code`: programs out of answers, tests of output, tests of functions, and whose fault
a failure is."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.errors import DataError
from ratchet.rewards.code.extract_program import (
    extract_program,
    find_fenced_blocks,
    has_expected_output,
)
from ratchet.rewards.code.reward import Code, CodeConfig, get_tests, parse_io_tests
from ratchet.rewards.deadline import CURRENT_DEADLINE, Deadline
from ratchet.sandbox import Reason, Result, SandboxError
from ratchet.testing import answered, check_reward
from ratchet.types import Failed, Message, Scored, Task, Truncated

DOUBLE = [
    {"stdin": "21\n", "stdout": "42\n"},
    {"stdin": "5", "stdout": "10"},
    {"stdin": "0", "stdout": "0"},
]
STREAM = Task("double", (Message("user", "Double it."),), meta={"tests": DOUBLE})


@pytest.fixture(scope="module")
def made():
    """`made(credit="share")`: the reward with these keys, closed at the end."""
    rewards = {}

    def make(**keys):
        name = json.dumps(keys)
        if name not in rewards:
            rewards[name] = Code(CodeConfig(**{"timeout_s": 1, **keys}))
        return rewards[name]

    yield make
    for reward in rewards.values():
        reward.sandbox.close()


def judge(reward, task, text, outcome=None):
    (found,) = asyncio.run(reward.score([answered(task, text, outcome)], task))
    return found


def function(test, prompt="", entry_point="f"):
    return Task("fun", (), meta={"prompt": prompt, "entry_point": entry_point, "test": test})


def parts(**shares):
    return {"passed": 0.0, "wrong": 0.0, "crashed": 0.0, "limit": 0.0, **shares}


# --- the program in an answer


@pytest.mark.parametrize(
    ("text", "blocks", "wanted"),
    [
        ("a = 1\n", "last", "a = 1\n"),
        ("Here:\n```python\na = 1\n```\nand\n```py\nb = 2\n```\nDone.", "last", "b = 2\n"),
        ("Here:\n```python\na = 1\n```\nand\n```py\nb = 2\n```\nDone.", "first", "a = 1\n"),
        (
            "Here:\n```python\na = 1\n```\nand\n```py\nb = 2\n```\nDone.",
            "all",
            "a = 1\n\n\nb = 2\n",
        ),
        ("```python\na = 1\n```\n```\noutput 1\n```", "last", "a = 1\n"),
        ("```bash\nls\n```\n```\na = 1\n```", "last", "a = 1\n"),
        ("```bash\nls\n```", "last", "```bash\nls\n```"),
        ("~~~Python3 title\na = 1\n~~~", "last", "a = 1\n"),
        ("````python\n'''\n```\n'''\n````", "last", "'''\n```\n'''\n"),
        ("```python\na = 1  # cut off", "last", "a = 1  # cut off"),
        ("  ```python\n    return 1\n  ```", "last", "    return 1\n"),
        ("```python\r\na = 1\r\n```\r\n", "last", "a = 1\r\n"),
        ("```python\n```", "last", ""),
        ("", "last", ""),
    ],
)
def test_the_program_in_an_answer(text, blocks, wanted):
    assert extract_program(text, blocks, require_block=False) == wanted


def test_a_block_may_be_required():
    assert extract_program("a = 1", "last", require_block=True) is None
    assert extract_program("```\na = 1\n```", "last", require_block=True) == "a = 1\n"
    assert find_fenced_blocks("no block") == []


# --- tests of output


def result(stdout, exit=0, reason=Reason.EXIT):
    return Result(exit, None, stdout, b"", 0.1, reason)


@pytest.mark.parametrize(
    ("stdout", "expected", "tokens", "lines"),
    [
        (b"1 2\n3\n", "1 2\n3", True, True),
        (b"1 2 3", "1 2\n3\n", True, False),
        (b"1  2\n3", "1 2\n3", True, False),
        (b"1 2 \r\n3\n\n", "1 2\n3\n", True, True),
        (b"1 2", "1 2 3", False, False),
        (b"1 2 3", "1 2", False, False),
        (b"12", "1 2", False, False),
        (b"", "", True, True),
        (b"", "0", False, False),
        (b"1.0", "1", False, False),
        (b"Yes", "YES", False, False),
        ("４２".encode(), "42", False, False),
        (b"\xff", "\ufffd", False, False),
        (b"1\xa02", "1 2", False, False),
    ],
)
def test_outputs_are_compared_by_tokens_or_lines(stdout, expected, tokens, lines):
    assert has_expected_output(result(stdout), expected, "tokens", None) is tokens
    assert has_expected_output(result(stdout), expected, "lines", None) is lines


@pytest.mark.parametrize(
    ("stdout", "expected", "right"),
    [
        (b"0.333", "0.33333", True),  # 0.00033 away, tolerance 0.001
        (b"0.3", "0.33333", False),
        (b"1000.9", "1000", True),  # 0.9 away, 0.001 of 1000 allowed
        (b"1001.1", "1000", False),
        (b"1e3", "1000", True),
        (b"+5.", "5", True),
        (b"nan", "1", False),
        (b"nan", "nan", True),  # the same text
        (b"inf", "1e999", False),
        (b"0", "1e400", False),  # beyond the range of floats
        (b"0x10", "16", False),
        (b"1_0", "10", False),
        (b"x 1.0001", "x 1", True),
        (b"y 1", "x 1", False),
        (b"1" + b"0" * 70, "1" + "0" * 70 + "0", False),
    ],
)
def test_numbers_within_the_tolerance_are_equal(stdout, expected, right):
    assert has_expected_output(result(stdout), expected, "tokens", 1e-3) is right


def test_a_bad_end_is_no_right_output():
    assert not has_expected_output(result(b"42", exit=1), "42", "tokens", None)
    assert not has_expected_output(
        result(b"42", exit=None, reason=Reason.WALL), "42", "tokens", None
    )


@pytest.mark.medium
def test_the_share_and_all_or_nothing(made):
    wrong_at_0 = "x = int(input())\nprint(x * 2 or 1)"
    assert judge(made(), STREAM, "print(int(input()) * 2)") == Scored(1.0, parts(passed=1.0))
    assert judge(made(), STREAM, wrong_at_0) == Scored(0.0, parts(passed=2 / 3, wrong=1 / 3))
    assert judge(made(credit="share"), STREAM, wrong_at_0) == Scored(
        2 / 3, parts(passed=2 / 3, wrong=1 / 3)
    )
    crash_at_5 = "x = int(input())\nprint(x * 2 if x != 5 else 1 / 0)"
    # the third was not run
    assert judge(made(), STREAM, crash_at_5) == Scored(0.0, parts(passed=1 / 3, crashed=1 / 3))
    assert judge(made(credit="share"), STREAM, crash_at_5) == Scored(
        2 / 3, parts(passed=2 / 3, crashed=1 / 3)
    )


@pytest.mark.medium
def test_a_program_that_overruns_a_limit_earns_nothing(made):
    assert judge(made(), STREAM, "while True: pass") == Scored(0.0, parts(limit=1 / 3))
    assert judge(made(output_kib=1), STREAM, "print('42\\n' * 1000)") == Scored(
        0.0, parts(limit=1 / 3)
    )
    assert (
        judge(made(memory_mib=64), STREAM, "x = bytearray(1 << 28)\nprint(int(input()) * 2)").parts[
            "crashed"
        ]
        == 1 / 3
    )


@pytest.mark.medium
def test_the_contract_of_rewards(made):
    check_reward(made(), STREAM, good="```python\nprint(int(input()) * 2)\n```", bad="print(42)")
    check_reward(
        made(),
        function("def check(c):\n    assert c(1) == 2"),
        good="def f(x): return 2",
        bad="def f(x): return 3",
    )


def test_an_answer_that_was_cut_off_is_not_run(made):
    assert judge(made(), STREAM, "print(int(input()) * 2)", Truncated()) == Truncated(
        0.0, {"code": 0.0}
    )


def test_an_answer_without_the_block_that_is_required(made):
    assert judge(made(require_block=True), STREAM, "print(int(input()) * 2)") == Scored(
        0.0, parts(wrong=1.0)
    )


# --- tests of functions


@pytest.mark.medium
@pytest.mark.parametrize(
    ("body", "test", "end"),
    [
        ("return x + 1", "assert candidate(1) == 2", "passed"),
        ("return x + 1", "assert candidate(1) == 3", "wrong"),
        ("return 1 / 0", "assert candidate(1) == 2", "crashed"),
        ("while True: pass", "assert candidate(1) == 2", "limit"),
        ("return x + 1", "assert f(1) == 2", "passed"),  # by its own name
        # arguments that depend on answers
        ("return x + 1", "assert candidate(candidate(candidate(1))) == 4", "passed"),
        ("return x + 1", "y = 0\n    while y < 9: y = candidate(y)\n    assert y == 9", "passed"),
        # the tests never end
        ("return x - 1", "y = 0\n    while y < 9: y = candidate(y)\n    assert y == 9", "limit"),
        (
            "return x + 1",
            "import random\n    for _ in range(50):\n        n = random.random()\n        assert "
            "f(n) == n + 1",
            "passed",
        ),
        (
            "raise ValueError('x')",
            "try: candidate(1)\n    except ValueError: return\n    assert False",
            "passed",
        ),
        (
            "raise KeyError('x')",
            "try: candidate(1)\n    except ValueError: return\n    assert False",
            "crashed",
        ),
        ("return x", "try: candidate(1)\n    except ValueError: return\n    assert False", "wrong"),
        ("print('chatter'); return x", "print('more'); assert candidate(1) == 1", "passed"),
        (
            "import sys; sys.exit(0)",
            "try: candidate(1)\n    except BaseException: pass\n    assert candidate",
            "passed",
        ),
        (
            "import os; os._exit(0)",
            "try: candidate(1)\n    except BaseException: pass\n    assert candidate",
            "crashed",
        ),
        # changes stay there
        (
            "x.append(1); return x",
            "y = [0]; assert candidate(y) == [0, 1]; assert y == [0]",
            "passed",
        ),
        ("return (i for i in range(x))", "assert list(candidate(3)) == [0, 1, 2]", "passed"),
        ("return lambda: 1", "assert candidate(3)", "crashed"),
        ("return x", "assert candidate(x=1) == 1 and candidate(*[2]) == 2", "passed"),
        ("return x", "assert candidate(float('inf')) == float('inf')", "passed"),
        (
            "return x",
            "assert isinstance(candidate(True), bool) and type(candidate(1)) is int",
            "passed",
        ),
        ("return {1: (2, [3])}", "assert candidate(0) == {1: (2, [3])}", "passed"),
        ("return {1: [2, [3]]}", "assert candidate(0) == {1: (2, [3])}", "wrong"),
    ],
)
def test_how_the_tests_of_a_function_end(made, body, test, end):
    task = function(f"def check(candidate):\n    {test}\n")
    assert judge(made(), task, f"def f(x):\n    {body}\n") == Scored(
        float(end == "passed"), parts(**{end: 1.0})
    )


PROMPT = (
    "import math\n\ndef square(x):\n    return x * x\n\ndef f(x):\n    '''The root of x + "
    "square.'''\n"
)
ROOT = "def check(candidate):\n    assert candidate(2) == math.sqrt(2 + square(2))\n"


@pytest.mark.parametrize(
    "answer",
    [
        "    return math.sqrt(x + square(x))\n",
        "    return math.sqrt(x + square(x))\n\n\ndef other():\n    pass\n",
        "```python\n    return math.sqrt(x + square(x))\n```",
        "def f(x):\n    return math.sqrt(x + square(x))\n",
        f"Sure.\n```python\n{PROMPT}    return math.sqrt(x + square(x))\n```\nIt works.",
        "from __future__ import annotations\nf = lambda x: math.sqrt(x + square(x))",
        "from math import sqrt\nclass C:\n    def f(self, x): return sqrt(x + x * x)\nf = C().f",
    ],
)
def test_a_completion_or_a_whole_program(made, answer):
    assert judge(made(), function(ROOT, PROMPT), answer).reward == 1.0
    if not answer.startswith(" "):
        stripped = function(ROOT, PROMPT.rstrip("\n"))
        assert judge(made(), stripped, answer).reward == 1.0


@pytest.mark.parametrize(
    "answer",
    ["", "    pass", "return 1", "I don't know.", "def g(x): return 1", "    return math.sqrt(x"],
)
def test_no_program_is_a_zero(made, answer):
    assert judge(made(), function(ROOT, PROMPT), answer).reward == 0.0


def test_a_prompt_in_prose_is_no_part_of_the_program(made):
    task = function(
        "def check(candidate):\n    assert candidate(2) == 4", "Write f, which doubles x."
    )
    assert judge(made(), task, "```python\ndef f(x): return 2 * x\n```").reward == 1.0


@pytest.mark.medium
def test_a_share_of_the_assertions(made):
    test = (
        "def check(c):\n    assert True\n    assert c(1) == 2\n    assert c(2) == 4, 'two'\n   "
        " "
        "for i in 3, 4: assert c(i) == 6"
    )
    reward = made(credit="share")
    assert judge(reward, function(test), "def f(x): return 2 * x") == Scored(
        2.5 / 3, parts(passed=2.5 / 3, wrong=0.5 / 3)
    )
    late = "def f(x):\n    while x > 2: pass\n    return 2 * x"
    assert judge(reward, function(test), late) == Scored(2 / 3, parts(passed=2 / 3, limit=1 / 3))
    assert judge(reward, function(test), "def f(x): return 2") == Scored(
        1 / 3, parts(passed=1 / 3, wrong=2 / 3)
    )


@pytest.mark.medium
@pytest.mark.parametrize(
    ("answer", "share"),
    [
        ("[1]", 1 / 3),
        ("[1] * 100_000", 1 / 3),  # a long loop of what is easily right
        ("[1] * 100_000 + [5]", 0),
        # An error between assertions ends the tests: it and what was not reached count as broken.
        ("[1] * (n == 12) or 1 // 0", 1 / 4),
        ("[d for d in range(1, n + 1) if n % d == 0]", 1),
    ],
)
def test_answers_do_not_decide_how_often_an_assertion_counts(made, answer, share):
    test = (
        "def check(c):\n    for d in c(12): assert 12 % d == 0\n"
        "    assert sorted(c(12)) == [1, 2, 3, 4, 6, 12]\n"
        "    prime = c(7)\n    assert sorted(prime) == [1, 7]\n"
    )
    outcome = judge(made(credit="share"), function(test), f"def f(n): return {answer}")
    assert outcome.reward == pytest.approx(share)


@pytest.mark.parametrize(
    ("test", "why"),
    [
        ("def check(candidate):\n    assert candidate(1) == ", "SyntaxError"),
        ("def test(candidate):\n    assert candidate(1) == 1", "no function check"),
        ("def check(candidate):\n    assert True", "never call f"),
        (
            "def check(candidate):\n    assert candidate(1) == helper(1)",
            "name 'helper' is not defined",
        ),
        ("import numpy as np\ndef check(candidate):\n    assert candidate(1) == 1", "numpy"),
        ("def check(candidate):\n    assert candidate(lambda: 1) == 1", "a value of type function"),
        ("import os\ndef check(candidate):\n    os._exit(0)", "ended before"),
    ],
)
def test_broken_tests_fail_the_attempt_and_are_no_zero(made, test, why):
    for credit in ("all", "share"):
        outcome = judge(made(credit=credit), function(test), "def f(x): return 1")
        assert isinstance(outcome, Failed), outcome
        assert "task 'fun'" in outcome.detail
        assert why in outcome.detail


def test_a_sandbox_that_fails_is_no_zero():
    reward = Code(CodeConfig(workers=1))
    reward.sandbox.close()
    for task in (STREAM, function("def check(c):\n    assert c(1) == 1")):
        outcome = judge(reward, task, "def f(x): return 1")
        assert isinstance(outcome, Failed)
        assert "this sandbox is closed" in outcome.detail


@pytest.mark.medium
def test_the_attempts_of_a_group_find_out_once_what_is_called(made):
    reward = made(workers=2)
    task = function("def check(c):\n    for i in range(20): assert c(i) == i")
    ran = []
    run = reward.sandbox.run

    async def counted(*arguments):
        ran.append(arguments)
        return await run(*arguments)

    reward.sandbox.run = counted
    group = [answered(task, "def f(x): return x") for _ in range(4)]
    outcomes = asyncio.run(reward.score(group, task))
    assert [outcome.reward for outcome in outcomes] == [1.0] * 4
    assert len(ran) == 1 + 4 * 2  # the calls; then the program and the tests, for each
    reward.sandbox.run = run


# --- tasks and keys


def test_where_the_tests_come_from():
    assert get_tests(STREAM)["tests"] == DOUBLE
    assert get_tests(Task("t", (), answer={"tests": DOUBLE}))["tests"] == DOUBLE
    assert get_tests(Task("t", (), answer=json.dumps({"tests": DOUBLE})))["tests"] == DOUBLE
    assert get_tests(function("T", "P")).entry_point == "f"
    assert parse_io_tests(json.dumps(DOUBLE), "t")[0] == (b"21\n", "42\n")
    assert parse_io_tests([{"stdout": "x"}], "t") == [(b"", "x")]
    assert parse_io_tests([{"stdin": None, "stdout": "x"}], "t") == [(b"", "x")]
    # Columns of other rows of the same file are empty here.
    assert get_tests(Task("t", (), {"tests": DOUBLE}, {"tests": None}))["tests"] == DOUBLE
    mixed = replace(function("T", "P"), meta={**function("T", "P").meta, "tests": None})
    assert get_tests(mixed).entry_point == "f"


@pytest.mark.parametrize(
    ("task", "why"),
    [
        (Task("t", ()), "task 't' has no tests"),
        (Task("t", (), answer="42"), "task 't' has no tests"),
        (
            Task("t", (), meta={"test": "x", "prompt": "p"}),
            "its entry_point is None: it must be text",
        ),
        (
            Task("t", (), meta={"test": "x", "prompt": "p", "entry_point": "f("}),
            r"entry_point='f\(' must be the name of a function",
        ),
        (Task("t", (), meta={"tests": None, "test": None}), "task 't' has no tests"),
        (
            Task("t", (), meta={"case_type": "input", "test_cases": []}),
            "test_cases must be a list of tests with at least one",
        ),
        (
            Task("t", (), meta={"case_type": "input", "test_cases": [{"stdin": "1"}]}),
            r"test_cases\[0\] has no expected_stdout",
        ),
    ],
)
def test_a_task_without_tests_says_so(task, why):
    with pytest.raises(DataError, match=why):
        get_tests(task)


@pytest.mark.parametrize(
    ("tests", "why"),
    [
        ([], "tests must be a list"),
        ("x", r"tests must be a list of \{stdin, stdout\} .* not 'x'"),
        (None, "tests must be a list"),
        (5, "tests must be a list"),
        ({"stdin": "x"}, "tests must be a list"),
        ([5], r"tests\[0\] must be \{stdin, stdout\}, not 5"),
        ([{"stdin": "x"}], r"tests\[0\] has no stdout"),
        ([{"input": "x", "output": "y"}], r"tests\[0\] has no stdout.* not \{'input'"),
        ([{"stdin": 1, "stdout": "x"}], r"tests\[0\].stdin must be text, not 1: write '1'"),
        ([{"stdout": "x"}, {"stdout": ["x"]}], r"tests\[1\].stdout must be text, not \['x'\]$"),
    ],
)
def test_tests_of_the_wrong_shape_are_refused(tests, why):
    with pytest.raises(DataError, match=why):
        parse_io_tests(tests, "t")


def test_a_tolerance_that_nobody_reads_is_refused():
    with pytest.raises(ValidationError, match="read only with compare=tokens"):
        resolve("rewards", {"kind": "code", "compare": "lines", "tolerance": 0.1})


@pytest.mark.fault("S12")
def test_a_machine_that_is_too_weak_is_refused_when_the_reward_is_made(monkeypatch):
    class Weak:
        def __init__(self, *, slots, at_least, readable):
            raise SandboxError(f"{slots} {at_least.name}")

    monkeypatch.setattr("ratchet.sandbox.local.LocalSandbox", Weak)
    with pytest.raises(SandboxError, match="3 NAMESPACES"):
        build(resolve("rewards", {"kind": "code", "workers": 3, "isolation": "namespaces"}))


def within(reward, task, answer, seconds, took):
    """The outcome within a deadline, where each program is said to take `took` seconds."""
    run, standing = reward.sandbox.run, []

    async def timed(*arguments):
        standing.append(CURRENT_DEADLINE.get()._timeout.when())
        return replace(await run(*arguments), seconds=took)

    async def score():
        async with Deadline(seconds) as deadline:
            before = deadline._timeout.when()
            outcome = (await reward.score([answered(task, answer)], task))[0]
            assert deadline._timeout.when() > before, "it does not go on where it stood"
            return outcome

    reward.sandbox.run = timed
    try:
        return asyncio.run(score())
    finally:
        reward.sandbox.run = run
        assert set(standing) == {None}


@pytest.mark.medium
def test_a_slow_program_is_a_wrong_answer_within_a_deadline(made):
    task = Task("t", (), meta={"tests": [{"stdin": str(i), "stdout": str(i)} for i in range(5)]})
    echo, chain = (
        "print(input())",
        "x = 0\n    for _ in range(5): x = candidate(x) * 2\n    assert x == 62",
    )
    assert within(made(credit="share"), task, echo, 100, 160) == Scored(
        0.4, parts(passed=0.4, limit=0.6)
    )
    assert within(made(), task, echo, 100, 160).reward == 0.0
    assert within(made(), task, echo, 100, 59).reward == 1.0
    steps = function(f"def check(candidate):\n    {chain}")
    assert within(made(), steps, "def f(x): return x + 1", 100, 160) == Scored(
        0.0, parts(limit=1.0)
    )
    assert within(made(), steps, "def f(x): return x + 1", 100, 1).reward == 1.0


def test_answers_that_make_the_tests_slow_in_every_round_end_as_a_limit(made):
    reward, ran = made(), []
    run = reward.sandbox.run

    async def with_slow_tests(script, stdin, limits):
        ran.append(script)
        is_tests = script == reward.function_judge._tests_script
        return replace(await run(script, stdin, limits), seconds=40.0 if is_tests else 0.01)

    chain = "x = 0\n    for _ in range(20): x = candidate(x) + 1"
    task = function(f"def check(candidate):\n    {chain}\n    assert x == 40")
    reward.sandbox.run = with_slow_tests
    try:
        outcome = judge(reward, task, "def f(x): return x + 1")
    finally:
        reward.sandbox.run = run
    assert outcome == Scored(0.0, parts(limit=1.0))
    # The limit of 3 s by the clock allows 90 s: the first look at the tests, then three rounds.
    assert len(ran) == 1 + 3 * 2
