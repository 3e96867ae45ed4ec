"""Replay on a decoder that is spread over ranks is replay on one."""

import asyncio

import pytest
import torch
from learners.ranks import run_ranks
from learners.routed_cases import WANTED, routed
from learners.spread_cases import OPTIMIZER, SPARSE, first

from ratchet.learners.compute.microbatch_dispatch import gather_columns
from ratchet.learners.config import LocalConfig
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.local import LocalLearner

REPLAYED = {"replay": True, "measure": False}
LOSSES = {"replay": True, "balance_coef": 0.3, "z_coef": 0.1}
TOPOLOGIES = {
    "ep2": ({"shards": 2, "experts": 2}, {"activation_checkpointing": True}, LOSSES),
    "pp2": ({"pipeline": 2}, {}, REPLAYED),
    "fsdp2": ({"shards": 2}, {}, LOSSES),
    "hsdp2x2": ({"replicas": 2, "shards": 2}, {}, LOSSES),
    "tp2 sequence": (
        {"tensor": 2},
        {"sequence_parallel": True, "activation_checkpointing": True},
        REPLAYED,
    ),
    "cp2": ({"context": 2}, {}, REPLAYED),
    "pp2 interleaved x ep2": (
        {"pipeline": 2, "shards": 2, "experts": 2},
        {"pipeline_chunks": 2},
        REPLAYED,
    ),
}
QUICK = ("ep2", "pp2", "fsdp2", "tp2 sequence", "cp2")


def alone(router, replays_routes=True):
    policy, head = first(SPARSE, torch.float64)
    learner = LocalLearner(
        LocalConfig(),
        policy,
        optimizer=OPTIMIZER,
        total_steps=10,
        head=head,
        replays_routes=replays_routes,
    )
    batch, terms = routed(router)
    columns = asyncio.run(learner.score(batch, WANTED))
    return batch, columns, asyncio.run(learner.update(batch, terms))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in TOPOLOGIES]
)
def test_ranks_replay_what_one_process_replays(name):
    topology, options, router = TOPOLOGIES[name]
    batch, expected, metrics = alone(router)
    places = Topology(**topology)
    results = run_ranks(
        places.world_size, "learners.routed_cases:spread", topology, options, router
    )
    rows = [list(own) for _, micros, _ in results for own in micros]
    found = gather_columns(batch, rows, [columns for *_, micros in results for columns in micros])
    _, unrouted, _ = alone(router, replays_routes=False)
    for column in WANTED:
        torch.testing.assert_close(found[column], expected[column], rtol=1e-8, atol=1e-9)
        assert (expected[column] - unrouted[column]).abs().max() > 1e-3
    for (told, *_), at in zip(results, places.coordinates(), strict=True):
        if places.is_reporting_rank(at):
            assert told == pytest.approx(metrics, rel=1e-6, abs=1e-9)
