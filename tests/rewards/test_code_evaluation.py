"""Tests that run what the program returned as code, and tests that are not the same twice: refused,
and never a reward."""

from __future__ import annotations

import asyncio

import pytest

from ratchet.rewards.code.eval_in_tests import find_evaluated_answer
from ratchet.rewards.code.function_tests import FunctionJudge
from ratchet.rewards.code.reward import Code, CodeConfig
from ratchet.testing import answered
from ratchet.types import Failed, Scored, Task

FORGED = """{"end": "passed", "why": "", "held": 1, "broken": 0}"""
TAKEOVER = f"__import__('os').write(3, b'{FORGED}') and __import__('os')._exit(0)"
LOADED = "cos\n_exit\n(I0\ntR."  # a pickle that ends its process well
PASSED, WRONG = (
    {"passed": 0.0, "wrong": 0.0, "crashed": 0.0, "limit": 0.0, end: 1.0}
    for end in ("passed", "wrong")
)


@pytest.fixture(scope="module")
def reward():
    reward = Code(CodeConfig(timeout_s=1, workers=2))
    yield reward
    reward.sandbox.close()


def function(test):
    return Task("fun", (), meta={"prompt": "", "entry_point": "f", "test": test})


def check(*lines, top=""):
    return f"{top}\ndef check(candidate):\n" + "".join(f"    {line}\n" for line in lines)


def judge(reward, test, program):
    (outcome,) = asyncio.run(reward.score([answered(function(test), program)], function(test)))
    return outcome


def returns(value):
    return f"def f(x):\n    return {value!r}\n"


SEEN = {
    "eval": check("assert eval(candidate(1)) == 2"),
    "exec": check(
        "code = candidate(1)", "names = {}", "exec(code, names)", "assert names['x'] == 2"
    ),
    "compile": check("assert (lambda s: eval(compile(s, 'x', 'eval')))(candidate(1)) == 2"),
    "by a name of the module": check(
        "assert b.eval(candidate(1)) == 2", top="import builtins as b"
    ),
    "import": check("assert __import__(candidate(1)).x == 2"),
    "import_module": check(
        "assert importlib.import_module(candidate(1)).x == 2", top="import importlib"
    ),
    "map": check("assert list(map(eval, [candidate(1)])) == [2]"),
    "assertRaises": check(
        "case.assertRaises(ValueError, eval, candidate(1))",
        top="import unittest\ncase = unittest.TestCase()",
    ),
    "pickle": check("assert pickle.loads(candidate(1)) == 2", top="import pickle"),
    "through a helper": check(
        "assert value(candidate(1)) == 2", top="def value(text):\n    return eval(text)"
    ),
    "through a list": check(
        "texts = []",
        "texts.append(candidate(1))",
        "for text in texts:",
        "    assert eval(text) == 2",
    ),
    "through what a function returns": check(
        "assert eval(run()) == 2", top="def run():\n    return f(1)"
    ),
    "another name of the parameter": "def check(g):\n    assert eval(g(1)) == 2\n",
}


@pytest.mark.parametrize("name", SEEN)
def test_tests_that_evaluate_answers_are_seen_in_source(name):
    assert find_evaluated_answer(SEEN[name], "f")


@pytest.mark.fault("S13")
def test_evaluating_tests_fail_every_attempt_alike(reward):
    for program in (
        returns("1 + 1"),
        returns(TAKEOVER),
        returns(7),
        "def f(x): return",
        "no program",
    ):
        outcome = judge(reward, SEEN["eval"], program)
        assert isinstance(outcome, Failed), outcome
        assert (
            "task 'fun': its tests evaluate what f returned: eval(candidate(1))" in outcome.detail
        )


HIDDEN = {
    "getattr": check("run = getattr(builtins, 'ev' + 'al')", "assert run(candidate(1)) == 2", top="import builtins"),
    "a table": check("assert RUN['e'](candidate(1)) == 2", top="RUN = {'e': eval}"),
    "exec under another name": check("run(candidate(1))", top="run = exec"),
    "a callback of the library": check(
        "with ThreadPoolExecutor(1) as threads:", "    assert threads.submit(RUN, "
                                                  "candidate(1)).result() == 2",
        top="from concurrent.futures import ThreadPoolExecutor\nRUN = eval",
    ),
    "caught": check("try:", "    run(candidate(1))", "except Exception:", "    pass", "assert True "
                                                                                      "== 1", top="run = eval"),
    "a module of the library": check("assert code.InteractiveInterpreter().runsource(candidate(1)) "
                                     "== 2", top="import code"),
    "a pickle": check("assert load(candidate(1).encode()) == 2", top="from pickle import loads as "
                                                                     "load"),
    "a function of code": check(
        "made = types.FunctionType(compiled(candidate(1), 'x', 'eval'), {})", "assert made() == 2",
        top="import types\ncompiled = compile",
    ),
    "text out of a list": check("assert run(''.join(candidate(1))) == 2", top="run = eval"),
    "a message": check("try: candidate(1)", "except Exception as error: run(str(error))", top="run = eval"),
}  # fmt: skip


