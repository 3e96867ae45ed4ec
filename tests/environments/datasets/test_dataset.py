"""Tasks from data: published sets by name, columns, templates, selection, splits, order, and what
is refused."""

import json
from collections import Counter
from itertools import islice

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from ratchet.config.resolve import build, resolve
from ratchet.data.formats.benchmark_rows import CODE_BLOCK_REQUEST
from ratchet.data.presets.datasets import PRESETS
from ratchet.data.presets.lookup import find_dataset_preset
from ratchet.environments.datasets.dataset import Dataset
from ratchet.errors import ConfigError, DataError
from ratchet.testing import check_environment
from ratchet.types import Comparison, LabelledAnswer, Message, ToolCall


def user(text):
    return Message("user", text)


def assistant(text):
    return Message("assistant", text)


def listed(*said):
    return [{"role": message.role, "content": message.text} for message in said]


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=4)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def made(**settings) -> Dataset:
    return build(resolve("environment", {"kind": "dataset", **settings}))


def tasks(environment, split="train"):
    return list(islice(environment.tasks(split, seed=0), len(environment.rows(split))))


# --- published sets, in their own form


def math(i, **more):
    return {
        "problem": f"What is {i} + 1?",
        "answer": str(i + 1),
        "solution": f"It is $\\boxed{{{i + 1}}}$.",
        **more,
    }


HH = "\n\nHuman: hi {i}\n\nAssistant:"
BOXED = "\nReason step by step, and put the final answer into \\boxed{}."
ASKED = (user("What is 3 + 1?" + BOXED),)


def oasst(i):
    def row(name, parent, role, text, rank=None, **more):
        named = {
            "message_id": f"{i}{name}",
            "parent_id": parent and f"{i}{parent}",
            "message_tree_id": f"{i}a",
        }
        return {
            **named,
            "text": text,
            "role": role,
            "lang": "en",
            "rank": rank,
            "deleted": False,
            **more,
        }

    return [
        row("a", None, "prompter", f"Q{i}"),
        row("b", "a", "assistant", "worse", 1),
        row("c", "a", "assistant", "better", 0),
        row("x", "a", "assistant", "gone", -1, deleted=True),
        row("d", "c", "prompter", "and?"),
        row("e", "d", "assistant", "so"),
        row("f", "e", "prompter", "thanks"),
    ]


