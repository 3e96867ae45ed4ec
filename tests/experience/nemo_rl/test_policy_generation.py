"""Upstream's calls around a generation and a refit, on the embedded engine."""

import asyncio

import pytest
import torch
from experience.counting import TOKENIZER
from generators.direct_link import DirectWeightSync

from ratchet.config.model_shape.presets import get_preset
from ratchet.errors import ModelError
from ratchet.experience.nemo_rl import PolicyGeneration
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.load import init_policy
from ratchet.protocols import Shard
from ratchet.types import Sampling

SHAPE = get_preset("tiny", vocab_size=TOKENIZER.vocab_size, hidden_size=32, n_layers=1)
SAMPLING = Sampling(max_new_tokens=4, seed=1)


class Weights:
    """As much of a learner as a push needs."""

    def __init__(self, policy) -> None:
        self.policy = policy

    def weights(self):
        for name, tensor in self.policy.canonical_weights():
            yield Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def start_engine(policy):
    return EmbeddedEngine(EngineConfig(kv_cache_gib=0.01), policy.decoder)


def draw(generator):
    completion = asyncio.run(generator.generate([1, 2, 3], SAMPLING))
    return completion.tokens.tolist(), completion.logprobs.tolist(), completion.versions.tolist()


@pytest.mark.parametrize("method", ["update_weights_from_collective", "update_weights_via_ipc_zmq"])
def test_a_refit_brings_the_weights_of_the_learner(method) -> None:
    learner = Weights(init_policy(SHAPE, seed=2))
    engine = start_engine(init_policy(SHAPE, seed=1))
    generation = PolicyGeneration(engine, SAMPLING, DirectWeightSync(learner, engine))
    info = {
        name: (weight.shape, weight.dtype) for name, weight in learner.policy.canonical_weights()
    }
    generation.prepare_refit_info(info)
    with pytest.raises(ModelError, match=r"lacks model\.norm\.weight"):
        generation.prepare_refit_info({**info, "model.norm.weight": (torch.Size([7]), None)})
    assert not generation.init_collective("localhost", 1, 2, train_world_size=1)
    before = draw(generation)
    assert not getattr(generation, method)()
    after = draw(generation)
    assert after[:2] != before[:2]
    assert (before[2][0], after[2][0], generation.version) == (0, 1, 1)
    assert draw(start_engine(learner.policy))[:2] == after[:2]
    assert generation.shutdown()
    assert generation.shutdown()


def as_llama(policy):
    """The state dict and its info, as a policy of another library has them."""
    weights = {name: weight.clone() for name, weight in policy.canonical_weights()}
    return weights, {name: (weight.shape, weight.dtype) for name, weight in weights.items()}


@pytest.mark.parametrize("as_pairs", [False, True])
def test_any_policy_hands_over_its_weights(as_pairs) -> None:
    policy = init_policy(SHAPE, seed=2)
    weights, info = as_llama(policy)
    engine = start_engine(init_policy(SHAPE, seed=1))
    generation = PolicyGeneration(engine, SAMPLING)
    generation.prepare_refit_info(info)
    assert generation.update_weights(iter(weights.items()) if as_pairs else weights)
    assert generation.version == 1
    found = draw(generation)
    assert found[:2] == draw(start_engine(policy))[:2]
    assert found[2][0] == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda weights: weights.popitem(), "the refit lacks model.norm.weight"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(7)}),
            r"weight model.norm.weight is \(7,\)",
        ),
        (
            lambda weights: weights.update({"more": torch.ones(1)}),
            "weight more is .*did not announce",
        ),
    ],
)
def test_a_wrong_refit_leaves_the_old_weights(change, why) -> None:
    weights, info = as_llama(init_policy(SHAPE, seed=2))
    generation = PolicyGeneration(start_engine(init_policy(SHAPE, seed=1)), SAMPLING)
    generation.prepare_refit_info(info)
    before = draw(generation)
    change(weights)
    with pytest.raises(ModelError, match=why):
        generation.update_weights(weights)
    assert draw(generation) == before
    assert generation.version == 0


def test_a_refit_that_was_not_announced_must_be_whole() -> None:
    weights, _ = as_llama(init_policy(SHAPE, seed=2))
    generation = PolicyGeneration(start_engine(init_policy(SHAPE, seed=1)), SAMPLING)
    before = draw(generation)
    for part in ({}, dict(list(weights.items())[:-1])):
        with pytest.raises(ModelError, match=r"the refit lacks .* of the model"):
            generation.update_weights(part)
    assert draw(generation) == before
    assert generation.update_weights(weights)


def test_a_generation_phase_ends_and_begins_again() -> None:
    policy = init_policy(SHAPE, seed=1)
    engine = start_engine(policy)
    generation = PolicyGeneration.from_learner(engine, SAMPLING, Weights(policy))
    before = draw(generation)
    assert generation.finish_generation(release_gpu=True)
    assert generation.finish_generation()
    generation.update_weights_from_collective()  # the learner's own tensors: the version alone
    assert generation.prepare_for_generation(tags=["weights"])
    assert generation.prepare_for_generation()
    assert draw(generation)[:2] == before[:2]
    with pytest.raises(ModelError, match="from_learner"):
        PolicyGeneration(engine, SAMPLING).update_weights_via_ipc_zmq()
