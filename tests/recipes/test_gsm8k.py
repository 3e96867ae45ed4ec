"""The GSM8K recipe, end to end on a CPU: a tiny random Hugging Face directory, the real data, two
steps."""

import json

import pytest

from ratchet.config.loader import load_config
from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_bpe_tokenizer
from ratchet.models.load import init_policy
from ratchet.training.start import start_run


@pytest.fixture
def model(tmp_path):
    """A Llama-shaped directory as the hub would give it, with a chat template of its own."""
    tokenizer = byte_bpe_tokenizer(
        ["Natalia sold clips to 48 of her friends in April. #### 72"] * 4, vocab_size=300
    )
    shape = get_preset(
        "tiny", tokenizer.vocab_size, family="llama", qk_norm=False, tied=False, max_positions=512
    )
    directory = tmp_path / "model"
    init_policy(shape, seed=0).save(directory)
    tokenizer.save(directory)
    return directory


def test_two_steps_on_the_real_data(repository, shared_data, model, tmp_path):
    train, test = shared_data("gsm8k/train.jsonl"), shared_data("gsm8k/test.jsonl")
    overrides = [
        f"model.path={model}",
        "tokenizer.template=chatml",
        f"environment.train={train}",
        f"environment.test={test}",
        "threads=1",
        "steps=2",
        "batch_size=3",
        "algorithm.group_size=4",
        "sampling.max_new_tokens=12",
        "optimizer.warmup_steps=1",
        "evaluation.tasks=4",
        "checkpoint.every=1",
    ]
    run = tmp_path / "run"
    assert (
        start_run(repository / "ratchet/recipes/grpo_gsm8k.yaml", overrides, run, command="test")
        == 0
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert 0 < rows[-1]["rollout/generated_tokens"] <= 3 * 4 * 12
    assert rows[-1]["rollout/failed_share"] == 0
    assert (run / "model" / "model.safetensors").is_file()
    assert (run / "model" / "tokenizer.json").is_file()


def test_it_validates_as_it_stands(repository):
    config = load_config(repository / "ratchet/recipes/grpo_gsm8k.yaml")
    assert config.model.path == "Qwen/Qwen3-0.6B"
    assert config.stages[0].algorithm.n_attempts == 16
