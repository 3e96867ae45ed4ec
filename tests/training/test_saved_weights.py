"""A run starts from the weights of another run, and its checkpoints are models."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file
from typer.testing import CliRunner

from ratchet.checkpoint.serialization import load_state
from ratchet.cli.main import app
from ratchet.commands.plan.command import read_shape
from ratchet.config.loader import load_config
from ratchet.errors import CheckpointNotFound, ConfigError, RunDirectoryError
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.run_dir import START
from ratchet.training.saved_weights import (
    SavedWeights,
    export_checkpoint,
    find_saved,
    replace_saved_model,
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
    "steps": 4,
    "algorithm": {"kind": "sft"},
    "logging": {"progress": "off", "tensorboard": False},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe and a finished run of it, `first`, with checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert start_run(folder / "recipe.yaml", [], folder / "first", command="train") == 0
    return folder


def start(folder: Path, run: Path, *overrides: str, **options: object) -> Path:
    recipe = folder / "recipe.yaml"
    assert start_run(recipe, overrides, run, command="train", **options) == 0  # pyright: ignore
    return run


def weights(directory: Path) -> dict:
    return load_file(directory / "model.safetensors")


def assert_same_weights(a: Path, b: Path) -> None:
    one, other = weights(a), weights(b)
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def losses(run: Path) -> list[float]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [row["policy/loss"] for row in rows if row.get("policy/loss") is not None]


@pytest.mark.medium
def test_a_run_and_its_checkpoint_are_planned_as_the_model_that_they_are(folder: Path) -> None:
    shape = read_shape(load_config(folder / "recipe.yaml"))
    for place in (folder / "first", f"{folder / 'first'}@2"):
        config = load_config(folder / "recipe.yaml", model_path=str(place), model_option="--from")
        assert read_shape(replace_saved_model(config)) == shape


@pytest.mark.medium
def test_overrides_hold_for_the_model_of_a_run(folder: Path, tmp_path: Path) -> None:
    """As for the directory of that model; a checkpoint has no config.json to change."""
    first, recipe = folder / "first", tmp_path / "recipe.yaml"
    model = {"path": str(first), "overrides": {"max_position_embeddings": 40}}
    recipe.write_text(yaml.safe_dump({**RECIPE, "model": model, "tokenizer": {"kind": "auto"}}))
    start(tmp_path, tmp_path / "run", "steps=1")
    config = json.loads((tmp_path / "run/model/config.json").read_text())
    assert config["max_position_embeddings"] == 40
    override = f"model.path={first}@2"
    for read in (
        lambda: replace_saved_model(load_config(recipe, [override])),
        lambda: start(tmp_path, tmp_path / "other", override),
    ):
        with pytest.raises(ConfigError, match=r"model.overrides changes .*@2 is a checkpoint"):
            read()


def test_names_of_saved_weights(folder: Path) -> None:
    first = folder / "first"
    assert find_saved(first) == SavedWeights(first, None)
    assert find_saved(f"{first}/") == SavedWeights(first, None)
    for place in (f"{first}@2", first / "checkpoints/step-2", first / "checkpoints/step-00000002"):
        assert find_saved(place) == SavedWeights(first, 2)
    assert find_saved(first / "model") is None
    assert find_saved("org/model") is None
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 3. There are \[2, 4\]"):
        find_saved(f"{first}@3")
    with pytest.raises(RunDirectoryError, match="holds no run"):
        find_saved(f"{folder}@3")


def test_a_run_without_a_model_names_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    run = shutil.copytree(folder / "first", tmp_path / "run")
    shutil.rmtree(run / "model")
    with pytest.raises(RunDirectoryError, match=rf"or give a step of it: {run}@4"):
        find_saved(run)


@pytest.mark.medium
def test_a_run_starts_from_a_finished_one(folder: Path, tmp_path: Path) -> None:
    run = start(folder, tmp_path / "run", start_from=str(folder / "first"))
    assert load_config(run / "config.yaml").model.path == str(folder / "first" / "model")
    assert losses(run)[0] < losses(folder / "first")[0]
    assert not (run / START).exists()


@pytest.mark.slow
def test_a_run_starts_from_a_checkpoint_which_it_keeps(folder: Path, tmp_path: Path) -> None:
    source = shutil.copytree(folder / "first", tmp_path / "source")
    run = start(folder, tmp_path / "run", start_from=f"{source}@2")
    export_checkpoint(SavedWeights(folder / "first", 2), tmp_path / "exported")
    assert_same_weights(run / START, tmp_path / "exported")
    shutil.rmtree(source)  # what it started from is not needed any more
    again = shutil.copytree(run, tmp_path / "again")
    shutil.rmtree(again / "checkpoints")
    (again / "metrics.jsonl").unlink()
    assert resume_run(again, command="resume") == 0
    assert_same_weights(again / "model", run / "model")


@pytest.mark.slow
def test_model_path_takes_a_run_and_its_checkpoints(folder: Path, tmp_path: Path) -> None:
    by_option = start(folder, tmp_path / "option", start_from=f"{folder / 'first'}@2")
    recipe = {key: value for key, value in RECIPE.items() if key not in ("model", "tokenizer")}
    for name, place in (("a", "first@2"), ("b", "first/checkpoints/step-2"), ("c", "first")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump({**recipe, "model": {"path": str(folder / place)}}))
        assert start_run(path, [], tmp_path / name, command="train") == 0
    for name in ("a", "b"):
        assert_same_weights(tmp_path / name / "model", by_option / "model")
    by_option = start(folder, tmp_path / "whole", start_from=str(folder / "first"))
    assert_same_weights(tmp_path / "c" / "model", by_option / "model")


@pytest.mark.slow
def test_the_optimizer_goes_on_and_its_schedule_begins_anew(folder: Path, tmp_path: Path) -> None:
    place = f"{folder / 'first'}@2"
    fresh = start(folder, tmp_path / "fresh", start_from=place)
    taken = start(folder, tmp_path / "taken", start_from=place, with_optimizer=True)
    state = load_state(taken / START / "optimizer")
    saved = load_state(folder / "first" / "checkpoints" / "step-00000002" / "policy")
    assert (saved["steps_taken"], state["steps_taken"]) == (2, 0)
    for name, moments in saved["optimizer"].items():
        assert all(moments[key].equal(state["optimizer"][name][key]) for key in moments)
    rows = [read_jsonl(run / "metrics.jsonl")[1] for run in (fresh, taken)]
    assert rows[0]["policy/loss"] == rows[1]["policy/loss"]
    assert rows[0]["policy/lr"] == rows[1]["policy/lr"] == 0.01
    assert losses(fresh)[1] != losses(taken)[1]
    again = shutil.copytree(taken, tmp_path / "again")
    shutil.rmtree(again / "checkpoints")
    (again / "metrics.jsonl").unlink()
    assert resume_run(again, command="resume") == 0
    assert_same_weights(again / "model", taken / "model")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["optimizer.kind=muon"], r"optimizer.kind=adamw, but the recipe has muon"),
        (["lora.rank=2"], "can't take over the state of an adapter"),
        (["optimizer.ema_decay=0.9"], "takes over the running average too"),
    ],
)
def test_an_optimizer_that_cant_go_on(
    folder: Path, tmp_path: Path, overrides: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        start(
            folder,
            tmp_path / "run",
            *overrides,
            start_from=str(folder / "first"),
            with_optimizer=True,
        )
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.mark.medium
def test_another_tokenizer_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer differs"):
        start(
            folder,
            tmp_path / "run",
            "tokenizer.alphabet='0123456789= '",
            start_from=str(folder / "first"),
        )


@pytest.mark.medium
@pytest.mark.needs("peft")
def test_an_adapter_of_a_checkpoint_is_merged(folder: Path, tmp_path: Path) -> None:
    run = start(folder, tmp_path / "run", "lora={rank: 2}", start_from=f"{folder / 'first'}@2")
    base = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert base["base_model_name_or_path"] == str((run / START).absolute())
    last = export_checkpoint(SavedWeights(run, 4), tmp_path / "last")
    assert last.stages[0].lora is not None
    assert_same_weights(tmp_path / "last", run / "model")


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(app, [*arguments])
    return f"{result.exception or ''}{result.stdout}"


@pytest.mark.medium
def test_every_checkpoint_converts_to_a_model(folder: Path, tmp_path: Path) -> None:
    first = folder / "first"
    said = invoke("convert", f"{first}@4", str(tmp_path / "a"))
    assert "step 4 of" in said
    assert_same_weights(tmp_path / "a", first / "model")
    for place, name in (("step-2", "b"), ("step-00000002/policy", "c")):
        invoke("convert", str(first / "checkpoints" / place), str(tmp_path / name))
    assert_same_weights(tmp_path / "b", tmp_path / "c")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]
    (tmp_path / ".c.source").mkdir()
    (tmp_path / ".c.source" / "mine").write_text("mine")
    assert "holds other files" in invoke("convert", f"{first}@4", str(tmp_path / "c"))
    assert (tmp_path / ".c.source" / "mine").read_text() == "mine"
    assert "has no checkpoint of step 3" in invoke("convert", f"{first}@3", str(tmp_path / "d"))


@pytest.mark.medium
def test_options_that_do_not_go_together(folder: Path) -> None:
    first = str(folder / "first")
    for option in ("--from", "--run-dir"):
        assert f"{option} is only for a new run" in invoke("train", "--resume", first, option, "x")
    assert "--with-optimizer is only for --from RUN" in invoke(
        "train", "x.yaml", "--with-optimizer"
    )
    assert "is not a run" in invoke("train", str(folder / "recipe.yaml"), "--from", str(folder))
    for key in ("preset=tiny", "overrides.hidden_size=32", "path=x"):
        said = invoke(
            "train", str(folder / "recipe.yaml"), "--from", first, f"model.{key}", "--run-dir", "no"
        )
        assert "--from says which model to start from" in said, key
