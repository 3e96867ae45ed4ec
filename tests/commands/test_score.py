"""`ratchet score`: a line for each row, in order; a bad row costs itself alone; only an unusable
file or reward is an error."""

from __future__ import annotations

import asyncio
import io
import json
import sys

import pytest
from command_line import ratchet
from rich.console import Console

from ratchet.cli.main import main
from ratchet.commands.score import (
    ROWS_PER_WORKER,
    Score,
    Summary,
    make_attempt,
    make_reward_section,
    score_file,
    score_rows,
)
from ratchet.errors import ConfigError, DataError
from ratchet.types import Failed, Message, Scored, Truncated

RIGHT = {"prompt": "2+2?", "response": "The answer is \\boxed{4}", "answer": "4"}
WRONG = {"prompt": "2+2?", "response": "5", "answer": "4"}
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n"
FUNCTION = {"task_id": "H/0", "prompt": "def twice(x):\n", "entry_point": "twice", "test": CHECK}


@pytest.fixture
def score(tmp_path, capsys):
    """`score(rows, "math", "timeout_s=3")`: the lines that come out, as values. A row may be raw
    text."""

    def run(rows, kind, *words, workers=2):
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows),
            encoding="utf-8",
        )
        score_file(path, kind, words, as_json=True, workers=workers)
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return run


def test_each_row_gets_a_line(score):
    right, wrong = score([RIGHT, {**WRONG, "id": "second"}], "boxed")
    assert right.pop("seconds") >= 0
    assert right == {
        "line": 1,
        "id": "line 1",
        "reward": 1.0,
        "parts": {"boxed": 1.0},
        "outcome": "scored",
        "detail": "",
    }
    assert (wrong["line"], wrong["id"], wrong["reward"]) == (2, "second", 0.0)


def test_the_keys_and_the_weight_of_a_reward(score):
    (line,) = score(
        [{"response": "a b c"}], "length", "unit=words", "at_most=2", "margin=2", "weight=3"
    )
    assert (line["reward"], line["parts"]) == (1.5, {"length": 0.5})


@pytest.mark.medium
def test_tests_of_output_and_of_functions(score):
    tests = [{"stdin": "4", "stdout": "8"}]
    found = score(
        [
            {"response": "```python\nprint(int(input()) * 2)\n```", "tests": tests},
            {"response": "print(9)", "tests": tests},
            {**FUNCTION, "response": "    return x * 2\n"},
            {**FUNCTION, "response": "def twice(x):\n    return x + x"},
            {**FUNCTION, "response": "import sys\nsys.exit(0)"},
            {"response": "print(8)", "answer": {"tests": tests}},
            {"response": "print(8)", "tests": []},
            {"response": "print(8)"},
            {"response": "print(8)", "entry_point": "twice", "test": CHECK},
        ],
        "code",
        "timeout_s=2",
    )
    assert [line["reward"] for line in found] == [1.0, 0.0, 1.0, 1.0, 0.0, 1.0, None, None, None]
    assert found[4]["parts"]["code/crashed"] == 1.0
    assert found[2]["id"] == "H/0"
    assert [line["outcome"] for line in found[6:]] == ["failed"] * 3
    for line, why in zip(
        found[6:], ("with at least one", "has no tests", "its prompt is None"), strict=True
    ):
        assert why in line["detail"]


def test_a_bad_row_costs_itself_alone(score):
    bad = [
        ("no json", "malformed JSON"),
        ("[1]", "holds an array"),
        ('{"response": "a", "response": "b"}', "appears twice"),
        ('{"response": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "nested more than 100 deep"),
        (
            {"prompt": "x"},
            "there is no column 'response', and there is no column 'messages'; the row has prompt",
        ),
        ({"response": 5}, "column 'response' is an integer, must be a string"),
        ({"response": None}, "column 'response' is null"),
        ({"response": "4", "prompt": 7}, "column 'prompt' is an integer, must be an array"),
        ({"messages": []}, "must end with a message of the assistant"),
        (
            {"messages": [{"role": "user", "content": "x"}]},
            "must end with a message of the assistant",
        ),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0] must have a role"),
        ({"messages": ["x"]}, "messages[0] must have a role"),
        ({"response": "4"}, "no answer to compare with: add a column `answer` to its row"),
    ]
    found = score([RIGHT, *(row for row, _ in bad), WRONG], "boxed")
    assert [line["line"] for line in found] == [*range(1, len(bad) + 3)]
    assert (found[0]["reward"], found[-1]["reward"]) == (1.0, 0.0)
    for line, (_, why) in zip(found[1:-1], bad, strict=True):
        assert (line["outcome"], line["reward"], line["parts"]) == ("failed", None, {})
        assert why in line["detail"]
        assert f"line {line['line']}" in line["detail"]


