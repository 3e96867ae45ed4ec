"""Training a model that reads pictures by recipes: supervised, GRPO, DPO and distillation, each of
its own stage."""

import json
import math
import shutil
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from pictures import model_directory
from safetensors.torch import load_file, save_file

from ratchet.config.media_limits import PROCESSOR_FILES
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import ConfigError, DataError
from ratchet.models.load import init_policy
from ratchet.models.transformers.multimodal_policy import MultimodalPolicy
from ratchet.training.start import start_run
from ratchet.types import Owner

STEPS, BATCH, HELD_OUT = 2, 3, 2
RECIPE = """\
name: pictures
model: {{path: {model}}}
generator: {{kind: hf}}
device: cpu
threads: 1
environment: {{kind: shapes, size: 32, grid: 2, questions: [colour, shape]}}
sampling: {{max_new_tokens: 4}}
evaluation: {{tasks: 2}}
logging: {{progress: "off", tensorboard: false}}
stages:
  - name: only
    algorithm: {algorithm}
    steps: {steps}
    batch_size: {batch}
    optimizer: {{lr: 1e-3, warmup_steps: 0}}
"""
TEACHER = "{teacher}"
ALGORITHMS = {
    "sft": {"kind": "sft"},
    "grpo": {"kind": "grpo", "group_size": 3},
    "dpo": {"kind": "dpo"},
    "distill_on_policy": {"kind": "distill_on_policy", "teacher": TEACHER, "top_k": 16},
    "on_policy_distillation": {"kind": "on_policy_distillation", "teacher": TEACHER},
}
OTHERS = {
    "sft": 0,
    "grpo": 0,
    "dpo": 1,
    "distill_on_policy": 1,
    "on_policy_distillation": 1,
}  # models beside the policy that are asked about a batch


def judge(trajectory, task):
    """Anything that differs between attempts: a model with random weights hardly ever answers
    rightly."""
    return int(trajectory.tokens[trajectory.owner == Owner.POLICY].sum()) % 5 / 4


def start(directory: Path, algorithm: dict, *overrides: str) -> Path:
    recipe, run = directory / "recipe.yaml", directory / "run"
    recipe.write_text(
        RECIPE.format(
            model=model_directory(), algorithm=json.dumps(algorithm), steps=STEPS, batch=BATCH
        ),
        encoding="utf-8",
    )
    assert start_run(recipe, overrides, run, command="test") == 0
    return run


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    """The model with other weights."""
    directory = tmp_path_factory.mktemp("teacher") / "model"
    shutil.copytree(model_directory(), directory)
    weights, generator = (
        load_file(directory / "model.safetensors"),
        torch.Generator().manual_seed(3),
    )
    for weight in weights.values():
        weight.mul_(torch.empty_like(weight).normal_(1.0, 0.1, generator=generator))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.fixture
def shown(monkeypatch):
    """By model: keys of the media that its learner's forwards were given."""
    keys, hidden = defaultdict(set), MultimodalPolicy.hidden

    def watched(self, tokens_T, positions_T, lengths, routing=None, media=(), **asked):
        # probes have none
        keys[self] |= {one.medium.key for placed in media for one in placed if one.medium.source}
        return hidden(self, tokens_T, positions_T, lengths, routing, media, **asked)

    monkeypatch.setattr(MultimodalPolicy, "hidden", watched)
    return keys


def reads_text(directory: Path) -> Path:
    tokenizer = load_tokenizer(model_directory())
    init_policy(
        get_preset("tiny", vocab_size=tokenizer.vocab_size, hidden_size=32, n_layers=1), seed=1
    ).save(directory)
    tokenizer.save(directory)
    return directory


def prepares_otherwise(directory: Path) -> Path:
    shutil.copytree(model_directory(), directory)
    file = directory / next(name for name in PROCESSOR_FILES if (directory / name).is_file())
    file.write_text(file.read_text().replace("0.5", "0.25"), encoding="utf-8")
    return directory


