"""Files as they are found: what their columns hold is told from usual names, or the error says
which line to write."""

from __future__ import annotations

import asyncio
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from tiny_llama import make_llama

from ratchet.config.resolve import build, resolve
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.environments.datasets.dataset import Dataset
from ratchet.environments.datasets.usual_columns import explain_no_prompt
from ratchet.errors import DataError
from ratchet.experience.sources.offline import SupervisedSource, TextRenderer
from ratchet.experience.sources.tasks import TaskStream
from ratchet.types import Message, Task


def made(path: Path, rows: list[dict[str, Any]], kind: str = "dataset", **settings: Any) -> Dataset:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    share = {"test_share": 0.0, "shuffle": False} if kind == "dataset" else {}
    return build(resolve("environment", {"kind": kind, "train": str(path), **share, **settings}))


def first(environment: Dataset) -> Task:
    return next(environment.tasks("train", seed=0))


def user(text: str) -> tuple[Message, ...]:
    return (Message("user", text),)


def assistant(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


CHAT = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A "}]
SHARE = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]


@pytest.mark.parametrize(
    ("row", "prompt", "learnt", "answer"),
    [
        ({"prompt": "Q", "answer": "A"}, "Q", "A", "A"),
        ({"question": "Q", "answer": 3}, "Q", "3", "3"),
        ({"question": "Q", "answer": "A", "problem": None}, None, None, None),
        ({"problem": "Q", "solution": "A"}, "Q", "A", None),
        ({"problem": "Q", "solution": "so A", "answer": "A"}, "Q", "so A", "A"),
        ({"query": "Q", "response": " A\n"}, "Q", " A\n", "A"),
        ({"instruction": "Q", "input": "x", "output": "A"}, "Q\n\nx", "A", "A"),
        ({"instruction": "Q", "input": "", "output": "A", "text": "Q A"}, "Q", "A", "A"),
        ({"input": "Q", "output": 2.5}, "Q", "2.5", "2.5"),
        ({"prompt": "Q", "completion": "A"}, "Q", "A", "A"),
        ({"prompt": [CHAT[0]], "completion": [CHAT[1]]}, "Q", "A ", "A"),
        ({"messages": CHAT}, "Q", "A ", "A"),
        ({"conversations": SHARE}, "Q", "A", "A"),
        ({"conversations": SHARE, "answer": "42"}, "Q", "A", "42"),
        ({"prompt": "Q", "question": "no", "answer": "A", "output": "no"}, "Q", "A", "A"),
    ],
)
def test_usual_names_are_recognised(
    row: dict[str, Any], prompt: str | None, learnt: str | None, answer: str | None, tmp_path: Path
):
    environment = made(tmp_path / "a.jsonl", [row])
    if prompt is None:
        with pytest.raises(DataError, match="question and problem may each be the prompt"):
            first(environment)
        return
    task = first(environment)
    assert task.messages == user(prompt)
    assert tuple(environment.demonstration(task)) == assistant(learnt or "")
    assert task.answer == answer


def test_a_csv_of_questions(tmp_path: Path):
    (tmp_path / "qa.csv").write_text("question,answer\nQ1,A1\nQ2,\n")
    environment: Dataset = build(
        resolve(
            "environment",
            {"kind": "dataset", "train": str(tmp_path / "qa.csv"), "test_share": 0.0},
        )
    )
    tasks = {task.messages[0].text: task for task in islice(environment.tasks("train", seed=0), 2)}
    assert tasks["Q1"].answer == "A1"
    with pytest.raises(
        DataError,
        match=r"qa.csv, line 3: column 'answer' is null; the row has question, but this algorithm "
        "learns from an answer",
    ):
        environment.demonstration(tasks["Q2"])


