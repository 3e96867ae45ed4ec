"""An adapter on ranks: what one process makes of it, whatever divides the base below it."""

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import SHAPE, SPARSE, UNTIED, alone, check_alike, first

from ratchet.checkpoint.sharded import BlockFiles
from ratchet.config.lora import LoRAConfig
from ratchet.learners.distributed.topology import Topology
from ratchet.models.lora.decoder import Adapter
from ratchet.models.weights.weight_layout import PEFT_PREFIX

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
    "ep2 of experts": (SPARSE, {"shards": 2, "experts": 2}, {}, ATTENTION),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "tp2" else [pytest.mark.slow]) for name in CASES],
)
def test_ranks_train_the_adapter_that_one_process_does(name, tmp_path):
    shape, topology, options, adapter = CASES[name]
    world = Topology(**topology).world_size
    more = (torch.float64, tmp_path, False, adapter)
    results = run_ranks(
        world, "learners.spread_cases:spread", topology, shape, STEPS, options, *more
    )
    expected = alone(shape, STEPS, adapter=adapter)
    check_alike(results, topology, expected)
    stored = BlockFiles(tmp_path)
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


@pytest.mark.slow
def test_ranks_drop_what_as_many_workers_do():
    """Both name what is dropped by the step and the micro-batch, and two ranks have the
    micro-batches of two workers."""
    adapter = Adapter(LoRAConfig(rank=2, alpha=4.0, dropout=0.4), seed=5)
    results = run_ranks(
        2,
        "learners.spread_cases:spread",
        {"shards": 2},
        SHAPE,
        STEPS,
        {},
        torch.float64,
        None,
        False,
        adapter,
    )
    check_alike(results, {"shards": 2}, alone(SHAPE, STEPS, adapter=adapter, workers=2), rtol=1e-11)


@pytest.mark.slow
def test_float32_agrees_to_rounding():
    results = run_ranks(
        2,
        "learners.spread_cases:spread",
        {"tensor": 2},
        SHAPE,
        STEPS,
        {},
        torch.float32,
        None,
        False,
        ADAPTER,
    )
    check_alike(
        results, {"tensor": 2}, alone(SHAPE, STEPS, torch.float32, adapter=ADAPTER), rtol=1e-5
    )