# name -> (row i of it, the messages of row 3, its answer, what it learns from)
FORMS = {
    "gsm8k": (
        lambda i: {"question": f"What is {i} + 1?", "answer": f"{i}+1=<<{i}+1={i + 1}>>{i + 1}\n#### {i + 1}"},
        (user('What is 3 + 1?\nEnd with "#### " and the answer as a number.'),), "4", assistant("3+1=<<3+1=4>>4\n#### 4"),
    ),
    "openmathinstruct2": (
        lambda i: {
            "problem": f"What is {i} + 1?", "generated_solution": f"{i + 1}!", "expected_answer": str(i + 1),
            "problem_source": "x",
        },
        ASKED, "4", assistant("4!"),
    ),
    "deepscaler": (math, ASKED, "4", assistant("4")),
    "dapo_math_17k": (
        lambda i: {
            "data_source": "math_dapo", "prompt": [{"content": f"What is {i} + 1?", "role": "user"}], "ability": "MATH",
            "reward_model": {"ground_truth": str(i + 1), "style": "rule"}, "extra_info": {"index": f"{i}"},
        },
        (user("What is 3 + 1?"),), "4", assistant("4"),
    ),
    "numinamath_cot": (
        lambda i: {"source": "x", "problem": f"What is {i} + 1?", "solution": f"It is $\\boxed{{{i + 1}}}$.", "messages": []},
        ASKED, "It is $\\boxed{4}$.", assistant("It is $\\boxed{4}$."),
    ),
    "openr1_math": (
        lambda i: math(
            i, uuid=f"u{i}", generations=["a", "b"], messages=listed(user(f"What is {i} + 1?"), assistant("<think>")),
            correctness_count=2,
        ),
        (user("What is 3 + 1?"),), "4", assistant("<think>"),
    ),
    "numinamath_1_5": (
        lambda i: math(
            i, problem_type="Algebra", question_type="math-word-problem" if i != 4 else "proof",
            problem_is_valid="Yes", solution_is_valid="Yes" if i != 5 else "Incomplete", source="x", synthetic=False,
            **({"answer": "notfound"} if i == 6 else {"answer": ""} if i == 7 else {}),
        ),
        ASKED, "4", assistant("It is $\\boxed{4}$."),
    ),
    "aime_2024": (lambda i: math(i, id=i, url="http", year="2024"), ASKED, "4", assistant("4")),
    "aime_2025": (lambda i: math(i, id=str(i)), ASKED, "4", assistant("4")),
    "aime_2026": (lambda i: {"problem_idx": i, "problem": f"What is {i} + 1?", "answer": i + 1}, ASKED, "4", assistant("4")),
    "aime_2022_2024": (lambda i: math(i, id=i, url="http"), ASKED, "4", assistant("It is $\\boxed{4}$.")),
    "squad": (
        lambda i: {
            "id": f"s{i}", "title": "T", "context": f"Text {i}.", "question": f"Which {i}?",
            "answers": {"text": [f"a{i}", "b"], "answer_start": [0, 1]},
        },
        (user("Text 3.\n\nWhich 3?\nAnswer with a few words of the text."),), "a3", assistant("a3"),
    ),
    "tulu3_sft": (
        lambda i: {"id": f"t{i}", "messages": listed(user(f"Q{i}"), assistant("A")), "source": "x"},
        (user("Q3"),), "A", assistant("A"),
    ),
    "nemotron_cascade2_sft_math": (
        lambda i: {"messages": listed(Message("system", "Think."), user(f"Q{i}"), assistant("A")), "source": "x"},
        (Message("system", "Think."), user("Q3")), "A", assistant("A"),
    ),
    "oasst1": (oasst, (user("Q3"), assistant("better"), user("and?")), "so", assistant("so")),
    "humaneval": (
        lambda i: {
            "task_id": f"HumanEval/{i}", "prompt": f"def f{i}():\n", "entry_point": f"f{i}", "canonical_solution": " return 1",
            "test": "def check(c): pass",
        },
        (user("def f3():\n"),), None, assistant(" return 1"),
    ),
    "kodcode": (
        lambda i: {
            "question_id": f"K{i}", "question": f"Q{i}", "solution": "def f(): pass", "test": "def test_f(): f()",
            "test_info": [{"function_name": "f", "function_declaration": "def f():"}],
        },
        (user(f"Q3\n\nThe tests call `def f():`.{CODE_BLOCK_REQUEST}"),), None, assistant("def f(): pass"),
    ),
    "tulu3_preference": (
        lambda i: {
            "id": f"p{i}", "source": "x", "prompt": f"Q{i}", "chosen": listed(user(f"Q{i}"), assistant("good")),
            "rejected": listed(user(f"Q{i}"), assistant("bad")),
        },
        (user("Q3"),), None, Comparison((assistant("good"),), (assistant("bad"),)),
    ),
    "helpsteer3": (
        lambda i: {
            "domain": "general", "language": "english", "context": listed(user("hi"), assistant("hello"), user(f"Q{i}")),
            "response1": "bad", "response2": "good", "overall_preference": (2, 0, 1)[i % 3] if i != 3 else 3,
            "individual_preference": [{"score": 1, "reasoning": "r", "feedback1": "f", "feedback2": "g"}],
        },
        (user("hi"), assistant("hello"), user("Q3")), None, Comparison((assistant("good"),), (assistant("bad"),)),
    ),
    "ultrafeedback": (
        lambda i: {
            "prompt": f"Q{i}", "prompt_id": f"u{i}", "chosen": listed(user(f"Q{i}"), assistant("good")),
            "rejected": listed(user(f"Q{i}"), assistant("bad")), "messages": listed(user(f"Q{i}"), assistant("good")),
            "score_chosen": 8.0, "score_rejected": 4.5,
        },
        (user("Q3"),), None, Comparison((assistant("good"),), (assistant("bad"),), rewards=(8.0, 4.5)),
    ),
    "hh_rlhf": (
        lambda i: {"chosen": HH.format(i=i) + " good", "rejected": HH.format(i=i) + " bad"},
        (user("hi 3"),), None, Comparison((assistant("good"),), (assistant("bad"),)),
    ),
}  # fmt: skip


def test_every_preset_is_shown_in_its_form():
    assert set(FORMS) == set(PRESETS)


