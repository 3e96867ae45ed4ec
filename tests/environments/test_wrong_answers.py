"""Slips made for tasks with one right answer: always wrong, always the same, and labelled from
where they begin to be wrong."""

import random
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.environments.toy.arithmetic import Arithmetic, ArithmeticConfig
from ratchet.environments.toy.sorting import Sorting, SortingConfig
from ratchet.environments.wrong_answers import SingleAnswer, add_mistake
from ratchet.types import Task

ANSWERS = st.text(min_size=1, max_size=12)
NUMBERS = st.integers(-(10**9), 10**9).map(str)
SEEDS = st.integers(0, 2**32)

environment = SingleAnswer()


def task(answer: str, name: str = "t") -> Task:
    return Task(name, (), answer=answer)


def neighbours_swapped(answer: str, wrong: str) -> bool:
    return any(
        answer[:i] + answer[i + 1] + answer[i] + answer[i + 2 :] == wrong
        for i in range(len(answer) - 1)
    )


@given(answer=st.one_of(ANSWERS, NUMBERS), seed=SEEDS)
def test_a_slip_is_never_the_right_answer_and_is_only_one(answer, seed):
    wrong = add_mistake(answer, random.Random(seed))
    assert wrong != answer
    assert len(wrong) == len(answer)
    changed = [i for i, (a, b) in enumerate(zip(answer, wrong, strict=True)) if a != b]
    assert len(changed) == 1 or neighbours_swapped(answer, wrong)
    assert set(wrong) <= {*answer, *"0123456789"}


@given(answer=ANSWERS, seed=SEEDS)
def test_a_slip_depends_on_its_chances_alone(answer, seed):
    assert add_mistake(answer, random.Random(seed)) == add_mistake(answer, random.Random(seed))


def test_both_kinds_of_slip_come_about_at_every_place():
    found = {add_mistake("1234", random.Random(seed)) for seed in range(2000)}
    assert {"2134", "1324", "1243"} <= found  # swapped
    assert {"1234"[:i] + d + "1234"[i + 1 :] for i in range(4) for d in "0123456789"} - {
        "1234"
    } <= found


@given(answer=NUMBERS, name=st.text(max_size=8))
def test_a_comparison_prefers_the_right_answer_and_is_the_same_each_time(answer, name):
    pair = environment.comparison(task(answer, name))
    assert [m.text for m in pair.chosen] == [answer]
    assert pair.rejected[0].text != answer
    assert pair.chosen[0].role == pair.rejected[0].role == "assistant"
    assert pair.rewards == (1.0, 0.0)
    assert environment.comparison(task(answer, name)) == pair


@given(answer=NUMBERS, name=st.text(max_size=8))
def test_a_judged_answer_is_one_of_the_pair_with_its_reward(answer, name):
    pair, judged = (
        environment.comparison(task(answer, name)),
        environment.labelled_answer(task(answer, name)),
    )
    assert judged.messages == (pair.chosen if judged.reward else pair.rejected)
    assert judged.reward in (0.0, 1.0)
    assert environment.labelled_answer(task(answer, name)) == judged


@given(answer=NUMBERS, name=st.text(max_size=8))
def test_steps_are_the_judged_answer_right_up_to_the_first_slip(answer, name):
    judged, steps = (
        environment.labelled_answer(task(answer, name)),
        environment.steps(task(answer, name)),
    )
    text = judged.messages[0].text
    assert "".join(step for step, _ in steps) == text
    first_wrong = next(
        (i for i, (a, b) in enumerate(zip(answer, text, strict=True)) if a != b), len(answer)
    )
    assert [label for _, label in steps] == [1.0] * first_wrong + [0.0] * (
        len(answer) - first_wrong
    )
    assert all(isinstance(label, float) for _, label in steps)


def test_other_tasks_with_the_same_answer_slip_elsewhere():
    assert len({environment.comparison(task("123456", f"t{i}")).rejected for i in range(50)}) > 10


def test_about_half_of_the_judged_answers_are_right():
    rewards = [environment.labelled_answer(task("42", f"t{i}")).reward for i in range(1000)]
    assert 430 < sum(rewards) < 570


@pytest.mark.parametrize(
    "made",
    [
        Arithmetic(ArithmeticConfig(digits=1)),
        Arithmetic(ArithmeticConfig(digits=3, operators=("+", "-", "*"), reverse=True)),
        Sorting(SortingConfig(digits=1)),
        Sorting(SortingConfig(digits=5)),
    ],
    ids=["one digit", "reversed", "a single number to sort", "sorting"],
)
def test_the_built_in_tasks_have_all_of_it(made):
    assert made.has_pairs
    assert made.has_labelled_answers
    assert made.has_step_labels
    for served in islice(made.tasks("train", seed=0), 200):
        pair = made.comparison(served)
        assert pair.chosen == made.demonstration(served)
        assert pair.rejected[0].text != served.answer
        assert len(made.steps(served)) == len(served.answer)
