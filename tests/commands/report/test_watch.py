"""`ratchet watch`: a frame has the curves, attempts, alarms and waits of a run, and the next one
what was added."""

import json
import os
import socket

import numpy as np
import pytest
from commands.report.made_runs import CONFIG, grow, make_run, rows_of, write_record
from rich.console import Console
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.report.server import RunReaders
from ratchet.commands.report.watch import RunFrames, find_stage, shrink_curve
from ratchet.errors import RunNotFound
from ratchet.runs.run_dir import RunDirectory


def text_of(frames: RunFrames) -> str:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(frames.draw())
    return capture.get()


def line_of(text: str, label: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(label))


def test_a_frame_shows_curves_attempts_and_alarms(tmp_path):
    text = text_of(RunFrames(make_run(tmp_path / "run").path))
    assert text.startswith("run  ·  stopped  ·  step 6  ·  accuracy 60.0%\n")
    assert line_of(text, "reward").split() == ["reward", "▁▂▄▅▇█", "0.1", "0.6"]
    assert line_of(text, "loss").split()[1] == "▇▁▂▆█"  # step 2 has none
    assert "attempts of step 6" in text
    assert "scored" in text
    assert "alarm at step 3: step 3: good" in text


def test_attempts_without_messages_or_with_images_are_shown(tmp_path):
    directory = make_run(tmp_path / "run")
    rows = rows_of(7, other=False, say="good")
    rows[0]["messages"] = []
    parts = [{"type": "text", "value": "Seen: "}, {"type": "image", "value": "media:0;image/png"}]
    rows[2]["messages"][-1] |= {"content": None, "parts": parts}
    write_record(directory.steps, [7], rows)
    text = text_of(RunFrames(directory.path))
    assert "attempts of step 7" in text
    assert "Seen: (image)" in text


def test_the_next_frame_has_what_was_added(tmp_path):
    directory = make_run(tmp_path / "run", steps=2)
    frames = RunFrames(directory.path)
    text_of(frames)
    grow(directory, [3, 4])
    assert line_of(text_of(frames), "reward").split()[1:] == ["▁▃▆█", "0.1", "0.4"]
    grow(directory, [3])  # resumed from the checkpoint of step 2
    assert line_of(text_of(frames), "reward").split()[1:] == ["▁▅█", "0.1", "0.3"]


def test_a_running_run_shows_what_it_waits_for_and_the_remaining_time(tmp_path):
    stage = {"name": "rl", "steps": 10}
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write_or_check_config({**CONFIG, "stages": [stage]})
    grow(directory, [1, 2, 3, 4])
    status = {"pid": os.getpid(), "host": socket.gethostname(), "socket": ""}
    directory.status.write_text(json.dumps(status))
    text = text_of(RunFrames(directory.path, query_waits=lambda path: "waits for rewards"))
    assert "running  ·  stage 1 of 1: rl  ·  step 4 of 10  ·  6s left" in text
    assert "waits for rewards" in text


def test_curves_are_of_the_current_stage():
    stages = [("sft", 4), ("rl", 6)]
    assert find_stage(stages, 3) == (1, "sft", 1)
    assert find_stage(stages, 4) == (2, "rl", 5)
    assert find_stage(stages, 10) == (2, "rl", 5)
    assert find_stage([], 3) == (1, "", 1)


def test_a_long_curve_is_shrunk_to_means():
    assert shrink_curve(np.arange(6.0), 3) == [0.5, 2.5, 4.5]
    assert shrink_curve(np.arange(2.0), 3) == [0.0, 1.0]


@pytest.mark.parametrize("n_steps", [100, 10**15])
def test_numbers_whose_sums_are_infinite_are_left_out(tmp_path, n_steps):
    directory = RunDirectory(tmp_path / "run")
    directory.path.mkdir()
    directory.write_or_check_config({**CONFIG, "stages": [{"name": "rl", "steps": n_steps}]})
    huge = dict.fromkeys(("time/step_s", "rollout/reward", "eval/accuracy"), 1e308)
    rows = [{"step": step, **huge, "policy/loss": step * 5e-324} for step in range(80)]
    directory.metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert "step 79" in text_of(RunFrames(directory.path))
    (answer,) = json.loads(RunReaders(tmp_path).list_runs({})[1]).values()
    assert (answer["progress"]["step"], answer["progress"]["accuracy"]) == (79, None)


@pytest.mark.medium
@pytest.mark.parametrize("options", [["--once"], []])  # a run that has ended has one frame
def test_the_command_prints_a_frame(tmp_path, options):
    result = CliRunner().invoke(app, ["watch", str(make_run(tmp_path / "run").path), *options])
    assert result.output.count("attempts of step 6") == 1
    missing = CliRunner().invoke(app, ["watch", str(tmp_path)])
    assert isinstance(missing.exception, RunNotFound)