def test_a_function_of_another_library_needs_no_kind(score, tmp_path, monkeypatch):
    (tmp_path / "verl_score.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"response": "4", "answer": "4"}, {"response": "5", "answer": "4"}]
    found = score(rows, "verl_score:compute_score")
    assert [line["reward"] for line in found] == [1.0, 0.0]


def test_bytes_that_are_no_text_cost_their_row(tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\xff\xfe\n\n" + json.dumps(RIGHT).encode() + b"\r\n")
    score_file(path, "boxed", [], as_json=True, workers=1)
    first, second = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert "not UTF-8" in first["detail"]
    assert (second["line"], second["reward"]) == (3, 1.0)


def test_messages_in_place_of_prompt_and_response():
    said = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    task, trajectory = make_attempt(
        {"messages": said, "answer": 4, "tag": "maths", "task_id": 7}, "line 1"
    )
    assert task.messages == (Message("user", "2+2?"),)
    assert trajectory.messages == (Message("user", "2+2?"), Message("assistant", "4"))
    assert (task.id, task.answer, task.tag, len(trajectory)) == ("7", 4, "maths", 0)
    assert task.meta == {"answer": 4, "tag": "maths", "task_id": 7}
    task, _ = make_attempt({"prompt": said[:1], "response": "4"}, "line 1")
    assert task.messages == (Message("user", "2+2?"),)


def test_tokens_that_are_not_there_are_not_counted(score):
    with pytest.raises(DataError, match="has no tokens to count: set unit to words or characters"):
        score([RIGHT], "length", "at_most=5")


class Raises:
    """Follows the protocol, and breaks."""

    async def score(self, trajectories, task):
        raise OSError("gone") if task.answer == "4" else ValueError("other")


class Gate:
    """Later rows end first. Notes how many are judged at once, and how far the file was read when
    the first ended."""

    def __init__(self):
        self.running = self.most = self.seen = 0
        self.go = asyncio.Event()

    async def score(self, trajectories, task):
        self.seen += 1
        self.running += 1
        self.most = max(self.most, self.running)
        if self.seen == 1:
            await self.go.wait()
        elif self.seen == 20:
            self.go.set()
        else:
            for _ in range(5):
                await asyncio.sleep(0)
        self.running -= 1
        return [Scored(float(task.answer))]


def write_numbers(path, count):
    path.write_text(
        "".join(json.dumps({"response": "x", "answer": i}) + "\n" for i in range(count)),
        encoding="utf-8",
    )
    return path


def collect(path, reward, workers):
    async def all_of_them():
        return [score async for score in score_rows(path, reward, workers)]

    return asyncio.run(all_of_them())


def test_rows_come_out_in_order_and_as_many_at_once_as_there_are_workers(tmp_path):
    gate = Gate()
    found = collect(write_numbers(tmp_path / "rows.jsonl", 50), gate, 3)
    assert [score.reward for score in found] == [float(i) for i in range(50)]
    assert gate.most == 3


def test_a_file_is_never_read_far_ahead_of_what_is_judged(tmp_path, monkeypatch):
    read = []

    def lines(path):
        for line in range(1, 10 * ROWS_PER_WORKER):
            read.append(line)
            yield line, {"response": "x", "answer": line}

    class Never:
        async def score(self, trajectories, task):
            await asyncio.Event().wait()

    monkeypatch.setattr("ratchet.commands.score.read_lines", lines)

    async def stuck():
        waiting = asyncio.ensure_future(anext(score_rows(tmp_path / "rows.jsonl", Never(), 2)))
        for _ in range(20 * ROWS_PER_WORKER):
            await asyncio.sleep(0)
        assert not waiting.done()
        waiting.cancel()

    asyncio.run(stuck())
    assert len(read) == 2 * ROWS_PER_WORKER


@pytest.mark.medium
def test_a_reward_that_ends_the_process_does_not_end_it_with_status_0(tmp_path, monkeypatch):
    """So an unfinished training can't look finished either: the guard is that of all commands."""
    (tmp_path / "ending.py").write_text(
        "import os\n\n\ndef end(trajectory, task):\n"
        "    if os.fork() == 0:\n        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n    os._exit(0)\n"
    )
    (tmp_path / "rows.jsonl").write_text(json.dumps(RIGHT) + "\n")
    monkeypatch.chdir(tmp_path)
    ended = ratchet("score", "rows.jsonl", "--reward", "ending:end")
    assert ended.returncode == 1
    assert "ending.py:8 called os._exit(0) before the command's end" in ended.stderr


def test_a_reward_that_raises_costs_its_row(tmp_path):
    first, second = collect(write_numbers(tmp_path / "rows.jsonl", 2), Raises(), 1)
    assert isinstance(first.outcome, Failed)
    assert "ValueError: other" in second.detail


def test_a_reward_of_your_own_by_its_path(score, tmp_path, monkeypatch):
    (tmp_path / "score_for_test.py").write_text(
        "def brief(trajectory, task, most: int = 3):\n    return "
        "float(len(trajectory.messages[-1].text) <= most)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert [
        line["reward"]
        for line in score([{"response": "four"}, {"response": "one"}], "score_for_test:brief")
    ] == [0, 1]
    (line,) = score([{"response": "four"}], "score_for_test:brief", "most=4")
    assert (line["reward"], line["parts"]) == (1.0, {"brief": 1.0})


@pytest.mark.parametrize(
    ("kind", "words", "why"),
    [
        ("cod", [], "reward cod: 'cod' is unknown: did you mean 'code'?"),
        ("code", ["timeout=5"], "command line: timeout: unknown key; did you mean 'timeout_s'?"),
        ("code", ["timeout_s=-1"], "timeout_s: -1 must be more than 0"),
        ("code", ["timeout_s"], "'timeout_s' is not of the form key=value"),
        ("regex", [], "pattern: is missing"),
        ("no_such_module:thing", [], "can't be imported"),
    ],
)
def test_an_unusable_reward_says_why(kind, words, why):
    with pytest.raises(ConfigError) as caught:
        make_reward_section(kind, words, 2)
    assert why in str(caught.value)


def test_the_workers_are_the_rewards_own_where_it_has_some():
    assert make_reward_section("code", [], 3).workers == 3
    assert make_reward_section("code", ["workers=5"], 3).workers == 5
    assert not hasattr(make_reward_section("boxed", [], 3), "workers")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("none.jsonl", None, "can't be read"),
        ("empty.jsonl", "", "holds no rows"),
        (
            "unanswered.jsonl",
            '{"prompt": "2+2?", "completion": "4", "answer": "4"}\n',
            "no row could be judged. line 1: .*no column 'response'.* the row has prompt, "
            "completion, answer. Give the column of the answers the name response",
        ),
        ("unjudged.jsonl", '{"response": "4"}\n', "no row could be judged. line 1: .*no answer to"),
        (".", None, "is a directory"),
    ],
)
def test_an_unusable_file_says_why(tmp_path, name, content, why):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=why):
        score_file(tmp_path / name, "boxed", [], as_json=True, workers=1)


