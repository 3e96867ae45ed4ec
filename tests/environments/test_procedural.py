"""Arithmetic, sorting and countdown."""

import random
from fractions import Fraction
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.environments.toy.arithmetic import Arithmetic, ArithmeticConfig
from ratchet.environments.toy.countdown import Countdown, CountdownConfig, Term, _join
from ratchet.environments.toy.sorting import Sorting, SortingConfig
from ratchet.errors import DataError
from ratchet.rewards.answers.countdown import CountdownReward, CountdownRewardConfig
from ratchet.rewards.answers.exact_match import ExactMatch, ExactMatchConfig
from ratchet.testing import check_environment
from ratchet.utils.arithmetic import evaluate

exact_match = ExactMatch(ExactMatchConfig())
countdown = CountdownReward(CountdownRewardConfig())


class Scripted(random.Random):
    """Gives the numbers of a script to `randrange`."""

    def __init__(self, *values: int) -> None:
        super().__init__(0)
        self.values = list(values)

    def randrange(self, *bounds, **options) -> int:
        return self.values.pop(0)


@pytest.mark.medium
@pytest.mark.parametrize(
    "config",
    [
        ArithmeticConfig(),
        ArithmeticConfig(digits=1),
        ArithmeticConfig(digits=3, operators=("+", "-", "*"), reverse=True),
        SortingConfig(),
        SortingConfig(digits=2),
    ],
)
def test_exactly_judged_environments_keep_the_contract(config):
    environment = Arithmetic(config) if isinstance(config, ArithmeticConfig) else Sorting(config)
    check_environment(environment, reward=exact_match)


@pytest.mark.medium
@pytest.mark.parametrize(
    "config",
    [
        CountdownConfig(),
        CountdownConfig(numbers=3, use_all=False, operators=("+", "-", "*", "/")),
        CountdownConfig(numbers=6, max_number=100, max_target=999, operators=("*", "/", "-")),
    ],
)
def test_countdown_keeps_the_contract(config):
    check_environment(Countdown(config), reward=countdown, n=20)


@pytest.mark.parametrize(
    ("operator", "x", "y", "plain", "reverse"),
    [
        ("+", 37, 48, "85", "580"),
        ("+", 99, 99, "198", "891"),
        ("+", 7, 3, "10", "010"),
        ("-", 48, 37, "11", "110"),
        ("-", 3, 8, "-5", "50-"),
        ("-", 0, 99, "-99", "99-"),
        ("*", 12, 12, "144", "4410"),
        ("*", 0, 99, "0", "0000"),
    ],
)
def test_answers_worked_by_hand(operator, x, y, plain, reverse):
    settings = {"digits": 2, "operators": (operator,)}
    for config, answer in (
        (ArithmeticConfig(**settings), plain),
        (ArithmeticConfig(**settings, reverse=True), reverse),
    ):
        rng = Scripted(x, y)
        rng.choice = lambda options: options[0]
        problem = Arithmetic(config).sample(rng)
        assert problem[:3] == (f"{x:02d}{operator}{y:02d}=", answer, {})


@given(st.integers(0, 2**32), st.integers(1, 12), st.booleans())
def test_arithmetic_answers_are_right(seed, digits, reverse):
    config = ArithmeticConfig(digits=digits, operators=("+", "-", "*"), reverse=reverse)
    problem = Arithmetic(config).sample(random.Random(seed))
    answer = problem.answer[::-1] if reverse else problem.answer
    assert int(answer) == evaluate(problem.prompt.removesuffix("="))[0]
    sign = next(c for c in problem.prompt if c in "+-*")
    assert not reverse or len(answer) == (2 * digits if sign == "*" else digits + 1)


def test_all_operators_are_drawn_and_only_those():
    tasks = islice(Arithmetic(ArithmeticConfig(operators=("-", "*"))).tasks("train", seed=0), 200)
    signs = [next(c for c in task.messages[0].text if c in "+-*") for task in tasks]
    assert set(signs) == {"-", "*"}
    assert 70 < signs.count("-") < 130


def test_the_small_test_space_ends():
    test = list(Arithmetic(ArithmeticConfig(digits=1)).tasks("test", seed=0))
    assert 1 <= len(test) <= 100
    assert len({task.messages for task in test}) == len(test)


@given(st.integers(0, 2**32), st.integers(1, 40))
def test_sorted_answers_are_right(seed, digits):
    prompt, answer, *_ = Sorting(SortingConfig(digits=digits)).sample(random.Random(seed))
    assert prompt[-1] == "="
    assert len(prompt) == digits + 1
    assert all(a <= b for a, b in pairwise(answer))
    assert all(answer.count(d) == prompt.count(d) for d in "0123456789")


@given(st.integers(0, 2**32), st.integers(2, 6), st.booleans())
def test_countdown_solutions_reach_the_target_with_the_numbers_shown(seed, numbers, use_all):
    config = CountdownConfig(
        numbers=numbers, max_number=30, use_all=use_all, operators=("+", "-", "*", "/")
    )
    problem = Countdown(config).sample(random.Random(seed))
    if problem is None:
        return
    value, used = evaluate(problem.answer)
    shown, target = problem.prompt.removesuffix("=").split(":")
    assert value == int(target) == problem.meta["target"]
    assert sorted(used) == [int(n) for n in shown.split()] == problem.meta["numbers"]
    assert 1 <= value <= config.max_target
    assert value not in used
    assert problem.meta["use_all"] is use_all


def test_countdown_uses_only_the_operators_and_the_template_of_its_config():
    config = CountdownConfig(
        operators=("*",),
        max_number=5,
        max_target=1000,
        template="Make {target} of {numbers}, {target}!",
    )
    task = next(Countdown(config).tasks("train", seed=0))
    numbers, target = task.meta["numbers"], task.meta["target"]
    assert task.messages[0].text == f"Make {target} of {' '.join(map(str, numbers))}, {target}!"
    assert set(task.answer) <= set("12345*()")


@pytest.mark.medium
def test_countdown_without_solvable_problems_is_an_error_and_not_a_hang():
    config = CountdownConfig(numbers=6, max_number=10_000, max_target=2, operators=("*",))
    with pytest.raises(DataError, match="found no training prompt"):
        next(Countdown(config).tasks("train", seed=0))


a, b, c = Term(7, "7"), Term(5, "5"), Term(3, "3")


@pytest.mark.parametrize(
    ("left", "sign", "right", "text", "value"),
    [
        (_join(a, "-", b), "-", c, None, None),  # 2 - 3 is not positive
        (a, "-", _join(b, "-", c), "7-(5-3)", 5),
        (_join(a, "+", b), "+", c, "7+5+3", 15),
        (_join(a, "+", b), "*", c, "(7+5)*3", 36),
        (a, "*", _join(b, "*", c), "7*(5*3)", 105),
        (_join(a, "+", b), "/", c, "(7+5)/3", 4),
        (a, "/", b, None, None),  # not whole
        (a, "+", _join(b, "*", c), "7+5*3", 22),
    ],
)
def test_joined_terms_have_the_parentheses_they_need(left, sign, right, text, value):
    joined = _join(left, sign, right)
    assert (joined and joined.text, joined and joined.value) == (text, value)
    if joined:
        assert evaluate(joined.text)[0] == Fraction(joined.value)
