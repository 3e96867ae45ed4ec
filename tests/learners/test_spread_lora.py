"""An adapter on ranks: what one process makes of it, whatever divides the base below it."""

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import (
    OPTIMIZER,
    SHAPE,
    SPARSE,
    UNTIED,
    Together,
    alone,
    check_alike,
    first,
)

from ratchet.checkpoint.sharded import BlockFiles
from ratchet.config.lora import LoRAConfig
from ratchet.learners.export import export_saved
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.weights.weight_layout import PEFT_PREFIX

pytestmark = pytest.mark.slow

STEPS = 3
ADAPTER = Adapter(LoRAConfig(rank=2, alpha=4.0), seed=5)
ATTENTION = Adapter(
    LoRAConfig(rank=3, target_modules=("q_proj", "v_proj", "o_proj"), rslora=True), seed=5
)
CASES = {
    "fsdp2": (SHAPE, {"shards": 2}, {}, ADAPTER),
    "tp2": (SHAPE, {"tensor": 2}, {}, ADAPTER),
    "tp2 sequence": (
        UNTIED,
        {"tensor": 2},
        {"sequence_parallel": True, "activation_checkpointing": True},
        ADAPTER,
    ),
    "fsdp2 x tp2": (UNTIED, {"shards": 2, "tensor": 2}, {}, ATTENTION),
    "hsdp2x2": (SHAPE, {"replicas": 2, "shards": 2}, {}, ATTENTION),
    "cp2": (SHAPE, {"context": 2}, {}, ADAPTER),
    "fsdp2 of experts": (SPARSE, {"shards": 2}, {}, ADAPTER),
    "ep2": (SPARSE, {"shards": 2, "experts": 2}, {}, ADAPTER),
    "tp2 of experts": (SPARSE, {"tensor": 2}, {}, ADAPTER),
    "ep2 of fsdp4": (SPARSE, {"shards": 4, "experts": 2}, {}, ADAPTER),
    "hsdp2 x ep2": (SPARSE, {"replicas": 2, "shards": 2, "experts": 2}, {}, ADAPTER),
    "ep2 x tp2": (SPARSE, {"shards": 2, "experts": 2, "tensor": 2}, {}, ADAPTER),
    "pp2": (SHAPE, {"pipeline": 2}, {"activation_checkpointing": True}, ADAPTER),
    "pp2 interleaved": (UNTIED, {"pipeline": 2}, {"pipeline_chunks": 2}, ATTENTION),
    "pp2 x fsdp2": (SHAPE, {"pipeline": 2, "shards": 2}, {}, ATTENTION),
    "pp2 x tp2": (UNTIED, {"pipeline": 2, "tensor": 2}, {"sequence_parallel": True}, ADAPTER),
    "pp2 x cp2": (SHAPE, {"pipeline": 2, "context": 2}, {}, ADAPTER),
    "pp2 x ep2": (SPARSE, {"pipeline": 2, "shards": 2, "experts": 2}, {}, ADAPTER),
}


DROPS = Adapter(LoRAConfig(rank=2, alpha=4.0, dropout=0.4), seed=5)
DROPPING = {
    "fsdp2 drops": ({"shards": 2}, SHAPE, STEPS, {}),
    "pp2 drops": ({"pipeline": 2}, SHAPE, STEPS, {"activation_checkpointing": True}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a case is saved, by its name."""
    return lambda name: tmp_path_factory.getbasetemp() / f"spread-lora-{name}"


@pytest.fixture(scope="module")
def together(folder):
    def make(name):
        if name in DROPPING:
            return *DROPPING[name], torch.float64, None, False, DROPS
        if name == "float32":
            return {"tensor": 2}, SHAPE, STEPS, {}, torch.float32, None, False, ADAPTER
        shape, topology, options, adapter = CASES[name]
        return topology, shape, STEPS, options, torch.float64, folder(name), False, adapter

    return Together({name: make(name)[0] for name in (*CASES, *DROPPING, "float32")}, make)


@pytest.mark.parametrize("name", CASES)
def test_ranks_train_the_adapter_that_one_process_does(name, together, folder):
    shape, topology, _, adapter = CASES[name]
    results = together.results(name)
    expected = alone(shape, STEPS, adapter=adapter)
    check_alike(results, topology, expected)
    stored = BlockFiles(folder(name))
    assert all(
        "lora_" in weight or weight.endswith("head.weight") for weight in stored.blocks_by_name
    )
    base, _ = first(shape, torch.float64)
    assert all(torch.equal(weight, expected[1][key]) for key, weight in base.canonical_weights())
    moved = [
        key
        for key in expected[1]
        if key.startswith(PEFT_PREFIX) and ".lora_B." in key and expected[1][key].any()
    ]
    assert moved


@pytest.mark.parametrize("name", DROPPING)
def test_ranks_drop_what_as_many_workers_do(name, together):
    """Both name what is dropped by the step, the micro-batch and the layer, and two data ranks have
    the micro-batches of two workers."""
    topology = DROPPING[name][0]
    expected = alone(SHAPE, STEPS, adapter=DROPS, workers=topology.get("shards", 1))
    check_alike(together.results(name), topology, expected, rtol=1e-11)


@pytest.mark.parametrize(
    ("shape", "topology", "later"),
    [
        (SHAPE, {"pipeline": 2}, {"pipeline": 2}),
        (SPARSE, {"shards": 2, "experts": 2}, {"pipeline": 2}),
    ],
)
def test_ranks_with_another_division_go_on_from_a_checkpoint(shape, topology, later, tmp_path):
    arguments = (topology, shape, 2, {}, torch.float64, tmp_path, False, ADAPTER, OPTIMIZER, later)
    results = run_ranks(2, "learners.spread_cases:spread", *arguments)
    check_alike(results, later, alone(shape, 2, adapter=ADAPTER))
    # One process has the same base.
    policy = init_policy(shape, seed=3, dtype=torch.float64)
    policy.attach(ADAPTER)
    export_saved(policy, tmp_path, tmp_path / "exported")


def test_float32_agrees_to_rounding(together):
    expected = alone(SHAPE, STEPS, torch.float32, adapter=ADAPTER)
    check_alike(together.results("float32"), {"tensor": 2}, expected, rtol=1e-5)