@pytest.mark.medium
@pytest.mark.parametrize("name", PRESETS)
def test_a_published_set_is_read_in_the_form_that_it_has(name, tmp_path):
    row, messages, answer, learnt = FORMS[name]
    rows = [one for i in range(40) for one in ([row(i)] if isinstance(row(i), dict) else row(i))]
    form = "jsonl" if name in ("gsm8k", "hh_rlhf", "humaneval") else "parquet"
    environment = made(preset=name, train=write(tmp_path / f"rows.{form}", rows))
    if name in ("gsm8k", "tulu3_sft", "hh_rlhf"):
        check_environment(environment)
    found = [*tasks(environment), *tasks(environment, "test")]
    assert len(found) == 40 - {"helpsteer3": 13, "numinamath_1_5": 4}.get(name, 0)
    task = next(task for task in found if task.messages == messages)
    assert task.answer == answer
    assert task.id.startswith(f"{name}/t")
    if isinstance(learnt, Comparison):
        assert environment.comparison(task) == learnt
        assert environment.demonstration(task) == learnt.chosen
    else:
        assert environment.demonstration(task) == (learnt,)
    config = resolve("environment", {"kind": "dataset", "preset": name})
    if config.default_reward:
        reward = config.default_reward
        assert build(resolve("rewards", {"kind": reward} if isinstance(reward, str) else reward))
    assert PRESETS[name].data_kinds <= config.data_kinds


# --- the real files


def test_gsm8k_as_published(shared_data):
    files = {
        "train": str(shared_data("gsm8k/train.jsonl")),
        "test": str(shared_data("gsm8k/test.jsonl")),
    }
    environment = made(preset="gsm8k", **files)
    assert [len(environment.rows(split)) for split in ("train", "test")] == [7473, 1319]
    first = next(environment.tasks("test", seed=0))
    assert (first.id, first.answer) == ("gsm8k/test/1", "18")
    assert environment.demonstration(first)[0].text.startswith("Janet sells 16 - 3 - 4")
    taken = [task.id for task in islice(environment.tasks("train", seed=5), 7473)]
    assert len(set(taken)) == 7473
    assert next(environment.tasks("train", seed=5, start=7000)).id == taken[7000]


def test_hh_rlhf_as_published(shared_data):
    environment = made(
        preset="hh_rlhf", train=str(shared_data("hh_rlhf/harmless-base.test.1200.jsonl"))
    )
    sizes = [len(environment.rows(split)) for split in ("train", "test")]
    assert sum(sizes) == 1200
    assert 90 < sizes[1] < 150
    for task in tasks(environment):
        pair = environment.comparison(task)
        assert pair.chosen != pair.rejected
        assert task.messages[-1].role == "user"


def test_humaneval_as_published(shared_data):
    environment = made(
        preset="humaneval",
        train=str(shared_data("humaneval/HumanEval_000-059.jsonl")),
        test_share=0.0,
    )
    found = {task.id: task for task in tasks(environment)}
    assert len(found) == 60
    first = found["humaneval/train/1"]
    assert (first.meta["task_id"], first.meta["entry_point"]) == (
        "HumanEval/0",
        "has_close_elements",
    )
    assert "def check(candidate)" in first.meta["test"]


# --- columns, templates, conversations


def test_columns_are_named_and_found_inside_values(tmp_path):
    rows = [
        {"q": f"Q{i}", "extra": {"gold": [i, 0]}, "how": f"Level {i % 5 + 1}", "who": "Be brief."}
        for i in range(9)
    ]
    columns = {"prompt": "q", "answer": "extra.gold.0", "difficulty": "how", "system": "who"}
    environment = made(train=write(tmp_path / "a.jsonl", rows), columns=columns, test_share=0.0)
    task = next(task for task in tasks(environment) if task.answer == "7")
    assert task.messages == (Message("system", "Be brief."), user("Q7"))
    assert task.meta["difficulty"] == 3.0
    assert environment.demonstration(task) == (assistant("7"),)


