"""What the engine says of experts: those that a forward of the whole sequence chooses, whatever
else is running."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from ratchet.errors import ConfigError
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.decoder import Decoder
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.layers.expert_routing import RouteRecorder
from ratchet.types import Sampling

EXPERTS = {
    "family": "qwen3_moe",
    "n_experts": 4,
    "experts_per_token": 2,
    "expert_intermediate_size": 48,
    "dense_layers": (0,),
}


@pytest.fixture
def sparse(decoder):
    return Decoder(replace(decoder.config, n_layers=3, **EXPERTS)).init_weights(0)


def routes_of(decoder, tokens):
    record = RouteRecorder(decoder.config, len(tokens), torch.device("cpu"))
    with torch.no_grad():
        decoder(
            torch.tensor(tokens),
            torch.arange(len(tokens)),
            PackedAttention([len(tokens)]),
            route=record,
        )
    return record.experts_TLK.numpy()


def test_every_token_but_the_last_has_its_experts_whoever_comes_and_goes(sparse):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 67, rng.integers(1, 20)).tolist() for _ in range(11)]
    prompts[4] = prompts[1]
    samplings = [
        Sampling(max_new_tokens=1 + 5 * (i % 5), seed=i, routes=i % 3 != 2) for i in range(11)
    ]
    made = EmbeddedEngine(EngineConfig(max_running=4, prefill_tokens=24), sparse)
    for prompt, sampling, found in zip(
        prompts, samplings, made.generate_all(prompts, samplings), strict=True
    ):
        if not sampling.routes:
            assert found.routes is None
            continue
        assert found.routes.shape == (len(prompt) + len(found.tokens), 2, 2)
        assert found.routes.dtype == np.int16
        assert (found.routes[-1] == -1).all()
        assert (
            found.routes[:-1].tolist() == routes_of(sparse, [*prompt, *found.tokens])[:-1].tolist()
        )


def test_recording_changes_nothing_else(sparse):
    prompts = [[1, 2, 3], [4, 5]]
    plain, recorded = (
        EmbeddedEngine(EngineConfig(), sparse).generate_all(
            prompts, [Sampling(max_new_tokens=9, seed=i, routes=on) for i in range(2)]
        )
        for on in (False, True)
    )
    for one, other in zip(plain, recorded, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()


def test_what_was_drawn_keeps_its_routes_when_new_weights_come(sparse):
    async def play():
        made = EmbeddedEngine(EngineConfig(), sparse)
        running = asyncio.ensure_future(
            made.generate([1, 2, 3], Sampling(max_new_tokens=8, seed=1, routes=True))
        )
        for _ in range(5):
            await asyncio.sleep(0)
        before = made.core.slots.read_routes(0)
        with torch.no_grad():
            for parameter in sparse.parameters():
                parameter.mul_(-1.0)
        await made.commit(1)
        return before, await running

    before, found = asyncio.run(play())
    assert set(found.versions.tolist()) == {0, 1}
    assert found.routes[: len(before) - 1].tolist() == before[:-1].tolist()
    assert (found.routes[:-1] >= 0).all()


def test_a_model_without_experts_records_none(decoder):
    with pytest.raises(ConfigError, match="records no routes"):
        EmbeddedEngine(EngineConfig(), decoder).generate_all([[1]], [Sampling(routes=True)])
