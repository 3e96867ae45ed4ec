"""Whatever kills a training, wherever: resumed, it ends with the bits of the run that nobody
killed."""

import json
import os
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from shutil import copytree

import pytest
import yaml
from forked_runs import training_forks

from ratchet.errors import DataError
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.testing.kill_and_resume import (
    ChaosTest,
    Trial,
    choose_evenly_spread,
    list_differences,
)
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "chaos.py"


@pytest.fixture(scope="module")
def script():
    spec = spec_from_file_location("benchmarks_chaos", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tiny(script, tmp_path_factory):
    folder = tmp_path_factory.mktemp("chaos")
    recipe = folder / "probe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {"name": "probe", **script.RECIPES["grpo"], "stages": [{**script.GRPO, "steps": 3}]}
        )
    )
    with training_forks(folder / "output.log") as forks:
        made = ChaosTest(recipe, folder, forks)
        made.record(resume_after="step.update:3:kill")
        yield made


KILLS = [
    ("file.drafted:1:kill",),  # before the run has a configuration: it begins anew
    (
        "metrics.written:3:kill",
        "file.drafted:1:kill",
    ),  # a step's line has no checkpoint yet; while it is taken back
    ("checkpoint.role:3:kill", "resume.role:2:kill"),
    ("checkpoint.after_rename:3:kill",),  # what it would have pruned still goes
    ("finish.exported:1:kill",),
]


@pytest.mark.parametrize("kills", KILLS, ids=[kills[0] for kills in KILLS])
@pytest.mark.fault("P6")
def test_a_training_killed_at_a_failpoint_ends_as_if_it_had_not_been(kills, tiny):
    verdict = tiny.run_trial(Trial(kills))
    assert verdict.differences == ()
    assert (verdict.has_missed, verdict.n_starts) == (False, len(kills) + 1)


SAVING = "checkpoint.after_write:2:interrupt"


@pytest.mark.parametrize(
    ("spec", "left"),
    [(SAVING, [1, 2]), (f"{SAVING}, checkpoint.after_manifest:2:interrupt", [1])],
    ids=["once", "twice"],
)
@pytest.mark.fault("P8", "P9")
def test_ctrl_c_in_the_middle_of_a_save(spec, left, tiny, tmp_path):
    """The first one lets it end, the second one does not wait for that."""
    run = tmp_path / "run"
    assert tiny.start(run, spec) == 130
    assert CheckpointStore(run / "checkpoints").steps() == left
    assert tiny.start(run, "") == 0
    assert list_differences(tiny.reference_run, run) == []


@pytest.fixture
def rows_recipe(script, tmp_path):
    """The recipe of a training on `rows.jsonl` beside it, the file and its rows."""
    data, recipe = tmp_path / "rows.jsonl", tmp_path / "rows.yaml"
    rows = [json.dumps({"question": str(n), "answer": f"#### {n}"}) for n in range(40)]
    data.write_text("\n".join(rows))
    columns = {"prompt": "question", "answer": "answer"}
    stage = {
        "algorithm": {"kind": "sft"},
        "environment": {"kind": "dataset", "train": [str(data)], "columns": columns},
        "steps": 2,
        "batch_size": 4,
    }
    characters = {"kind": "characters", "template": "plain"}
    recipe.write_text(
        yaml.safe_dump(
            {
                **script.TINY,
                "name": "rows",
                "tokenizer": characters,
                "checkpoint": {"every": 1},
                **stage,
            }
        )
    )
    return recipe, data, rows


@pytest.mark.parametrize(
    ("step", "since", "consequence"),
    [
        (2, "step 1", "rows may be repeated or skipped"),
        (1, "the run began", "it begins again on the changed data"),
    ],
)
@pytest.mark.fault("D9")
def test_data_that_changed_since_the_checkpoint_are_not_gone_on_with(
    step, since, consequence, rows_recipe, tiny, tmp_path
):
    (recipe, data, rows), run = rows_recipe, tmp_path / "run"
    changed = ChaosTest(recipe, tmp_path, tiny.forks)
    assert changed.start(run, f"step.update:{step}:kill") == -9
    data.write_text("\n".join(rows[1:]))
    metrics = (run / "metrics.jsonl").read_bytes()
    assert changed.start(run, "") == 1
    assert (run / "metrics.jsonl").read_bytes() == metrics
    assert f"DataError: {data} changed since {since}" in tiny.forks.log.read_text()
    allowed = tmp_path / "allowed"
    copytree(run, allowed)
    assert resume_run(allowed, command="test", changed_data=True) == 0
    assert f"{data} changed since {since}: {consequence}" in (allowed / "run.log").read_text()
    data.write_text("\n".join(rows))
    assert changed.start(run, "") == 0
    assert "was edited" not in (run / "run.log").read_text()


