"""Whole runs through the command line: what they leave behind, and that nothing that happens to the
process changes it."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from command_line import TRAINING_MODULES, call_in_fork, ratchet
from forked_runs import training_forks
from safetensors.numpy import load_file

from ratchet.errors import RunDirectoryError
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.training.start import resume_run

RECIPE = {
    "name": "probe",
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"every": 3, "tasks": 8},
    "checkpoint": {"every": 2, "keep": 2},
    "optimizer": {"lr": 0.01, "ema_decay": 0.8},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 4, "batch_size": 8, "examples": 20},
        {
            "name": "rl",
            "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.01}},
            "steps": 5,
            "batch_size": 6,
        },
    ],
}


def results(run: Path):
    """Weights and metrics of a run, without what depends on the clock."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = [
        {k: v for k, v in row.items() if not k.startswith(("time/", "system/"))} for row in rows
    ]
    weights = {
        f"{name}/{key}": weight
        for name in ("model", "model-ema")
        for key, weight in _weights(run / name).items()
    }
    return weights, kept


def _weights(model: Path):
    return load_file(model / "model.safetensors")


def assert_equal_runs(a: Path, b: Path):
    (weights_a, rows_a), (weights_b, rows_b) = results(a), results(b)
    assert rows_a == rows_b
    assert weights_a.keys() == weights_b.keys()
    for name, weight in weights_a.items():
        assert weight.tobytes() == weights_b[name].tobytes(), f"{name} differs"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    path = tmp_path_factory.mktemp("recipe") / "probe.yaml"
    path.write_text(yaml.safe_dump(RECIPE))
    return path


@pytest.fixture(scope="module")
def whole(recipe, tmp_path_factory):
    """A run that nothing disturbed."""
    run = tmp_path_factory.mktemp("whole") / "run"
    done = ratchet("train", recipe, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    return run, done.stdout


def test_a_run_leaves_everything_where_it_says(whole):
    run, output = whole
    assert "Held-out accuracy" in output
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "summary.json",
        "run.log",
        "provenance.json",
        "model/config.json",
    ):
        assert (run / name).is_file(), name
    assert list((run / "tensorboard").iterdir())
    summary = json.loads((run / "summary.json").read_text())
    assert [(s["name"], s["algorithm"], s["steps"]) for s in summary["stages"]] == [
        ("sft", "sft", 4),
        ("rl", "grpo", 5),
    ]
    assert summary["seed"] == 0
    assert summary["command"].startswith("ratchet train ")
    assert set(summary["versions"]) == {"ratchet", "torch", "transformers", "python"}
    for stage in summary["stages"]:
        assert 0 <= stage["accuracy_before"] <= 1
        assert 0 <= stage["accuracy_after"] <= 1
        assert stage["seconds"] > 0
    assert summary["stages"][1]["accuracy_before"] == summary["stages"][0]["accuracy_after"]
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(10))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == [
        "step-00000008",
        "step-00000009",
    ]


def test_the_same_recipe_gives_the_same_bits(whole, recipe, tmp_path):
    assert ratchet("train", recipe, "--run-dir", tmp_path / "again").returncode == 0
    assert_equal_runs(whole[0], tmp_path / "again")


