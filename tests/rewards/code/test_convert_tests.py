"""Assert, pytest, check-based and text tests, in ROLL's columns: what passes, and what can't cheat."""

import asyncio
import json
from typing import Any

import pytest

from ratchet.config.resolve import build, resolve
from ratchet.data.presets.lookup import find_dataset_preset
from ratchet.errors import DataError
from ratchet.rewards.code import pytest_shim
from ratchet.rewards.code.convert_tests import convert_source, convert_tests
from ratchet.types import Message, Task

PYTEST = """
import pytest
from pytest import approx
from solution import add

@pytest.fixture
def one():
    yield 1

def test_one(one):
    assert add(one, 2) == 3

@pytest.mark.slow
@pytest.mark.parametrize("a, b, total", [(1, 1, 2), pytest.param(2, 3, 5)])
@pytest.mark.parametrize("c", [0])
def test_many(a, b, total, c):
    assert add(a, b) == total + c

def test_error():
    with pytest.raises(TypeError, match="unsupported"):
        add(1, "a")

class TestMore:
    def setup_method(self):
        self.tenth = 0.1

    def test_float(self):
        assert add(self.tenth, 0.2) == approx(0.3)
        assert [add(1, 1)] == approx([2.0])
        assert {"a": add(1, 1)} == approx({"a": 2}, abs=0.1)
"""
CASES = {
    "assert": [
        "r = add(1, 2)\nassert r == 3",
        {"assert_code": "x = 2\nr = add(x, 2)\nassert r == 4"},
    ],
    "pytest": [{"assert_code": PYTEST}],
    "check_based": [
        {
            "assert_code": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
            "    assert candidate(math.floor(2.5), 2) == 4\n",
            "entry_point": "add",
            "import_prefix": "import math\n",
        }
    ],
    "input": [{"stdin": "1 2", "expected_stdout": "3"}, {"stdin": "2 2", "expected_stdout": "4\n"}],
}
ADD = "def add(a, b):\n    return a + b\n"
READS = "print(sum(map(int, input().split())))"


def row(case_type, cases=None):
    values: dict[str, Any] = {"case_type": case_type, "test_case_function": " ", "tag": "KodCode"}
    values["test_cases"] = json.dumps(CASES[case_type] if cases is None else cases)
    return Task("t", (Message("user", "Write add."),), meta=values)


CODE_REWARDS: dict[tuple[tuple[str, object], ...], Any] = {}


@pytest.fixture(scope="module", autouse=True)
def close_sandboxes():
    """A sandbox serves all tests of its reward: its start takes longer than most of them."""
    yield
    for reward in CODE_REWARDS.values():
        reward.sandbox.close()
    CODE_REWARDS.clear()


def grade(text, task, **keys):
    key = tuple(keys.items())
    if key not in CODE_REWARDS:
        CODE_REWARDS[key] = build(resolve("rewards", {"kind": "code", **keys}))
    return asyncio.run(CODE_REWARDS[key].grade(text, task))


@pytest.mark.medium
@pytest.mark.parametrize("case_type", CASES)
def test_a_right_program_passes_and_wrong_ones_fail(case_type):
    program = READS if case_type == "input" else ADD
    assert grade(f"So:\n```python\n{program}\n```", row(case_type)).reward == 1.0
    wrong = "print(3)" if case_type == "input" else "def add(a, b):\n    return 3\n"
    assert grade(wrong, row(case_type)).reward == 0.0
    assert grade("no program", row(case_type)).reward == 0.0


# Each makes the tests pass where they run in the program's own process.
ATTACKS = [
    "import os\ndef add(a, b):\n    os._exit(0)",
    "import sys\nsys.exit(0)",
    "class Same:\n    def __eq__(self, other): return True\ndef add(a, b): return Same()",
    "import builtins\nbuiltins.AssertionError = SystemExit\ndef add(a, b): return 0",
    "class pytest: pass\ndef _run_test(test): pass\ndef check(candidate): pass\n"
    "def add(a, b): return 0",
    "import atexit, os\natexit.register(os._exit, 0)\ndef add(a, b): raise SystemExit(0)",
    "def add(a, b): return 'x or True'",
    "def add(a, b): raise AssertionError",
    "def add(a, b): raise StopIteration",
]


@pytest.mark.medium
@pytest.mark.parametrize("case_type", ["assert", "pytest", "check_based"])
@pytest.mark.parametrize("program", ATTACKS)
def test_programs_can_not_cheat(program, case_type):
    assert grade(program, row(case_type)).reward == 0.0