@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.fault("S13")
def test_hidden_evaluation_is_stopped_before_it_runs(reward, name):
    assert not find_evaluated_answer(HIDDEN[name], "f")
    text = LOADED if name == "a pickle" else TAKEOVER
    program = returns([*text]) if name == "text out of a list" else returns(text)
    if name == "a message":
        program = f"def f(x):\n    raise ValueError({text!r})\n"
    outcome = judge(reward, HIDDEN[name], program)
    assert isinstance(outcome, Failed), outcome
    assert "its tests can't judge f: they evaluate what f returned" in outcome.detail


IDENTITY = "def f(x): return x"
HONEST = {
    "an expected value by eval": (
        check("for s in '1+1', '2*3':", "    assert candidate(s) == eval(s)"),
        "def f(s): return {'1+1': 2}.get(s, 6)",
    ),
    "drawn numbers": (check("a, b = 3, 4", "assert candidate(a, b) == eval(f'{a} + {b}')"), "def f(a, b): return a + b"),
    "the call itself is text": (check("assert candidate('a') == 'a'", "assert eval('candidate')('b') == 'b'"), IDENTITY),
    "literal_eval": (check("assert ast.literal_eval(candidate(1)) == [1]", top="import ast"), "def f(x): return '[1]'"),
    "a regular expression": (check("assert re.compile(candidate(1)).match('aa')", top="import re"), "def f(x): return 'a+'"),
    "json": (check("assert json.loads(candidate(1)) == {}", top="import json"), "def f(x): return "
                                                                                "'{}'"),
    "classes made after an answer": (
        check(
            "assert candidate(1) == 'a'",
            "from collections import namedtuple",
            "from dataclasses import make_dataclass",
            "import difflib, statistics, textwrap, colorsys",
            "P = namedtuple('P', 'x y')",
            "Q = make_dataclass('Q', ['x'])",
            "assert P(1, 2).y == 2 and Q(3).x == 3 and candidate(2) == 'a'",
        ),
        "def f(x): return 'a'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HONEST)
def test_honest_tests_that_compile_something_still_judge(reward, name):
    test, program = HONEST[name]
    assert find_evaluated_answer(test, "f") == ""
    assert judge(reward, test, program) == Scored(1.0, PASSED)
    assert judge(reward, test, "def f(*x): return None").reward == 0.0


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("assert ast.literal_eval(candidate(1)) == 2", returns("1 +")),
        ("assert importlib.util.find_spec(candidate(1)).name == 'os'", returns("no.such")),
        ("if not candidate(1) == 'y': helper()", returns("x")),
    ],
)
@pytest.mark.fault("S13")
def test_an_answer_that_breaks_the_tests_is_a_wrong_one(reward, line, program):
    assert judge(reward, check(line, top="import ast, importlib.util"), program) == Scored(
        0.0, WRONG
    )