def command(monkeypatch, *words):
    """The exit status."""
    monkeypatch.setattr(sys, "argv", ["ratchet", "score", *map(str, words)])
    monkeypatch.setattr(sys, "path", [*sys.path])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


@pytest.mark.medium
def test_the_command(tmp_path, monkeypatch, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(RIGHT)}\nnot a row\n{json.dumps(WRONG)}\n")
    assert (
        command(monkeypatch, path, "--reward", "boxed", "normalise=false", "--json", "--workers", 1)
        == 0
    )
    assert [json.loads(line)["reward"] for line in capsys.readouterr().out.splitlines()] == [
        1.0,
        None,
        0.0,
    ]
    assert command(monkeypatch, path, "--reward", "boxed") == 0
    shown = capsys.readouterr().out
    assert "0.5" in shown
    assert "malformed JSON" in " ".join(shown.split())
    assert command(monkeypatch, path) == 2
    assert "--reward is missing" in capsys.readouterr().err
    for place, reason in ((tmp_path / "none", "is not there"), (tmp_path, "not a run directory")):
        assert command(monkeypatch, place) == 2
        assert f"{reason}: name a file of answers" in " ".join(capsys.readouterr().err.split())
    assert command(monkeypatch, path, "--reward", "boxed", "normalize=false") == 2
    assert "did you mean 'normalise'?" in capsys.readouterr().err


def test_the_summary_keeps_little_and_names_the_worst():
    summary = Summary()
    for line in range(1, 21):
        summary.add(Score(line, f"id {line}", Scored(line % 7 / 8, {"part": 0.5}), 0.5))
    summary.add(Score(21, "[bold]", Failed("row", "first\nlast [b]"), 0.0))
    summary.add(Score(22, "cut", Truncated(None), 0.0))
    console = Console(file=io.StringIO(), width=120)
    summary.show(console)
    shown = console.file.getvalue()
    assert [score.line for *_, score in sorted(summary.lowest_scores, reverse=True)] == [
        7,
        14,
        1,
        8,
        15,
    ]
    assert len(summary.lowest_scores) == 5
    assert f"{sum(line % 7 / 8 for line in range(1, 21)) / 20:.4g}" in shown
    for word in ("[bold]", "last [b]", "truncated", "scored", "failed"):
        assert word in shown
    assert "first" not in shown
