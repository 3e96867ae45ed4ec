import asyncio
from fractions import Fraction
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.rewards.answers.countdown import (
    CountdownReward,
    CountdownRewardConfig,
    extract_expression,
)
from ratchet.testing import answered, check_reward
from ratchet.types import Failed, Message, Task, Truncated
from ratchet.utils.arithmetic import MAX_CHARS, MAX_DEPTH, NotAnExpression
from ratchet.utils.arithmetic import evaluate as evaluate_any

reward = CountdownReward(CountdownRewardConfig())
evaluate = partial(evaluate_any, is_puzzle=True)


def task(*, use_all: bool = True) -> Task:
    meta = {"numbers": [3, 5, 7], "target": 22, "use_all": use_all}
    return Task("t/0", (Message("user", "3 5 7:22="),), answer="5*3+7", meta=meta)


@pytest.mark.parametrize(
    ("text", "value", "numbers"),
    [
        ("7", 7, [7]),
        ("1+2*3", 7, [1, 2, 3]),
        ("(1+2)*3", 9, [1, 2, 3]),
        ("10-3-2", 5, [10, 3, 2]),
        ("10-(3-2)", 9, [10, 3, 2]),
        ("8/4/2", 1, [8, 4, 2]),
        ("1/3+1/3+1/3", 1, [1, 3] * 3),
        ("6/(1-3/4)", 24, [6, 1, 3, 4]),
        ("1/3", Fraction(1, 3), [1, 3]),
        (" ( 1 +\t2 ) ", 3, [1, 2]),
        ("6×7÷2−1", 20, [6, 7, 2, 1]),
        ("((((5))))", 5, [5]),
        ("0*7", 0, [0, 7]),
        ("(" * MAX_DEPTH + "5" + ")" * MAX_DEPTH, 5, [5]),
    ],
)
def test_values_worked_by_hand(text, value, numbers):
    assert evaluate(text) == (value, numbers)


MALFORMED = [
    "",
    " ",
    "()",
    "+",
    "1+",
    "*2",
    "1 2",
    "(1",
    "1)",
    "(1+2))",
    "1++2",
    "-1",
    "+1",
    "1--2",
    "2**3",
    "2^3",
    "7//2",
    "1/0",
]
MALFORMED += [
    "1/(2-2)",
    "1.5",
    "1e3",
    "1_000",
    "0x10",
    "x",
    "1=1",
    "1,2",
    "٣+٥",
    "²",
    "½",
    "5!",
    "[5]",
    "abs(5)",
    "None",
    "2(3)",
]


@pytest.mark.parametrize("text", MALFORMED)
def test_what_is_no_expression_is_refused(text):
    with pytest.raises(NotAnExpression):
        evaluate(text)


@given(
    st.recursive(
        st.integers(0, 99).map(str),
        lambda e: st.tuples(e, st.sampled_from("+-*/"), e).map(lambda t: f"({''.join(t)})"),
    )
)
def test_values_agree_with_fractions_computed_by_python(text):
    """The oracle builds the same tree of Fractions with Python's own parser."""
    tree = compile(text, "", "eval", flags=0x400)  # ast.PyCF_ONLY_AST

    def value(node):
        if hasattr(node, "value"):
            return Fraction(node.value)
        left, right = value(node.left), value(node.right)
        operation = type(node.op).__name__
        methods = {"Add": "__add__", "Sub": "__sub__", "Mult": "__mul__", "Div": "__truediv__"}
        return getattr(left, methods[operation])(right)

    try:
        expected = value(tree.body)
    except ZeroDivisionError:
        expected = None
    if len(text) > MAX_CHARS or expected is None:
        with pytest.raises(NotAnExpression):
            evaluate(text)
    else:
        assert evaluate(text)[0] == expected


