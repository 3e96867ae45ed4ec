"""Rollouts in Harbor's trajectory format: the official models accept them, no token is lost, and
they come back as rows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from command_line import ratchet
from commands.clients.test_clients import CLIENTS
from commands.report.made_runs import make_run
from pages import run

from ratchet.commands.atif import export_trajectories, write_document
from ratchet.commands.trajectory_rows import read_rows, write_rows
from ratchet.data.chat.messages import read_messages
from ratchet.errors import ConfigError, DataError
from ratchet.observe.records.reader import Record
from ratchet.types import Group, Message, Part, Scored, Task, ToolCall, Trajectory, Turn

PIXEL = "data:image/png;base64,iVBORw0KGgo="
CALL = ToolCall("call_0", "add", {"a": 1})
MESSAGES = (
    Message("system", "Be brief."),
    Message("user", (Part("text", "1+2?"), Part("image", PIXEL))),
    Message("assistant", "Well."),
    Message("user", "And?"),
    Message("assistant", "", (CALL,)),
    Message("tool", "3", tool_call_id="call_0"),
    Message("assistant", "3"),
)
VALIDATE = """
import pathlib, sys
from atif import Trajectory
for path in pathlib.Path(sys.argv[1]).glob("*.json"):
    print(len(Trajectory.model_validate_json(path.read_text()).steps))
"""


def make_trajectory() -> Trajectory:
    """A first answer that came with the prompt, then two turns with a tool's result between."""
    sampled = np.array([0, 0, 0, 1, 1, 0, 1], bool)
    return Trajectory(
        tokens=np.arange(7),
        owner=sampled.astype(np.int8),
        trainable=sampled,
        rollout_logprobs=np.where(sampled, -0.5, 0).astype(np.float32),
        versions=np.where(sampled, 4, -1).astype(np.int32),
        turns=(Turn(3, 5), Turn(6, 7)),
        messages=MESSAGES,
        outcome=Scored(0.5),
    )


def test_a_trajectory_keeps_its_tokens_calls_and_reward(tmp_path: Path) -> None:
    trajectory = make_trajectory()
    group = Group("g", Task("t", MESSAGES[:2]), (trajectory,))
    document = write_document("a", 7, group, trajectory, tmp_path)
    system, user, copied, _, call, answer = document["steps"]
    assert [step["step_id"] for step in document["steps"]] == [1, 2, 3, 4, 5, 6]
    assert (system["source"], copied["is_copied_context"]) == ("system", True)
    image = user["message"][1]["source"]
    assert (image["media_type"], (tmp_path / image["path"]).stat().st_size) == ("image/png", 8)
    assert call["observation"]["results"] == [{"source_call_id": "call_0", "content": "3"}]
    assert call["tool_calls"][0]["arguments"] == {"a": 1}
    metrics = call["metrics"]
    assert (metrics["prompt_token_ids"], metrics["completion_token_ids"]) == ([0, 1, 2], [3, 4])
    assert metrics["logprobs"] == [-0.5, -0.5]
    assert answer["metrics"]["extra"] == {"weight_versions": [4]}
    assert document["extra"]["reward"] == 0.5


def test_a_media_type_can_not_choose_where_a_file_is_written(tmp_path: Path) -> None:
    for media_type, suffix in (("image/../../../a", ""), ("image/webp", ".webp")):
        part = Part("image", PIXEL.replace("image/png", media_type))
        trajectory = replace(make_trajectory(), messages=(Message("user", (part,)),), turns=())
        group = Group("g", Task("t", ()), (trajectory,))
        document = write_document("a", 7, group, trajectory, tmp_path / media_type)
        path = Path(document["steps"][0]["message"][0]["source"]["path"])
        assert (path.parent, path.suffix) == (Path("media"), suffix)
    broken = replace(trajectory, messages=(Message("user", (Part("image", f"{PIXEL}="),)),))
    with pytest.raises(DataError, match="a damaged image"):
        write_document("a", 7, group, broken, tmp_path)