@pytest.mark.parametrize(
    "fault",
    [
        "step.sample:2:kill",  # before the first checkpoint: it starts anew
        # inside a step of the first stage
        pytest.param("step.update:4:kill", marks=pytest.mark.slow),
        pytest.param("step.sample:5:kill", marks=pytest.mark.slow),  # between the stages
        # inside a step of the second, whose reference is the first stage's model
        pytest.param("step.update:8:kill", marks=pytest.mark.slow),
        "checkpoint.after_write:3:kill",  # inside a save
    ],
)
def test_a_killed_run_resumes_to_the_same_bits(fault, whole, recipe, tmp_path):
    run = tmp_path / "run"
    killed = ratchet("train", recipe, "--run-dir", run, faults=fault)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = ratchet("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(whole[0], run)


MEMORY = {
    "critic, adaptive KL": {
        "kind": "ppo",
        "critic": {"lr": 0.02, "warmup_steps": 1},
        "kl": {"coef": 0.1, "target": 0.01, "place": "reward"},
        "shaping": [{"kind": "normalise", "over": "running"}],
        "epochs": 2,
    },
    "greedy baseline": {"kind": "remax"},
    "reference rows": {"kind": "kto"},
    "scalar head": {"kind": "reward_model"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "critic, adaptive KL",
        pytest.param("greedy baseline", marks=pytest.mark.slow),
        pytest.param("reference rows", marks=pytest.mark.slow),
        pytest.param("scalar head", marks=pytest.mark.slow),
    ],
)
def test_whatever_an_algorithm_remembers_survives_a_kill(name, tmp_path):
    recipe = tmp_path / "probe.yaml"
    stage = {"name": "one", "algorithm": MEMORY[name], "steps": 4, "batch_size": 8}
    recipe.write_text(yaml.safe_dump({**RECIPE, "stages": [RECIPE["stages"][0], stage]}))
    assert ratchet("train", recipe, "--run-dir", tmp_path / "whole").returncode == 0
    killed = ratchet("train", recipe, "--run-dir", tmp_path / "run", faults="step.update:7:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = ratchet("train", "--resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")
    heads = [
        path / "model" / "score.safetensors" for path in (tmp_path / "whole", tmp_path / "run")
    ]
    assert [head.exists() for head in heads] == [name == "scalar head"] * 2
    if heads[0].exists():
        assert heads[0].read_bytes() == heads[1].read_bytes()


@pytest.mark.medium
def test_a_killed_run_with_products_in_bfloat16_resumes_to_the_same_bits(tmp_path):
    recipe = tmp_path / "probe.yaml"
    recipe.write_text(yaml.safe_dump({**RECIPE, "precision": "bfloat16"}))

    def run(*words: object, faults: str = "") -> subprocess.CompletedProcess[str]:
        return call_in_fork(
            "support.emulated_bfloat16:run_command",
            [str(word) for word in words],
            environment={"RATCHET_FAULTS": faults},
            timeout=300,
            preload=TRAINING_MODULES,
        )

    assert run("train", recipe, "--run-dir", tmp_path / "whole").returncode == 0
    killed = run("train", recipe, "--run-dir", tmp_path / "run", faults="step.update:7:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert run("train", "--resume", tmp_path / "run").returncode == 0
    assert_equal_runs(tmp_path / "whole", tmp_path / "run")


SIGNALS = {"interrupt": 130, "terminate": 143, "hang_up": 129}


@pytest.fixture(scope="module")
def forks(tmp_path_factory):
    with training_forks(tmp_path_factory.mktemp("forks") / "log") as forks:
        yield forks


@pytest.mark.slow
@pytest.mark.fault("P8")
@pytest.mark.parametrize("fault", SIGNALS)
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    fault, forks, whole, recipe, tmp_path
):
    run = tmp_path / "run"
    train = "ratchet.testing.kill_and_resume:train_here"
    assert forks.call(train, str(recipe), str(run), f"step.update:7:{fault}") == SIGNALS[fault], (
        forks.log.read_text()
    )
    assert max(CheckpointStore(run / "checkpoints").steps()) == 7
    assert f"ratchet train --resume {run}" in forks.log.read_text()
    assert forks.call(train, str(recipe), str(run), "") == 0, forks.log.read_text()
    assert_equal_runs(whole[0], run)


@pytest.mark.slow
@pytest.mark.fault("P8")
def test_evaluations_that_signals_put_off_are_made_up(forks, tmp_path):
    recipe = tmp_path / "probe.yaml"
    keys = {
        "evaluation": {"every": 1, "tasks": 8, "patience": 2, "metric": "eval/loss"},
        "checkpoint": {"every": 1, "keep": 1, "keep_best": 1, "end_with": "best"},
        "optimizer": {"lr": 1.0, "warmup_steps": 0, "ema_decay": 0.8},  # the loss grows at once
        "stages": [{**RECIPE["stages"][0], "steps": 6}],
    }
    recipe.write_text(yaml.safe_dump({**RECIPE, **keys}))
    train = "ratchet.testing.kill_and_resume:train_here"
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert forks.call(train, str(recipe), str(whole), "") == 0, forks.log.read_text()
    for fault, status in (
        ("step.update:1:terminate", 143),
        ("metrics.written:1:kill", -signal.SIGKILL),  # before the checkpoint has the score
        ("step.update:1:terminate", 143),
    ):
        assert forks.call(train, str(recipe), str(run), fault) == status, forks.log.read_text()
    assert forks.call(train, str(recipe), str(run), "") == 0, forks.log.read_text()
    assert_equal_runs(whole, run)
    losses = [row["eval/loss"] for row in results(run)[1]]
    assert 1 < len(losses) < 6, "the run should end early"


@pytest.mark.medium
def test_resuming_a_finished_run_changes_nothing(whole, tmp_path):
    run, _ = whole
    before = {p: p.read_bytes() for p in (run / "model").iterdir()}
    again = ratchet("train", "--resume", run)
    assert again.returncode == 0, again.stderr
    assert "Held-out accuracy" in again.stdout
    assert {p: p.read_bytes() for p in (run / "model").iterdir()} == before


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["train"], 2, "next: ratchet train quickstart"),
        (["train", "absent.yaml"], 2, "absent.yaml"),
        (["train", "{recipe}", "stages.rl.algorithm.loss.clip_hihg=0.3"], 2, "clip_high"),
        (["train", "{recipe}", "--run-dir", "{run}"], 2, "holds a run. Continue it with --resume"),
        (["train", "--resume", "{tmp}"], 2, "holds no run"),
        (["report", "{tmp}/nope"], 2, "holds no run"),
        (["ui", "{tmp}/nope"], 2, "there is no directory"),
        (["chat", "{run}", "--prompt", "Ж"], 2, "(U+0416) has no token"),
        (["eval", "{tmp}"], 2, "config.json"),
        (["check", "{recipe}", "seed=-1"], 2, "seed"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    arguments, status, message, whole, recipe, tmp_path
):
    filled = [a.format(recipe=recipe, run=whole[0], tmp=tmp_path) for a in arguments]
    done = ratchet(*filled)
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_configuration_that_no_run_wrote_is_refused(recipe, tmp_path):
    shutil.copy(recipe, tmp_path / "config.yaml")
    with pytest.raises(
        RunDirectoryError, match=r"config.yaml: (device|threads)=auto, but a run stores"
    ):
        resume_run(tmp_path, command="")


@pytest.mark.medium
def test_eval_and_chat_read_the_run(whole):
    run, _ = whole
    evaluated = ratchet("eval", run, "--tasks", 8, "--samples", 2)
    assert evaluated.returncode == 0, evaluated.stderr
    assert "mean@2" in evaluated.stdout
    said = ratchet("chat", run, "--prompt", "21=")
    assert said.returncode == 0, said.stderr


@pytest.mark.medium
def test_check_and_doctor(recipe):
    checked = ratchet("check", recipe)
    assert checked.returncode == 0
    assert "6 prompts x 4 attempts = 24 trajectories" in checked.stdout
    assert ratchet("doctor").returncode == 0


STARTING = """
import sys
from ratchet.cli.main import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
print(sorted({"torch._dynamo", "torch._inductor", "sympy", "torch.distributed.tensor", "transformers"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_run_never_imports_what_takes_longer_than_torch_itself(recipe, tmp_path):
    command = [
        sys.executable,
        "-c",
        STARTING,
        "train",
        str(recipe),
        "--run-dir",
        str(tmp_path / "run"),
        "stages.rl.steps=1",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_what_a_link_leaves_lies_in_the_runs_directory(recipe, tmp_path):
    """And not in the one that the recipe's name suggests, which may be another run's."""
    run = tmp_path / "elsewhere"
    link = ["weight_sync.kind=files", "learner.kind=dtensor"]
    done = ratchet(
        "train", recipe, "--run-dir", run, *link, "stages.sft.steps=1", "stages.rl.steps=1"
    )
    assert done.returncode == 0, done.stderr
    assert (run / "weight_sync").is_dir()


def test_seconds_of_a_try_are_not_supervised(recipe):
    refused = ratchet("train", recipe, "--supervise", 1, "--try", 5)
    assert refused.returncode == 2
    assert "--try-steps" in refused.stderr


@pytest.mark.slow
def test_a_supervised_run_that_is_killed_again_and_again_ends_in_the_same_bits(
    whole, recipe, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    done = ratchet("train", recipe, "--supervise", 1, faults="step.update:4:kill")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting it again") >= 2
    assert_equal_runs(whole[0], tmp_path / "runs" / "probe")


@pytest.mark.slow
def test_a_signal_to_the_supervisor_saves_and_ends_the_run(recipe, tmp_path):
    run = tmp_path / "run"
    options = ["stages.rl.steps=100000", "checkpoint.every=100000", "--supervise", "3"]
    process = subprocess.Popen(
        [sys.executable, "-m", "ratchet", "train", recipe, "--run-dir", run, *options],
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = run / "metrics.jsonl"
    while process.poll() is None and (not metrics.exists() or metrics.stat().st_size < 5000):
        time.sleep(0.05)
    process.terminate()
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "starting it again" not in stderr
    assert list((run / "checkpoints").glob("step-*"))
