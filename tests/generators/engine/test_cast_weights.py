"""The engine's copy of the layers' matrices in bfloat16."""

import asyncio

import numpy as np
import pytest
import torch

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine import engine as engine_module
from ratchet.generators.engine.cast_weights import CastDecoder
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.types import Sampling

SHAPE = DecoderConfig(32, 32, 2, 4, 2, 16, 64, init_std=0.2)
CONFIG = EngineConfig(kv_cache_gib=0.01)
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(autouse=True)
def casts(monkeypatch):
    """The CPU takes the part of an accelerator."""
    monkeypatch.setattr(engine_module, "casts_matrices", lambda decoder: True)


def generate(engine, **sampling):
    return engine.generate_all([PROMPT], [Sampling(max_new_tokens=8, **sampling)])[0]


def test_only_the_layers_matrices_are_copied():
    decoder = init_policy(SHAPE, seed=0).decoder
    cast = CastDecoder(decoder, torch.bfloat16)
    assert cast.renew()
    source = dict(decoder.named_parameters())
    for name, parameter in cast.decoder.named_parameters():
        is_matrix = name.startswith("layers.") and parameter.dim() == 2
        assert (parameter is source[name]) != is_matrix
        assert parameter.dtype is (torch.bfloat16 if is_matrix else torch.float32)
        assert torch.equal(parameter, source[name].to(parameter.dtype))
    addresses = [parameter.data_ptr() for parameter in cast.decoder.parameters()]
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(0.5)
    assert not cast.renew()
    assert addresses == [parameter.data_ptr() for parameter in cast.decoder.parameters()]
    for name, parameter in cast.decoder.named_parameters():
        assert torch.equal(parameter, source[name].to(parameter.dtype))


@pytest.mark.parametrize("has_adapter", [False, True])
def test_tokens_are_those_of_the_learners_autocast(has_adapter):
    policy = init_policy(SHAPE, seed=0)
    engine = EmbeddedEngine(CONFIG, policy)
    generate(engine)
    if has_adapter:
        policy.attach(Adapter(LoRAConfig(rank=2, alpha=4.0), seed=1))
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for _, parameter in policy.trained_parameters():
                parameter.normal_(0, 0.3, generator=generator)
    completion = generate(engine)
    tokens = torch.tensor([*PROMPT, *completion.tokens.tolist()])
    logprobs = {}
    for autocast in (False, True):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            hidden = policy.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
        scores = policy.logits(hidden).detach().log_softmax(-1)[len(PROMPT) - 1 : -1]
        logprobs[autocast] = scores.gather(1, tokens[len(PROMPT) :, None])[:, 0].numpy()
    assert np.abs(completion.logprobs - logprobs[True]).max() < 0.1
    assert np.abs(completion.logprobs - logprobs[False]).max() > 1e-4


def test_a_commit_renews_the_copy_under_running_requests():
    async def run(commits):
        policy = init_policy(SHAPE, seed=0)
        engine = EmbeddedEngine(CONFIG, policy)
        request = asyncio.ensure_future(
            engine.generate(PROMPT, Sampling(max_new_tokens=8, temperature=0.0))
        )
        for _ in range(4):
            await asyncio.sleep(0)
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                if "layers" in name:
                    parameter.mul_(-1)
        if commits:
            await engine.commit(1)
        return await request

    kept, renewed = asyncio.run(run(False)), asyncio.run(run(True))
    assert set(renewed.versions.tolist()) == {0, 1}
    before = int((renewed.versions == 0).sum())
    assert kept.logprobs[:before].tolist() == renewed.logprobs[:before].tolist()
    assert kept.logprobs[before:].tolist() != renewed.logprobs[before:].tolist()


def test_idle_engines_read_the_weights_anew():
    policy = init_policy(SHAPE, seed=0)
    engine = EmbeddedEngine(CONFIG, policy)
    before = generate(engine)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.copy_(parameter.neg())
    fresh = generate(EmbeddedEngine(CONFIG, policy))
    assert generate(engine).logprobs.tolist() == fresh.logprobs.tolist() != before.logprobs.tolist()
