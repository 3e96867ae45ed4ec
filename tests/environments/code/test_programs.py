"""Programs to write, judged by tests; and to repair, with the error shown."""

import asyncio
import json
from itertools import islice

import pytest

from ratchet.config.resolve import build, resolve
from ratchet.errors import DataError
from ratchet.rewards.weighted_sum import compose_rewards
from ratchet.testing import check_environment
from ratchet.types import Message, Task

CODE = compose_rewards((resolve("rewards", {"kind": "code"}),))
ECHO = {
    "prompt": "double it",
    "tests": [{"stdin": "2", "stdout": "4"}, {"stdin": "5", "stdout": "10"}],
}


def made(kind, **keys):
    return build(resolve("environment", {"kind": kind, **keys}))


@pytest.mark.medium
def test_made_up_programs_keep_the_kit_and_their_demonstrations_pass_their_tests():
    environment = made("programs", operations=2)
    check_environment(environment, reward=CODE)
    task = next(iter(environment.tasks("train", seed=0)))
    assert task.meta["entry_point"] == "f"


def test_a_made_up_function_by_hand():
    environment = made("programs", operations=3)
    task = environment.sample(type("Fixed", (), {"choice": lambda s, x: next(s.signs), "randint": lambda s, a, b: 3,
                                                 "signs": iter("*+-")})())  # fmt: skip
    assert task.prompt == "*3+3-3\n"
    assert task.answer == "def f(x):\n x*=3\n x+=3\n x-=3\n return x"
    assert "assert candidate(7) == 21" in task.meta["test"]
    assert "assert candidate(-12) == -36" in task.meta["test"]


def rows(tmp_path, *extra):
    path = tmp_path / "code.jsonl"
    given = [
        {**ECHO, "prompt": f"double it, {i}", "canonical_solution": "print(int(input()) * 2)"}
        for i in range(30)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*given, *extra]))
    return path


