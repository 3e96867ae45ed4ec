"""Which checkpoints a run keeps, and what it does where its time or its disk ends."""

import json

import pytest
import yaml
from forked_runs import training_forks

from ratchet.config.checks.stages import conflicts
from ratchet.config.schema import RunConfig
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.testing.kill_and_resume import ChaosTest, list_differences
from ratchet.training.run import OUT_OF_TIME

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "evaluation": {"tasks": 0},
    "logging": {"progress": "off", "tensorboard": False},
    "algorithm": {"kind": "sft"},
    "optimizer": {"lr": 0.05},
    "steps": 4,
    "batch_size": 4,
}


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with training_forks(tmp_path_factory.mktemp("forks") / "output.log") as made:
        yield made


def train_in(forks, folder, checkpoint, fault="", **keys):
    """Start, or go on with, the run of a folder, with these keys of `checkpoint`, and maybe a
    fault. Return its status."""
    folder.mkdir(exist_ok=True)
    recipe = folder / "probe.yaml"
    changes = {"checkpoint": {"every": 1, **checkpoint}, **keys}
    recipe.write_text(yaml.safe_dump({**RECIPE, **changes}))
    return ChaosTest(recipe, folder, forks).start(folder / "run", fault)


@pytest.fixture
def training(forks, tmp_path):
    """`train_in` for a folder's name."""

    def start(name, checkpoint, fault="", **keys):
        return train_in(forks, tmp_path / name, checkpoint, fault, **keys)

    return start


@pytest.mark.slow
def test_what_has_no_time_for_another_step_saves_and_can_be_resumed(training, tmp_path):
    assert training("whole", {}) == 0
    # each process has time for one step
    statuses = [training("limited", {"limit_s": 0.001}) for _ in range(5)]
    assert statuses == [OUT_OF_TIME] * 4 + [0]
    different = list_differences(tmp_path / "whole" / "run", tmp_path / "limited" / "run")
    assert different == ["config.yaml differs"]
    assert "no time for another step" in (tmp_path / "limited" / "run" / "run.log").read_text()


@pytest.mark.medium
def test_a_limit_that_is_far_off_changes_nothing(training):
    assert training("run", {"limit_s": 10_000}) == 0


@pytest.mark.medium
@pytest.mark.fault("P10")
def test_where_the_disk_is_full_the_run_ends_and_can_be_resumed(training, forks, tmp_path):
    assert training("run", {}, "checkpoint.after_write:2:enospc") == 1
    assert "CheckpointError: the checkpoint of step 2 can't be written" in forks.log.read_text()
    assert CheckpointStore(tmp_path / "run" / "run" / "checkpoints").steps() == [1]
    assert training("run", {}) == 0


@pytest.mark.medium
@pytest.mark.fault("P10")
def test_or_goes_on_and_warns_where_the_recipe_says_so(training, tmp_path):
    assert training("run", {"on_error": "warn"}, "checkpoint.after_write:2:enospc") == 0
    assert CheckpointStore(tmp_path / "run" / "run" / "checkpoints").steps() == [3, 4]
    assert "step 2 can't be written" in (tmp_path / "run" / "run" / "run.log").read_text()


@pytest.mark.medium
@pytest.mark.parametrize(
    ("metric", "best"), [("policy/grad_norm", max), ("-policy/grad_norm", min)]
)
def test_the_best_by_a_metric_stay(metric, best, training, tmp_path):
    assert training("run", {"keep": 1, "keep_best": 1, "metric": metric}) == 0
    run = tmp_path / "run" / "run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    measured = {row["step"]: row["policy/grad_norm"] for row in rows if "policy/grad_norm" in row}
    assert CheckpointStore(run / "checkpoints").steps() == sorted(
        {4, best(measured, key=measured.__getitem__)}
    )


@pytest.mark.slow
def test_a_checkpoint_that_only_a_signal_asked_for_is_never_the_best(training, tmp_path):
    keys = {"every": 2, "keep": 1, "keep_best": 1, "end_with": "best", "metric": "policy/lr"}
    falling = {"optimizer": {"lr": 0.05, "schedule": "linear"}}  # the first step is the best
    assert training("whole", keys, **falling) == 0
    assert training("stopped", keys, "step.update:1:terminate", **falling) == 143
    assert CheckpointStore(tmp_path / "stopped" / "run" / "checkpoints").steps() == [1]
    assert training("stopped", keys, **falling) == 0
    models = [
        tmp_path / name / "run" / "model" / "model.safetensors" for name in ("whole", "stopped")
    ]
    assert models[0].read_bytes() == models[1].read_bytes()
    assert CheckpointStore(tmp_path / "stopped" / "run" / "checkpoints").steps() == [2, 4]


# --- beside the training


