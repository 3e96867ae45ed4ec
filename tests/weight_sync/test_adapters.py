"""An adapter travels alone, behind a first push that brings its base too: checked and committed as
all weights are."""

import asyncio

import pytest
import torch
from learners.test_local import ALGORITHMS, VOCAB, prepared
from weight_sync.components import ENGINE
from weight_sync.test_transfer import LINKS

from ratchet.config.experience import ParityConfig
from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import WeightSyncError
from ratchet.experience.checks.logprob_parity import ParityGate, ParityPair
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.types import Sampling
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

SHAPE = DecoderConfig(VOCAB, 16, 2, 2, 1, 8, 24, init_std=0.3, tied=False)
ADAPTER = Adapter(LoRAConfig(rank=2, alpha=4.0), seed=5)


def learner():
    net = init_policy(SHAPE, seed=0)
    net.attach(ADAPTER)
    return LocalLearner(LocalConfig(), net, optimizer=OptimizerConfig(lr=0.05), total_steps=10)


def step(made):
    batch, terms = prepared(ALGORITHMS["grpo"])
    asyncio.run(made.update(batch, terms))


def furthest(made, generator):
    """Between the logprobs of what the generator samples and the learner's."""
    sampling = Sampling(max_new_tokens=6, seed=1)
    completion = generator.generate_all([[3, 1, 4]], [sampling])[0]
    tokens = torch.tensor([3, 1, 4, *completion.tokens.tolist()])
    with torch.no_grad():
        hidden = made.model.hidden(tokens, torch.arange(len(tokens)), [len(tokens)])
        found = made.model.logits(hidden)[2:-1].log_softmax(-1).gather(1, tokens[3:, None])[:, 0]
    return float((found - torch.from_numpy(completion.logprobs)).abs().max())


@pytest.mark.medium
@pytest.mark.parametrize("kind", LINKS)
def test_later_pushes_carry_the_adapter_alone(kind, tmp_path):
    made, generator = learner(), EmbeddedEngine(ENGINE, init_policy(SHAPE, seed=9))
    ends = LocalRank(WeightSender(made)), LocalRank(WeightReceiver(generator))
    link = LINKS[kind](*ends, tmp_path / "weight_sync", adapter=ADAPTER)
    adapter_bytes = sum(weight.nbytes for _, weight in made.model.adapter_weights())
    base_bytes = sum(weight.nbytes for _, weight in made.model.canonical_weights())
    asyncio.run(link.push(1))
    assert link.sent_bytes >= base_bytes
    assert furthest(made, generator) < 1e-5
    for version in (2, 3):
        step(made)
        assert asyncio.run(link.audit()), "the learner has moved on"
        asyncio.run(link.push(version))
        assert 0 < link.sent_bytes <= adapter_bytes
        assert asyncio.run(link.audit()) == []
        assert generator.version == version
        assert furthest(made, generator) < 1e-5
    asyncio.run(link.close())


def test_a_push_that_fails_leaves_the_adapter_before(monkeypatch):
    made, generator = learner(), EmbeddedEngine(ENGINE, init_policy(SHAPE, seed=0))
    link = SharedMemoryWeightSync(
        LocalRank(WeightSender(made)), LocalRank(WeightReceiver(generator)), adapter=ADAPTER
    )
    asyncio.run(link.push(1))
    step(made)
    asyncio.run(link.push(2))
    before = {shard.name: shard.tensor.clone() for shard in generator.weights()}
    step(made)
    monkeypatch.setattr(
        "ratchet.weight_sync.endpoints.prepare_checksum_check",
        lambda numbers, wanted: lambda: False,
    )
    with pytest.raises(WeightSyncError, match="lora_A"):
        asyncio.run(link.push(3))
    assert generator.version == 2
    assert all(torch.equal(before[shard.name], shard.tensor) for shard in generator.weights())
    monkeypatch.undo()
    asyncio.run(link.push(3))
    assert furthest(made, generator) < 1e-5
    asyncio.run(link.close())


def test_the_parity_gate_sees_an_adapter_that_did_not_arrive():
    """And names its weights."""
    made, generator = learner(), EmbeddedEngine(ENGINE, init_policy(SHAPE, seed=0))
    link = SharedMemoryWeightSync(
        LocalRank(WeightSender(made)), LocalRank(WeightReceiver(generator)), adapter=ADAPTER
    )
    asyncio.run(link.push(1))
    step(made)
    found = asyncio.run(
        ParityGate(ParityPair(made, generator, link, {}), ParityConfig())._compare_weights()
    )
    assert found.is_cause
    assert (
        "tensors differ, the first is base_model.model.model.layers.0.self_attn.q_proj.lora_"
        in found.text
    )
    asyncio.run(link.close())


def test_a_generator_has_one_adapter_of_a_learner():
    generator = EmbeddedEngine(ENGINE, init_policy(SHAPE, seed=0))
    asyncio.run(
        SharedMemoryWeightSync(
            LocalRank(WeightSender(learner())),
            LocalRank(WeightReceiver(generator)),
            adapter=ADAPTER,
        ).push(1)
    )
    other = Adapter(LoRAConfig(rank=3))
    with pytest.raises(WeightSyncError, match="another adapter"):
        asyncio.run(
            SharedMemoryWeightSync(
                LocalRank(WeightSender(learner())),
                LocalRank(WeightReceiver(generator)),
                adapter=other,
            ).push(2)
        )