def test_what_other_libraries_call_the_answer_is_the_answer(tmp_path):
    prompt = [{"role": "user", "content": "1 + 1?"}]
    verl = {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": "2"}}
    rows = [
        (verl, "2"),
        ({"prompt": "1 + 1?", "ground_truth": 2}, "2"),
        ({"prompt": "1 + 1?", "expected_answer": "2", "response": "1 and 1 are 2."}, "2"),
        (
            {
                "messages": [*prompt, {"role": "assistant", "content": "It is 2."}],
                "ground_truth": "2",
            },
            "2",
        ),
        ({"prompt": "1 + 1?", "answer": "two", "ground_truth": "2"}, "two"),
        ({"prompt": "1 + 1?", "ground_truth": {"inputs": [1]}}, None),  # of a program
        ({"prompt": "1 + 1?", "ground_truth": ""}, None),
        ({**verl, "ground_truth": ""}, "2"),
        ({"prompt": "1 + 1?", "solution": "1 and 1 are 2.", "ground_truth": "2"}, "2"),
        ({**verl, "reward_model": {"style": "model"}}, None),
    ]
    for row, answer in rows:
        environment = made(train=write(tmp_path / "rows.jsonl", [row]), test_share=0)
        (task,) = tasks(environment)
        assert task.answer == answer
    said = {"prompt": "1 + 1?", "response": "So #### 3", "ground_truth": "2"}
    written = write(tmp_path / "rows.jsonl", [said])
    (task,) = tasks(made(train=written, test_share=0, answer_after="####"))
    assert task.answer == "2"
    written = write(tmp_path / "rows.jsonl", [rows[2][0]])
    environment = made(train=written, test_share=0)
    (message,) = environment.demonstration(tasks(environment)[0])
    assert message.text == "1 and 1 are 2."


def test_a_template_makes_the_prompt_of_columns_and_nothing_else(tmp_path):
    rows = [{"a": "{b} and {0.__class__}", "b": 2.5, "answer": "x"}]
    (task,) = tasks(
        made(train=write(tmp_path / "a.jsonl", rows), prompt='{a} {b} { } {"x": 1}', test_share=0.0)
    )
    # what a row says is never filled in again
    assert task.messages == (user('{b} and {0.__class__} 2.5 { } {"x": 1}'),)


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WITH_CALLS = [
    {"role": "developer", "content": "Calculate."},
    {"role": "user", "content": [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
    {"role": "assistant", "content": "2"},
]


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS), [TOOLS[0]["function"]]])
def test_a_conversation_with_tools_is_read_as_openai_writes_it(tools, tmp_path):
    path = write(tmp_path / "a.jsonl", [{"messages": WITH_CALLS, "tools": tools}])
    environment = made(
        train=path, columns={"messages": "messages", "tools": "tools"}, test_share=0.0
    )
    assert environment.has_tools
    (task,) = tasks(environment)
    assert task.messages == (
        Message("system", "Calculate."),
        user("1+1?"),
        Message("assistant", "", (ToolCall("c1", "add", {"a": 1}),)),
        Message("tool", "2", tool_call_id="c1"),
    )
    assert environment.demonstration(task) == (assistant("2"),)
    assert environment.tools(task) == tuple(TOOLS)
    # who plays it need not know how the policy calls tools
    assert not made(train=path).has_tools


def test_sharegpt_and_labelled_rows_and_steps(tmp_path):
    rows = [
        {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]},
        {"prompt": "P", "completion": "C", "label": True},
        {"prompt": "S", "completions": ["one", "two"], "labels": [1, 0.75]},
        {"prompt": "T", "completion": "D", "label": False},
    ]
    path = write(tmp_path / "a.jsonl", [{"conversations": None, **row} for row in rows])
    environment = made(
        train=path, columns={"messages": "conversations"}, test_share=0.0, shuffle=False
    )
    talk, labelled, stepped, bad = tasks(environment)
    assert (talk.messages, environment.demonstration(talk)) == ((user("Q"),), (assistant("A"),))
    assert environment.labelled_answer(labelled) == LabelledAnswer((assistant("C"),), 1.0)
    assert environment.steps(stepped) == (("one\n", 1.0), ("two\n", 0.75))
    assert environment.demonstration(stepped) == (assistant("one\ntwo\n"),)
    with pytest.raises(DataError, match=r"line 4: the answer is labelled as bad"):
        environment.demonstration(bad)
    with pytest.raises(
        DataError,
        match=r"line 2: no column 'chosen'; the row has prompt, completion, label, but this algo",
    ):
        environment.comparison(labelled)


# --- which rows, and in which split