@pytest.mark.medium
def test_shares_count_assertions():
    outcome = grade("def add(a, b):\n    return 3\n", row("assert"), credit="share")
    assert 0 < outcome.reward < 1


def square(x):
    if x < 0:
        raise ValueError("negative")
    return x * x


def run_in_this_process(source, function):
    """Run the converted tests of `f` on a function, without the sandbox."""
    namespace = {"__name__": "tests", "f": function}
    exec(convert_source(source, "t").test, namespace)
    namespace["check"](function)


@pytest.mark.parametrize(
    "source",
    [
        "r = f(1)\nassert r == 1\nr = f(2)\nassert r == 4",
        "import pytest as p\ndef test_a():\n    p.raises(ValueError, f, -1)\n    assert f(2) == 4",
        "import pytest\ndef test_a():\n    with pytest.raises(ValueError) as info: f(-1)\n"
        "    assert info.match('neg') and f(2) == 4",
        "import pytest\n@pytest.mark.parametrize(('x',), [(1,), pytest.param(2), "
        "pytest.param(5, marks=pytest.mark.skip)])\ndef test_a(x): assert f(x) == x * x < 9",
        "import pytest\n@pytest.mark.parametrize('x', [1, 2])\nclass TestA:\n"
        "    def test_a(self, x): assert f(x) == x * x",
        "import unittest\nclass Squares(unittest.TestCase):\n    @classmethod\n"
        "    def setUpClass(cls): cls.n = 2\n    def test_a(self): self.assertEqual(f(self.n), 4)\n"
        "    @unittest.skip('no')\n    def test_b(self): self.assertEqual(f(2), 5)",
        "class Base:\n    def test_a(self): assert f(2) == 4\nclass TestA(Base): pass",
        "class TestA:\n    def setup_class(cls): cls.n = 1\n"
        "    def setup_method(self, method): self.m = self.n + 1\n"
        "    def test_a(self): assert f(self.m) == 4",
        "N = 0\ndef setup_module(module): module.N = 2\ndef test_a(n=1): assert f(N) == 4 * n",
        "import pytest\nL = []\n@pytest.fixture(autouse=True)\ndef fill(): L.append(2)\n"
        "@pytest.fixture(name='l')\ndef _l(): return L\n"
        "def test_a(l):\n    assert len(l) == 1 and f(l[0]) == 4",
        "import pytest\n@pytest.fixture\ndef a(): return []\n@pytest.fixture\ndef b(a): a.append(2)"
        "\n@pytest.mark.usefixtures('b')\ndef test_a(a): assert f(a[0]) == 4",
        "import pytest\nclass TestA:\n    @pytest.fixture\n    def n(self): return 2\n"
        "    def test_a(self, n): assert f(n) == 4",
        "import pytest\ndef test_a(): assert f(2) == 4\n@pytest.mark.xfail\n"
        "def test_b(): assert f(2) == 5\n@pytest.mark.skipif(True, reason='')\n"
        "def test_c(): assert f(2) == 5",
        "from pytest import mark\npytestmark = [mark.slow, mark.parametrize('x', [2, 3])]\n"
        "def test_a(x): assert f(x) == x * x",
        "import pytest\nclass TestA:\n    pytestmark = pytest.mark.skip\n"
        "    def test_a(self): assert f(2) == 5\ndef test_b(): assert f(2) == 4",
        "import pytest\n@pytest.mark.parametrize('x', [2])\nclass TestA:\n    class TestB:\n"
        "        def test_a(self, x): assert f(x) == 4",
        "import pytest\n@pytest.fixture\ndef n(): return 2\nclass TestA:\n    @pytest.fixture\n"
        "    def n(self, n): return n + 1\n    def test_a(self, n): assert f(n) == 9\n"
        "class TestB:\n    @pytest.fixture(autouse=True)\n    def n(self): self.m = 4\n"
        "    def test_a(self): assert f(self.m) == 16\ndef test_b(n): assert f(n) == 4",
        "import pytest\nclass TestA:\n    @pytest.fixture\n    def test_n(self): yield 2\n"
        "    def test_a(self, test_n): assert f(test_n) == 4",
        "import pytest\n@pytest.fixture\ndef n(x): return x + 1\n"
        "@pytest.mark.parametrize('x', [1])\ndef test_a(n): assert f(n) == 4",
        "import pytest\n@pytest.fixture(scope='module')\ndef n():\n    yield 2\n"
        "    assert f(3) == 9\ndef test_a(n): f(n)",
        "def teardown_module(): assert f(3) == 9\ndef test_a(): f(2)",
        "class TestBase:\n    __test__ = False\n    def test_a(self): assert f(self.n) == 9\n"
        "def test_b(): assert f(2) == 4",
        "def test_a():\n    import pytest as p\n    from pytest import raises as r\n"
        "    from solution import f as g\n    with r(expected_exception=ValueError): g(-1)\n"
        "    assert g(2) == p.approx(4)",
        "if True:\n    def test_a(): assert f(3) == 9\ndef test_b(): f(2)",
        "import enum\nclass TestRow:\n    def __init__(self): self.n = 2\n"
        "class TestKind(enum.Enum): A = 4\n"
        "def test_a(): assert f(TestRow().n) == TestKind.A.value",
        "from pytest import approx as near\nassert f(2) == near(4)",
        "import pytest\ndef test_a(): assert f(2) == 4\nif __name__ == '__main__': pytest.main()",
        # Tests without a definition of their own.
        "def make(n):\n    def run(): assert f(n) == n * n\n    return run\n"
        "def test_1(): f(1)\ntest_2 = make(2)",
        "import functools\ndef run(n): assert f(n) == n * n\nassert f(1) == 1\n"
        "test_2 = functools.partial(run, 2)",
        "def run(): assert f(2) == 4\ntest_a, tests = run, [1]",
        "def test_1(): f(1)\nfor n in [2]: exec(f'def test_{n}(): assert f({n}) == 4')",
        "from unittest import TestCase as Base\nclass Squares(Base):\n"
        "    def test_a(self): self.assertEqual(f(2), 4)\ndef test_b(): f(1)",
        "import unittest\nclass Squares(unittest.TestCase):\n"
        "    def runTest(self): self.assertEqual(f(2), 4)\ndef test_b(): f(1)",
        # What unittest runs after a test, a class and a module.
        "import unittest\nclass Squares(unittest.TestCase):\n"
        "    def setUp(self): self.addCleanup(self.assertEqual, f(2), 4)\n"
        "    def test_a(self): f(1)",
        "import unittest\nclass Squares(unittest.TestCase):\n    def test_a(self):\n"
        "        self.addCleanup(self.assertEqual, f(2), 4)\n        self.doCleanups()",
        "import unittest\nL = []\nclass Squares(unittest.TestCase):\n    @classmethod\n"
        "    def setUpClass(cls): cls.addClassCleanup(L.append, f(2))\n"
        "    def tearDown(self): L.append(self.n)\n    def test_a(self):\n"
        "        self.n = f(1)\n        self.addCleanup(lambda: L.append(f(3)))\n"
        "def test_b(): assert L == [1, 9, 4]",
        "import unittest\nL = []\ndef setUpModule(): unittest.addModuleCleanup(check_all)\n"
        "def check_all(): assert L == [4]\ndef test_a(): L.append(f(2))",
    ],
)
def test_right_programs_pass_what_pytest_passes(source):
    run_in_this_process(source, square)
    with pytest.raises(AssertionError):
        run_in_this_process(source, lambda x: 1)