def test_files_in_the_way_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path, sentence in ((tmp_path / "file", "is a file"), (tmp_path, "has files already")):
        with pytest.raises(ConfigError, match=sentence):
            export_trajectories(tmp_path, path)


def write_trajectory(path: Path) -> Trajectory:
    trajectory = make_trajectory()
    group = Group("g", Task("t", MESSAGES[:2]), (trajectory,))
    path.write_text(json.dumps(write_document("a", 7, group, trajectory, path.parent)))
    return trajectory


def test_written_answers_come_back_as_rows_with_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    trajectory = write_trajectory(path)
    rows = list(read_rows(path))
    lengths = (5, 7)
    assert [len(row["messages"]) for row in rows] == [*lengths], "the copied answer is no row"
    for row, turn, length in zip(rows, trajectory.turns, lengths, strict=True):
        span = slice(turn.start, turn.end)
        assert row["prompt_token_ids"] == trajectory.tokens[: turn.start].tolist()
        assert row["completion_token_ids"] == trajectory.tokens[span].tolist()
        assert row["logprobs"] == trajectory.rollout_logprobs[span].tolist()
        assert (row["task"], row["reward"]) == ("t", 0.5)
        messages = list(read_messages(row["messages"], "row"))
        (image,) = messages[1].media
        assert (tmp_path / image).read_bytes() == b"\x89PNG\r\n\x1a\n"
        messages[1] = MESSAGES[1]
        assert messages == list(MESSAGES[:length])


TURN = {
    "node_id": "n0",
    "prompt_token_ids": [1, 2],
    "completion_token_ids": [3, 4],
    "per_token_logps": [-0.5, -0.25],
    "loss_mask": [0, 0, 1, 0],
    "request": {"messages": [{"role": "user", "content": "1+2?", "name": None}]},
    "response": {"choices": [{"message": {"role": "assistant", "content": "3", "refusal": None}}]},
}
CONTEXT = {**TURN, "node_id": "n1", "loss_mask": [0, 0, 0, 0]}
TRACE = {"schema_version": 1, "turns": [TURN, CONTEXT]}


@pytest.mark.medium
def test_turns_of_a_training_trace_become_rows(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(TRACE))
    done = ratchet("data", "trajectories", tmp_path, "--out", tmp_path / "out" / "rows.jsonl")
    assert done.returncode == 0, done.stderr
    (line,) = (tmp_path / "out" / "rows.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert [message["content"] for message in row.pop("messages")] == ["1+2?", "3"]
    assert row == {
        "prompt_token_ids": [1, 2],
        "completion_token_ids": [3, 4],
        "logprobs": [-0.5, -0.25],
        "completion_mask": [1, 0],
    }
    shown = ratchet("data", "inspect", tmp_path / "out" / "rows.jsonl")
    assert shown.returncode == 0, shown.stderr
    assert "1+2?" in shown.stdout


STEP = {"source": "agent", "message": "3"}
ATIF = {"schema_version": "ATIF-v1.8", "agent": {}}


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"turns": []}, "schema_version=None is neither"),
        ({**TRACE, "turns": [{**TURN, "loss_mask": [1]}]}, r"turns\[0\]: loss_mask has 1 values"),
        ({**TRACE, "turns": [{**TURN, "response": {}}]}, r"turns\[0\].response has no choices"),
        ({**TRACE, "turns": [{**TURN, "node_id": 5}]}, r"turns\[0\].node_id: "),
        ({**ATIF, "steps": [{}]}, r"steps\[0\].source: "),
        (
            {
                **ATIF,
                "steps": [{**STEP, "message": [{"type": "text"}]}],
            },
            r"steps\[0\].message\[0\]: has no text",
        ),
        (
            {
                "schema_version": "ATIF-v1.8",
                "agent": {},
                "steps": [STEP, {**STEP, "metrics": {"completion_token_ids": [1], "logprobs": []}}],
            },
            r"steps\[1\].metrics: logprobs has 0 values for 1 tokens",
        ),
        (
            {**ATIF, "extra": {"reward": float("nan")}, "steps": [STEP]},
            "a value that no row can have",
        ),
        ({**ATIF, "steps": [{**STEP, "message": "\ud800"}, STEP]}, "half of a character"),
    ],
)
def test_bad_trajectories_are_refused_by_file_and_field(
    tmp_path: Path, document: dict[str, object], reason: str
) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match=rf"bad\.json: .*{reason}"):
        write_rows(path, tmp_path / "rows.jsonl")
    path.write_text("{")
    with pytest.raises(DataError, match=r"bad\.json: "):
        write_rows(path, tmp_path / "rows.jsonl")


