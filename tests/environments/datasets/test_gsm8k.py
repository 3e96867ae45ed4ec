import json
from itertools import islice
from pathlib import Path

import pytest

from ratchet.environments.datasets.gsm8k import GSM8K, GSM8KConfig
from ratchet.environments.single_turn import is_held_out
from ratchet.errors import DataError
from ratchet.rewards.answers.numeric import (
    NumericAnswer,
    NumericAnswerConfig,
    extract_final_number,
    read_number,
)
from ratchet.testing import check_environment
from ratchet.types import Message

DATA = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"
published = pytest.mark.skipif(
    not DATA.is_dir(), reason="the published GSM8K files are not at ../shared/data/gsm8k"
)
reward = NumericAnswer(NumericAnswerConfig())


def row(i: int, **more) -> dict:
    return {
        "question": f"What is {i} + 1?",
        "answer": f"{i} + 1 = <<{i}+1={i + 1}>>{i + 1}\n#### {i + 1:,}",
        **more,
    }


def write(path: Path, rows) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    return path


def test_two_files(tmp_path):
    train, test = (
        write(tmp_path / "train.jsonl", map(row, range(30))),
        write(tmp_path / "test.jsonl", map(row, range(1233, 1236))),
    )
    environment = GSM8K(GSM8KConfig(train=train, test=test, suffix=" Go."))
    check_environment(environment, reward=reward)
    first, second, third = environment.tasks("test", seed=5)
    assert (first.id, third.id) == ("gsm8k/test/1", "gsm8k/test/3")
    assert second.messages == (Message("user", "What is 1234 + 1? Go."),)
    assert second.answer == "1,235"
    assert environment.demonstration(second) == (
        Message("assistant", "1234 + 1 = <<1234+1=1235>>1235\n#### 1,235"),
    )


def test_one_file_with_a_split_column(tmp_path):
    rows = [row(i, part="test" if i % 3 == 0 else "train") for i in range(12)]
    environment = GSM8K(GSM8KConfig(train=write(tmp_path / "all.jsonl", rows), split_column="part"))
    check_environment(environment, reward=reward)
    tasks = list(environment.tasks("test", seed=0))
    assert [task.id for task in tasks] == [f"gsm8k/test/{line}" for line in (1, 4, 7, 10)]
    assert tasks[0].meta.keys() == {"part", "solution"}, (
        "a further column may say how hard a question is"
    )


def test_one_file_split_by_hash(tmp_path):
    environment = GSM8K(GSM8KConfig(train=write(tmp_path / "all.jsonl", map(row, range(100)))))
    check_environment(environment, reward=reward)
    lines = [i + 1 for i in range(100) if is_held_out(f"What is {i} + 1?")]
    assert [task.id for task in environment.tasks("test", seed=0)] == [
        f"gsm8k/test/{line}" for line in lines
    ]


def test_shots_come_before_the_question_and_leave_the_training_split(tmp_path):
    train, test = (
        write(tmp_path / "train.jsonl", map(row, range(5))),
        write(tmp_path / "test.jsonl", map(row, [9])),
    )
    environment = GSM8K(GSM8KConfig(train=train, test=test, shots=2, suffix=""))
    (task,) = environment.tasks("test", seed=0)
    assert [m.role for m in task.messages] == ["user", "assistant", "user", "assistant", "user"]
    assert [m.text for m in task.messages[::2]] == [
        "What is 0 + 1?",
        "What is 1 + 1?",
        "What is 9 + 1?",
    ]
    assert task.messages[1].text == row(0)["answer"]
    assert sorted(t.id for t in islice(environment.tasks("train", seed=0), 3)) == [
        f"gsm8k/train/{i}" for i in (3, 4, 5)
    ]


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        (
            [{"question": "q", "answer": "72"}],
            {},
            ", line 1: column 'answer' must end with '#### ' and a number",
        ),
        (
            [row(0), {"question": "q", "answer": "#### many"}],
            {},
            ", line 2: column 'answer' must end with '#### ' and a number",
        ),
        ([{"question": "q"}], {}, ", line 1: no column 'answer'; the row has question"),
        (
            [row(0)],
            {"split_column": "split"},
            ", line 1: no column 'split'; the row has question, answer",
        ),
        (
            [row(0, split="dev")],
            {"split_column": "split"},
            ", line 1: column 'split' is 'dev', must be 'train' or 'test'",
        ),
        (
            [row(0, split="train")],
            {"split_column": "split", "shots": 1},
            ": 1 training rows are too few for shots=1: lower shots",
        ),
    ],
)
def test_errors_name_file_and_line(tmp_path, rows, settings, message):
    path = write(tmp_path / "train.jsonl", rows)
    with pytest.raises(DataError) as caught:
        GSM8K(GSM8KConfig(train=path, **settings)).tasks("train", seed=0)
    assert str(caught.value) == f"{path}{message}"


@pytest.mark.fault("D6")
def test_a_question_in_both_splits_is_refused(tmp_path):
    train, test = (
        write(tmp_path / "train.jsonl", map(row, range(5))),
        write(tmp_path / "test.jsonl", map(row, [7, 3])),
    )
    with pytest.raises(DataError) as caught:
        GSM8K(GSM8KConfig(train=train, test=test)).tasks("test", seed=0)
    expected = (
        f"{test}, line 2: the question is also in the training split ({train}, line 4): "
        "remove one of the two"
    )
    assert str(caught.value) == expected


@published
def test_the_published_files_keep_the_contract():
    environment = GSM8K(GSM8KConfig(train=DATA / "train.jsonl", test=DATA / "test.jsonl"))
    check_environment(environment, reward=reward)
    assert len(environment.rows("train")) == 7473
    assert len(environment.rows("test")) == 1319


@published
def test_every_published_solution_is_right_and_one_more_is_wrong():
    environment = GSM8K(GSM8KConfig(train=DATA / "train.jsonl", test=DATA / "test.jsonl"))
    tasks = [*environment.rows("train"), *environment.rows("test")]
    assert len(tasks) == 8792
    for task in tasks:
        gold = int(task.answer.replace(",", ""))
        assert read_number(task.answer) == gold
        assert reward.grade(task.meta["solution"], task) == 1.0
        assert reward.grade(f"so it is ${gold:,}.", task) == 1.0
        assert reward.grade(f"\\boxed{{{gold}}}", task) == 1.0
        assert (
            extract_final_number(task.meta["solution"].rpartition("####")[0] + f"#### {gold + 1}")
            == gold + 1
        )
        assert reward.grade(f"#### {gold + 1}", task) == 0.0
        assert reward.grade(f"the answer is {gold - 1}", task) == 0.0
