"""Whole runs with `lora`: what they leave behind, and that one that was killed ends with the same
bits."""

import json
import signal
from pathlib import Path

import pytest
import torch
import yaml
from command_line import ratchet
from safetensors.torch import load_file
from training.test_session import RECIPE

from ratchet.checkpoint.serialization import load_state
from ratchet.commands.model_target import open_target
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.errors import ModelError
from ratchet.models.load import init_policy, load_policy
from ratchet.models.lora.decoder import is_adapter_parameter, merge_lazily
from ratchet.models.lora.files import WEIGHTS, load_adapter
from ratchet.training.start import resume_run, start_run

pytestmark = pytest.mark.needs("peft")
QUIET = ["logging.progress=off", "logging.tensorboard=false"]
LORA = {"rank": 2, "dropout": 0.1}
KL = {"coef": 0.01}
ALGORITHMS = {
    "sft": {"kind": "sft"},
    "dpo": {"kind": "dpo"},
    "grpo": {"kind": "grpo", "group_size": 4, "kl": KL},
    "ppo": {"kind": "ppo", "kl": KL},
}


def recipe_of(directory: Path, *stages, **more) -> Path:
    path = directory / "probe.yaml"
    made = {**RECIPE, "stages": list(stages), **more}
    path.write_text(
        yaml.safe_dump({**made, "optimizer": {"lr": 0.01}, "checkpoint": {"every": 1, "keep": 1}})
    )
    return path


def stage(name, algorithm, **more):
    return {"name": name, "algorithm": algorithm, "steps": 2, "batch_size": 4, **more}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_kind_of_algorithm_trains_an_adapter(name, tmp_path):
    """Behind a stage that trains the whole model, which the run keeps as the adapter's base."""
    steps = stage("warm", {"kind": "sft"}), stage("low", ALGORITHMS[name], lora=LORA)
    run = tmp_path / "run"
    assert start_run(recipe_of(tmp_path, *steps), QUIET, run, command="test") == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "policy/trainable_share" in row] == [3]
    assert 0 < rows[3]["policy/trainable_share"] < 0.2
    adapter, base = load_adapter(run / "adapter"), load_policy(run / "base" / "low")
    assert adapter.adapter.base_model == str((run / "base" / "low").absolute())
    whole = load_file(run / "model" / "model.safetensors")
    for key, weight in merge_lazily(
        dict(base.canonical_weights()), adapter.weights, adapter.adapter.lora.scale
    ).items():
        torch.testing.assert_close(
            whole[key], weight.to("cpu", torch.float32, copy=True), rtol=0, atol=1e-6
        )
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert all(is_adapter_parameter(key) for key in load_state(checkpoint / "policy")["parameters"])
    assert (
        sorted(p.name for p in checkpoint.iterdir() if p.is_dir())
        == ["critic", "policy"][name != "ppo" :]
    )


@pytest.mark.slow
def test_two_stages_with_adapters_follow_each_other(tmp_path):
    """The first one's is merged, and is the second one's base and reference."""
    run = tmp_path / "run"
    steps = (
        stage("a", ALGORITHMS["sft"], lora=LORA),
        stage("b", ALGORITHMS["grpo"], lora={"rank": 3}),
    )
    assert start_run(recipe_of(tmp_path, *steps), QUIET, run, command="test") == 0
    bases = [load_file(run / "base" / name / "model.safetensors") for name in ("a", "b")]
    assert any(not torch.equal(bases[0][key], bases[1][key]) for key in bases[0])
    assert load_adapter(run / "adapter").adapter.lora.rank == 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["step.update:4:kill", "step.update:6:kill"])
def test_a_killed_run_resumes_to_the_same_bits(fault, tmp_path):
    """The checkpoints hold the adapter alone."""
    stages = (
        stage("warm", {"kind": "sft"}),
        stage("low", ALGORITHMS["ppo"], lora=LORA),
        stage("b", ALGORITHMS["grpo"], lora=LORA),
    )
    recipe = recipe_of(tmp_path, *stages)
    for run, faults in (("whole", ""), ("killed", fault)):
        done = ratchet("train", recipe, "--run-dir", tmp_path / run, faults=faults)
        assert done.returncode == (-signal.SIGKILL if faults else 0), done.stderr
    assert ratchet("train", "--resume", tmp_path / "killed").returncode == 0
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()
    rows = [
        [
            {
                key: value
                for key, value in json.loads(line).items()
                if not key.startswith(("time/", "system/"))
            }
            for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        ]
        for run in ("whole", "killed")
    ]
    assert rows[0] == rows[1]


def fused_recipe(tmp_path, algorithm, **more):
    """(recipe, tokenizer) of a model of transformers with adapters of fused experts."""
    tokenizer = character_tokenizer("0123456789=")
    shape = DecoderConfig(
        tokenizer.vocab_size, 16, 2, 2, 1, 8, 24, family="qwen3_moe", n_experts=4, experts_per_token=2,
        expert_intermediate_size=12, init_std=0.3,
    )  # fmt: skip
    base = tmp_path / "base"
    init_policy(shape, seed=0).save(base)
    tokenizer.save(base)
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"rank": 2, "target_modules": ["q_proj"], "target_parameters": targets}
    recipe = recipe_of(
        tmp_path,
        {**stage("low", algorithm, lora=lora), "steps": 3},
        model={"path": str(base), "backend": "transformers"},
        tokenizer={"kind": "auto"},
        generator={"kind": "hf"},
        **more,
    )
    return recipe, tokenizer


