"""What ranks of a spread learner do with given routes: each micro-batch's columns, and the
gradient's norm of a step."""

import numpy as np
import torch
from learners.spread_cases import SHAPE, SPARSE, groups, made, make_config, micros_of

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.config.policy_gradient import RouterConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.batch import ROUTES
from ratchet.data.packing import pack
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.topology import Topology

WANTED = ["logprobs", "values"]
LAYERS = SHAPE.n_layers - 1


def routed(router):
    """(weighed batch whose rows go to any two experts, some of their tokens to no given ones,
    terms)"""
    algorithm = build_policy_gradient(GRPOConfig(group_size=3, router=RouterConfig(**router)))
    batch = pack(groups(0))
    generator = torch.Generator().manual_seed(5)
    pairs = torch.tensor([[a, b] for a in range(4) for b in range(4) if a != b], dtype=torch.int16)
    routes = pairs[torch.randint(0, len(pairs), (batch.n_tokens, LAYERS), generator=generator)]
    routes[torch.rand(batch.n_tokens, generator=generator) < 0.1] = -1
    batch = batch.fill_tokens(**{ROUTES: routes})
    return algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState()), algorithm.losses[
        "policy"
    ]


def spread(rank, topology, options, router):
    """On one rank: (metrics of a step, rows and columns of each micro-batch where the rank
    answers)."""
    mesh = Mesh(Topology(**topology), "cpu")
    learner = made(mesh, SPARSE, torch.float64, make_config(topology, options))
    learner.forward.replays_routes = True
    batch, terms = routed(router)
    micros = micros_of(mesh, batch)
    columns = learner.score([micro.batch for micro in micros], WANTED)
    metrics = dict(learner.update([micro.batch for micro in micros_of(mesh, batch, terms)], terms))
    return metrics, [np.asarray(micro.rows) for micro in micros] if columns else [], columns
