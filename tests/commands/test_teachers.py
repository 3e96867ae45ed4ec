"""Whole runs that learn from a teacher: on prompts that nothing judges, and refused before anything
trains."""

import json

import pytest
import yaml

from ratchet.config.loader import load_config
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.errors import ConfigError
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.training.start import start_run

ALPHABET = "0123456789=+"


@pytest.fixture
def teacher(tmp_path):
    tokenizer = character_tokenizer(ALPHABET)
    config = DecoderConfig(
        tokenizer.vocab_size + 8, 16, 1, 2, 1, 8, 24, max_positions=64, init_std=0.5
    )
    DecoderPolicy(Decoder(config).init_weights(3)).save(tmp_path / "teacher")
    tokenizer.save(tmp_path / "teacher")
    return str(tmp_path / "teacher")


@pytest.fixture
def recipe(tmp_path):
    """Writes one whose environment has prompts alone: nothing judges an attempt."""
    rows = [
        {"prompt": f"{a}+{b}=", "chosen": "1", "rejected": "2"} for a in range(8) for b in range(8)
    ]
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps(row) for row in rows))

    def write(*stages):
        given = {
            "name": "probe",
            "threads": 1,
            "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
            "tokenizer": {"kind": "characters", "alphabet": ALPHABET},
            "environment": {"kind": "preferences", "train": str(tmp_path / "prompts.jsonl")},
            "sampling": {"max_new_tokens": 3},
            "evaluation": {"tasks": 0},
            "optimizer": {"lr": 0.01},
            "logging": {"progress": "off", "tensorboard": False},
            "stages": [{"steps": 2, "batch_size": 4, **stage} for stage in stages],
        }
        path = tmp_path / "probe.yaml"
        path.write_text(yaml.safe_dump(given))
        return path

    return write


@pytest.mark.medium
@pytest.mark.parametrize("kind", ["distill_on_policy", "on_policy_distillation"])
def test_prompts_alone_are_enough(kind, teacher, recipe, tmp_path):
    path = recipe({"name": "d", "algorithm": {"kind": kind, "teacher": teacher}})
    assert start_run(path, [], tmp_path / "run", command="test") == 0
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    for line in (line for line in lines if line["step"]):
        # an untrained model rarely stops within three tokens
        assert line["rollout/truncated_share"] > 0.5
        assert line["rollout/failed_share"] == 0
        assert line["rollout/trained_tokens"] == line["rollout/generated_tokens"] > 0
        assert line["policy/grad_norm"] > 0
        assert not [name for name in line if name.startswith("rollout/reward")]


def test_what_reads_rewards_still_needs_them(teacher, recipe):
    both = {
        "kind": "mixture",
        "parts": [{"kind": "group_relative"}, {"kind": "on_policy_distillation"}],
    }
    algorithm = {
        "kind": "on_policy_distillation",
        "teacher": teacher,
        "advantage": both,
        "group_size": 4,
    }
    with pytest.raises(
        ConfigError, match="nothing judges the attempts in environment preferences: set rewards"
    ):
        load_config(recipe({"name": "d", "algorithm": algorithm}))


@pytest.mark.medium
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": "NONE"}, "teacher: there is no model directory"),
        (
            {"sampling": {"max_new_tokens": 64}},
            "reads 64 tokens, but attempts may have 65. Lower sampling.max_new_tokens",
        ),
        (
            {"tokenizer": {"kind": "characters", "alphabet": ALPHABET[::-1]}},
            "another tokenizer than the policy.* Set teacher_tokens=aligned",
        ),
    ],
)
def test_the_last_stages_teacher_is_refused_before_the_first_trains(
    changes, message, teacher, recipe, tmp_path
):
    given = dict(changes)
    overrides = [f"tokenizer={json.dumps(given.pop('tokenizer'))}"] if "tokenizer" in given else []
    path = given.pop("teacher", teacher).replace("NONE", str(tmp_path / "none"))
    first = {
        "name": "sft",
        "algorithm": {"kind": "sft"},
        "environment": {"kind": "sorting", "digits": 2},
    }
    last = {"name": "d", "algorithm": {"kind": "distill_on_policy", "teacher": path}, **given}
    with pytest.raises(ConfigError, match=message):
        start_run(recipe(first, last), overrides, tmp_path / "run", command="test")
    assert not (tmp_path / "run").exists()  # `ratchet check` says it too
