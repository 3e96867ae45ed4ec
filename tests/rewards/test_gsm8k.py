"""All published answers of GSM8K, where the data are beside the repository."""

import asyncio

import pytest

from ratchet.environments.datasets.gsm8k import GSM8K, GSM8KConfig
from ratchet.rewards.answers.math import Math, MathConfig
from ratchet.rewards.answers.numeric import (
    NumericAnswer,
    NumericAnswerConfig,
    extract_final_number,
    read_number,
)
from ratchet.testing import answered

STYLES = [
    "{}",
    "#### {}",
    "So the answer is {}.",
    "It costs ${} in all.",
    "\\boxed{{{}}}",
    "**{}**",
]


@pytest.fixture(scope="module")
def tasks(shared_data):
    config = GSM8KConfig(
        train=shared_data("gsm8k/train.jsonl"), test=shared_data("gsm8k/test.jsonl")
    )
    environment = GSM8K(config)
    return [*environment.rows("train"), *environment.rows("test")]


def test_every_published_answer_parses(tasks):
    assert len(tasks) == 8792
    assert [task.id for task in tasks if read_number(task.answer) is None] == []


def grades(tasks, text):
    reward = NumericAnswer(NumericAnswerConfig())
    return {reward.grade(text(task), task) for task in tasks}


def test_every_published_solution_grades_correct_against_its_own_answer(tasks):
    reward = NumericAnswer(NumericAnswerConfig())

    async def outcomes():
        return [
            (await reward.score([answered(task, task.meta["solution"])], task))[0] for task in tasks
        ]

    assert {outcome.reward for outcome in asyncio.run(outcomes())} == {1.0}


@pytest.mark.parametrize("style", STYLES)
def test_every_answer_grades_correct_however_it_is_written_and_wrong_by_one_grades_wrong(
    tasks, style
):
    assert grades(tasks, lambda task: style.format(task.answer)) == {1.0}
    for off in (1, -1):
        assert grades(
            tasks, lambda task, off=off: style.format(read_number(task.answer) + off)
        ) == {0.0}


def test_a_published_solution_that_ends_wrong_by_one_grades_wrong(tasks):
    def spoilt(task):
        steps, _, _ = task.meta["solution"].rpartition("####")
        return f"{steps}#### {extract_final_number(task.meta['solution']) + 1}"

    assert grades(tasks, spoilt) == {0.0}


def test_the_reward_math_agrees(tasks):
    reward = Math(MathConfig(symbolic="never"))

    async def rewards(offset):
        texts = [f"\\boxed{{{read_number(task.answer) + offset}}}" for task in tasks]
        return {
            (await reward.score([answered(task, text)], task))[0].reward
            for task, text in zip(tasks, texts, strict=True)
        }

    assert [asyncio.run(rewards(offset)) for offset in (0, 1, -1)] == [{1.0}, {0.0}, {0.0}]
