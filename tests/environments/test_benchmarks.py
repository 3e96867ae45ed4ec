"""Benchmarks by name: each from a file in the form of the hub's, with a right and a wrong answer;
two from their real files."""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import zlib
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ratchet.commands.eval_setup import make_env_section
from ratchet.config.resolve import build
from ratchet.config.schema import get_default_rewards
from ratchet.data.presets.benchmarks import ALIASES, BENCHMARK_NAMES, BENCHMARKS
from ratchet.data.presets.lookup import PUBLISHED
from ratchet.errors import DataError
from ratchet.testing import answered
from ratchet.training.stage_from_config import build_reward
from ratchet.types import Task


def packed(tests: list[dict[str, str]]) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def case(given: str, wanted: str, kind: str) -> dict[str, str]:
    return {"input": given, "output": wanted, "testtype": kind}


LCB = {
    "question_title": "Sum",
    "question_content": "Add two numbers.",
    "platform": "atcoder",
    "question_id": "abc1_a",
    "contest_id": "abc1",
    "contest_date": "2024-01-06T00:00:00",
    "starter_code": "",
    "difficulty": "easy",
    "public_test_cases": json.dumps([case("1 2\n", "3", "stdin")]),
    "private_test_cases": packed([case("5 5\n", "10", "stdin")]),
    "metadata": "{}",
}
LEETCODE = {
    **LCB,
    "platform": "leetcode",
    "starter_code": "class Solution:\n    def pairs(self, nums: List[int], k: int) -> List[int]:\n "
    "       ",
    "public_test_cases": json.dumps([case("[1, 2]\n2", "[2, 4]", "functional")]),
    "private_test_cases": packed(
        [case("[]\n7", "[]", "functional"), case("[3]\n-1", "[-3]", "functional")]
    ),
    "metadata": json.dumps({"func_name": "pairs"}),
}
MULTIPLIES = (
    "```python\nclass Solution:\n    def pairs(self, nums: List[int], k):\n        "
    "return "
    "tuple(n * k for n in nums)\n```"
)
NOTHING = "```python\nclass Solution:\n    def pairs(self, nums, k):\n        return nums\n```"
MBPP = {
    "task_id": 2,
    "code": "def shared(a, b):\n  return set(a) & set(b)",
    "test_list": [
        "assert shared((3, 4), (4, 5)) == {4}",
        "assert math.isclose(len(shared((1,), (2,))), 0)",
    ],
}
SHARED = "```python\ndef shared(a, b):\n    return {x for x in a if x in b}\n```"
EMPTY = "```python\ndef shared(a, b):\n    return set()\n```"
CARBON = {
    "Question": "Which is carbon?",
    "Correct Answer": "C \n",
    "Incorrect Answer 1": "N",
    "Incorrect Answer 2": "O",
    "Incorrect Answer 3": "H",
    "High-level domain": "Chemistry",
}
IFEVAL = {
    "key": 1000,
    "prompt": "Say hello in lower case, without a comma, twice.",
    "instruction_id_list": [
        "change_case:english_lowercase",
        "punctuation:no_comma",
        "keywords:frequency",
    ],
    "kwargs": [{}, {}, {"keyword": "hello", "frequency": 2, "relation": "at least"}],
}
AIME = {
    "id": 60,
    "problem": "Find $1+1$.",
    "solution": "It is 2.",
    "answer": "2",
    "url": "x",
    "year": "2024",
}
OPTIONS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]

