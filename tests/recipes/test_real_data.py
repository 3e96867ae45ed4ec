"""The recipes on published files, end to end on a CPU, cut down to a few steps of a smaller
model."""

import json
import math

import pytest

from ratchet.config.loader import load_config
from ratchet.training.start import start_run

HH, GSM8K = "hh_rlhf/harmless-base.test.1200.jsonl", "gsm8k/train.jsonl"
RECIPES = {"sft_gsm8k": GSM8K, "dpo_hh": HH, "reward_model_hh": HH}
SMALL = ["hidden_size=32", "n_layers=1", "n_heads=2", "n_kv_heads=2", "intermediate_size=32"]


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_trains_on_the_published_file(name, repository, shared_data, tmp_path):
    recipe, train = repository / "ratchet" / "recipes" / f"{name}.yaml", shared_data(RECIPES[name])
    files = [f"environment.train={train}", f"tokenizer.texts=[{train}]"]
    files += [f"environment.test={shared_data('gsm8k/test.jsonl')}"] if name == "sft_gsm8k" else []
    stages = [f"stages.{stage.name}" for stage in load_config(recipe, files).stages]
    cut = [
        f"{stage}.{key}"
        for stage in stages
        for key in ("steps=3", "batch_size=4", "optimizer.warmup_steps=0")
    ]
    shape = [f"model.overrides.{pair}" for pair in SMALL]
    rest = [
        "evaluation.tasks=4",
        "sampling.max_new_tokens=4",
        "logging.progress=off",
        "logging.tensorboard=false",
    ]
    run = tmp_path / "run"
    assert start_run(recipe, [*files, *cut, *shape, *rest], run, command="test") == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 3 * len(stages)
    assert all(
        math.isfinite(row["policy/loss"]) and row["policy/grad_norm"] > 0
        for row in rows
        if row.get("policy/loss")
    )
    assert 0 <= rows[-1]["eval/accuracy"] <= 1
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_it_validates_as_it_stands(name, repository):
    path = repository / "ratchet" / "recipes" / f"{name}.yaml"
    config = load_config(path)
    assert config.name == name
    assert len(path.read_text().splitlines()) <= 45
