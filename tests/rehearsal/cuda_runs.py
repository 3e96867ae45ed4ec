"""Whole runs with `device=cuda`: workers and ranks on devices of their own, resuming, evaluation.

That every recipe trains on the accelerator is shown by tests/recipes/test_every_recipe.py in the
rehearsal's session.
"""

import itertools
import json
import sys

import pytest
import torch
from commands.replay.test_command import trained
from safetensors.torch import load_file
from support.programs import run_program

from ratchet.commands.eval import evaluate_target
from ratchet.commands.eval_setup import EvaluationSettings
from ratchet.observe.matmul_rate import SQUARE_SIDE_BY_DEVICE
from ratchet.observe.tracing.profiler import (
    RECORDED_GENERATOR_STEPS,
    ProfiledStage,
    Profiler,
)
from ratchet.testing.tiny_vlm import SHAPES, write_tiny_vlm
from ratchet.training.start import resume_run, start_run
from ratchet.utils.tracer import Tracer

RECIPE = {
    "name": "rehearsed",
    "device": "cuda",
    "threads": 1,
    "logging": {"progress": "off", "tensorboard": False},
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 2}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "rewards": [{"kind": "recipes.test_every_recipe:judge"}],
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 8, "every": 0},
    "batch_size": 8,
    "optimizer": {"lr": 1e-3, "ema_decay": 0.9},
    "checkpoint": {"every": 2},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 2},
        {"name": "grpo", "algorithm": {"kind": "grpo", "group_size": 4}, "steps": 4},
    ],
}
WORKERS = "generator={kind: workers, workers: 1, worker: {kind: engine}}"
NO_AVERAGE = "optimizer.ema_decay=null"
PARITY = "parity={every: 1, threshold: 0.1}"


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """`train(*overrides)`: the directory of a new run that has ended well."""
    directory = tmp_path_factory.mktemp("runs")
    numbers = itertools.count()
    return lambda *overrides: trained(directory / str(next(numbers)), RECIPE, *overrides)


@pytest.fixture(scope="module")
def alone(train):
    """The run of one process on one device."""
    return train(PARITY, NO_AVERAGE)


