"""Recipes that ask for a precision which can't be had here: each is refused when it is read, with
what to change."""

import re

import pytest

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError
from ratchet.executors.freeze import freeze

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
"""
WITHOUT_PACKAGES = {
    "optimizer={kind: adamw8bit}": "bitsandbytes, which is not installed: pip install "
    "'ratchet-rl[quantised]', or set "
    "optimizer.kind=adamw",
    "lora={base: nf4}": "bitsandbytes, which is not installed: pip install 'ratchet-rl[quantised]', "
    "set lora.base=float8, or remove",
    "generator={kind: workers, worker: {kind: engine, quantise: nf4}}": "bitsandbytes, which is not "
    "installed: pip install "
    "'ratchet-rl[quantised]', or set generator.quantise=float8",
}
WRONG = {
    "lora={base: float8} learner={kind: dtensor}": "lora.base=float8 quantises whole matrices, and "
    "learner.kind=dtensor",
    "lora={base: int4}": "lora.base: 'int4' must be 'nf4' or 'float8'",
    "generator={kind: engine, quantise: float8}": "set generator={kind: workers, worker: {kind: "
    "engine, quantise: float8}}",
    "device=cpu learner={kind: megatron, fp8: hybrid, weights: bfloat16}": "works only on CUDA devices, and",
    "learner={kind: megatron, fp8: e4m3}": "needs weights in bfloat16, and learner.weights=float32: set learner.weights=bfloat16",
    "lora={rank: 4} learner={kind: megatron, weights: bfloat16}": "is for training them: set learner.weights=float32",
    "device=cpu precision=bfloat16 learner={kind: dtensor}": "computes in float32: set precision=auto, "
    "or learner.kind=local",
    "device=cpu precision=bfloat16 generator={kind: hf}": "generator.kind=hf, which rounds otherwise",
    "device=cpu precision=bfloat16 model={path: x, backend: transformers}": "for the built-in decoder "
    "only, and model.backend=transformers",
    "device=cpu generator={kind: vllm, quantise: float8}": "works in vLLM only on CUDA devices, "
    "and there is none here: remove it",
}


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """What is said of RECIPE with this override where no package of those that low precision needs
    is installed."""
    monkeypatch.setattr("ratchet.config.checks.precision.find_spec", lambda name: None)
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)

    def refusal(*overrides):
        with pytest.raises(ConfigError) as caught:
            load_config(path, overrides)
        return str(caught.value)

    return refusal


@pytest.mark.parametrize("override", WITHOUT_PACKAGES)
def test_a_missing_package_is_named(override, refusal):
    assert WITHOUT_PACKAGES[override] in refusal(override)


@pytest.mark.parametrize("overrides", WRONG)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(overrides, refusal):
    assert WRONG[overrides] in refusal(*re.split(r" (?=[a-z]+=)", overrides))


def test_quantised_rollouts_of_vllm_want_an_accelerator(refusal, monkeypatch):
    """Those of another machine are judged there."""
    monkeypatch.setattr("ratchet.config.checks.precision.CUDA_DEVICES", ())
    wanted = "generator.quantise=float8 works in vLLM only on CUDA devices, and there is none here"
    assert wanted in refusal("generator={kind: vllm, quantise: float8}")


def test_cuda_has_no_choice_of_precision(refusal, monkeypatch, tmp_path):
    said = refusal("device=cuda", "precision=float32")
    assert "device=cuda multiplies in bfloat16. Set precision=auto" in said
    # Only `freeze` finds out what device=auto is.
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    config = load_config(tmp_path / "r.yaml", ["precision=float32"])
    with pytest.raises(ConfigError, match=r"device=auto became cuda.*Set precision=auto, or"):
        freeze(config)


def test_a_key_of_the_run_is_found_at_its_line_and_once(tmp_path):
    path = tmp_path / "r.yaml"
    stages = "stages: [{name: a, algorithm: {kind: grpo}}, {name: b, algorithm: {kind: grpo}}]"
    shared = RECIPE.replace("algorithm: {kind: grpo}\n", "")
    path.write_text(f"{shared}{stages}\ndevice: cuda\nprecision: float32\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert str(caught.value).count("precision=float32 is for CPUs") == 1
    assert "r.yaml:7: precision: " in str(caught.value)


def test_recipes_of_runs_on_cuda_are_read_without_one(tmp_path, monkeypatch):
    monkeypatch.setattr("ratchet.config.checks.precision.CUDA_DEVICES", ())
    path = tmp_path / "r.yaml"
    path.write_text(f"{RECIPE}device: cuda\nprecision: bfloat16\nlearner: {{kind: dtensor}}\n")
    assert load_config(path).rounds_products


@pytest.mark.parametrize(("device", "rounds"), [("cpu", False), ("cuda", True), ("mps", False)])
def test_what_auto_stands_for(device, rounds, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(f"{RECIPE}threads: 1\ndevice: {device}\n")
    config = load_config(path)
    assert config.rounds_products == rounds
    assert freeze(config).precision == ("bfloat16" if rounds else "float32")


def test_fp8_training_wants_transformer_engine(refusal, monkeypatch, tmp_path):
    monkeypatch.setattr("ratchet.config.checks.precision.CUDA_DEVICES", (str(tmp_path),))
    said = refusal("learner={kind: megatron, fp8: hybrid, weights: bfloat16}")
    assert (
        "which is not installed: pip install 'transformer-engine[pytorch]', or remove learner.fp8"
        in said
    )
