"""Rollouts in Harbor's trajectory format: the official models accept them, and no token is lost."""

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

from ratchet.commands.atif import export_trajectories, write_document
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


@pytest.mark.slow
def test_the_official_models_read_a_run(
    tmp_path: Path, require: Callable[[str, str], None]
) -> None:
    require(str(CLIENTS), "make .venv/clients/installed")
    run = make_run(tmp_path / "run", steps=2)
    done = ratchet("runs", "trajectories", tmp_path / "run", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    record = Record(run.steps)
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