# name (and a number where there are several forms) -> (row, a right answer, a wrong one, tag)
FORMS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "gsm8k": ({"question": "2+2?", "answer": "2+2=4\n#### 4"}, "So\n#### 4", "#### 5", "gsm8k"),
    "aime_2024": (AIME, r"\boxed{2}", r"\boxed{3}", "aime_2024"),
    "aime_2025": ({"problem": "Find $1+1$.", "answer": "2", "id": "0"}, r"\boxed{2}", r"\boxed{3}", "aime_2025"),
    "aime_2026": ({"problem_idx": 1, "problem": "Find $1+1$.", "answer": 2}, r"\boxed{2}", r"\boxed{3}", "aime_2026"),
    "math_500": (
        {
            "problem": "Half?", "solution": "...", "answer": "\\frac{1}{2}", "subject": "Algebra", "level": 2,
            "unique_id": "test/algebra/1.json",
        },
        r"It is $\boxed{0.5}$.", r"\boxed{2}", "Algebra",
    ),
    "gpqa": (CARBON, "", "", "Chemistry"),
    "mmlu": (
        {"question": "1+1?", "subject": "arithmetic", "choices": ["1", "2", "3", "4"], "answer": 1},
        "The answer is B", "The answer is A", "arithmetic",
    ),
    "mmmlu": (
        {
            "Unnamed: 0": 0, "Question": "Was ist 1+1?", "A": "1", "B": "2", "C": "3", "D": "4", "Answer": "B",
            "Subject": "arithmetic",
        },
        "The answer is B", "The answer is A", "arithmetic",
    ),
    "mmlu_pro": (
        {
            "question_id": 7, "question": "9?", "options": OPTIONS, "answer": "J", "answer_index": 9, "cot_content": "",
            "category": "math", "src": "x",
        },
        "Hence the answer is (J).", "The answer is I", "math",
    ),
    "ifeval": (IFEVAL, "hello there my dear old friend and hello again", "hello there, my friend, "
                                                                         "hello again", "ifeval"),
    "mbpp": (
        {**MBPP, "prompt": "Find what is shared.", "test_imports": ["import math"], "source_file": "x"},
        SHARED, EMPTY, "mbpp",
    ),
    "mbpp 2": (
        {**MBPP, "text": "Find what is shared.", "test_setup_code": "import math", "challenge_test_list": []},
        SHARED, EMPTY, "mbpp",
    ),
    "livecodebench": (
        LCB, "```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```", "easy",
    ),
    "livecodebench 2": (LEETCODE, MULTIPLIES, NOTHING, "easy"),
    "humaneval": (
        {
            "task_id": "HumanEval/99", "prompt": 'def double(x: int) -> int:\n    """Twice '
                                                 'x."""\n', "entry_point": "double",
            "canonical_solution": "    return 2 * x\n", "test": "def check(candidate):\n    assert "
                                                                "candidate(4) == 8\n",
        },
        "```python\ndef double(x):\n    return x + x\n```", "```python\ndef double(x):\n    return "
                                                            "x\n```", "humaneval_chat",
    ),
}  # fmt: skip


def tasks_of(name: str, path: Path, count: int = 10) -> tuple[Any, list[Task]]:
    section = make_env_section(name, [f"test={path}"])
    return section, list(islice(build(section).tasks("test", seed=0), count))


def rewards_of(section: Any, task: Task, answers: Sequence[str]) -> list[float | None]:
    reward = build_reward(get_default_rewards(section))
    assert reward is not None
    rows = [answered(task, answer) for answer in answers]
    return [getattr(outcome, "reward", None) for outcome in asyncio.run(reward.score(rows, task))]


def test_every_benchmark_has_a_form():
    assert {ALIASES.get(name.split()[0], name.split()[0]) for name in FORMS} >= set(BENCHMARKS)
    assert set(ALIASES.values()) | set(BENCHMARKS) <= BENCHMARK_NAMES <= set(PUBLISHED)


@pytest.mark.medium
@pytest.mark.needs("math_verify", "langdetect")
@pytest.mark.parametrize(
    ("name", "suffix"),
    [*((name, ".jsonl") for name in FORMS), ("mmlu_pro", ".parquet"), ("ifeval", ".parquet")],
)
def test_right_and_wrong_answers_to_each(name: str, suffix: str, tmp_path: Path):
    row, right, wrong, tag = FORMS[name]
    path = tmp_path / f"rows{suffix}"
    if suffix == ".jsonl":
        path.write_text(json.dumps(row) + "\n", encoding="utf-8")
    else:
        pq.write_table(pa.Table.from_pylist([row]), path)
    section, (task,) = tasks_of(name.split()[0], path)
    assert task.tag == tag
    if name == "gpqa":
        right, wrong = (
            f"The answer is {task.answer}",
            f"The answer is {'ABCD'['BCDA'.index(task.answer)]}",
        )
    assert rewards_of(section, task, [right, wrong, ""]) == [1.0, 0.0, 0.0]


