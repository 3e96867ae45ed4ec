"""A model that reads audio clips beside text goes through the interface of those that read images:
a tiny Qwen2-Audio."""

import asyncio
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from learners.picture_cases import check_ranks, local
from learners.ranks import run_ranks
from sounds import clip, write_tiny_qwen2_audio

from ratchet.batch import Batch
from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.packing import pack
from ratchet.data.processor import load_processor
from ratchet.generators.config import HFConfig
from ratchet.generators.hf import HFGenerator
from ratchet.models.load import load_policy
from ratchet.models.transformers.multimodal_policy import MultimodalPolicy
from ratchet.testing.builders import make_group
from ratchet.types import Message, Part, Sampling, Trajectory

pytestmark = pytest.mark.needs("soundfile")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tiny_qwen2_audio(tmp_path_factory.mktemp("audio"))


def batch_of(directory: Path) -> Batch:
    """Two clips, one of them twice; none; one again."""
    first, second = clip(1, 0.5), clip(2, 0.8)
    text = lambda words: Part("text", words)  # noqa: E731
    dialogues = [
        [
            Message("user", (first, text("and "), second, first, text("?"))),
            Message("assistant", "one"),
        ],
        [Message("user", "nothing"), Message("assistant", "none")],
        [Message("user", (text("hear: "), second)), Message("assistant", "two")],
    ]
    made = Renderer(load_tokenizer(directory), processor=load_processor(directory))
    rows = []
    for messages in dialogues:
        tokens, trainable = made.supervised(messages, train="all")
        rows.append(Trajectory.supervised(tokens, trainable, media=made.media(tokens, messages)))
    return pack([make_group(str(i), [row]) for i, row in enumerate(rows)])


@pytest.mark.medium
def test_packed_sequences_with_clips_are_what_transformers_makes_of_each(directory):
    policy, batch = load_policy(directory), batch_of(directory)
    assert isinstance(policy, MultimodalPolicy)
    assert [[one.medium.kind for one in row] for row in batch.media_S] == [
        ["audio"] * 3,
        [],
        ["audio"],
    ]
    assert [one.medium.span for one in batch.media_S[0]] == [12, 20, 12]
    lengths = batch.lengths_S.tolist()
    with torch.no_grad():
        packed = policy.logits(
            policy(batch.tokens_T, batch.positions_T, lengths, None, batch.media_S)
        ).split(lengths)
        for tokens, media, found in zip(
            batch.tokens_T.split(lengths), batch.media_S, packed, strict=True
        ):
            names = ("input_features", "feature_attention_mask") if media else ()
            given = {
                name: torch.from_numpy(np.concatenate([one.medium.inputs[name] for one in media]))
                for name in names
            }
            theirs = policy.model(input_ids=tokens[None], use_cache=False, **given).logits[0]
            assert torch.allclose(found, theirs, rtol=0, atol=1e-4)
    assert float(packed[0].std()) > 0.1


@pytest.mark.medium
@pytest.mark.parametrize("train_encoders", [False, True])
def test_supervised_steps_move_what_trains_however_the_batch_is_divided(directory, train_encoders):
    batch, before = batch_of(directory), dict(load_policy(directory).canonical_weights())
    steps, after, together, _ = local(
        directory, train_encoders, [batch] * 3, tokens=4096, dtype=torch.float32
    )
    assert steps[2]["loss"] < steps[0]["loss"]
    still = {name for name, weight in before.items() if torch.equal(weight, after[name])}
    heard = {name for name in before if "audio_tower" in name or "multi_modal_projector" in name}
    assert heard
    assert still == (heard if not train_encoders else set())
    *_, alone, _ = local(directory, train_encoders, [batch] * 3, tokens=1, dtype=torch.float32)
    torch.testing.assert_close(alone, together, rtol=0, atol=1e-4)


def test_logprobs_of_what_is_sampled_are_the_learner_s(directory):
    """Prompts of one padded batch, with two clips, one and none."""
    policy = load_policy(directory)
    made = Renderer(load_tokenizer(directory), processor=load_processor(directory))
    asked = [
        [Message("user", (clip(1, 0.5), clip(2, 0.8)))],
        [Message("user", (clip(2, 0.8),))],
        [Message("user", "a")],
    ]
    prompts = [made.prompt(messages) for messages in asked]
    media = [made.media(tokens, messages) for tokens, messages in zip(prompts, asked, strict=True)]
    generator = HFGenerator(HFConfig(), policy)

    async def sample():
        samplings = [Sampling(max_new_tokens=6, seed=i) for i in range(3)]
        return await asyncio.gather(*map(generator.generate, prompts, samplings, media))

    for prompt, placed, completion in zip(prompts, media, asyncio.run(sample()), strict=True):
        tokens = torch.tensor([*prompt, *completion.tokens.tolist()])
        with torch.no_grad():
            hidden = policy(tokens, torch.arange(len(tokens)), [len(tokens)], None, [placed])
            logprobs = policy.logits(hidden).log_softmax(-1)[len(prompt) - 1 : -1]
        expected = logprobs.gather(-1, tokens[len(prompt) :, None])[:, 0]
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), rtol=0, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("train_encoders", [False, True])
def test_a_model_of_clips_is_divided_by_tensor_parallelism(directory, train_encoders):
    options, batches = {"tensor_parallel": 2}, [batch_of(directory)] * 2
    expected = local(directory, train_encoders, batches)
    arguments = (options, directory, train_encoders, pickle.dumps(batches))
    results = run_ranks(2, "learners.picture_cases:ranked", *arguments)
    check_ranks(results, options, expected, batches[-1])
