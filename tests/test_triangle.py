"""Decoder, engine and learner against transformers, and against each other: packed, under a
temperature, at the end of turn."""

import asyncio

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.packing import pack
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.testing.conformance import check_generator
from ratchet.types import Sampling, StopReason

VOCAB, EOS = 29, 5
EXPERTS = {"n_experts": 4, "experts_per_token": 2}
FAMILIES = {
    "qwen3": {"family": "qwen3", "qk_norm": True, "tied": True},
    "qwen2": {"family": "qwen2", "qk_norm": False, "qkv_bias": True, "tied": True},
    "llama": {"family": "llama", "qk_norm": False, "tied": False},
    "qwen3_moe": {
        "family": "qwen3_moe",
        "tied": False,
        **EXPERTS,
        "expert_intermediate_size": 24,
        "renormalise": False,
    },
    "mixtral": {
        "family": "mixtral",
        "qk_norm": False,
        "tied": False,
        **EXPERTS,
        "expert_intermediate_size": 48,
    },
}


@pytest.fixture(scope="module", params=FAMILIES)
def made(request, tmp_path_factory):
    """(our policy, the same model loaded by transformers from what we saved)"""
    config = DecoderConfig(
        VOCAB, 32, 2, 4, 2, 8, 48, max_positions=128, init_std=0.2, **FAMILIES[request.param]
    )
    policy = init_policy(config, seed=3)
    with torch.no_grad():  # biases start at 0 and norms at 1: make them matter
        for parameter in policy.parameters():
            if parameter.dim() == 1:
                parameter.add_(
                    0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
                )
    directory = tmp_path_factory.mktemp(request.param)
    policy.save(directory)
    return policy, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def theirs(model, tokens, start, temperature):
    """transformers' logprobs of tokens[start:], computed on the row alone."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0].double()
    table = (logits / temperature).log_softmax(-1)
    return np.array([float(table[t - 1, tokens[t]]) for t in range(start, len(tokens))])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_three_ways_to_one_logprob(made, temperature):
    policy, model = made
    engine = EmbeddedEngine(EngineConfig(), policy)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCAB, int(n)).tolist() for n in rng.integers(1, 9, 24)]
    samplings = [
        Sampling(temperature=temperature, max_new_tokens=24, stop_ids=(EOS,), seed=s)
        for s in range(24)
    ]
    completions = engine.generate_all(prompts, samplings)
    assert {c.stop for c in completions} == {StopReason.STOP_TOKEN, StopReason.LENGTH}, (
        "the seeds should show both ends"
    )
    groups = [
        make_group(
            str(i),
            [
                make_trajectory(
                    p, c.tokens, reward=0.0, temperature=temperature, logprobs=c.logprobs
                )
            ],
        )
        for i, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    batch = pack(groups)
    learner = LocalLearner(LocalConfig(micro_batch_tokens=40), policy)
    scored = asyncio.run(learner.score(batch, ["logprobs"]))["logprobs"]
    trainable = batch.trainable_T
    np.testing.assert_allclose(scored[trainable], batch.rollout_logprobs_T[trainable], atol=1e-5)
    expected = [
        theirs(model, [*p, *c.tokens.tolist()], len(p), temperature)
        for p, c in zip(prompts, completions, strict=True)
    ]
    np.testing.assert_allclose(scored[trainable].numpy(), np.concatenate(expected), atol=2e-5)


@pytest.mark.medium
def test_greedy_tokens_are_those_of_transformers_generate(made):
    policy, model = made
    engine = EmbeddedEngine(EngineConfig(), policy)
    prompts = [[1, 2, 3], [7], [9, 8, 7, 6, 5, 4, 20]]
    greedy = engine.generate_all(
        prompts, [Sampling(temperature=0.0, max_new_tokens=20, stop_ids=(EOS,))] * 3
    )
    for prompt, completion in zip(prompts, greedy, strict=True):
        ours = completion.tokens.tolist()
        made_by = model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=20,
            eos_token_id=EOS,
            pad_token_id=0,
            top_k=None,
        )
        assert ours == made_by[0, len(prompt) :].tolist()


def test_the_next_token_comes_from_the_learners_new_weights(made):
    """The engine holds no copy: what an optimizer step changed is what it samples from."""
    policy, _ = made
    engine = EmbeddedEngine(EngineConfig(), policy)
    sampling = Sampling(temperature=0.0, max_new_tokens=6)
    before = engine.generate_all([[1, 2, 3]], [sampling])[0]
    saved = {name: p.detach().clone() for name, p in policy.named_parameters()}
    try:
        with torch.no_grad():
            policy.decoder.embed_tokens.weight.mul_(-1.0)
        asyncio.run(engine.commit(1))
        after = engine.generate_all([[1, 2, 3]], [sampling])[0]
        assert not np.allclose(before.logprobs, after.logprobs, atol=1e-3)
        assert set(after.versions.tolist()) == {1}
    finally:
        with torch.no_grad():
            for name, p in policy.named_parameters():
                p.copy_(saved[name])


def test_the_engine_conforms(made):
    asyncio.run(check_generator(EmbeddedEngine(EngineConfig(), made[0]), [[1, 2, 3], [4]]))
