"""Preference data in every published format: what is read, what is refused and how, and that
algorithms learn from it."""

import asyncio
import json
from collections import Counter

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError

from ratchet.config.loader import load_config
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.environments.datasets.config import PreferencesConfig
from ratchet.environments.datasets.preferences import Preferences
from ratchet.errors import DataError
from ratchet.experience.sources.offline import PairSource, TextRenderer
from ratchet.experience.sources.tasks import TaskStream
from ratchet.testing import check_environment
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Comparison, LabelledAnswer, Message


def user(text):
    return Message("user", text)


def assistant(text):
    return Message("assistant", text)


def listed(*messages):
    return [{"role": message.role, "content": message.text} for message in messages]


SYSTEM = Message("system", "Be brief.")
Q, A, B = user("2+2?"), assistant("4"), assistant("5")
PAIR = {"prompt": "2+2?", "chosen": "4", "rejected": "5"}
LABELLED = {"prompt": "2+2?", "completion": "4", "label": True}
STEPPED = {"prompt": "2+2?", "completions": ["2 and 2", "is 5"], "labels": [True, False]}
HH = "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: 2+2?\n\nAssistant:"


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def only(tmp_path):
    """The environment of a file with one row (as training data; another makes the test split), and
    its task."""

    def make(row, **settings):
        test = write(tmp_path / "test.jsonl", [{"prompt": "another", "completion": "", "label": 0}])
        if "columns" in settings:
            settings["columns"] = dict(settings["columns"])
            test = write(
                test,
                [
                    {
                        settings["columns"].get(k, k): v
                        for k, v in json.loads(test.read_text()).items()
                    }
                ],
            )
        environment = Preferences(
            PreferencesConfig(train=write(tmp_path / "train.jsonl", [row]), test=test, **settings)
        )
        return environment, environment.rows("train")[0]

    return make


# --- what is read


@pytest.mark.parametrize(
    ("row", "prompt", "chosen", "rejected"),
    [
        pytest.param(PAIR, (Q,), (A,), (B,), id="texts"),
        pytest.param(
            {**PAIR, "prompt": listed(SYSTEM, Q)}, (SYSTEM, Q), (A,), (B,), id="prompt of messages"
        ),
        pytest.param(
            {"prompt": listed(Q), "chosen": listed(A), "rejected": listed(B)},
            (Q,),
            (A,),
            (B,),
            id="answers of messages",
        ),
        pytest.param(
            {"chosen": listed(SYSTEM, Q, A), "rejected": listed(SYSTEM, Q, B)},
            (SYSTEM, Q),
            (A,),
            (B,),
            id="conversations",
        ),
        pytest.param(
            {"prompt": "2+2?", "chosen": listed(SYSTEM, Q, A), "rejected": listed(SYSTEM, Q, B)},
            (SYSTEM, Q),
            (A,),
            (B,),
            id="conversations whose prompt is repeated, as in UltraFeedback",
        ),
        pytest.param(
            {"chosen": listed(Q, A, user("sure?"), A), "rejected": listed(Q, B, user("sure?"), B)},
            (Q,),
            (A, user("sure?"), A),
            (B, user("sure?"), B),
            id="conversations that part early",
        ),
        pytest.param(
            {"chosen": f"{HH} 4", "rejected": f"{HH} 5"},
            (user("hi"), assistant("hello"), Q),
            (A,),
            (B,),
            id="transcripts",
        ),
        pytest.param(
            {"prompt": HH, "chosen": " 4", "rejected": " 5"},
            (user("hi"), assistant("hello"), Q),
            (A,),
            (B,),
            id="transcript as the prompt",
        ),
        pytest.param(
            {
                "chosen": "\n\nHuman: 2+2?\n\nAssistant: ",
                "rejected": "\n\nHuman: 2+2?\n\nAssistant: 5",
            },
            (Q,),
            (assistant(""),),
            (B,),
            id="silence",
        ),
        pytest.param(
            {**PAIR, "score_chosen": None, "completion": None},
            (Q,),
            (A,),
            (B,),
            id="nulls of other formats",
        ),
        pytest.param(
            {**PAIR, "chosen": "  4\n"}, (Q,), (assistant("  4\n"),), (B,), id="spaces are kept"
        ),
    ],
)
def test_a_pair_is_read_from(only, row, prompt, chosen, rejected):
    environment, task = only(row)
    assert task.messages == prompt
    assert environment.comparison(task) == Comparison(chosen, rejected)
    assert environment.demonstration(task) == chosen