@pytest.mark.parametrize(
    "source",
    [
        "def test_a(): assert f(2) == 4\ndef test_b(capsys): assert f(2) == 4",
        "def test_a(): assert f(2) == 4\nasync def test_b(): assert f(2) == 4",
        "import pytest\n@pytest.fixture(params=[1])\ndef n(request): return 1\n"
        "def test_a(n): assert f(n) == 1",
        "class TestA:\n    def __init__(self): self.n = 2\n    def test_a(self): assert f(2) == 4",
        "import pytest\n@pytest.fixture\nasync def n(): return 2\ndef test_a(n): assert f(n) == 4",
        "import unittest\nclass Squares(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test_a(self): assert f(2) == 4\ndef test_b(): assert f(2) == 4",
        "import pytest\nclass TestA:\n    @pytest.fixture(autouse=True)\n    def fill(self): f(1)\n"
        "    class TestB:\n        def test_a(self): assert f(2) == 4",
        "import pytest\nclass TestA:\n    @pytest.fixture\n    def n(self): return 2\n"
        "def test_a(n): assert f(n) == 4",
        "import pytest\n@pytest.mark.parametrize('x', [2])\ndef test_a(): assert f(2) == 4",
        "import unittest\nclass A(unittest.IsolatedAsyncioTestCase):\n"
        "    async def asyncSetUp(self): self.n = 2\n    def test_a(self): f(self.n)",
        "def make(n): lambda: f(n)\ntest_1 = make(1)",
    ],
)
def test_what_the_sandbox_lacks_of_pytest_shows_before_the_first_answer(source):
    with pytest.raises(
        NameError, match=r"capsys|corout|params|init|class aro|fixture n|lacks|without"
    ):
        run_in_this_process(source, lambda x: pytest.fail("it is called"))


