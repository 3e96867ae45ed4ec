"""Weights that `model.freeze` names stay as they are, in one process and on ranks."""

import asyncio
from dataclasses import replace

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import SHAPE, SPARSE, UNTIED, alone, check_alike, first
from learners.test_local import ALGORITHMS, prepared
from learners.test_lora import learner, policy

from ratchet.checkpoint.serialization import load_state
from ratchet.checkpoint.sharded import BlockFiles
from ratchet.errors import CheckpointError
from ratchet.learners.config import LocalConfig
from ratchet.learners.distributed.topology import Topology
from ratchet.models.load import load_policy

PATTERNS = ("model.embed_tokens", "model.layers.0", "*.input_layernorm.weight")


def frozen(seed=0):
    model = policy(seed=seed)
    model.freeze(PATTERNS)
    return model


def is_frozen(name):
    return "embed" in name or ".layers.0." in name or "input_layernorm" in name


@pytest.mark.parametrize("workers", [1, 2])
def test_frozen_weights_stay_and_others_train(workers):
    made = learner(frozen(), config=LocalConfig(workers=workers, micro_batch_tokens=20))
    before = {name: weight.clone() for name, weight in made.model.canonical_weights()}
    batch, terms = prepared(ALGORITHMS["grpo"])
    asyncio.run(made.update(batch, terms))
    for name, weight in made.model.canonical_weights():
        assert torch.equal(weight, before[name]) == is_frozen(name), name
    assert not any(map(is_frozen, made.optimizer.state))
    assert {shard.name for shard in made.weights() if shard.is_frozen} == set(
        filter(is_frozen, before)
    )


def test_the_others_have_the_gradients_that_they_have_without_frozen_ones():
    batch, terms = prepared(ALGORITHMS["grpo"])
    whole, part = learner(policy()), learner(frozen())
    gradients = [
        dict(
            zip(
                [name for name, _ in made.forwards[0].parameters()],
                made.gradient(batch, terms)[0],
                strict=True,
            )
        )
        for made in (whole, part)
    ]
    assert gradients[1].keys() == {name for name in gradients[0] if not is_frozen(name)}
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name])


def test_a_checkpoint_holds_what_trains_and_goes_on_bit_for_bit(tmp_path):
    batch, terms = prepared(ALGORITHMS["grpo"])
    made = learner(frozen())
    asyncio.run(made.update(batch, terms))
    made.save(tmp_path / "state")
    stored = load_state(tmp_path / "state")["parameters"]
    assert stored
    assert not any(map(is_frozen, stored))
    asyncio.run(made.update(batch, terms))
    made.export(tmp_path / "model")
    again = learner(frozen())
    again.load(tmp_path / "state")
    asyncio.run(again.update(batch, terms))
    for exported in (again.model, load_policy(tmp_path / "model")):
        for (name, ours), (_, theirs) in zip(
            made.model.canonical_weights(), exported.canonical_weights(), strict=True
        ):
            assert torch.equal(ours, theirs), name
    with pytest.raises(CheckpointError, match="another base model"):
        learner(frozen(seed=1)).load(tmp_path / "state")


CASES = {
    "fsdp2": (SHAPE, {"shards": 2}, {}),
    "tp2": (UNTIED, {"tensor": 2}, {"activation_checkpointing": True}),
    "hsdp2x2": (UNTIED, {"replicas": 2, "shards": 2}, {}),
    "cp2 x tp2": (SHAPE, {"context": 2, "tensor": 2}, {"sequence_parallel": True}),
    "ep2": (SPARSE, {"shards": 2, "experts": 2}, {}),
    "pp2": (SHAPE, {"pipeline": 2}, {"activation_checkpointing": True}),
    "pp2 x ep2": (SPARSE, {"pipeline": 2, "shards": 2, "experts": 2}, {}),
    # The first stage trains nothing.
    "pp2 interleaved": (SHAPE, {"pipeline": 2}, {"pipeline_chunks": 2}),
    "pp2 x fsdp2": (replace(UNTIED, n_layers=2), {"pipeline": 2, "shards": 2}, {}),
}


@pytest.mark.medium
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "fsdp2" else [pytest.mark.slow]) for name in CASES],
)
def test_ranks_freeze_what_one_process_does(name, tmp_path):
    shape, topology, options = CASES[name]
    more = (torch.float64, tmp_path, False, PATTERNS)
    results = run_ranks(
        Topology(**topology).world_size,
        "learners.spread_cases:spread",
        *(topology, shape, 2, options),
        *more,
    )
    expected = alone(shape, 2, adapter=PATTERNS)
    check_alike(results, topology, expected)
    start, _ = first(shape, torch.float64)
    for weight_name, weight in start.canonical_weights():
        assert torch.equal(weight, expected[1][weight_name]) == is_frozen(weight_name)
    stored = {key for key in BlockFiles(tmp_path).blocks_by_name if "/" not in key}
    assert stored == {key for key in expected[1] if not is_frozen(key)}