def read_gradient_norms(run):
    """Return the norms of all updates of the policy."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["policy/grad_norm"] for row in rows if "policy/grad_norm" in row]


def test_a_resumed_run_has_the_same_bits_and_is_evaluated(train, tmp_path):
    whole, stopped = train(), train("stages.grpo.steps=2")
    assert resume_run(stopped, ["stages.grpo.steps=4"], command="test") == 0
    weights = [load_file(run / "model" / "model.safetensors") for run in (whole, stopped)]
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())
    evaluate_target(str(whole), EvaluationSettings(tasks=8, samples=2), out=tmp_path / "eval")
    assert any((tmp_path / "eval").iterdir())


# The command `ratchet`, which measures a small product: an accelerator's takes minutes on a CPU.
RATCHET = """
from ratchet.cli.main import main
from ratchet.observe.matmul_rate import SQUARE_SIDE_BY_DEVICE
SQUARE_SIDE_BY_DEVICE["cuda"] = 64
main()
"""


def test_a_profiled_run_writes_its_table(tmp_path, repository):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(RECIPE), encoding="utf-8")
    words = ["train", recipe, "--run-dir", tmp_path / "run", "--profile", "1"]
    words.append("sampling.max_new_tokens=40")  # more steps than are recorded
    run_program(sys.executable, "-c", RATCHET, *words, cwd=repository, timeout=600)
    tables = list((tmp_path / "run").glob("**/table.txt"))
    assert tables
    for table in tables:
        assert "of the accelerator" in table.read_text(encoding="utf-8")
        assert "of generation after its first steps" in table.read_text(encoding="utf-8")


def test_the_recipe_with_pictures_trains(tmp_path, repository):
    model = write_tiny_vlm(tmp_path / "model", SHAPES)
    tiny = [f"model.path={model}", "device=cuda", "evaluation.tasks=2", "evaluation.every=0"]
    tiny += ["logging.progress=off", "sampling.max_new_tokens=3"]
    for stage in ("sft", "grpo"):
        tiny += [f"stages.{stage}.steps=2", f"stages.{stage}.batch_size=4"]
        tiny.append(f"stages.{stage}.optimizer.warmup_steps=0")
    tiny += ["stages.grpo.algorithm.equal_rewards=keep"]
    recipe = repository / "ratchet" / "recipes" / "shapes.yaml"
    assert start_run(recipe, tiny, tmp_path / "run", command="test") == 0
    assert min(read_gradient_norms(tmp_path / "run")[:2]) > 0


PARTS = {
    "a frozen base in float8": [
        "stages.grpo.lora={rank: 2, alpha: 4, base: float8}",
        "device=cuda:1",
    ],
    "experts whose routes are replayed": [
        "model.overrides={hidden_size: 32, n_layers: 2, family: qwen3_moe, n_experts: 4, "
        "experts_per_token: 2, expert_intermediate_size: 16}",
        "stages.grpo.algorithm.router={replay: true}",
    ],
}


@pytest.mark.parametrize("name", PARTS)
def test_these_parts_train(name, train):
    norms = read_gradient_norms(train(PARITY, *PARTS[name]))
    assert len(norms) == 6
    assert min(norms) > 0


SETUPS = {
    "a generator worker on the other accelerator": [WORKERS],
    "weights by broadcast": [WORKERS, "weight_sync.kind=collective"],
    "two ranks": ["learner={kind: dtensor, dp_shard: 2}"],
}


@pytest.mark.parametrize("name", SETUPS)
def test_processes_on_devices_of_their_own_train_as_one_does(name, train, alone):
    norms = read_gradient_norms(train(PARITY, NO_AVERAGE, *SETUPS[name]))
    assert len(norms) == 6
    assert min(norms) > 0
    assert norms == pytest.approx(read_gradient_norms(alone), rel=0.05)  # bfloat16


def test_a_profile_has_the_first_steps_of_the_generator_and_whole_updates(tmp_path, monkeypatch):
    monkeypatch.setitem(SQUARE_SIDE_BY_DEVICE, "cuda", 64)
    subject = ProfiledStage(
        stage="a",
        device=torch.device("cuda:0"),
        dtype=torch.float32,
        threads=1,
        vocab_size=12,
        largest_layer=(8, 8),
        requested_tokens=lambda: float(len(generated)),
        generated_tokens=lambda: float(len(generated)),
    )
    generated, tracer = [], Tracer()
    profiler = Profiler(
        subject, 1, first_step=0, steps_left=1, directory=tmp_path, show=lambda text: None
    )
    tracer.subscribe(profiler.follow, phases_only=True)
    x = torch.ones(3, 5, device="cuda:0", requires_grad=True)
    profiler.begin_step()
    with tracer.phase("steps", "sample", 1):
        for _ in range(RECORDED_GENERATOR_STEPS + 8):
            generated.append(x.detach() @ x.detach().T)
            profiler.end_generator_step()
    with tracer.phase("steps", "update", 1):
        (x @ x.T).sum().backward()
    with tracer.phase("steps", "evaluate", 1):
        generated.append(x.detach() @ x.detach().T)
    profiler.end_step()
    assert profiler.profile is not None
    phases = profiler.profile.phases
    # Each operation has three events here: this backend calls the CPU's.
    product = 3 * 2 * 3 * 5 * 3
    assert phases["sample"].flop == RECORDED_GENERATOR_STEPS * product
    assert phases["sample"].tokens == RECORDED_GENERATOR_STEPS
    assert phases["update"].flop == 3 * product  # with the backward's
    assert phases["sample"].seconds > phases["sample"].unrecorded_s > 0
    assert phases["update"].unrecorded_s == 0
    assert "of generation after its first steps" in profiler.profile.table()
