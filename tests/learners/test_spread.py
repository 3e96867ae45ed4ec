"""A learner that is spread over ranks computes what one process computes: losses, gradients,
weights, columns."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import (
    MUON,
    OPTIMIZER,
    SHAPE,
    SPARSE,
    UNTIED,
    Together,
    alone,
    check_alike,
)

from ratchet.learners.distributed.topology import Topology

pytestmark = pytest.mark.slow

STEPS = 2
TOPOLOGIES = {
    "fsdp2": ({"shards": 2}, {}),
    "hsdp2x2": ({"replicas": 2, "shards": 2}, {}),
    "tp2": ({"tensor": 2}, {}),
    "tp2 sequence": ({"tensor": 2}, {"sequence_parallel": True, "activation_checkpointing": True}),
    "cp2": ({"context": 2}, {}),
    "cp2 x tp2": ({"context": 2, "tensor": 2}, {"sequence_parallel": True}),
    "pp2": ({"pipeline": 2}, {}),
    "pp4": ({"pipeline": 4}, {"activation_checkpointing": True}),
    "pp2 interleaved": ({"pipeline": 2}, {"pipeline_chunks": 2}),
    "pp3 unequal": ({"pipeline": 3}, {"stage_layers": (1, 2, 1)}),
    "pp2 x fsdp2": ({"pipeline": 2, "shards": 2}, {}),
    "pp2 x tp2": ({"pipeline": 2, "tensor": 2}, {"sequence_parallel": True}),
    "pp2 x cp2": ({"pipeline": 2, "context": 2}, {}),
    "fsdp2 x tp2": (
        {"shards": 2, "tensor": 2},
        {"activation_checkpointing": True, "logprob_chunk_mib": 1},
    ),
}


OF_EXPERTS = {
    "ep2": ({"shards": 2, "experts": 2}, {}),
    "ep2 of fsdp4": ({"shards": 4, "experts": 2}, {}),
    "ep2 of hsdp2x2": (
        {"replicas": 2, "shards": 2, "experts": 2},
        {"activation_checkpointing": True},
    ),
    "ep2 x tp2": ({"shards": 2, "experts": 2, "tensor": 2}, {"sequence_parallel": True}),
    "fsdp2": ({"shards": 2}, {}),
    "pp2 x ep2": ({"pipeline": 2, "shards": 2, "experts": 2}, {}),
}
OF_FIVE_LAYERS = {
    "pp2 interleaved unequal": (
        {"pipeline": 2},
        {"pipeline_chunks": 2, "stage_layers": (1, 1, 2, 1)},
    ),
}
SHAPES = {
    "tied": SHAPE,
    "untied": UNTIED,
    "sparse": SPARSE,
    "five layers": replace(SHAPE, n_layers=5),
}
OTHER_CASES = {"sparse": OF_EXPERTS, "five layers": OF_FIVE_LAYERS}
ALL = [(shape, name) for shape in ("tied", "untied") for name in TOPOLOGIES] + [
    (shape, name) for shape, cases in OTHER_CASES.items() for name in cases
]


@cache
def expected(name):
    return alone(SHAPES[name], STEPS)


def plain(case):
    """The arguments of a case."""
    kind, name = case
    topology, options = OTHER_CASES.get(kind, TOPOLOGIES)[name]
    return topology, SHAPES[kind], STEPS, options, torch.float64


PLAIN = Together({case: plain(case)[0] for case in ALL}, plain)


@pytest.mark.parametrize(("kind", "name"), ALL)
def test_ranks_compute_what_one_process_does(kind, name):
    results = PLAIN.results((kind, name))
    check_alike(results, plain((kind, name))[0], expected(kind))


def test_a_pipeline_saves_the_scalar_head_that_its_last_stage_trained(tmp_path):
    topology = {"pipeline": 2}
    arguments = (topology, SHAPE, 2, {}, torch.float64, tmp_path, False, None, OPTIMIZER, topology)
    results = run_ranks(2, "learners.spread_cases:spread", *arguments)
    check_alike(results, topology, alone(SHAPE, 2))


@pytest.mark.parametrize("kind", ["tied", "sparse"])
@pytest.mark.parametrize("name", ["fsdp2", "pp2 x fsdp2"])
def test_under_autocast_ranks_compute_what_one_process_does_under_it(kind, name):
    """Far closer than that is to float32, from which its losses are 1e-3 away: the same numbers are
    rounded."""
    topology, options = TOPOLOGIES[name]
    world = Topology(**topology).world_size
    arguments = (topology, SHAPES[kind], 1, options, torch.float32, None, True)
    results = run_ranks(world, "learners.spread_cases:spread", *arguments)
    check_alike(results, topology, alone(SHAPES[kind], 1, torch.float32, autocast=True), rtol=1e-4)


def test_under_autocast_matrices_of_layers_travel_in_bfloat16():
    for seen, held in run_ranks(2, "learners.spread_cases:precisions", SHAPE):
        assert (
            seen["layers.0.self_attn.qkv_proj.weight"]
            == seen["layers.1.mlp.down_proj.weight"]
            == torch.bfloat16
        )
        assert seen["layers.0.input_layernorm.weight"] == seen["norm.weight"] == torch.float32
        assert held == {torch.float32}


MUON_CASES = [
    ("tied", "fsdp2"),
    ("tied", "pp2 x fsdp2"),
    ("untied", "fsdp2 x tp2"),
    ("untied", "hsdp2x2"),
    ("sparse", "ep2 of fsdp4"),
    ("sparse", "ep2 x tp2"),
]


WITH_MUON = Together(
    {case: plain(case)[0] for case in MUON_CASES},
    lambda case: (*plain(case), None, False, None, MUON),
)


@cache
def expected_of_muon(kind):
    return alone(SHAPES[kind], STEPS, optimizer=MUON)


@pytest.mark.parametrize(
    ("kind", "name"),
    MUON_CASES,
)
def test_muon_on_ranks_takes_the_steps_of_one_process(kind, name):
    results = WITH_MUON.results((kind, name))
    check_alike(results, plain((kind, name))[0], expected_of_muon(kind))


def test_ranks_with_muon_go_on_from_what_they_saved_bit_by_bit(tmp_path):
    for rank in run_ranks(2, "learners.state_cases:goes_on", str(tmp_path), MUON):
        assert rank["keys"]["layers.0.self_attn.qkv_proj.weight"] == ["momentum"]
        assert all(rank["same"])
        assert "was saved with a model of another shape" in rank["refusal"]