@pytest.mark.parametrize("kind", ["dataset", "preferences"])
@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"question": "Q", "chosen": "A", "rejected": "B"}, "Q"),
        ({"instruction": "Q", "input": "x", "chosen": "A", "rejected": "B"}, "Q\n\nx"),
        # a whole conversation holds its prompt
        ({"query": "no", "chosen": CHAT, "rejected": [CHAT[0], {**CHAT[1], "content": "B"}]}, "Q"),
        (
            {"query": "no", "problem": "no", "chosen": "\n\nHuman: Q\n\nAssistant: A",
             "rejected": "\n\nHuman: Q\n\nAssistant: B"},
            "Q",
        ),
    ],
)  # fmt: skip
def test_pairs_find_their_prompt(kind: str, row: dict[str, Any], prompt: str, tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", [row] * 2, kind)
    task = (
        first(environment)
        if kind == "dataset"
        else next(t for split in ("train", "test") for t in environment.rows(split))  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    )
    assert task.messages == user(prompt)
    assert environment.comparison(task).rejected == assistant("B")


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        (
            {"q": "Q", "a": "A"}, {},
            "no column 'prompt'; the row has q, a, and none of question, instruction, problem, "
            "query, input, messages, conversations, text: name yours in `columns`: {prompt: q, "
            "answer: a}",
        ),
        ({"answer": "A"}, {}, "no column 'prompt'; the row has answer, and none of"),
        (
            {"data": [{"question": "Q"}]}, {},
            "no column 'prompt', but a list of objects in 'data': if these are the rows, write that "
            "list alone into the file",
        ),
        ({"talk": [{"from": "human"}]}, {}, "no column 'prompt'; the row has talk, and none of"),
        (
            {"answer": "A", "q": "Q", "r": "R"}, {},
            "no column 'prompt'; the row has answer, q, r, and none of question, instruction, "
            "problem, query, input, messages, conversations, text: name yours in `columns`: "
            "{prompt: q}",
        ),
        (
            {"question": "Q", "problem": "P"}, {},
            "columns question and problem may each be the prompt: set one, columns: {prompt: "
            "question}",
        ),
        (
            {"prompt": "Q", "output": "A", "response": "B"}, {},
            "columns output and response may each be the answer: set one, columns: {answer: "
            "output}",
        ),
        (
            {"prompt": "Q", "what": "A"}, {},
            "no column 'answer'; the row has prompt, what, but this algorithm learns from an "
            "answer: name yours in `columns`: {answer: ...}",
        ),
        ({"prompt": "Q", "output": True}, {}, "column 'output' is true or false, must be text"),
        ({"text": ""}, {}, "column 'text' is empty"),
        (
            {"prompt": "Q", "completion": [CHAT[0]]}, {},
            "column 'completion' ends without an answer of the assistant",
        ),
    ],
)  # fmt: skip
def test_what_is_unclear_is_said_with_the_line_to_write(
    row: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
):
    environment = made(tmp_path / "a.jsonl", [row], **settings)
    with pytest.raises(DataError) as caught:
        environment.demonstration(first(environment))
    assert f"a.jsonl, line 1: {message}" in str(caught.value)
    assert "pair" not in str(caught.value)


def test_columns_decide_between_several(tmp_path: Path):
    row = {"question": "Q", "problem": "P", "output": "A", "response": "B"}
    columns = {"prompt": "problem", "answer": "response"}
    environment = made(tmp_path / "a.jsonl", [row], columns=columns)
    task = first(environment)
    assert (task.messages, task.answer) == (user("P"), "B")
    assert environment.demonstration(task) == assistant("B")


def test_the_mark_before_the_answer_holds_for_every_name(tmp_path: Path):
    row = {"question": "Q", "response": "so\n#### 4"}
    environment = made(tmp_path / "a.jsonl", [row], answer_after="####")
    task = first(environment)
    assert task.answer == "4"
    assert environment.demonstration(task) == assistant("so\n#### 4")