def test_choices_are_lettered_and_those_of_gpqa_are_shuffled_the_same_each_time(tmp_path: Path):
    (tmp_path / "rows.csv").write_text(
        "Question,Correct Answer,Incorrect Answer 1,Incorrect Answer 2,Incorrect Answer "
        "3,High-level domain\n" + "".join(f'"Which, {i}?",right,a,b,c,Physics\n' for i in range(40))
    )
    _, tasks = tasks_of("gpqa", tmp_path / "rows.csv", 40)
    assert {task.answer for task in tasks} == set("ABCD")
    assert all(f"{task.answer}. right" in task.messages[0].text for task in tasks)
    assert [task.answer for task in tasks] == [
        task.answer for task in tasks_of("gpqa", tmp_path / "rows.csv", 40)[1]
    ]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mmlu", {"answer": 4}, "'answer' is 4, must be an index from 0 of 4 choices"),
        ("mmlu", {"choices": None}, "'choices' is null, must be an array"),
        ("mmmlu", {"Answer": "E"}, "'Answer' is 'E', must be A, B, C or D"),
        ("gpqa", {"Incorrect Answer 3": None}, "'Incorrect Answer 3' is null"),
        (
            "mbpp",
            {"test_list": ["assert other(1)"]},
            "must call one function that 'code' defines, and they call none",
        ),
        ("mbpp", {"code": "def ("}, "is not Python"),
        ("mbpp", {"prompt": None, "text": None}, r"'prompt' \(or 'text'\) must be a string"),
        ("livecodebench", {"private_test_cases": "AAAA"}, "neither JSON nor packed JSON"),
        (
            "livecodebench",
            {"private_test_cases": "[1]"},
            "must be an array of objects with input, output, testtype",
        ),
        (
            "livecodebench",
            {"private_test_cases": packed([case("1", "1", "functional")])},
            "of the kinds",
        ),
        ("livecodebench 2", {"metadata": "{}"}, "names no func_name"),
        ("humaneval", {"test": 3}, "'test' is an integer, must be a string"),
    ],
)
def test_rows_of_another_form_are_named(
    name: str, change: dict[str, Any], message: str, tmp_path: Path
):
    row = {**FORMS[name][0], **change}
    (tmp_path / "rows.jsonl").write_text(json.dumps(FORMS[name][0]) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataError, match=rf"rows.jsonl, line 2: .*{message}"):
        tasks_of(name.split()[0], tmp_path / "rows.jsonl")


class Bomb:
    def __reduce__(self):
        return (Path.touch, (Path("ran"),))


def test_packed_tests_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    bomb = base64.b64encode(zlib.compress(pickle.dumps([Bomb()]))).decode()
    (tmp_path / "rows.jsonl").write_text(json.dumps({**LCB, "private_test_cases": bomb}) + "\n")
    with pytest.raises(DataError, match="its tests are"):
        tasks_of("livecodebench", tmp_path / "rows.jsonl")
    assert not (tmp_path / "ran").exists()


def test_gsm8k_as_it_is_published(shared_data: Callable[[str], Path]):
    section, tasks = tasks_of("gsm8k", shared_data("gsm8k/test.jsonl"), 2000)
    assert len(tasks) == 1319
    assert (tasks[0].answer, tasks[0].meta["question"][:15]) == ("18", "Janet’s ducks l")
    assert rewards_of(section, tasks[0], [tasks[0].meta["answer"], "#### 17"]) == [1.0, 0.0]


def test_humaneval_as_it_is_published(shared_data: Callable[[str], Path]):
    section, tasks = tasks_of("humaneval", shared_data("humaneval"), 200)
    assert len(tasks) >= 60
    for task in tasks[:60:12]:
        right = f"```python\n{task.meta['prompt']}{task.meta['canonical_solution']}```"
        assert rewards_of(section, task, [right, "```python\npass\n```"]) == [1.0, 0.0]