def test_scores_of_a_pair_are_its_rewards(only):
    environment, task = only({**PAIR, "score_chosen": 9, "score_rejected": -0.5})
    assert environment.comparison(task).rewards == (9.0, -0.5)


@pytest.mark.parametrize(("label", "reward"), [(True, 1.0), (False, 0.0), (-1, -1.0), (0.25, 0.25)])
@pytest.mark.parametrize(
    "completion", ["4", listed(A), listed(Q, A), "\n\nHuman: 2+2?\n\nAssistant: 4"]
)
def test_a_labelled_answer_is_read_with_its_reward(only, completion, label, reward):
    environment, task = only({**LABELLED, "completion": completion, "label": label})
    assert task.messages == (Q,)
    assert environment.labelled_answer(task) == LabelledAnswer((A,), reward)
    assert isinstance(environment.labelled_answer(task).reward, float)


def test_steps_are_read_with_their_labels_and_end_in_the_separator(only):
    environment, task = only(STEPPED)
    assert environment.steps(task) == (("2 and 2\n", 1.0), ("is 5\n", 0.0))
    environment, task = only({**STEPPED, "labels": [0.75, 1]}, separator="")
    assert environment.steps(task) == (("2 and 2", 0.75), ("is 5", 1.0))
    assert environment.demonstration(task) == (assistant("2 and 2is 5"),)


def test_columns_are_read_by_the_names_that_the_file_gives_them(only):
    columns = {"prompt": "question", "chosen": "preferred", "rejected": "other", "label": "score"}
    environment, task = only(
        {"question": "2+2?", "preferred": "4", "other": "5", "chosen": 1}, columns=columns
    )
    assert environment.comparison(task) == Comparison((A,), (B,))
    environment, task = only({"question": "2+2?", "completion": "4", "score": 7.5}, columns=columns)
    assert environment.labelled_answer(task) == LabelledAnswer((A,), 7.5)
    with pytest.raises(
        DataError, match="no column 'other'; the row has question, preferred: add it"
    ):
        only({"question": "2+2?", "preferred": "4"}, columns=columns)


@pytest.mark.parametrize(
    "row",
    [
        {**LABELLED, "label": False},
        {**LABELLED, "label": -1},
        STEPPED,
        {**STEPPED, "labels": [0.5, 1.0]},
    ],
)
def test_a_bad_answer_is_no_demonstration(only, tmp_path, row):
    environment, task = only(row)
    with pytest.raises(DataError) as caught:
        environment.demonstration(task)
    expected = "the answer is labelled as bad, so there is none to learn from: drop such rows"
    assert str(caught.value) == f"{tmp_path / 'train.jsonl'}, line 1: {expected}"


@pytest.mark.parametrize(
    ("row", "method", "message"),
    [
        (LABELLED, "comparison", "no column 'chosen'; the row has prompt, completion, label"),
        (STEPPED, "comparison", "no column 'chosen'; the row has prompt, completions, labels"),
        (PAIR, "labelled_answer", "no column 'completion'; the row has prompt, chosen, rejected"),
        (
            STEPPED,
            "labelled_answer",
            "no column 'completion'; the row has prompt, completions, labels",
        ),
        (PAIR, "steps", "no column 'completions'; the row has prompt, chosen, rejected"),
        (LABELLED, "steps", "no column 'completions'; the row has prompt, completion, label"),
    ],
)
def test_what_a_row_does_not_have_is_an_error_where_it_is_asked_for(
    only, tmp_path, row, method, message
):
    environment, task = only(row)
    with pytest.raises(DataError) as caught:
        getattr(environment, method)(task)
    assert str(caught.value).startswith(
        f"{tmp_path / 'train.jsonl'}, line 1: {message}, but this algorithm learns from "
    )
    assert str(caught.value).endswith(": use a file with such rows, or another algorithm")


# --- what is refused

