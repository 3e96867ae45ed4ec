"""`ratchet train --profile`: a trace and a table beside the run, which learns the same."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path

import pytest
import yaml
from command_line import ratchet

RECIPE = {
    "name": "probe",
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"every": 3, "tasks": 8},
    "checkpoint": {"every": 1},
    "logging": {"tensorboard": False},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 1, "batch_size": 4},
        {
            "name": "rl",
            "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.01}},
            "steps": 5,
            "batch_size": 4,
        },
    ],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "probe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


def weights(run: Path) -> bytes:
    return (run / "model" / "model.safetensors").read_bytes()


def table(run: Path) -> dict[str, list[str]]:
    """The cells of each row, by its name."""
    lines = (run / "profile" / "table.txt").read_text().split("\n\n")[1].splitlines()[1:]
    return {
        name: cells
        for name, *cells in (line.replace(" %", "").replace(",", "").split() for line in lines)
    }


@pytest.mark.slow
def test_a_profiled_run_learns_the_same_and_says_where_its_time_went(
    recipe: Path, tmp_path: Path
) -> None:
    plain = ratchet("train", recipe, "--run-dir", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    assert not (tmp_path / "plain" / "profile").exists()
    run = tmp_path / "profiled"
    done = ratchet("train", recipe, "--run-dir", run, "--profile", 2)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert weights(run) == weights(tmp_path / "plain")

    found = (run / "profile" / "table.txt").read_text()
    assert found in done.stdout
    assert found.startswith("Profile of stage rl, steps 5 to 6\n")
    rows = table(run)
    assert list(rows) == ["sample", "score", "update", "sync", "other", "step"]
    for name in ("sample", "score", "update"):
        seconds, share, speed, rows_per_token, gflops, of_rate = map(float, rows[name])
        assert min(seconds, share, speed, rows_per_token) > 0, name
        assert min(gflops, of_rate) >= 0  # so small a model may round to 0
    # Prompts are shared: the learner computes fewer rows than there are tokens, the engine pads its
    # own to a multiple.
    assert float(rows["sample"][3]) >= 1 >= float(rows["update"][3])
    assert sum(float(cells[1]) for name, cells in rows.items() if name != "step") == pytest.approx(
        100, abs=0.5
    )
    assert not re.search(r"nan|inf\b", found)

    with gzip.open(run / "profile" / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    assert all(names.count(phase) == 2 for phase in ("sample", "score", "update", "sync")), names
    assert any(
        event.get("name") == "aten::addmm" or event.get("name") == "aten::mm" for event in events
    )


@pytest.mark.slow
def test_a_resumed_run_is_profiled_as_far_as_it_goes(recipe: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    killed = ratchet("train", recipe, "--run-dir", run, faults="step.update:5:kill")
    assert killed.returncode < 0
    resumed = ratchet("train", "--resume", run, "--profile", 9)
    assert resumed.returncode == 0, resumed.stderr
    assert "Profile of stage rl, step 6 (of 9 requested: the stage had no more)" in resumed.stdout
    again = ratchet("train", "--resume", run, "--profile", 1)
    assert again.returncode == 0, again.stderr
    assert "Nothing is profiled: stage rl has no step left." in again.stdout


@pytest.mark.slow
def test_a_supervised_run_is_profiled_in_its_first_stage(recipe: Path, tmp_path: Path) -> None:
    only = tmp_path / "sft.yaml"
    only.write_text(yaml.safe_dump({**RECIPE, "stages": [{**RECIPE["stages"][0], "steps": 3}]}))
    done = ratchet("train", only, "--run-dir", tmp_path / "run", "--profile", 1)
    assert done.returncode == 0, done.stderr
    assert "Profile of stage sft, step 3\n" in done.stdout
    rows = table(tmp_path / "run")
    assert rows["sample"][2:] == ["-"] * 4
    assert float(rows["update"][2]) > 0


def test_fewer_than_one_step_is_refused(recipe: Path) -> None:
    done = ratchet("train", recipe, "--profile", 0)
    assert done.returncode == 2
    assert "--profile" in done.stderr