@pytest.mark.medium
@pytest.mark.parametrize(
    ("make", "keys", "reason"),
    [
        (reads_text, {"kind": "distill_on_policy"}, "reads text alone, but the tasks have images"),
        (
            prepares_otherwise,
            {"kind": "distill_on_policy"},
            "has another media processor than the policy",
        ),
        (
            reads_text,
            {"kind": "on_policy_distillation", "teacher_tokens": "aligned"},
            "reads text alone.* with teacher_tokens=same",
        ),
    ],
)
def test_a_teacher_that_would_see_other_pictures_or_none_is_refused_at_the_start(
    make, keys, reason, tmp_path
):
    with pytest.raises(ConfigError, match=reason):
        start(tmp_path, {**keys, "teacher": str(make(tmp_path / "teacher"))})


@pytest.mark.medium
def test_a_teacher_of_text_is_refused_for_a_game_that_is_seen_as_pictures(tmp_path):
    algorithm = {"kind": "distill_on_policy", "teacher": str(reads_text(tmp_path / "teacher"))}
    seen = {"kind": "frozen_lake", "observation": "both", "size": 2}
    with pytest.raises(ConfigError, match="reads text alone"):
        start(tmp_path, algorithm, f"environment={json.dumps(seen)}")


@pytest.mark.medium
def test_a_teacher_of_text_is_refused_where_pictures_turn_up_among_tasks_without(tmp_path):
    teacher = reads_text(tmp_path / "teacher")
    mixed = {
        "kind": "mixture",
        "parts": [{"kind": "shapes", "size": 32, "grid": 2}, {"kind": "sorting"}],
    }
    with pytest.raises(
        DataError,
        match="teacher only reads text, but a row has a medium of kind image",
    ):
        start(
            tmp_path,
            {"kind": "distill_on_policy", "teacher": str(teacher)},
            f"environment={json.dumps(mixed)}",
        )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ALGORITHMS)
def test_it_trains_and_all_of_its_models_see_the_same_pictures(kind, teacher, shown, tmp_path):
    algorithm = {
        key: str(teacher) if value == TEACHER else value for key, value in ALGORITHMS[kind].items()
    }
    rewards = [f'rewards=[{{"kind": "{__name__}:judge"}}]'] if kind == "grpo" else []
    run = start(tmp_path, algorithm, *rewards)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "policy/loss" in step]
    assert len(steps) == STEPS
    assert all(math.isfinite(step["policy/loss"]) for step in steps)
    assert all(0 < step["policy/grad_norm"] < math.inf for step in steps)
    first, *others = (keys for keys in shown.values() if keys)
    # A held-out loss is computed of given text, and of what a teacher alone guides.
    assert len(first) == STEPS * BATCH + (HELD_OUT if kind not in ("grpo", "dpo") else 0)
    assert others == [first] * OTHERS[kind]
    before, after = (
        load_file(Path(path) / "model.safetensors") for path in (model_directory(), run / "model")
    )
    still = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    assert still == {name for name in before if name.startswith(("model.visual.", "visual."))}


@pytest.mark.slow
def test_ranks_that_divide_the_model_and_its_tokens_train_and_push_as_one_process(tmp_path):
    steps_by_run = []
    for name, keys in (
        ("one", ()),
        ("ranks", ("kind=dtensor", "tensor_parallel=2", "context_parallel=2")),
    ):
        (tmp_path / name).mkdir()
        learner = [f"learner.{key}" for key in keys]
        rewards = f'rewards=[{{"kind": "{__name__}:judge"}}]'
        run = start(tmp_path / name, ALGORITHMS["grpo"], rewards, *learner)
        steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        steps_by_run.append([step for step in steps if "policy/loss" in step])
    for one, ranks in zip(*steps_by_run, strict=True):
        assert ranks["parity/max"] < 1e-4
        for key in ("rollout/reward", "policy/loss", "policy/grad_norm"):
            assert ranks[key] == pytest.approx(one[key], rel=1e-5, abs=1e-6)