BOTH = "'chosen' and 'rejected'"
NO_ANSWER = f"no column has an answer ({BOTH}, or 'completion' or 'completions'); the row has "
ERRORS = [
    ({"prompt": "q"}, f"{NO_ANSWER}prompt: name yours in `columns`"),
    ({}, f"{NO_ANSWER}no columns: name yours in `columns`"),
    (
        {**PAIR, **LABELLED},
        "columns 'chosen' and 'completion' belong to two formats: remove one of them",
    ),
    (
        {"prompt": "q", "chosen": "a"},
        "no column 'rejected'; the row has prompt, chosen: add it, or name yours in `columns`",
    ),
    (
        {**PAIR, "chosen": None},
        "no column 'chosen'; the row has prompt, rejected: add it, or name yours in `columns`",
    ),
    ({**PAIR, "rejected": "4"}, f"{BOTH} are the same: remove the row"),
    (
        {"chosen": "4", "rejected": "5"},
        f"no column 'prompt', and {BOTH} are only answers; the row has chosen, rejected: add the "
        "prompt",
    ),
    (
        {**PAIR, "chosen": listed(Q, A)},
        f"one of {BOTH} is a whole conversation, the other only an answer: write both in the same "
        "way",
    ),
    (
        {"chosen": listed(Q, A), "rejected": listed(user("3+3?"), B)},
        f"{BOTH} begin with different messages: they must answer the same prompt",
    ),
    (
        {"chosen": listed(Q, A), "rejected": listed(Q, A, Q, B)},
        f"one of {BOTH} is the beginning of the other: give each another last answer",
    ),
    (
        {"prompt": "3+3?", "chosen": listed(Q, A), "rejected": listed(Q, B)},
        f"{BOTH} do not contain 'prompt': set it to their common beginning, or drop it",
    ),
    (
        {"chosen": listed(Q, A), "rejected": listed(Q, B, Q)},
        "'rejected' ends without an answer of the assistant: drop what follows the last answer",
    ),
    (
        {"chosen": listed(Q, A, user("x"), A), "rejected": listed(Q, A, user("y"), B)},
        "'chosen' continues the prompt with a message of 'user': an answer begins with one of "
        "'assistant'",
    ),
    ({**PAIR, "prompt": ""}, "'prompt' is empty: write a prompt"),
    ({**PAIR, "prompt": []}, "'prompt' is an empty array: give it messages"),
    (
        {**PAIR, "prompt": "\n\nAssistant:"},
        "'prompt' has no message: write a prompt",
    ),
    (
        {**PAIR, "prompt": listed(Q, A)},
        "'prompt' ends with a message of the assistant: end it with a user message",
    ),
    ({**PAIR, "prompt": 3}, "'prompt' is an integer, must be a string or an array of messages"),
    (
        {**PAIR, "prompt": ["2+2?"]},
        'message 0 of \'prompt\' is a string, must be an object such as {"role": "user", '
        '"content": "..."}',
    ),
    (
        {**PAIR, "prompt": [{"from": "human", "value": "?"}]},
        "message 0 of 'prompt' has no 'role': write it as a string",
    ),
    (
        {**PAIR, "prompt": [{"role": "user"}]},
        "message 0 of 'prompt' has no 'content': write it as a string",
    ),
    (
        {**PAIR, "chosen": [{"role": "assistant", "content": None}]},
        "message 0 of 'chosen' has null as 'content': write it as a string",
    ),
    (
        {**PAIR, "chosen": [*listed(A), {"role": "human", "content": "?"}]},
        "message 1 of 'chosen' has the role 'human', must be one of system, user, assistant, tool",
    ),
    (
        {**PAIR, "chosen": [{"role": "assistant", "content": "4", "tool_calls": [{}]}]},
        "message 0 of 'chosen' has 'tool_calls', which would be lost: only 'role' and 'content' "
        "are read; remove it",
    ),
    (
        {**PAIR, "chosen": "\ud800"},
        "'chosen' holds half of a surrogate pair (\\ud800 to \\udfff), which is not text: remove "
        "it",
    ),
    (
        {**PAIR, "score_chosen": 1},
        "no column 'score_rejected'; the row has prompt, chosen, rejected, score_chosen: add it, "
        "or name yours in `columns`",
    ),
    (
        {**PAIR, "score_chosen": True, "score_rejected": 0},
        "'score_chosen' is true or false, must be a number",
    ),
    (
        {**PAIR, "score_chosen": "9", "score_rejected": 0},
        "'score_chosen' is a string, must be a number",
    ),
    (
        {"completion": "4", "label": 1},
        "no column 'prompt'; the row has completion, label: add it, or name yours in `columns`",
    ),
    (
        {"prompt": "q", "completion": "4"},
        "no column 'label'; the row has prompt, completion: add it, or name yours in `columns`",
    ),
    ({**LABELLED, "label": "good"}, "'label' is a string, must be true, false or a number"),
    ({**LABELLED, "label": 10**400}, "'label' is too large: write a number below 1e308"),
    (
        {**LABELLED, "completion": listed(user("3+3?"), A)},
        "'completion' doesn't begin with 'prompt': give only the answer",
    ),
    (
        {**LABELLED, "completion": listed(Q)},
        "'completion' ends without an answer of the assistant: drop what follows the last answer",
    ),
    (
        {**STEPPED, "completions": "4"},
        "'completions' is a string, must be an array with one item a step",
    ),
    (
        {**STEPPED, "completions": []},
        "'completions' is an empty array, must be an array with one item a step",
    ),
    (
        {**STEPPED, "completions": ["a", 4]},
        "item 1 of 'completions' is an integer, must be the text of a step",
    ),
    (
        {**STEPPED, "completions": ["a", ""]},
        "item 1 of 'completions' is empty, must be the text of a step",
    ),
    (
        {**STEPPED, "labels": [1]},
        "'completions' has 2 steps, 'labels' 1 labels: give each step one label",
    ),
    (
        {**STEPPED, "labels": [1, -1]},
        "item 1 of 'labels' is -1, must be true, false or between 0 and 1",
    ),
    (
        {**STEPPED, "labels": [None, 1]},
        "item 0 of 'labels' is null, must be true, false or a number",
    ),
    (
        {"prompt": "q", "completions": ["a"]},
        "no column 'labels'; the row has prompt, completions: add it, or name yours in `columns`",
    ),
]