def test_a_label_tells_a_judged_answer_from_one_to_learn(tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", [{"prompt": "Q", "completion": "A"}])
    with pytest.raises(DataError, match="no column 'label'; the row has prompt, completion, but"):
        environment.labelled_answer(first(environment))
    environment = made(tmp_path / "a.jsonl", [{"prompt": "Q", "completion": "A", "label": 1}])
    assert environment.labelled_answer(first(environment)).reward == 1.0


# --- plain text

TEXTS = [{"text": f"Once there were {i} of them."} for i in range(30)]


def rendered(environment: Dataset, renderer: Renderer, name: str = "x") -> list[Any]:
    source = SupervisedSource(
        TaskStream(environment, seed=0), name, TextRenderer(renderer, max_context=99), train="all"
    )
    task = first(environment)
    (group,) = asyncio.run(source.make([(task.id, task)], version=0))
    (row,) = group.trajectories
    return [row.tokens.tolist(), row.trainable.tolist()]


def test_plain_text_trains_whole_and_without_the_template(tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", TEXTS[:1])
    tokenizer = byte_tokenizer()
    tokens, trains = rendered(environment, Renderer(tokenizer, "turns"))
    text = "Once there were 0 of them."
    assert tokens == [*tokenizer.encode(text), tokenizer.eos_ids[0]]
    assert trains == [False] + [True] * len(text)
    assert first(environment).messages == ()


def test_control_tokens_of_plain_text_are_read(tmp_path: Path):
    llama = make_llama(tmp_path / "llama", ["Once there were."])
    tokenizer = load_tokenizer(llama)
    row = {"text": "<|user|>Hello<|end|>"}
    tokens, _ = rendered(made(tmp_path / "a.jsonl", [row]), Renderer(tokenizer))
    assert tokens[0] == tokenizer.token_id("<|user|>")
    assert tokens.count(tokenizer.eos_ids[0]) == 1


def test_plain_text_is_held_out_by_itself(tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", TEXTS * 2, test_share=0.3)
    train, test = (environment.rows(split) for split in ("train", "test"))
    assert len(train) + len(test) == 60
    assert 6 < len(test) < 30
    texts = [
        {environment.demonstration(task)[0].text for task in islice(tasks, len(rows))}
        for tasks, rows in (
            (environment.tasks("train", seed=0), train),
            (environment.tasks("test", seed=0), test),
        )
    ]
    assert texts[0].isdisjoint(texts[1])
    stream = TaskStream(environment, seed=0, examples=5)
    assert len({task.id for _, task in stream.take(5)}) == 5


def test_plain_text_has_no_prompt_to_answer(tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(DataError, match="line 1: the row is plain text without a prompt"):
        asyncio.run(environment.reset(first(environment)))


def test_so_few_rows_that_none_is_held_out(tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", [{"prompt": "Q", "answer": "A"}], test_share=0.1)
    with pytest.raises(
        DataError, match=r"test_share=0.1 holds out none of so few rows.* evaluation.tasks: 0"
    ):
        environment.tasks("test", seed=0)


def test_no_row_is_held_out_where_the_share_is_0(tmp_path: Path):
    environment = made(tmp_path / "a.jsonl", [{"prompt": "Q", "answer": "A"}], test_share=0.0)
    with pytest.raises(
        DataError, match=r"test_share=0 holds out none of its rows\. Raise test_share, name `test`"
    ):
        environment.tasks("test", seed=0)


def test_an_error_names_few_of_many_columns():
    text = explain_no_prompt({f"column_{i}": "" for i in range(1000)})
    assert "column_11 and 988 more" in text


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"2+2?": "3+3?", "4": "6"}, "Put a line of names before it, such as prompt,answer"),
        (
            {"data": {"question": "2+2?", "answer": "4"}, "id": 7},
            "one in the object 'data' (question, answer): write the keys of that object as columns",
        ),
    ],
)
def test_columns_that_could_not_be_the_prompt_are_not_advised(values, fix):
    """In a CSV without a line of names, and in a table whose rows lie in a column."""
    assert fix in explain_no_prompt(values)