def test_files_that_can_not_be_read_or_written_are_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with pytest.raises(ConfigError, match=r"trace\.json does not exist: give a trajectory"):
        write_rows(path, tmp_path / "rows.jsonl")
    path.write_text(json.dumps(TRACE))
    with pytest.raises(ConfigError, match=r"--out .*rows\.jsonl can't be written \(File exists\)"):
        write_rows(path, path / "rows.jsonl")
    document = {
        "schema_version": "ATIF-v1.8",
        "agent": {},
        "steps": [{**STEP, "message": "\ud800"}],
    }
    path.write_text(json.dumps(document))
    with pytest.raises(DataError, match="half of a character"):
        write_rows(path, tmp_path / "rows.jsonl")
    path.write_text(json.dumps({**TRACE, "turns": [CONTEXT]}))
    with pytest.raises(DataError, match=r"trace\.json: the trajectories have no answer that may"):
        write_rows(path, tmp_path / "rows.jsonl")
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_rows_of_a_trajectory_train(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(json.dumps(TRACE))
    write_rows(tmp_path / "trace.json", tmp_path / "rows.jsonl")
    recipe = """
model: {preset: tiny}
tokenizer: {kind: bytes, template: turns}
environment: {kind: dataset, train: rows.jsonl}
algorithm: {kind: sft, train: last}
evaluation: {tasks: 0}
steps: 1
batch_size: 1
"""
    (tmp_path / "recipe.yaml").write_text(recipe)
    run(tmp_path, "-m", "ratchet", "train", "recipe.yaml")


@pytest.mark.slow
def test_a_trace_of_openenvs_own_model_is_read(
    tmp_path: Path, require: Callable[[str, str], None]
) -> None:
    require(str(CLIENTS), "make .venv/clients/installed")
    program = (
        "import sys; from openenv.core.harness.training import TrainingTrace; "
        "print(TrainingTrace.model_validate_json(sys.stdin.read()).model_dump_json())"
    )
    written = subprocess.run(
        [CLIENTS, "-c", program],
        input=json.dumps(TRACE),
        capture_output=True,
        text=True,
        check=True,
    )
    (tmp_path / "trace.json").write_text(written.stdout)
    (row,) = read_rows(tmp_path / "trace.json")
    assert (row["completion_token_ids"], row["completion_mask"]) == ([3, 4], [1, 0])


@pytest.mark.slow
def test_the_official_models_read_a_run(
    tmp_path: Path, require: Callable[[str, str], None]
) -> None:
    require(str(CLIENTS), "make .venv/clients/installed")
    made_run = make_run(tmp_path / "run", steps=2)
    done = ratchet("runs", "trajectories", tmp_path / "run", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    record = Record(made_run.steps)
    count = sum(len(g.trajectories) for step in record.steps for g in record.groups(step))
    trajectory = make_trajectory()
    document = write_document("a", 1, record.groups(1)[0], trajectory, tmp_path / "out")
    (tmp_path / "out" / "a.json").write_text(json.dumps(document))
    validated = subprocess.run(
        [CLIENTS, "-c", VALIDATE, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert validated.returncode == 0, validated.stderr[-2000:]
    assert len(validated.stdout.split()) == count + 1