@pytest.mark.parametrize(("row", "message"), ERRORS)
def test_a_row_that_can_not_be_used_is_named_with_what_to_change(tmp_path, row, message):
    path = write(tmp_path / "train.jsonl", [PAIR, row])
    with pytest.raises(DataError) as caught:
        Preferences(PreferencesConfig(train=path)).tasks("train", seed=0)
    assert str(caught.value) == f"{path}, line 2: {message}"


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (float("nan"), "is NaN: write a number, or drop the row"),
        (b"1", "is a bytes, must be true, false or a number"),
    ],
)
def test_a_table_s_value_that_is_no_label_is_named(tmp_path, label, message):
    path = tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist([{**LABELLED, "label": label}]), path)
    with pytest.raises(DataError) as caught:
        Preferences(PreferencesConfig(train=path)).tasks("train", seed=0)
    assert str(caught.value) == f"{path}, row 1: 'label' {message}"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "train"),
        (
            {"train": "a", "columns": {"chosne": "x"}},
            "chosne is not a usual column: did you mean chosen",
        ),
        (
            {"train": "a", "columns": {"chosen": "rejected"}},
            "chosen and rejected would both be read from 'rejected'",
        ),
        ({"train": "a", "columns": {"chosen": 3}}, "valid string"),
    ],
)
def test_a_recipe_that_names_columns_wrongly_is_refused(settings, message):
    with pytest.raises(ValidationError, match=message):
        PreferencesConfig(**settings)


# --- splits


def many(n=60):
    """Every format, mixed; each prompt on two lines."""
    for i in range(n):
        prompt = f"What is {i % (n // 2)} + 1?"
        yield [
            {"prompt": prompt, "chosen": f"{i}", "rejected": f"-{i}"},
            {"prompt": prompt, "completion": f"{i}", "label": i % 2 == 0},
            {"prompt": prompt, "completions": [f"{i}", "so"], "labels": [1, 0.5]},
            {"chosen": listed(user(prompt), A), "rejected": listed(user(prompt), B)},
        ][i % 4]


@pytest.mark.medium
@pytest.mark.fault("D6")
def test_one_file_keeps_the_contract_and_lines_with_one_prompt_fall_into_one_split(tmp_path):
    environment = Preferences(PreferencesConfig(train=write(tmp_path / "all.jsonl", many())))
    check_environment(environment)
    train_split, test_split = environment.rows("train"), environment.rows("test")
    assert len(train_split) + len(test_split) == 60
    for split in (train_split, test_split):
        assert set(Counter(task.messages for task in split).values()) == {2}


@pytest.mark.medium
def test_two_files_keep_the_contract(tmp_path):
    test_file = write(
        tmp_path / "test.jsonl", [{**LABELLED, "prompt": f"other {i}"} for i in range(3)]
    )
    environment = Preferences(
        PreferencesConfig(train=write(tmp_path / "train.jsonl", many()), test=test_file)
    )
    check_environment(environment)
    assert [task.id for task in environment.tasks("test", seed=3)] == [
        f"preferences/test/{line}" for line in (1, 2, 3)
    ]
    assert len(environment.rows("train")) == 60