@pytest.mark.parametrize(
    ("text", "expression"),
    [
        ("5*3+7", "5*3+7"),
        ("5*3+7 = 22", "5*3+7"),
        ("I try 3+5.\nThen 5*3+7\n", "Then 5*3+7"),
        ("I try 3+5.\n5*3+7\n\n", "5*3+7"),
        ("<answer>3+5</answer> no <answer> 5*3+7 = 22 </answer> done", "5*3+7"),
        ("<answer>5*3+7", "5*3+7"),
        ("5*3+7</answer>", "5*3+7"),
        ("", ""),
        ("<answer></answer>", ""),
    ],
)
def test_the_expression_is_found(text, expression):
    assert extract_expression(text) == expression


@pytest.mark.parametrize(
    ("text", "use_all", "earned"),
    [
        ("5*3+7", True, 1.0),
        ("7+(3*5)=22", True, 1.0),
        ("(7*3)+5", True, 0.0),  # 26
        ("7*3+5-5+1", True, 0.0),  # numbers that were not given
        ("15+7", True, 0.0),
        ("22", True, 0.0),
        ("22", False, 0.0),
        ("7*3", False, 0.0),
        ("5*3+7+7-7", False, 0.0),  # 7 used three times
        ("5*3+7", False, 1.0),
    ],
)
def test_grades_worked_by_hand(text, use_all, earned):
    assert reward.grade(text, task(use_all=use_all)) == earned


def test_at_most_once_admits_fewer_numbers_and_exactly_once_does_not():
    rules = {"numbers": [2, 7, 11], "target": 22}
    for use_all, earned in ((True, 0.0), (False, 1.0)):
        assert reward.grade("11*2", Task("t", (), meta={**rules, "use_all": use_all})) == earned


def test_a_number_given_twice_may_be_used_twice():
    meta = {"numbers": [4, 4, 2], "target": 18, "use_all": True}
    assert reward.grade("4*4+2", Task("t", (), meta=meta)) == 1.0


def test_fractions_on_the_way_are_exact():
    assert (
        reward.grade(
            "8/(3-8/3)",
            Task("t", (), meta={"numbers": [3, 3, 8, 8], "target": 24, "use_all": True}),
        )
        == 1.0
    )


def test_partial_reward_is_for_legal_expressions_only():
    shaped = CountdownReward(CountdownRewardConfig(partial=0.1))
    assert [shaped.grade(text, task()) for text in ("5*3+7", "7*3+5", "7*3", "hm", "22")] == [
        1.0,
        0.1,
        0.0,
        0.0,
        0.0,
    ]


HOSTILE = [
    "(" * 10**6,
    "(" * 500_000 + "5" + ")" * 500_000,
    "(" * (MAX_DEPTH + 1) + "5*3+7" + ")" * (MAX_DEPTH + 1),
    "9" * 100_000,
    "*".join(["9" * 100] * 1000),
    "1e999999",
    "9**9**9**9",
    "٥*٣+٧",
    "５*３+７",
    '__import__("os").system("true")',
    "().__class__.__bases__[0].__subclasses__()",
    "<answer>" * 20_000,
    "</answer>" * 20_000,
    "\n" * 100_000,
    "=" * 100_000,
    "1/0",
    "\x00\ud800",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_earns_0_and_never_raises(text):
    assert reward.grade(text, task()) == 0.0
    assert reward.grade(f"<answer>{text}</answer>", task()) == 0.0


@given(st.text(alphabet="3570+-*/()= \n<answer>", max_size=60))
def test_no_text_raises(text):
    assert reward.grade(text, task()) in (0.0, 1.0)


def test_the_contract_truncation_and_a_broken_task():
    check_reward(reward, task(), good="5*3+7", bad="5+3+7")
    (cut,) = asyncio.run(reward.score([answered(task(), "5*3+7", Truncated(None))], task()))
    assert cut == Truncated(0.0, {"countdown": 0.0})
    bare = Task("t/1", task().messages, answer="5*3+7")
    (outcome,) = asyncio.run(reward.score([answered(bare, "5*3+7")], bare))
    assert isinstance(outcome, Failed)
    assert "KeyError: 'numbers'" in outcome.detail
