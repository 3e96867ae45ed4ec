"""A learner that is spread over ranks computes what one process computes: losses, gradients, weights, columns."""

import pytest
import torch
from learners.ranks import run_ranks
from learners.spread_cases import SHAPE, UNTIED, alone, assembled, columns_of, weighed

STEPS = 2
TOPOLOGIES = {
    "fsdp2": ({"shards": 2}, {}),
    "hsdp2x2": ({"replicas": 2, "shards": 2}, {}),
    "tp2": ({"tensor": 2}, {}),
    "tp2 sequence": ({"tensor": 2}, {"sequence_parallel": True, "activation_checkpointing": True}),
    "cp2": ({"context": 2}, {}),
    "cp2 x tp2": ({"context": 2, "tensor": 2}, {"sequence_parallel": True}),
    "fsdp2 x tp2": ({"shards": 2, "tensor": 2}, {"activation_checkpointing": True, "logprob_chunk_mib": 1}),
}


@pytest.fixture(scope="module", params=["tied", "untied"])
def expected(request):
    shape = SHAPE if request.param == "tied" else UNTIED
    return shape, alone(shape, STEPS)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_ranks_compute_what_one_process_does(name, expected):
    shape, (metrics, weights, columns) = expected
    topology, options = TOPOLOGIES[name]
    world = torch.tensor(list(topology.values())).prod().item()
    results = run_ranks(world, "learners.spread_cases:spread", topology, shape, STEPS, options, torch.float64)
    for step in range(STEPS):
        for found, *_ in results:
            assert found[step].keys() == metrics[step].keys()
            for key, value in metrics[step].items():
                assert found[step][key] == pytest.approx(value, rel=1e-6, abs=1e-9), (step, key)
    whole = assembled(results)
    assert whole.keys() | {"head.weight"} == weights.keys()
    for key, tensor in whole.items():
        torch.testing.assert_close(tensor, weights[key], rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
    for key, column in columns_of(results, weighed(0)[0]).items():
        torch.testing.assert_close(column, columns[key], rtol=1e-6, atol=1e-7, msg=lambda text, key=key: f"{key}: {text}")
