"""A run goes on with other keys, says so, and is still replayed bit for bit."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.commands.replay.command import compare_steps
from ratchet.commands.replay.engine import Replay
from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.recipe_changes import (
    list_changes,
    load_changed_config,
    restore_earlier_config,
)
from ratchet.training.start import resume_run, start_run

RECIPE = {
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 4},
    "checkpoint": {"every": 2, "keep": 9},
    "optimizer": {"lr": 0.01, "schedule": "linear"},
    "batch_size": 4,
    "logging": {"progress": "off", "tensorboard": False},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 3},
        {"name": "rl", "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.1}}, "steps": 4},
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 and 4 steps."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert start_run(folder / "recipe.yaml", [], folder / "run", command="train") == 0
    return folder / "run"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return shutil.copytree(finished, tmp_path / "run")


@pytest.fixture(scope="module")
def longer(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run with 3 steps more, and another rate."""
    path = shutil.copytree(finished, tmp_path_factory.mktemp("longer") / "run")
    changes = ["stages.rl.steps=7", "stages.rl.optimizer.lr=0.002", "stages.rl.evaluation.every=2"]
    assert resume_run(path, changes, command="resume") == 0
    return path


def metrics(run: Path, name: str) -> dict[int, float]:
    return {
        row["step"]: value
        for row in read_jsonl(run / "metrics.jsonl")
        for key, value in row.items()
        if key.endswith(name) and value is not None
    }


def changes_of(run: Path) -> list[dict]:
    entries = json.loads((run / "provenance.json").read_text())
    return [entry for entry in entries if "changes" in entry]


@pytest.mark.slow
def test_a_finished_run_goes_on_with_more_steps_and_another_rate(longer: Path) -> None:
    # linear to 0, over 7 steps: 0.002 x (7 - t) / 7 for t = 4, 5, 6
    rates = metrics(longer, "policy/lr")
    assert [rates[step] for step in (8, 9, 10)] == pytest.approx(
        [0.002 * 3 / 7, 0.002 * 2 / 7, 0.002 / 7]
    )
    assert set(metrics(longer, "eval/accuracy")) == {0, 3, 7, 9, 10}
    stage = load_config(longer / "config.yaml").stages[1]
    assert (stage.steps, stage.optimizer.lr) == (7, 0.002)
    assert json.loads((longer / "summary.json").read_text())["stages"][1]["steps"] == 7


def test_changes_are_noted_with_time_and_step(longer: Path) -> None:
    (entry,) = changes_of(longer)
    assert entry["after_step"] == 7
    assert entry["time"]
    assert {change["key"]: (change["from"], change["to"]) for change in entry["changes"]} == {
        "stages.rl.steps": (4, 7),
        "stages.rl.optimizer.lr": (0.01, 0.002),
        "stages.rl.evaluation.every": (0, 2),
    }
    log = (longer / "run.log").read_text()
    assert "changed after step 7: stages.rl.optimizer.lr: 0.01 -> 0.002" in log
    assert f"resuming {longer} from step 7 of 10" in log
    assert "was edited" not in log


def test_each_step_has_the_recipe_that_it_was_trained_by(longer: Path) -> None:
    now = load_config(longer / "config.yaml")
    before = restore_earlier_config(now, longer / "provenance.json", 6)
    assert before.stages[1].steps == 4
    assert before.stages[1].optimizer.lr == 0.01
    assert restore_earlier_config(now, longer / "provenance.json", 7) == now
    assert [change.key for change in list_changes(before, now)] == [
        change["key"] for change in changes_of(longer)[0]["changes"]
    ]


@pytest.mark.medium
@pytest.mark.parametrize("lost", [False, True])
def test_steps_before_and_after_a_change_replay_bit_for_bit(
    longer: Path, tmp_path: Path, lost: bool
) -> None:
    """Also from a checkpoint before it, where that of the change is gone."""
    path = shutil.copytree(longer, tmp_path / "run")
    if lost:
        shutil.rmtree(path / "checkpoints" / "step-00000007")

    async def play() -> list:
        return [verdict async for verdict in compare_steps(Replay(path), [2, 6, 7, 8, 10])]

    for verdict in asyncio.run(play()):
        assert verdict.is_equal, (verdict.replayed.step, verdict.differences)