@pytest.mark.parametrize(("again", "rows"), [(["q2"], "1 row"), (["q2", "new", "q1"], "2 rows")])
def test_prompts_in_both_files_are_refused(tmp_path, again, rows):
    train_file = write(tmp_path / "train.jsonl", [{**PAIR, "prompt": f"q{i}"} for i in range(4)])
    test_file = write(
        tmp_path / "test.jsonl", [{**LABELLED, "prompt": prompt} for prompt in ["fresh", *again]]
    )
    with pytest.raises(DataError) as caught:
        Preferences(PreferencesConfig(train=train_file, test=test_file)).tasks("train", seed=0)
    assert str(caught.value) == (
        f"{test_file}, line 2: the prompt is also in the training split ({train_file}, line 3). "
        f"Remove the {rows} of this file with such prompts, or drop `test` to hold out a tenth of "
        "the prompts."
    )


# --- the published file


def test_the_published_pairs_are_answers_to_one_prompt(shared_data):
    environment = Preferences(
        PreferencesConfig(train=shared_data("hh_rlhf/harmless-base.test.1200.jsonl"))
    )
    check_environment(environment)
    tasks = [*environment.rows("train"), *environment.rows("test")]
    assert len(tasks) == 1200
    assert 60 < len(environment.rows("test")) < 180
    lines = (
        shared_data("hh_rlhf/harmless-base.test.1200.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    for task in tasks:
        row = json.loads(lines[int(task.id.rpartition("/")[2]) - 1])
        pair = environment.comparison(task)
        assert task.messages[0].role == task.messages[-1].role == "user"
        for column, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            who = {"user": "Human", "assistant": "Assistant"}
            assert (
                "".join(f"\n\n{who[m.role]}: {m.text}" for m in (*task.messages, *answer))
                == row[column]
            )
            assert len(answer) == 1


def test_the_published_pairs_render_with_chatml(shared_data):
    environment = Preferences(
        PreferencesConfig(train=shared_data("hh_rlhf/harmless-base.test.1200.jsonl"))
    )
    tokenizer = byte_tokenizer()
    renderer = Renderer(tokenizer, "chatml")
    pairs = PairSource(
        TaskStream(environment, seed=0), "p", TextRenderer(renderer, max_context=10**6)
    )
    for group in asyncio.run(pairs.draw(25, version=0)):
        expected = environment.comparison(group.task)
        prompt = renderer.prompt(group.task.messages)
        assert tokenizer.decode(prompt, skip_special=False).endswith("<|im_start|>assistant\n")
        for trajectory, answer in zip(
            group.trajectories, (expected.chosen, expected.rejected), strict=True
        ):
            start = int(trajectory.trainable.argmax())
            assert trajectory.tokens[:start].tolist() == prompt
            assert trajectory.trainable[start:].all()
            trained = tokenizer.decode(trajectory.tokens[start:].tolist(), skip_special=False)
            assert trained == answer[0].text + "<eos>"


# --- algorithms learn from it

ALGORITHMS = {
    "dpo": PAIR,
    "rpo": {**PAIR, "score_chosen": 1.0, "score_rejected": 0.5},
    "reward_model": PAIR,
    "kto": LABELLED,
    "score_regression": LABELLED,
    "process_reward": STEPPED,
    "sft": PAIR,
}


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_an_algorithm_learns_from_its_format(kind, tmp_path):
    rows = [{**ALGORITHMS[kind], "prompt": f"{i}?"} for i in range(40)]
    rows = [{**row, "label": i % 2 == 0} if "label" in row else row for i, row in enumerate(rows)]
    recipe = {
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "characters", "template": "turns"},
        "algorithm": {"kind": kind},
        "environment": {"kind": "preferences", "train": str(write(tmp_path / "rows.jsonl", rows))},
        "optimizer": {"lr": 0.01},
        "evaluation": {"tasks": 0},
        "steps": 2,  # a scalar head starts from zero: the first moves it alone
        "batch_size": 4,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
    config = load_config(tmp_path / "recipe.yaml")
    policy = build_policy(config)
    run = build_run(config, 0, policy)
    before = {name: parameter.clone() for name, parameter in policy.model.named_parameters()}
    updates = []
    run.measure = lambda role, numbers: updates.append(dict(numbers)) if role == "policy" else None
    asyncio.run(train(run))
    assert len(updates) == 2
    for update in updates:
        assert update["grad_norm"] > 0
        assert update["skipped_nonfinite"] == 0
    assert any(
        not parameter.equal(before[name]) for name, parameter in policy.model.named_parameters()
    )
