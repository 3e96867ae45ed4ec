"""Runs whose start model was replaced since, or is looked up in another working directory."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

from ratchet.commands.replay.command import replay_steps
from ratchet.commands.replay.explain import explain_step
from ratchet.errors import ModelError
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

RECIPE = {
    "threads": 1,
    "logging": {"progress": "off", "tensorboard": False},
    "environment": {"kind": "sorting", "digits": 1},
    "sampling": {"max_new_tokens": 2},
    "evaluation": {"tasks": 0},
    "checkpoint": {"every": 2},
    "optimizer": {"lr": 0.01},
    "stages": [
        {
            "name": "grpo",
            "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.1}},
            "steps": 3,
            "batch_size": 4,
        }
    ],
}
SFT = {
    **RECIPE,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "stages": [{"name": "sft", "algorithm": {"kind": "sft"}, "steps": 20, "batch_size": 16}],
}


def train(recipe: dict, directory: Path) -> Path:
    file = directory.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(recipe))
    assert start_run(file, [], directory, command="test") == 0
    return directory


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Return a directory with a model `start`, and a run `run` from this relative path."""
    project = tmp_path_factory.mktemp("project")
    model = train({"name": "sft", **SFT}, project / "sft") / "model"
    shutil.copytree(model, project / "start")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project)
        train({"name": "grpo", "model": {"path": "start"}, **RECIPE}, project / "run")
        failpoints.arm("step.sample:2:raise")
        try:
            with pytest.raises(failpoints.InjectedFault):
                train({"name": "grpo", "model": {"path": "start"}, **RECIPE}, project / "killed")
        finally:
            failpoints.arm("")
    return project


@pytest.fixture
def other(project, tmp_path, monkeypatch):
    """Change into a directory whose `start` holds other weights, and return it."""
    file = shutil.copytree(project / "start", tmp_path / "start") / "model.safetensors"
    file.chmod(0o644)
    halved = {name: weight / 2 for name, weight in load_file(file).items()}
    save_file(halved, file, metadata={"format": "pt"})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_explain_of_the_same_model_says_nothing_else(project, monkeypatch, capsys):
    monkeypatch.chdir(project)
    assert explain_step(Path("run"), 1, top=1) == 0
    assert capsys.readouterr().out.startswith("step 1 (grpo), policy: gradient norm ")
    assert explain_step(Path("run"), 2, top=1, as_json=True) == 0
    explanation = json.loads(capsys.readouterr().out)
    assert (explanation["equal"], explanation["differences"]) == (True, [])


@pytest.mark.medium
@pytest.mark.fault("M15")
def test_explain_first_says_that_the_step_is_another(project, other, capsys):
    assert explain_step(project / "run", 1, top=1) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step 1 (grpo), from the start of the run: NOT bit-equal"
    assert f"model.path=start, read from the working directory {other}," in lines[1]
    assert "holds other weights than the run started from" in lines[1]
    explained = lines.index("  What follows explains the step computed here, not the recorded one.")
    differences = "\n".join(lines[2:explained])
    assert "policy/grad_norm: recorded " in differences
    assert "ref_logprobs of group " in differences
    assert "weights of policy after the step: recorded " in differences
    assert lines[explained + 1].startswith("step 1 (grpo), policy: gradient norm ")
    assert explain_step(project / "run", 2, as_json=True) == 1
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["weights_differ_since"] == 1
    assert "holds other weights" in explanation["changed_start"]


@pytest.mark.medium
@pytest.mark.fault("M15")
def test_replay_with_changes_first_says_so_too(project, other, capsys):
    assert replay_steps(project / "run", [1], changes=["optimizer.lr=0.1"]) == 1
    first, cause, *_ = capsys.readouterr().out.splitlines()
    assert first.endswith("NOT bit-equal")
    assert "holds other weights than the run started from" in cause


@pytest.mark.medium
def test_a_step_after_a_checkpoint_needs_no_start_model(project, other):
    assert explain_step(project / "run", 3) == 0


@pytest.mark.medium
@pytest.mark.fault("M15")
def test_a_run_without_checkpoint_resumes_from_no_other_model(project, other, monkeypatch):
    run = shutil.copytree(project / "killed", other / "killed")
    with pytest.raises(ModelError, match=r"holds other weights .* no checkpoint to continue from"):
        resume_run(run, command="test")
    monkeypatch.chdir(project)
    assert resume_run(run, command="test") == 0
    weights = [directory / "model" / "model.safetensors" for directory in (run, project / "run")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.medium
@pytest.mark.fault("M15")
def test_a_relative_model_path_elsewhere_is_explained(project, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    run = shutil.copytree(project / "killed", tmp_path / "killed")
    monkeypatch.chdir(tmp_path)
    cause = "model.path=start is a directory, it is relative to the working directory"
    with pytest.raises(ModelError, match=cause):
        explain_step(project / "run", 1)
    with pytest.raises(ModelError, match=cause):
        resume_run(run, command="test")