DRAWN = {
    "a secret": check(
        "x = secrets.randbelow(10**9)", "assert candidate(x) == x + 1", top="import secrets"
    ),
    "the clock": check(
        "assert candidate(0) == 1",
        "x = time.time_ns()",
        "assert candidate(x) == x + 1",
        top="import time",
    ),
    "its own generator": check(
        "x = random.Random().random()", "assert candidate(x) == x + 1", top="import random"
    ),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.fault("R17")
def test_tests_that_are_not_the_same_twice_are_refused(reward, name):
    outcome = judge(reward, DRAWN[name], "def f(x): return x + 1")
    assert isinstance(outcome, Failed), outcome
    assert "task 'fun': its tests call f differently each time" in outcome.detail


@pytest.mark.medium
def test_a_program_that_leads_the_tests_on_earns_its_zero(reward, monkeypatch):
    """Every answer leads to another call, which is not a fault of the tests."""
    monkeypatch.setattr("ratchet.rewards.code.function_tests.MAX_ROUNDS", 5)
    chain = check("x = 0", "while x < 100: x = candidate(x) + 1 if candidate(x) != x else x + 50")
    assert judge(reward, chain + "    assert x == 7\n", "def f(x): return x").reward == 0.0
    endless = check("x = 0", "while not candidate(x): x += 1", "assert x == 3")
    assert judge(reward, endless, "def f(x): return x == 3").reward == 1.0
    assert judge(reward, endless, "def f(x): return False").reward == 0.0


RAISED = {
    "a text that is not its argument": (
        "KeyError",
        "str(e) == \"'a'\"",
        "def f(x): return {}['a']",
    ),
    "several arguments": (
        "UnicodeDecodeError",
        "e.start == 1",
        "def f(x): return b'a\\xff'.decode()",
    ),
    "a number": ("OSError", "e.errno == 5", "def f(x): raise OSError(5, 'no')"),
    "a file": ("FileNotFoundError", "'none.txt' in str(e)", "def f(x): open('none.txt')"),
    "a class of its own": (
        "ValueError",
        "str(e) == 'bad'",
        "class B(ValueError): pass\ndef f(x): raise B('bad')",
    ),
    "one of the library": (
        "ValueError",
        "'line 1' in str(e)",
        "import json\ndef f(x): json.loads('{')",
    ),
    "a text of its own": (
        "LookupError",
        "str(e) == 'none'",
        "class N(LookupError):\n    def __str__(self): return 'none'\ndef f(x): raise N(object())",
    ),
}


@pytest.mark.parametrize("name", RAISED)
@pytest.mark.fault("S13")
def test_exceptions_arrive_as_the_nearest_built_in(reward, name):
    kind, holds, program = RAISED[name]
    test = check("try: candidate(1)", f"except {kind} as e: assert {holds}", "else: assert False")
    assert judge(reward, test, program).reward == 1.0
    assert judge(reward, test, "def f(x): raise RuntimeError").reward == 0.0


SILENT = ("StopIteration", "StopAsyncIteration", "SystemExit", "GeneratorExit", "KeyboardInterrupt")


@pytest.mark.parametrize("kind", SILENT)
@pytest.mark.fault("S13")
def test_no_exception_ends_the_tests_silently(reward, kind):
    test = check(
        "assert all(map(candidate, [1, 2]))",
        "assert next((False for _ in [1] if not candidate(1)), True)",
    )
    program = f"class E({kind}): pass\ndef f(x): raise E"
    assert judge(reward, test, program).reward == 0.0
    assert judge(reward, test, program.replace("raise E", f"raise {kind}")).reward == 0.0


CHAINS = {
    "each the answer before": check(
        "x = 0", "for _ in range(600): x = candidate(x)", "assert x == 600"
    ),
    "in a list": check("x = [0]", "for _ in range(600): x = [f(*x)]", "assert x == [600]"),
    "pairs": check("for i in range(300): assert candidate(candidate(i)) == i + 2"),
    "twelve thousand apart": check("for i in range(12_000): assert candidate(i) == i + 1"),
    "until an answer ends it": check(
        "x = 0", "while x != 600: x = candidate(x)", "assert candidate(x) == 601"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS)
def test_long_chains_of_calls_are_judged(reward, name):
    assert judge(reward, CHAINS[name], "def f(x): return x + 1").reward == 1.0
    assert judge(reward, CHAINS[name], "def f(x): return x + 1 + (x == 250) * 999").reward == 0.0
    assert judge(reward, CHAINS[name], "def f(x): return x + 1 if x != 250 else None").reward == 0.0


@pytest.mark.medium
def test_too_long_a_chain_is_refused_by_the_tasks_name(reward, monkeypatch, caplog):
    monkeypatch.setattr("ratchet.rewards.code.function_tests.MAX_ROUNDS", 5)
    chain = check("x = 0", "for _ in range(9): x = candidate(x) * 2", "assert x == 1022")
    outcome = judge(reward, chain, "def f(x): return x + 1")
    assert isinstance(outcome, Failed), outcome
    assert "task 'fun': its tests make too many calls" in outcome.detail
    reward.function_judge = FunctionJudge(reward.sandbox, reward.limits, share=False)
    endless = check("x = 0", "while not candidate(x): x = candidate(x) + 1", "assert x == 3")
    for _ in range(2):
        assert judge(reward, endless, "def f(x): return x * (x == 99)").parts["limit"] == 1.0
    assert [r.getMessage()[:40] for r in caplog.records] == [
        "task 'fun': answers of a program led its"
    ]


def test_the_message_of_an_assertion_is_not_evaluated(reward):
    test = check("assert not candidate(1), missing(2)", "assert candidate(2) == 3, missing")
    assert judge(reward, test, "def f(x): return (x == 2) * 3").reward == 1.0
    assert judge(reward, test, "def f(x): return x").reward == 0.0
