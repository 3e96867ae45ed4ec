"""The gate finds a sampler that isn't the learner, and says which part of it is another."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

import pytest
import torch

from ratchet.config.experience import ParityConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.data.packing import pack
from ratchet.errors import ParityError
from ratchet.experience.checks.logprob_parity import ParityGate, ParityPair, select_comparable_rows
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Sampling
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

SHAPE = DecoderConfig(23, 16, 2, 4, 2, 8, 24, init_std=0.3)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [10], [11, 12]]
DOWN = "model.layers.1.mlp.down_proj.weight"


class World:
    """A learner, a generator with weights of its own, and a weight sync that has pushed once."""

    def __init__(self, *, dtype=torch.float32, sent=None, prints=None, **options):
        policy = init_policy(SHAPE, seed=0)
        self.learner = LocalLearner(LocalConfig(), policy)
        engine = init_policy(SHAPE, seed=1, dtype=dtype)
        self.generator = EmbeddedEngine(EngineConfig(kv_cache_gib=0.01, row_multiple=1), engine)
        self.weight_sync = SharedMemoryWeightSync(
            LocalRank(WeightSender(self.learner)),
            LocalRank(WeightReceiver(self.generator)),
            dtype=sent,
        )
        asyncio.run(self.weight_sync.push(1))
        settings = {
            "threshold": 1e-3,
            "first_steps": 2,
            "every": 4,
            "sample": 4,
            "action": "stop",
            **options,
        }
        self.gate = ParityGate(
            ParityPair(self.learner, self.generator, self.weight_sync, prints or {}),
            ParityConfig(**settings),
        )

    def batch(self, *, temperature=1.0, recorded=None):
        """Fresh samples. recorded: the temperature under which the logprobs are."""
        samplings = [
            Sampling(temperature=temperature, max_new_tokens=9, seed=i) for i in range(len(PROMPTS))
        ]
        made = self.generator.generate_all(PROMPTS, samplings)
        rows = [
            make_trajectory(
                prompt,
                c.tokens,
                reward=1.0,
                logprobs=c.logprobs,
                temperature=temperature,
                version=1,
            )
            for prompt, c in zip(PROMPTS, made, strict=True)
        ]
        batch = pack([make_group("g", [replace(row, attempt=i) for i, row in enumerate(rows)])])
        if recorded is None:
            return batch
        other = replace(batch, temperature_S=torch.full_like(batch.temperature_S, recorded))
        columns = asyncio.run(self.learner.score(other, ["logprobs"]))
        return replace(batch, rollout_logprobs_T=columns["logprobs"].float())

    def check(self, batch, version=1):
        return asyncio.run(self.gate.check(batch, version))

    def refused(self, batch):
        with pytest.raises(ParityError) as found:
            self.check(batch)
        return str(found.value)


def test_a_sampler_with_the_learners_weights_passes():
    world = World()
    numbers = world.check(world.batch(temperature=0.7))
    assert numbers["tokens"] == 4 * 9
    assert numbers["mean"] <= numbers["max"] < 1e-5


@pytest.mark.medium
def test_the_first_tensor_that_differs_is_named():
    world = World()
    {shard.name: shard.tensor for shard in world.generator.weights()}[DOWN].mul_(-1)
    text = world.refused(world.batch())
    assert f"the cause is: weights (1 tensors differ, the first is {DOWN})" in text


@pytest.mark.medium
@pytest.mark.fault("M7")
def test_weights_that_were_never_pushed_are_found():
    world = World()
    with torch.no_grad():
        for parameter in world.learner.model.parameters():
            parameter.mul_(1.5)
    assert "the cause is: weights" in world.refused(world.batch())


@pytest.mark.medium
@pytest.mark.parametrize(("recorded", "said"), [(1.0, "ignores it"), (0.25, "applies twice it")])
def test_a_temperature_that_the_sampler_gets_wrong_is_found(recorded, said):
    world = World()
    text = world.refused(world.batch(temperature=0.5, recorded=recorded))
    assert "the cause is: temperature" in text
    assert said in text
    assert "equal, by the checksum of every tensor" in text


def test_another_precision_is_found():
    world = World(dtype=torch.bfloat16, sent="bfloat16")
    text = world.refused(world.batch())
    assert "the cause is: dtype (learner float32, generator bfloat16)" in text
    assert "equal, by the checksum" in text


def test_another_tokenizer_is_found():
    world = World(prints={"policy": "a1", "generator": "b2"})
    batch = world.batch()
    text = world.refused(replace(batch, rollout_logprobs_T=batch.rollout_logprobs_T - 1))
    assert "the cause is: tokenizer (different: policy a1, generator b2)" in text


def test_the_engine_shows_its_tokenizer():
    world, own, theirs = World(), character_tokenizer("0123456789="), character_tokenizer("abc")
    engine = EmbeddedEngine(EngineConfig(kv_cache_gib=0.01), init_policy(SHAPE, seed=0), theirs)
    ends = ParityPair.create(world.learner, engine, world.weight_sync, own)
    assert ends.fingerprints == {"policy": own.fingerprint, "generator": theirs.fingerprint}


@pytest.mark.fault("M7")
def test_a_kernel_is_suspected_last_with_the_places_where_it_differs():
    world = World()
    batch = world.batch()
    off_T = torch.where(batch.turn_T >= 0, -0.5, 0.0)
    off_T[batch.starts_S + torch.tensor([len(prompt) for prompt in PROMPTS])] = 0.0
    text = world.refused(replace(batch, rollout_logprobs_T=batch.rollout_logprobs_T + off_T))
    assert "weights and inputs agree: a kernel differs" in text
    first, later = (
        float(part.split(": ")[1])
        for part in text.split("from 0")[1].split("\n")[0].split(", ")[:2]
    )
    assert first < 1e-5
    assert later == pytest.approx(0.5, abs=1e-4)
    assert "alone or together" in text


@pytest.mark.medium
def test_a_logprob_that_is_not_a_number_is_above_every_threshold():
    world = World(threshold=100.0)
    batch = world.batch()
    assert "nan" in world.refused(
        replace(batch, rollout_logprobs_T=batch.rollout_logprobs_T * torch.nan)
    )


def test_it_can_warn_instead(caplog):
    world = World(action="warn")
    batch = world.batch()
    with caplog.at_level(logging.WARNING):
        numbers = world.check(replace(batch, rollout_logprobs_T=batch.rollout_logprobs_T - 1))
    assert numbers["mean"] == pytest.approx(1.0, abs=1e-4)
    assert "a kernel differs" in caplog.text


def test_only_rows_of_the_learners_version_are_compared():
    row = make_trajectory([1], [2, 3], reward=1.0, version=3)
    mixed = replace(row, versions=row.versions.copy(), attempt=1)
    mixed.versions[-1] = 4
    greedy = replace(row, use="baseline", attempt=2)
    given = replace(make_trajectory([1], [2, 3], reward=1.0, version=-1), attempt=3)
    batch = pack([make_group("g", [row, mixed, greedy, given])])
    assert select_comparable_rows(batch, 3) == [0]
    assert select_comparable_rows(batch, 4) == []
    assert World().check(batch, version=4) == {}


def test_it_compares_at_the_first_steps_and_then_every_so_many():
    gate = World().gate
    assert [step for step in range(10) if gate.is_due(step)] == [0, 1, 4, 8]
    gate.every = 0
    assert [step for step in range(10) if gate.is_due(step)] == [0, 1]