@pytest.mark.slow
def test_a_killed_run_with_fused_experts_resumes_to_the_same_bits(tmp_path):
    """transformers runs the model. peft loads the adapter, and `ratchet convert` merges it."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    recipe, tokenizer = fused_recipe(tmp_path, ALGORITHMS["dpo"])
    base = tmp_path / "base"
    for run, faults in (("whole", ""), ("killed", "step.update:2:kill")):
        done = ratchet("train", recipe, "--run-dir", tmp_path / run, faults=faults)
        assert done.returncode == (-signal.SIGKILL if faults else 0), done.stderr
    assert ratchet("train", "--resume", tmp_path / "killed").returncode == 0
    for file in ("model/model.safetensors", "adapter/adapter_model.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "killed" / file).read_bytes()
    adapter = tmp_path / "whole" / "adapter"
    moved = {name for name, weight in load_file(adapter / WEIGHTS).items() if weight.any()}
    assert {name for name in moved if ".experts." in name and ".lora_B." in name}
    tokens = torch.arange(10)[None] % tokenizer.vocab_size
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "model")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    with torch.no_grad():
        expected = theirs.eval()(input_ids=tokens).logits
        torch.testing.assert_close(ours(tokens).logits, expected, rtol=0, atol=1e-5)
    merged = ratchet("convert", base, tmp_path / "merged", "--merge-lora", adapter)
    assert merged.returncode == 0, merged.stderr
    left = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    for name, weight in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(left[name], weight, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_a_generator_gets_the_fused_adapters_that_ranks_divide(tmp_path):
    """The parity gate compares it with the learner. Also of a run that is resumed."""
    ranks = {"kind": "dtensor", "dp_shard": 2, "expert_parallel": 2}
    recipe, _ = fused_recipe(
        tmp_path,
        {**ALGORITHMS["grpo"], "entropy_coef": 1.0},
        learner=ranks,
        parity={"first_steps": 9, "threshold": 1e-4},
    )
    run = tmp_path / "run"
    killed = ratchet("train", recipe, "--run-dir", run, faults="step.update:2:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = ratchet("train", "--resume", run)
    assert resumed.returncode == 0, resumed.stderr
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["parity/max"] < 1e-4 for row in rows[1:]] == [True] * 3
    moved = {name for name, w in load_file(run / "adapter" / WEIGHTS).items() if w.any()}
    assert {name for name in moved if ".experts." in name and ".lora_B." in name}


@pytest.mark.slow
def test_a_run_resumes_from_a_model_on_disk_without_a_copy_of_it(tmp_path):
    """And its adapter names that model."""
    first = tmp_path / "first"
    assert (
        start_run(recipe_of(tmp_path, stage("warm", {"kind": "sft"})), QUIET, first, command="test")
        == 0
    )
    model = {"model": {"path": str(first / "model")}, "tokenizer": {"kind": "auto"}}
    path, run = (
        recipe_of(tmp_path, stage("low", ALGORITHMS["grpo"], lora=LORA), **model),
        tmp_path / "run",
    )
    assert start_run(path, QUIET, run, command="test") == 0
    assert not (run / "base").exists()
    assert load_adapter(run / "adapter").adapter.base_model == str(first / "model")
    merge = rf"ratchet convert {first}/model NEW_DIRECTORY --merge-lora {run}/adapter"
    with pytest.raises(ModelError, match=merge):
        open_target(run / "adapter")
    assert resume_run(run, command="test") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "learner"),
    [
        ("ppo", {"dp_shard": 2}),
        ("dpo", {"tensor_parallel": 2}),
        ("ppo", {"pipeline_parallel": 2}),
    ],
)
def test_ranks_leave_the_same_files_and_resume(name, learner, tmp_path):
    steps = stage("warm", {"kind": "sft"}), stage("low", ALGORITHMS[name], lora=LORA)
    run = tmp_path / "run"
    model = {**RECIPE["model"], "overrides": {**RECIPE["model"]["overrides"], "n_layers": 2}}
    recipe = recipe_of(tmp_path, *steps, model=model, learner={"kind": "dtensor", **learner})
    assert start_run(recipe, QUIET, run, command="test") == 0
    adapter, base = load_adapter(run / "adapter"), load_policy(run / "base" / "low")
    whole = load_file(run / "model" / "model.safetensors")
    for key, weight in merge_lazily(
        dict(base.canonical_weights()), adapter.weights, adapter.adapter.lora.scale
    ).items():
        torch.testing.assert_close(
            whole[key], weight.to("cpu", torch.float32, copy=True), rtol=0, atol=1e-6
        )
    assert resume_run(run, command="test") == 0
    assert all(
        torch.equal(weight, whole[key])
        for key, weight in load_file(run / "model" / "model.safetensors").items()
    )


@pytest.mark.slow
def test_generators_in_other_processes_get_the_base_once_and_then_the_adapter(tmp_path):
    """Also those of a run that is resumed: the parity gate, which stops a run, compares them with
    the learner at first."""
    places = {
        "generator": {
            "kind": "workers",
            "workers": 2,
            "worker": {"kind": "engine", "kv_cache_gib": 0.1},
        }
    }
    steps = (
        stage("warm", {"kind": "sft"}),
        stage("low", {**ALGORITHMS["grpo"], "group_size": 8}, lora=LORA),
    )
    recipe = recipe_of(tmp_path, *steps, **places, parity={"first_steps": 9, "threshold": 1e-4})
    killed = ratchet("train", recipe, "--run-dir", tmp_path / "run", faults="step.update:4:kill")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = ratchet("train", "--resume", tmp_path / "run")
    assert resumed.returncode == 0, resumed.stderr
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert all(row["parity/max"] < 1e-4 for row in rows[3:])
    assert len(rows) == 5