LEVELS = [
    {"prompt": f"Q{i}", "answer": "a", "level": i, "kind": "ab"[i % 2], "tags": ["x"] * (i == 3)}
    for i in range(10)
]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ({"column": "level", "at_least": 4, "at_most": 6}, [4, 5, 6]),
        ({"column": "kind", "one_of": ["b", "c"]}, [1, 3, 5, 7, 9]),
        ({"column": "level", "none_of": [0, 1, 2, 3, 4, 5, 6, 7]}, [8, 9]),
        ({"column": "tags", "contains": "x"}, [3]),
        ({"column": "prompt", "contains": "7"}, [7]),
        ({"column": "prompt", "max_chars": 1}, None),
    ],
)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_rows_are_kept_by_declared_comparisons(keep, left, form, tmp_path):
    path = write(tmp_path / f"a.{form}", LEVELS)
    environment = made(train=path, keep=[keep], test_share=0.0)
    if left is None:
        with pytest.raises(
            DataError, match="no rows for its train split: `keep` filters out all rows"
        ):
            environment.tasks("train", seed=0)
        return
    assert sorted(task.meta["level"] for task in tasks(environment)) == left


def test_csv_holds_text_which_is_compared_as_the_number_it_is(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer,level\na,1,3\nb,2,10\nc,3,\n")
    keep = [{"column": "level", "at_least": 4}]
    (task,) = tasks(
        made(
            train=str(tmp_path / "a.csv"),
            keep=keep,
            columns={"difficulty": "level"},
            test_share=0.0,
        )
    )
    assert (task.answer, task.meta["difficulty"]) == ("2", 10.0)


def test_a_row_never_changes_sides(tmp_path):
    rows = [{"prompt": f"Q{i}", "answer": "a"} for i in range(300)]
    few = made(train=write(tmp_path / "few.jsonl", rows[:150]), test_share=0.2)
    many = made(train=write(tmp_path / "many.jsonl", rows[::-1]), test_share=0.2)
    sides = [
        {task.messages: split for split in ("train", "test") for task in tasks(e, split)}
        for e in (few, many)
    ]
    assert len(sides[1]) == 300
    assert all(sides[1][prompt] == side for prompt, side in sides[0].items())
    assert 40 < Counter(sides[1].values())["test"] < 80
    by_id = [{"id": i, "prompt": f"Q{i}", "answer": "a"} for i in range(200)]
    held_out = {
        row.messages for row in tasks(made(train=write(tmp_path / "ids.jsonl", by_id)), "test")
    }
    renamed = [{**row, "prompt": f"Another {row['prompt']}"} for row in by_id]
    again = {
        row.messages for row in tasks(made(train=write(tmp_path / "again.jsonl", renamed)), "test")
    }
    assert {(user(f"Another {prompt.text}"),) for (prompt,) in held_out} == again, "the id decides"
    assert 5 < len(held_out) < 40


@pytest.mark.fault("D6")
def test_a_prompt_under_several_ids_is_on_one_side_only(tmp_path, caplog):
    """Rows go by their ids; those whose prompt is asked in the test split don't train, and the log
    says how many."""
    rows = [{"id": i, "prompt": f"Q{i % 40}", "answer": "a"} for i in range(120)]
    environment = made(train=write(tmp_path / "a.jsonl", rows))
    train, test = (tasks(environment, split) for split in ("train", "test"))
    assert {task.messages for task in train}.isdisjoint(task.messages for task in test)
    assert {task.messages for task in (*train, *test)} == {(user(f"Q{i}"),) for i in range(40)}, (
        "and none is lost"
    )
    assert (
        f"{120 - len(train) - len(test)} training rows have a prompt of the test split and are left out"
        in caplog.text
    )
    assert len(test) > 5
    assert len(train) > 60


@pytest.mark.fault("D6")
def test_prompts_of_the_test_split_are_refused_for_training_or_left_out(tmp_path):
    train = write(tmp_path / "train.jsonl", LEVELS)
    test = write(tmp_path / "test.jsonl", [{"prompt": "new", "answer": "a"}, LEVELS[4]])
    with pytest.raises(DataError) as caught:
        made(train=train, test=test).tasks("train", seed=0)
    expected = (
        f"{test}, line 2: the prompt is also in the training split ({train}, line 5); "
        "1 training rows have a prompt of the test split: "
    )
    assert str(caught.value) == expected + "remove them, or set overlap: drop"
    environment = made(train=train, test=test, overlap="drop")
    assert [len(environment.rows(split)) for split in ("train", "test")] == [9, 2]


def test_repeated_prompts_are_kept_once_where_asked(tmp_path):
    path = write(tmp_path / "a.parquet", LEVELS * 3)
    assert len(made(train=path, test_share=0.0).rows("train")) == 30
    assert len(made(train=path, test_share=0.0, distinct=True).rows("train")) == 10


# --- the order


def test_the_order_is_a_function_of_seed_and_position_and_costs_no_counting(tmp_path):
    path = write(tmp_path / "a.parquet", [{"prompt": f"Q{i}", "answer": "a"} for i in range(50)])
    environment = made(train=path)
    taken = [task.id for task in islice(environment.tasks("train", seed=1), 120)]
    for start in (0, 7, 44, 119):
        assert next(made(train=path).tasks("train", seed=1, start=start)).id == taken[start]
    size = len(environment.rows("train"))
    assert len(set(taken[:size])) == size
    assert taken[:size] != taken[size : 2 * size]
    assert taken != [task.id for task in islice(environment.tasks("train", seed=2), 120)]


def test_without_a_scan_rows_are_read_when_they_are_met(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"prompt": "Q0", "answer": "a"}\n{"prompt": "Q1"\n{"prompt": "Q2", "answer": "a"}\n'
    )
    lazy = made(train=str(path), scan=False, test_share=0.0, shuffle=False).tasks("train", seed=0)
    assert next(lazy).messages == (user("Q0"),)
    with pytest.raises(DataError, match=r"line 2 col 16: malformed JSON"):
        next(lazy)
    with pytest.raises(DataError, match=r"line 2 col 16: malformed JSON"):
        made(train=str(path)).tasks("train", seed=0)
    for more in (
        {},
        {"test_share": 0.0, "distinct": True},
        {"test_share": 0.0, "keep": [{"column": "x", "contains": "y"}]},
    ):
        with pytest.raises(ValidationError, match="scan: false"):
            made(train=str(path), scan=False, **more)


def test_a_test_split_alone_is_checked_and_filtered_as_its_tasks_are_read(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"Q{i // 2}", "answer": "a", "level": i} for i in range(10)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    path.write_text(text + '{"prompt": "Q"\n')
    keep = [{"column": "level", "at_least": 3}]
    environment = made(test=str(path), distinct=True, keep=keep)
    lazy = environment.tasks("test", seed=0)
    assert [next(lazy).id for _ in range(4)] == [f"dataset/test/{n}" for n in (4, 5, 7, 9)]
    with pytest.raises(DataError, match="line 11 col 15: malformed JSON"):
        next(lazy)
    path.write_text(text)
    environment = made(test=str(path), distinct=True, keep=keep)
    assert tasks(environment, "test") == list(environment.tasks("test", seed=0))
    assert tasks(environment, "test")[2:] == list(environment.tasks("test", seed=0, start=2))
    none_kept = made(test=str(path), keep=[{"column": "level", "at_least": 30}])
    with pytest.raises(DataError, match=r"no rows for its test split: `keep` filters out all"):
        next(none_kept.tasks("test", seed=0))
    no_split = made(preset="gsm8k", train_split="", test_split="")
    with pytest.raises(DataError, match="no rows for its test split: name its files in `test`"):
        no_split.tasks("test", seed=0)


def test_parts_of_a_mixture_come_by_their_weights(tmp_path):
    one = {
        "kind": "dataset",
        "train": write(tmp_path / "a.jsonl", LEVELS),
        "tag": "one",
        "weight": 3,
    }
    other = {
        "kind": "dataset",
        "preset": "aime_2022_2024",
        "train": write(tmp_path / "b.parquet", [math(i) for i in range(9)]),
    }
    mixture = build(resolve("environment", {"kind": "mixture", "parts": [one, other]}))
    taken = [task.tag for task in islice(mixture.tasks("train", seed=0), 40)]
    assert Counter(taken) == {"one": 30, "dataset": 10}


# --- where from


def test_rows_in_an_object_store(tmp_path):
    write(tmp_path / "a.parquet", LEVELS)
    with fsspec.open("memory://dataset/a.parquet", "wb") as file:
        file.write((tmp_path / "a.parquet").read_bytes())
    environment = made(train=["memory://dataset/*.parquet"], test_share=0.0)
    assert Counter(task.meta["level"] for task in tasks(environment)) == Counter(range(10))


@pytest.mark.needs("datasets")
def test_a_file_in_the_home_directory(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", [{"prompt": "Q", "answer": "a"}])
    assert len(tasks(made(train="~/a.jsonl", test_share=0))) == 1


def test_a_directory_in_the_form_of_the_hub_is_read_by_the_hub_s_own_library(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"question": f"{i}?", "answer": f"so\n#### {i}"} for i in range(12)]
    write(tmp_path / "set" / "main" / "train-00000-of-00001.parquet", rows[:9])
    write(tmp_path / "set" / "main" / "test-00000-of-00001.parquet", rows[9:])
    card = "---\nconfigs:\n- config_name: main\n  data_files:\n"
    card += "".join(
        f"  - split: {split}\n    path: main/{split}-*\n" for split in ("train", "test")
    )
    (tmp_path / "set" / "README.md").write_text(card + "---\n")
    environment = made(preset="gsm8k", hub=str(tmp_path / "set"))
    assert [len(environment.rows(split)) for split in ("train", "test")] == [9, 3]
    assert [task.answer for task in environment.tasks("test", seed=0)] == ["9", "10", "11"]
    with pytest.raises(
        DataError, match=r"set \(other, train\): can't be loaded: BuilderConfig 'other' not found"
    ):
        made(preset="gsm8k", hub=str(tmp_path / "set"), subset="other").tasks("train", seed=0)
    with pytest.raises(DataError, match=r"set \(main, dev\): can't be loaded: Unknown split"):
        made(preset="gsm8k", hub=str(tmp_path / "set"), train_split="dev").tasks("train", seed=0)


# --- what is refused


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"q": "Q", "a": "A"}, {}, "no column 'prompt'; the row has q, a, and none of "
                                "question, instruction, problem, query, input, messages, "
                                "conversations, text: name yours in `columns`: {prompt: q, "
                                "answer: a}"),
        ({"q": 3, "answer": "a"}, {"columns": {"prompt": "q"}}, "column 'q' is an integer, must be "
                                                                "a string"),
        ({"q": "", "answer": "a"}, {"columns": {"prompt": "q"}}, "column 'q' is empty: write a prompt"),
        ({"prompt": "Q"}, {"columns": {"answer": "gold"}}, "no column 'gold'; the row has prompt: "
                                                           "name one of these"),
        ({"prompt": "Q", "m": {"x": 1}}, {"columns": {"answer": "m.y"}}, "no column 'm.y'; 'm' of "
                                                                         "the row has x: name"),
        ({"prompt": "Q", "answer": ["a"]}, {}, "column 'answer' is an array, must be text or a "
                                               "number"),
        ({"prompt": "Q", "answer": None}, {"columns": {"answer": "answer"}}, "column 'answer' is "
                                                                             "null; the row has "
                                                                             "prompt"),
        ({"prompt": "Q", "answer": "72"}, {"answer_after": "####"}, "column 'answer' has no answer "
                                                                    "after '####': add it, or"),
        ({"prompt": "Q"}, {"prompt": "{question}!"}, "no column 'question'; the row has prompt"),
        ({"prompt": ["Q"]}, {}, "column 'prompt', message 0 is a string, must be an object such "
                                "as"),
        ({"prompt": "Q", "d": "hard"}, {"columns": {"difficulty": "d"}}, "column 'd' is 'hard', "
                                                                         "must be a number, or "
                                                                         "text"),
        ({"prompt": "Q", "d": "hard"}, {"keep": [{"column": "d", "at_most": 1}]}, "column 'd' is "
                                                                                  "'hard', must be "
                                                                                  "a number"),
        ({"prompt": "Q"}, {"keep": [{"column": "d", "at_most": 1}]}, "no column 'd'; the row has "
                                                                     "prompt"),
        ({"messages": []}, {}, "column 'messages' is an empty array, must be an array of messages"),
        ({"messages": [{"role": "user"}]}, {}, "column 'messages', message 0 has no 'content': "
                                               "write it as a string"),
        ({"messages": [{"role": "bot", "content": ""}]}, {}, "message 0 has the role 'bot', must "
                                                             "be one of system, user"),
        ({"messages": [{"role": "user", "content": "", "audio": "x"}]}, {}, "message 0 has "
                                                                            "'audio', which would "
                                                                            "be lost: only"),
        ({"messages": [{"role": "assistant", "content": "A"}]}, {}, "has only an answer: add the message that it answers"),
        ({"messages": [{"role": "system", "content": "A"}]}, {}, "ends with a system message: add a user message"),
        (
            {"messages": [{"role": "user", "content": "Q", "tool_calls": [CALL]}]}, {},
            "message 0 has tool_calls, and its role is 'user': only the assistant calls tools",
        ),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, {},
            "message 0, tool call 0: malformed JSON in a string",
        ),
        ({"messages": [{"role": "user", "content": "Q\ud83d"}]}, {}, "message 0 holds half of a "
                                                                     "surrogate pair"),
        ({"messages": listed(Message("user", "Q")), "tools": "[3]"}, {"columns": {"tools": "tools"}}, "'tools' is an array"),
        ({"messages": listed(user("Q")), "tools": TOOLS}, {}, "column 'tools' would not be read: "
                                                              "declare it, columns: {tools:"),
        ({"prompt": "Q", "chosen": "A", "rejected": "A"}, {}, "'chosen' and 'rejected' are the "
                                                              "same: remove the row"),
        ({"prompt": "Q", "chosen": "A"}, {}, "no column 'rejected'; the row has prompt, chosen: "
                                             "add it, or name yours"),
        (
            {"context": "Q", "response1": "A", "response2": "B", "overall_preference": 0},
            {"columns": {"prompt": "context", "first": "response1", "second": "response2", "preference": "overall_preference"}},
            "column 'overall_preference' is 0, so neither is better: leave such rows out with keep: [{column: overall_",
        ),
    ],
)  # fmt: skip
@pytest.mark.fault("D1", "D8")
def test_a_row_that_can_t_be_used_is_named_with_its_column_and_the_way_out(
    row, settings, message, tmp_path
):
    path = write(tmp_path / "a.jsonl", [row])
    with pytest.raises(DataError) as caught:
        made(train=path, test_share=0.0, **settings).tasks("train", seed=0)
    assert str(caught.value).startswith(f"{path}, line 1: ")
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("column", "settings"),
    [("answer", {}), ("response", {}), ("level", {"prompt": "{prompt} {level}"})],
)
def test_a_table_s_missing_number_is_no_text(column, settings, value, tmp_path):
    path = write(tmp_path / "a.parquet", [{"prompt": "Q", column: value}])
    with pytest.raises(DataError) as caught:
        made(train=path, test_share=0.0, **settings).tasks("train", seed=0)
    assert str(caught.value).startswith(
        f"{path}, row 1: column '{column}' is {value}, which is no JSON number, must be text"
    )


