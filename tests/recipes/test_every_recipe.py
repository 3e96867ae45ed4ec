"""Every recipe from its file to a saved model: two tiny steps a stage, and a gradient in the
last."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
from support.rotation import todays

from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.schema import StageConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.models.load import init_policy
from ratchet.training.start import start_run
from ratchet.types import Owner

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = {
    "grpo_gsm8k",
    "sft_gsm8k",
    "dpo_hh",
    "reward_model_hh",
    "shapes",
}  # real data: test_gsm8k.py, test_real_data.py; pictures: test_in_part.py
RECIPES = sorted(
    path.stem
    for path in (ROOT / "ratchet" / "recipes").glob("*.yaml")
    if path.stem not in ELSEWHERE
)
SMALL = ["hidden_size=32", "n_layers=1", "n_heads=2", "n_kv_heads=2", "intermediate_size=32"]


def judge(trajectory, task):
    """Anything that differs between attempts."""
    return int(trajectory.tokens[trajectory.owner == Owner.POLICY].sum()) % 5 / 4


@pytest.fixture(scope="session")
def benchmark() -> ModuleType:
    """benchmarks/recipes.py, which is not a package's."""
    spec = spec_from_file_location("benchmarks_recipes", ROOT / "benchmarks" / "recipes.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """A model as the recipes' teachers are, with the quick-start's tokenizer."""
    directory = tmp_path_factory.mktemp("teacher")
    tokenizer = character_tokenizer("0123456789=")
    shape = {key: int(value) for key, value in (pair.split("=") for pair in SMALL)}
    init_policy(get_preset("tiny", vocab_size=tokenizer.vocab_size, **shape), seed=1).save(
        directory
    )
    tokenizer.save(directory)
    return directory


def cut_down(stage: StageConfig) -> Iterator[str]:
    at = f"stages.{stage.name}"
    yield from (
        f"{at}.steps=2",
        f"{at}.batch_size=4",
        f"{at}.evaluation.tasks=4",
        f"{at}.evaluation.every=0",
    )
    yield f"{at}.optimizer.warmup_steps=0"
    if getattr(stage.algorithm, "critic", None) is not None:
        yield f"{at}.algorithm.critic.warmup_steps=0"
    # an untrained model hardly ever earns a reward that the environment's own steps give
    if stage.source == "rollouts":
        names = [
            str(getattr(reward, "kind", "")).rpartition(":")[2] for reward in stage.rewards
        ] or ["judge"]
        for name in names:  # what is given by a part's name must still find it
            setattr(sys.modules[__name__], name, judge)
        yield f"{at}.rewards={json.dumps([{'kind': f'{__name__}:{name}'} for name in names])}"


@pytest.mark.parametrize("name", todays(RECIPES, 10))
def test_a_recipe_runs_from_its_file_to_a_saved_model(name, benchmark, teacher, tmp_path):
    path = ROOT / "ratchet" / "recipes" / f"{name}.yaml"
    needed = benchmark.read_header(path).needs
    teachers = benchmark.replace_directories(path, dict.fromkeys(needed, str(teacher)))
    config = load_config(path, teachers)
    shape = [f"model.overrides.{pair}" for pair in SMALL]
    stages = [override for stage in config.stages for override in cut_down(stage)]
    overrides = [
        "threads=1",
        "logging.progress=off",
        "logging.tensorboard=false",
        *shape,
        *teachers,
        *stages,
    ]
    run = tmp_path / "run"
    assert start_run(path, overrides, run, command="test") == 0
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["step"] == 2 * len(config.stages)
    assert math.isfinite(last["policy/loss"])
    assert 0 < last["policy/grad_norm"] < math.inf
    assert (run / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_what_a_reader_takes_in_at_a_glance(name, benchmark):
    """Its own name, one thread, and where it states a result, one that learning has raised."""
    path = ROOT / "ratchet" / "recipes" / f"{name}.yaml"
    config, header = load_config(path), benchmark.read_header(path)
    assert config.name == name
    assert len(path.read_text().splitlines()) <= 45
    for before, after in header.measured.values():
        assert 0 <= before < after <= 100
    for directory, needed in header.needs.items():
        assert (ROOT / "ratchet" / "recipes" / f"{needed}.yaml").is_file()
        assert len(benchmark.replace_directories(path, {directory: "elsewhere"})) == 1