@pytest.mark.parametrize("place", ["", "*.jsonl"])
@pytest.mark.fault("D9")
def test_a_file_added_to_the_data_is_not_gone_on_with(place, rows_recipe, tiny, tmp_path):
    recipe, data, rows = rows_recipe
    folder, run = tmp_path / "folder", tmp_path / "run"
    folder.mkdir()
    data.rename(folder / "b.jsonl")
    recipe.write_text(recipe.read_text().replace(str(data), str(folder / place)))
    changed = ChaosTest(recipe, tmp_path, tiny.forks)
    assert changed.start(run, "step.update:2:kill") == -9
    (folder / "a.jsonl").write_text("\n".join(rows).replace('question": "', 'question": "9'))
    assert changed.start(run, "") == 1
    assert f"DataError: {folder}/a.jsonl added since step 1, so" in tiny.forks.log.read_text()
    (folder / "a.jsonl").unlink()
    assert changed.start(run, "") == 0


@pytest.mark.fault("D17")
def test_data_overwritten_in_place_end_the_run(rows_recipe, monkeypatch, tmp_path):
    (recipe, data, rows), run = rows_recipe, tmp_path / "run"
    os.utime(data, (0, 0))  # the clock of file systems is coarse
    changed = "\n".join(reversed(rows))
    monkeypatch.setitem(failpoints.ACTIONS, "overwrite", lambda _: data.write_text(changed))
    failpoints.arm("step.update:1:overwrite")
    try:
        with pytest.raises(DataError, match=f"{data}: it changed while it was read"):
            start_run(recipe, ["steps=6"], run, command="test")
    finally:
        failpoints.arm("")
    assert CheckpointStore(run / "checkpoints").steps() == [1]
    with pytest.raises(DataError, match=f"{data} changed since step 1"):
        resume_run(run, command="test")
    data.write_text("\n".join(rows))
    assert resume_run(run, command="test") == 0


@pytest.mark.fault("C11")
def test_a_recipe_that_was_edited_under_a_run_is_told(tiny, tmp_path):
    run = tmp_path / "run"
    assert tiny.start(run, "step.update:3:kill") == -9
    config = run / "config.yaml"
    edited = config.read_text().replace("lr: 0.01", "lr: 0.02")
    assert edited != config.read_text()
    config.write_text(edited)
    assert tiny.start(run, "") == 0
    assert (
        "the recipe was edited since step 2; the new values apply from here on: stages.0.optimizer.lr: 0.01 "
        "-> 0.02" in (run / "run.log").read_text()
    )


def test_and_at_a_random_time(tiny):
    (trial,) = tiny.draw_random_trials(1, seed=0)
    assert tiny.run_trial(trial).differences == ()


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "summary.json", "model/model.safetensors", "extra"]
)
def test_a_difference_would_be_seen(name, tiny, tmp_path):
    other = tmp_path / "run"
    other.mkdir()
    for path in sorted(tiny.reference_run.rglob("*")):
        copy = other / path.relative_to(tiny.reference_run)
        copy.mkdir() if path.is_dir() else copy.write_bytes(path.read_bytes())
    assert list_differences(tiny.reference_run, other) == []
    if name == "metrics.jsonl":
        *rows, last = [json.loads(line) for line in (other / name).read_text().splitlines()]
        rows.append({**last, "rollout/reward": -1.0})
        (other / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name == "summary.json":
        (other / name).write_text((other / name).read_text().replace('"steps": 3', '"steps": 4'))
    else:
        (other / name).write_bytes(b"x")
    assert len(list_differences(tiny.reference_run, other)) == 1


def test_passages_are_spread_over_the_run():
    assert [
        choose_evenly_spread(3, 4),
        choose_evenly_spread(9, 3),
        choose_evenly_spread(9, 1),
        choose_evenly_spread(2, 1),
    ] == [
        [1, 2, 3],
        [1, 5, 9],
        [9],
        [2],
    ]


def shorten(recipe):
    """The recipe with so few steps that each failpoint is still passed."""
    *first, last = recipe["stages"]
    return {**recipe, "stages": [*({**stage, "steps": 2} for stage in first), {**last, "steps": 3}]}


@pytest.mark.parametrize("name", ["grpo", "stages"])
@pytest.mark.fault("P6")
def test_every_failpoint(name, script, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(script.RECIPES, name, shorten(script.RECIPES[name]))
    monkeypatch.setattr(script, "RESUME_AFTER", "step.update:3:kill")
    result = script.measure(name, tmp_path / name, passages=1, at_random=2, seed=1)
    assert not any(verdict.differences for verdict in result.verdicts), capsys.readouterr().out
    assert script.make_table([result]).count("\n") > 25
