"""Weights are pushed plain, checked by their checksums, and quantised by the generator that
receives them."""

import asyncio

import pytest
import torch
from weight_sync.test_failures import Tampering
from weight_sync.test_transfer import LINKS

from ratchet.config.experience import ParityConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.packing import pack
from ratchet.errors import WeightSyncError
from ratchet.experience.checks.logprob_parity import ParityGate, ParityPair
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.layers.quantized import QuantizedMatrix
from ratchet.models.load import init_policy
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Sampling
from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

SHAPE = DecoderConfig(23, 32, 2, 2, 1, 16, 48, init_std=0.15, tied=False, qkv_bias=True)
FORMS = ["float8", pytest.param("nf4", marks=pytest.mark.needs("bitsandbytes"))]


def ends(form, seed=0):
    learner = LocalLearner(LocalConfig(), init_policy(SHAPE, seed=seed))
    section = EngineConfig(kv_cache_gib=0.01, row_multiple=1, quantise=form)
    return learner, EmbeddedEngine(section, init_policy(SHAPE, seed=9))


def shown(generator):
    return {shard.name: shard.tensor.clone() for shard in generator.weights()}


@pytest.mark.parametrize("sent", [None, "bfloat16"])
@pytest.mark.parametrize("kind", LINKS)
def test_what_arrives_is_quantised_within_the_bound_of_its_form(kind, sent, tmp_path):
    learner, generator = ends("float8")
    link = LINKS[kind](
        LocalRank(WeightSender(learner)),
        LocalRank(WeightReceiver(generator)),
        tmp_path / "weight_sync",
        dtype=sent,
    )
    for version in (1, 2):
        asyncio.run(link.push(version))
        rounded = getattr(torch, sent or "float32")
        weights = {
            name: tensor.to(rounded).float() for name, tensor in learner.model.canonical_weights()
        }
        found = shown(generator)
        for name, plain in weights.items():
            wanted = QuantizedMatrix(plain, "float8").plain() if "proj.weight" in name else plain
            assert torch.equal(found[name], wanted), name
            assert (found[name] - weights[name]).abs().max() <= weights[name].abs().max() / 16
        assert generator.version == version
        assert all(
            linear.quantised.write_buffer is None
            for _, linear in generator.policy.decoder.layer_linears
        )
        with torch.no_grad():
            for parameter in learner.model.parameters():
                parameter.mul_(1.3)
    asyncio.run(link.close())


@pytest.mark.parametrize("form", FORMS)
def test_a_push_that_fails_leaves_the_codes_that_serve(form):
    learner, generator = ends(form)
    before = shown(generator)
    asked = [[1, 2, 3]], [Sampling(max_new_tokens=5, seed=1)]
    tokens = generator.generate_all(*asked)[0].tokens.tolist()

    def cut(*_):
        raise WeightSyncError("cut off behind what was received")

    link = SharedMemoryWeightSync(
        LocalRank(WeightSender(learner)), Tampering(WeightReceiver(generator), "commit", cut)
    )
    with pytest.raises(WeightSyncError, match="cut off"):
        asyncio.run(link.push(1))
    assert all(
        linear.quantised.write_buffer is None
        for _, linear in generator.policy.decoder.layer_linears
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in shown(generator).items())
    assert generator.generate_all(*asked)[0].tokens.tolist() == tokens
    asyncio.run(link.close())


def test_the_parity_gate_names_the_form():
    learner, generator = ends("float8")
    link = SharedMemoryWeightSync(
        LocalRank(WeightSender(learner)), LocalRank(WeightReceiver(generator))
    )
    asyncio.run(link.push(1))
    prompts = [[1, 2, 3], [4, 5]]
    made = generator.generate_all(prompts, [Sampling(max_new_tokens=9, seed=i) for i in range(2)])
    rows = [
        make_trajectory(prompt, c.tokens, reward=1.0, logprobs=c.logprobs, version=1, attempt=i)
        for i, (prompt, c) in enumerate(zip(prompts, made, strict=True))
    ]
    gate = ParityGate(ParityPair(learner, generator, link, {}), ParityConfig(threshold=1e-5))
    batch = pack([make_group("g", rows)])
    report = asyncio.run(gate.report(batch, asyncio.run(gate._compute_difference(batch))))
    assert "the cause is: dtype (learner float32, generator float8)" in report
    assert "weights      not compared: the generator rounds received weights to float8" in report
    assert (
        asyncio.run(ParityGate(gate.pair, ParityConfig(threshold=0.3)).check(batch, 1))["mean"]
        < 0.3
    )