@pytest.mark.slow
def test_a_run_that_goes_on_in_parts_ends_in_the_same_bits(run: Path, longer: Path) -> None:
    changes = ["stages.rl.steps=7", "stages.rl.optimizer.lr=0.002", "stages.rl.evaluation.every=2"]
    assert resume_run(run, changes, command="resume") == 0
    shutil.rmtree(run / "checkpoints" / "step-00000010")
    assert resume_run(run, command="resume") == 0
    weights = [path / "model" / "model.safetensors" for path in (run, longer)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert len(changes_of(run)) == 1


@pytest.mark.slow
def test_a_change_holds_from_the_checkpoint_that_the_run_falls_back_to(run: Path) -> None:
    assert resume_run(run, ["stages.rl.steps=6"], command="resume") == 0
    for step in (7, 9):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08d}")
    assert resume_run(run, command="resume") == 0
    assert [entry["after_step"] for entry in changes_of(run)] == [5]


REFUSED = {
    "model.path=x": "model.path can't change: the checkpoints hold the weights of the old model",
    "tokenizer={kind: bytes}": "tokenizer can't change: the model was trained on the tokens",
    "stages.rl.algorithm.group_size=2": "the run would continue as another experiment",
    "stages.rl.environment.digits=3": "the run's position in its data would no longer be valid",
    "stages.rl.learner={kind: dtensor}": "a learner of another kind can't read the checkpoints",
    "stages.rl.optimizer.kind=muon": "stages.rl.optimizer.kind can't change: the state in the",
    "stages.rl.lora={rank: 2}": "stages.rl.lora can't change: the state in the",
    "seed=3": "seed can't change: this key is fixed for the whole run",
    "stages.sft.steps=9": "stages.sft.steps can't change: stage sft is over",
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.items())
def test_what_cant_change_is_named_with_the_way_out(run: Path, change: str, reason: str) -> None:
    before = (run / "config.yaml").read_bytes()
    with pytest.raises(ConfigError) as caught:
        resume_run(run, [change, "stages.rl.steps=9"], command="resume")
    assert reason in str(caught.value)
    assert f"--from {run}" in str(caught.value)
    assert (run / "config.yaml").read_bytes() == before
    assert not changes_of(run)


def test_steps_that_are_done_cant_be_taken_back(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"steps=3 is no more than the 4 steps that are done"):
        resume_run(run, ["stages.rl.steps=3"], command="resume")


@pytest.mark.medium
def test_keys_that_stay_as_they_are_change_nothing(run: Path) -> None:
    same = ["stages.rl.steps=4", "stages.rl.optimizer.kind=adamw", "model.preset=tiny"]
    assert resume_run(run, same, command="resume") == 0
    assert not changes_of(run)


@pytest.mark.medium
def test_of_a_section_only_the_changed_keys_count(run: Path) -> None:
    config = load_changed_config(
        run / "config.yaml", ["stages.rl.optimizer={kind: adamw, lr: 0.5}"], run=run
    )
    assert config.stages[1].optimizer.lr == 0.5
    with pytest.raises(ConfigError, match="optimizer can't change: the state"):
        load_changed_config(run / "config.yaml", ["stages.rl.optimizer={kind: muon}"], run=run)


def test_typing_errors_are_found(run: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        resume_run(run, ["stages.rl.step=9"], command="resume")


def invoke(*arguments: str) -> tuple[int, BaseException | None]:
    result = CliRunner().invoke(app, ["train", *arguments])
    return result.exit_code, result.exception


@pytest.mark.slow
def test_the_command_takes_keys_in_place_of_a_recipe(tmp_path: Path) -> None:
    recipe = tmp_path / "one.yaml"
    one = {key: value for key, value in RECIPE.items() if key != "stages"}
    recipe.write_text(yaml.safe_dump({**one, "algorithm": {"kind": "sft"}, "steps": 2}))
    place = str(tmp_path / "run")
    assert invoke(str(recipe), "--run-dir", place)[0] == 0
    # a run of one stage needs no name of it
    assert invoke("--resume", place, "steps=3", "optimizer.lr=0.02")[0] == 0
    assert changes_of(Path(place))[0]["changes"][0]["key"] == "stages.sft.steps"
    _, error = invoke("--resume", place, str(recipe))
    assert "give a recipe, or --resume" in str(error)


@pytest.mark.medium
def test_a_stage_that_patience_ended_goes_on_with_more_of_it(tmp_path: Path) -> None:
    recipe = tmp_path / "one.yaml"
    one = {key: value for key, value in RECIPE.items() if key != "stages"}
    evaluation = {"tasks": 2, "every": 1, "patience": 1, "min_gain": 2.0}
    recipe.write_text(
        yaml.safe_dump({**one, "algorithm": {"kind": "sft"}, "steps": 6, "evaluation": evaluation})
    )
    run = tmp_path / "run"
    assert start_run(recipe, [], run, command="train") == 0
    first = max(metrics(run, "policy/lr"))
    assert first < 6
    assert resume_run(run, ["evaluation.patience=2"], command="resume") == 0
    assert max(metrics(run, "policy/lr")) > first