def test_plain_assertions_run_without_the_part_of_pytest():
    plain = convert_source("import pytest\nre = f(1)\nassert re == 1", "t")
    assert "_run_tests" not in plain.test
    # Each case's assertions come before the next case's definitions.
    cases = [
        "def two(): return 2\nassert f(two()) == 4",
        "def two(): return 3\nassert f(two()) == 9",
    ]
    namespace = {"f": square}
    exec(convert_tests("assert", cases, "t").test, namespace)


def test_the_attempts_of_a_task_share_its_converted_tests():
    first, again, other = (
        convert_tests("assert", ["assert f(2) == 4"], label) for label in ("t", "t", "other")
    )
    assert first is again
    assert other.label == "other"


TEXT = [
    "assert len({response}.split()) <= 3 and not re.search('[0-9]{5}', {response})",
    {"assert_code": "assert {response}.endswith('!')"},
]


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        ("well done!", 1.0),
        ("<think>\na long thought, which is not judged\n</think>\n\nwell done!", 1.0),
        ("far too many words!", 0.0),
        ("''' + 1/0 + '''!", 0.0),  # it closes the quotes of a text that is pasted into the test
        ("'''.split() or exit(0) or '!'''", 0.0),
    ],
)
def test_text_tests_judge_the_answer_as_data(answer, reward):
    assert grade(answer, row("text", TEXT)).reward == reward


SEVERAL = {
    "assert": ["assert add(1, 2) == 3", "assert negate(add(1, 2)) == -3"],
    "pytest": [
        "from solution import add, negate as minus\ndef test_a(): assert minus(add(1, 2)) == -3"
    ],
    "check_based": [
        {"assert_code": "def check(candidate): assert candidate(1, 2) == 3", "entry_point": "add"},
        {"assert_code": "def check(c): assert c(3) == two - 5", "entry_point": "negate"},
        {"assert_code": "def check(c): assert c(1, 1) == 2", "entry_point": "add"},
    ],
}
SEVERAL["check_based"][1]["import_prefix"] = "two = 2"


@pytest.mark.medium
@pytest.mark.parametrize("case_type", SEVERAL)
def test_rows_may_test_several_functions(case_type):
    task = row(case_type, SEVERAL[case_type])
    assert grade(f"{ADD}\ndef negate(a):\n    return -a\n", task).reward == 1.0
    assert grade(f"{ADD}\ndef negate(a):\n    return a\n", task).reward == 0.0
    assert grade(ADD, task).parts["crashed"] == 1.0
    fake = f"{ADD}\ndef _call_function(name, *arguments):\n    return -3"
    assert grade(fake, task).reward == 0.0
    if case_type != "pytest":
        assert 0 < grade(ADD, task, credit="share").reward < 1


def test_text_tests_may_not_run_the_answer():
    with pytest.raises(DataError, match="evaluate what response returned"):
        grade("1", row("text", ["assert eval({response}) == 1"]))