@pytest.mark.slow
def test_what_is_written_beside_the_training_is_the_same(training, tmp_path):
    for name, background in (("at_once", False), ("beside", True)):
        assert training(name, {"keep": 4, "background": background}) == 0
    one, other = tmp_path / "at_once" / "run", tmp_path / "beside" / "run"
    assert list_differences(one, other) == ["config.yaml differs"]
    assert CheckpointStore(other / "checkpoints").steps() == [1, 2, 3, 4]


POINTS = (
    "begin",
    "between_files",
    "after_write",
    "after_manifest",
    "after_sync",
    "after_rename",
    "published",
)


@pytest.fixture(scope="module")
def whole(forks, tmp_path_factory):
    """The run that is not killed."""
    folder = tmp_path_factory.mktemp("whole")
    assert train_in(forks, folder, {"background": True}) == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.fault("P6")
@pytest.mark.parametrize(
    "kill",
    [
        "checkpoint.copied:2:kill",
        f"checkpoint.{POINTS[-1]}:2:kill",
        *(
            pytest.param(f"checkpoint.{point}:2:kill", marks=pytest.mark.slow)
            for point in POINTS[:-1]
        ),
    ],
)
def test_a_kill_beside_the_training_leaves_the_checkpoint_before_whole(
    kill, whole, training, tmp_path
):
    assert training("killed", {"background": True}, kill) == -9
    run = tmp_path / "killed" / "run"
    if "begin" in kill or "copied" in kill or "write" in kill:
        latest = CheckpointStore(run / "checkpoints").latest()
        assert latest is not None
        assert latest.step == 1
    assert training("killed", {"background": True}) == 0
    assert list_differences(whole, run) == []


RANKS = {
    "kind": "dtensor",
    "dp_shard": 2,
    "micro_batch_tokens": 32,
}


@pytest.fixture(scope="module")
def whole_on_ranks(forks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    assert train_in(forks, folder, {"keep": 4}, learner=RANKS) == 0
    return folder / "run"


@pytest.mark.slow
@pytest.mark.fault("P6")
@pytest.mark.parametrize("kill", ["copied", "begin", "after_write", "published"])
def test_a_kill_while_ranks_write_leaves_the_checkpoint_before_whole(
    kill, whole_on_ranks, training, tmp_path
):
    """The ranks end with the driver, wherever their threads are."""
    beside = {"keep": 4, "background": True}
    assert training("killed", beside, f"checkpoint.{kill}:2:kill", learner=RANKS) == -9
    run = tmp_path / "killed" / "run"
    latest = CheckpointStore(run / "checkpoints").latest()
    assert latest is not None
    assert latest.step == (2 if kill == "published" else 1)
    assert training("killed", beside, learner=RANKS) == 0
    assert list_differences(whole_on_ranks, run) == ["config.yaml differs"]


@pytest.mark.slow
@pytest.mark.fault("P10")
@pytest.mark.parametrize("at", [2, 3])
def test_a_disk_that_is_full_beside_the_training_is_told_at_the_next_step(
    at, training, forks, tmp_path
):
    fault = f"checkpoint.after_write:{at}:enospc"
    assert training("stops", {"background": True}, fault) == 1
    assert f"CheckpointError: the checkpoint of step {at} can't be written" in forks.log.read_text()
    store = CheckpointStore(tmp_path / "stops" / "run" / "checkpoints")
    assert max(store.steps()) == at - 1
    assert training("stops", {"background": True}) == 0
    assert training("warns", {"background": True, "on_error": "warn", "keep": 4}, fault) == 0
    run = tmp_path / "warns" / "run"
    assert CheckpointStore(run / "checkpoints").steps() == sorted({1, 2, 3, 4} - {at})
    assert f"step {at} can't be written" in (run / "run.log").read_text()


@pytest.mark.medium
def test_a_signal_while_it_is_written_waits_for_both(training, tmp_path):
    assert (
        training("run", {"background": True, "keep": 4}, "checkpoint.after_write:2:interrupt")
        == 130
    )
    steps = CheckpointStore(tmp_path / "run" / "run" / "checkpoints").steps()
    assert steps[:2] == [1, 2]
    assert training("run", {"background": True, "keep": 4}) == 0


class OwnLearner:
    """A learner without keys, whose `save` may write any files."""


@pytest.mark.parametrize(
    "kind", ["megatron", "training.test_checkpointing:OwnLearner", "local", "dtensor"]
)
def test_a_learner_that_writes_its_own_files_is_refused(kind):
    """A learner of the user's own would write them to the working directory, not the checkpoint."""
    stage = {
        **{key: RECIPE[key] for key in ("environment", "algorithm")},
        "name": "a",
        "learner": {"kind": kind},
    }
    stage["checkpoint"] = {"background": True}
    recipe = {"model": RECIPE["model"], "tokenizer": RECIPE["tokenizer"], "stages": [stage]}
    found = [conflict.message for conflict in conflicts(RunConfig.model_validate(recipe))]
    refused = any(message.startswith("checkpoint.background writes copies") for message in found)
    assert refused == (kind not in ("local", "dtensor"))