def test_settings_that_can_t_work_are_refused():
    for settings, message in (
        ({}, "there is nothing to read: set train"),
        ({"preset": "gsm8"}, "'gsm8' is not the preset of a dataset: did you mean 'gsm8k'"),
        (
            {"train": "a", "columns": {"promt": "q"}},
            "promt is not a usual column: did you mean prompt",
        ),
        ({"train": "a", "keep": [{"column": "q"}]}, "the filter of 'q' has no condition"),
    ):
        with pytest.raises(ValidationError, match=message):
            made(**settings)
    with pytest.raises(ConfigError, match="did you mean 'hh_rlhf'"):
        find_dataset_preset("hh-rlhf")


def test_a_tree_without_answers_or_columns_is_refused(tmp_path):
    for rows, message in (
        ([{"text": "Q"}], "line 1: no column 'message_id'; the row has text"),
        (oasst(0)[:1], "line 1: no tree of this file has an answer"),
    ):
        with pytest.raises(DataError, match=message):
            made(preset="oasst1", train=write(tmp_path / "a.jsonl", rows)).tasks("train", seed=0)


@pytest.mark.fault("D9")
def test_a_checkpoint_holds_the_fingerprint_of_every_file_here(tmp_path):
    for name in ("deep/a.jsonl", "deep/b.parquet", "c.jsonl"):
        write(tmp_path / name, LEVELS)
    places = [str(tmp_path / "deep"), "memory://elsewhere/d.jsonl"]
    config = resolve(
        "environment", {"kind": "dataset", "train": places, "test": str(tmp_path / "*.jsonl")}
    )
    with fsspec.open("memory://elsewhere/d.jsonl", "wb") as file:
        file.write(b"{}\n")
    assert [path.name for path in config.list_data_files()] == ["a.jsonl", "b.parquet", "c.jsonl"]