@pytest.mark.parametrize(
    ("case_type", "cases", "message"),
    [
        ("asserts", ["assert f(1)"], "case_type='asserts' is not known"),
        ("assert", [], "test_cases is empty"),
        ("assert", [1], "must be text, or have the text assert_code"),
        ("assert", ["assert f(1"], "its tests are not Python"),
        ("assert", ["x = f(1)"], "they test nothing"),
        ("assert", ["assert len('a') == 1"], "they call none"),
        ("pytest", ["import solution\ndef test_a(): assert solution.f()"], "they call none"),
        ("pytest", ["from solution import f\nimport solution\ndef test_a(): f()"], "the module"),
        (
            "assert",
            ["assert Solution().add(1) == 2"],
            "can't judge Solution, because they use .add of what it",
        ),
        (
            "pytest",
            ["def test_a():\n    s = stack(1)\n    assert s.top() == 1"],
            "can't judge stack, because they use .top of what",
        ),
        ("check_based", [{"assert_code": "", "entry_point": 1}], "must be text"),
        ("text", [" "], "its tests are empty"),
        ("text", ["assert len('{response}') > 2 and {response}"], "without quotes"),
        ("assert", ["from solution import f, N\nassert f(1) == N"], "N, because .* as a value"),
        ("assert", ["s = Stack()\ns.push(f(1))\nassert s.pop()"], "Stack, because they use .push"),
        ("assert", ["from solution import f as g\nassert g(1)(2) == 3"], "judge f, .* call what"),
        ("pytest", ["import pytest\ndef test_a():\n    pytest.skip(f(1))"], "use pytest's skip"),
        ("pytest", ["from pytest import warns\ndef test_a(): f(1)"], "use pytest's warns"),
        (
            "pytest",
            ["from solution import f, E\ndef test_a():\n    try: f()\n    except E: pass"],
            "E, .* class",
        ),
        (
            "pytest",
            ["from solution import f, E\nimport pytest\ndef test_a(): pytest.raises((E,), f)"],
            "judge E, because they use it as a class",
        ),
        ("pytest", ["import pytest as p\ndef test_a(): p.skip(f(1))"], "use pytest's skip"),
        ("pytest", ["def test_a(): f(1)", "def test_a(): f(2)"], "two .* define test_a"),
        (
            "pytest",
            ["def make(n): return lambda: f(n)\ntest_a = make(1)", "test_a = make(2)"],
            "two .* define test_a",
        ),
        ("pytest", ["N = 1\ndef test_a(): f(N)", "N = 2\ndef test_b(): f(N)"], "two .* define N"),
    ],
)
def test_unusable_tests_are_named(case_type, cases, message):
    with pytest.raises(DataError, match=message):
        convert_tests(case_type, cases, "t")


def test_malformed_columns_are_named():
    task = Task("t", (Message("user", "?"),), meta={"case_type": "assert", "test_cases": "{"})
    with pytest.raises(DataError, match="test_cases must be a list"):
        grade("x", task)


@pytest.mark.medium
def test_kodcode_rows_are_judged_by_their_pytest_tests(tmp_path):
    values = {
        "question_id": "a",
        "question": "Write a function that adds.",
        "solution": ADD,
        "test": PYTEST,
        "test_info": [{"function_name": "add", "function_declaration": "def add(a, b):"}],
    }
    file = tmp_path / "kod.jsonl"
    other = {**values, "question_id": "b", "question": "Add."}
    file.write_text(f"{json.dumps(values)}\n{json.dumps(other)}\n")
    section = resolve(
        "environment",
        {"kind": "dataset", "preset": "kodcode", "train": str(file), "test_share": 0.0},
    )
    assert section.default_reward == "code"
    task = next(iter(build(section).tasks("train", seed=0)))
    assert "`def add(a, b):`" in task.messages[-1].text
    assert grade(ADD, task).reward == 1.0
    assert grade(ATTACKS[0], task).reward == 0.0
    convert = find_dataset_preset("kodcode").convert_row
    assert convert is not None
    with pytest.raises(DataError, match="must name the functions"):
        convert({**values, "test_info": [{}, {}]}, "row 1")
    infos = [*values["test_info"], {"function_name": "negate"}]
    prompt = convert({**values, "test_info": infos}, "row 1")["asked"]
    assert "The tests call `def add(a, b):`, `def negate`." in prompt


@pytest.mark.medium
def test_rolls_file_is_read_by_programs_and_dataset(tmp_path):
    rows = [{"id": str(n), "prompt": f"Write add {n}.", **row("pytest").meta} for n in range(3)]
    file = tmp_path / "roll.jsonl"
    file.write_text("".join(json.dumps(values) + "\n" for values in rows))
    for given in ({"kind": "programs"}, {"kind": "dataset", "test_share": 0.0}):
        section = resolve("environment", {"train": str(file), **given})
        task = next(iter(build(section).tasks("train", seed=0)))
        assert grade(ADD, task).reward == 1.0


def test_no_number_is_close_to_infinity():
    infinite = pytest_shim.pytest.approx(float("inf"))
    assert infinite == float("inf")
    assert infinite != 1.0