@pytest.mark.medium
def test_programs_come_from_a_file(tmp_path):
    environment = made("programs", train=str(rows(tmp_path)))
    check_environment(environment, reward=CODE)
    with pytest.raises(DataError, match=r"code.jsonl, line 31: a row needs tests"):
        made("programs", train=str(rows(tmp_path, {"prompt": "no tests"}))).rows("train")
    with pytest.raises(DataError, match=r"the prompt of 'programs/test/1' is also in"):
        made("programs", train=str(rows(tmp_path)), test=str(rows(tmp_path))).rows("train")
    (bare,) = islice(
        made("programs", train=str(rows(tmp_path, ECHO)), test=None).tasks("train", seed=0), 1
    )
    assert bare.meta["tests"]
    for keys, message in (
        ({"test": "x.jsonl"}, "test has no effect without train"),
        ({"train": "x", "operations": 3}, "generated functions"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve("environment", {"kind": "programs", **keys})


def repaired(task, *programs, **keys):
    environment = made("code_repair", problems={"kind": "programs"}, **keys)

    async def play():
        assert await environment.reset(task) == task.messages
        return [await environment.step(Message("assistant", program)) for program in programs]

    return asyncio.run(play())


@pytest.mark.slow
def test_the_kit_where_every_try_is_judged_by_the_tests():
    check_environment(made("code_repair", problems={"kind": "programs"}), n=50)


@pytest.mark.medium
def test_what_a_program_printed_is_shown_and_the_second_one_passes():
    task = Task("t", (Message("user", "double it"),), meta=ECHO)
    wrong, right = repaired(
        task, "print(4)", "```python\nprint(2 * int(input()))\n```", discount=0.5
    )
    assert (wrong.done, wrong.reward) == (False, 0.0)
    assert wrong.messages == (
        Message("user", "For the input\n5\nyour program prints\n4\n\nand this is expected:\n10"),
    )
    assert (right.done, right.reward, right.metrics) == (
        True,
        0.5,
        {"programs": 1, "repaired": 1.0},
    )


@pytest.mark.medium
def test_a_crash_is_shown_by_the_end_of_its_traceback_and_tries_are_bounded():
    task = Task("t", (Message("user", "double it"),), meta=ECHO)
    first, second = repaired(task, "int('x')", "print(", tries=2, error_chars=100)
    (told,) = first.messages
    assert told.text.startswith("For the input\n2\nYour program does not pass its tests:\n...")
    assert "ValueError: invalid literal for int()" in told.text
    assert (second.done, second.reward, second.messages) == (True, 0.0, ())


SECRET = 731_946  # stands nowhere but in the tests
HIDDEN = {
    "prompt": 'def inc(x):\n    """Adds one."""\n',
    "entry_point": "inc",
    "test": "def check(candidate):\n    assert candidate(41) == 42, 'told'\n"
    f"    assert candidate(7) + {SECRET} == {SECRET + 8}\n",
}


def hint(meta, program, **keys):
    (step,) = repaired(Task("h", (Message("user", "?"),), meta=meta), program, **keys)
    assert (step.done, step.reward) == (False, 0.0)
    return step.messages[0].text


@pytest.mark.slow
def test_the_call_after_which_a_test_fails_is_shown():
    task = Task("h", (Message("user", HIDDEN["prompt"]),), meta=HIDDEN)
    wrong, right = repaired(task, "    return x\n", "def inc(x):\n    return x + 1\n")
    assert (
        wrong.messages[0].text
        == "For the call\ninc(41)\nyour program returns\n41\nand a test that makes this call fails."
    )
    assert right.reward == 1.0
    later = hint(HIDDEN, "def inc(x):\n    # the second test fails\n    return {41: 42}[x]\n")
    assert later.startswith("For the call\ninc(7)\nYour program does not pass its tests:\n")
    assert "line 3, in inc\n    return {41: 42}[x]" in later
    assert later.endswith("KeyError: 7")
    nested = {**HIDDEN, "test": "def check(candidate):\n    assert candidate(candidate(1)) == 3"}
    assert hint(nested, "def inc(x): return x + 7").startswith(
        "For the call\ninc(8)\nyour program returns\n15\n"
    )
    assert hint(nested, "import os\ndef inc(x): os._exit(0)").endswith(
        "your program ends without an answer."
    )
    assert "SyntaxError" in hint(HIDDEN, "def inc(x: return 1\n")
    assert hint(
        {**HIDDEN, "test": "def check(c):\n    assert c(10**5000) == c(x='a')"},
        "def inc(x): return x",
    ) == (
        "For the call\ninc(x='a')\nyour program returns\n'a'\nand a test that makes this call fails."
    )


TELLING = """
def inc(x):
    text = repr({})
    at = text.find("".join(reversed("649137")))
    raise ValueError("nothing" if at < 0 else text[max(0, at - 90):at + 90])
"""
LEAKS = {
    "linecache": "__import__('linecache').cache",
    "frames": "[(f.f_locals, f.f_globals) for f, _ in __import__('traceback').walk_stack(None)]",
    "inspect": "__import__('inspect').stack(99)",
    "gc": "__import__('gc').get_objects()",
    "code": "[o.co_consts for o in __import__('gc').get_objects() if hasattr(o, 'co_consts')]",
    "__main__": "vars(__import__('__main__'))",
    "modules": "[vars(m) for m in __import__('sys').modules.values()]",
    "the file": "open('main.py').read()",
    "the folder": "[open(f).read() for f in __import__('os').listdir('.')]",
    "stdin": "__import__('os').pread(0, 99999, 0)",
    "the command": "__import__('sys').orig_argv",
}


@pytest.mark.slow
def test_no_hint_holds_text_of_the_tests():
    task = Task("h", (Message("user", "?"),), meta=HIDDEN)
    steps = repaired(task, *map(TELLING.format, LEAKS.values()), tries=99, error_chars=100_000)
    for name, step in zip(LEAKS, steps, strict=True):
        told = step.messages[0].text
        assert told.startswith("For the call\ninc(41)\nYour program does not pass its tests:\n"), (
            name
        )
        assert str(SECRET) not in told, name


@pytest.mark.slow
def test_one_expected_output_is_shown_and_others_must_be_found():
    shown = hint(ECHO, "print(0)")
    assert shown.endswith("this is expected:\n4")
    task = Task("t", (Message("user", "double it"),), meta=ECHO)
    _, second, third = repaired(task, "print(0)", "print(4)", "print(4 if input() == '2' else 9)")
    assert (
        second.messages[0].text
        == "For the input\n5\nyour program prints\n4\n\nwhich is not expected."
    )
    assert (third.done, third.reward) == (True, 0.0)
    for meta, keys in ((ECHO, {"judge": {"credit": "share"}}), ({"tests": ECHO["tests"][:1]}, {})):
        assert hint(meta, "print(0)", **keys).endswith("which is not expected.")


def test_an_answer_without_a_program_is_told_so():
    task = Task("t", (Message("user", "double it"),), meta=ECHO)
    (told,) = repaired(task, "I don't know", judge={"require_block": True})
    assert "There is no program in your answer" in told.messages[0].text
