"""What learners do with pictures in tests, in one process and on ranks."""

import asyncio
import pickle

import torch

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.sft import build_sft
from ratchet.config.schema import OptimizerConfig
from ratchet.learners.compute.microbatch_dispatch import distribute_microbatches, strip_media
from ratchet.learners.compute.microbatching import plan_microbatches
from ratchet.learners.config import DTensorConfig, LocalConfig
from ratchet.learners.distributed.fsdp_models import DTensorModels
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.local import LocalLearner
from ratchet.models.load import load_transformers_policy
from ratchet.models.model_source import ModelSource

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5, weight_decay=0.1)
TOKENS = 70  # of a micro-batch


def weighed(batch):
    algorithm = build_sft(SFTConfig())
    batch = algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState())
    return batch, list(algorithm.losses["policy"])


def local(
    directory, train_encoders, batches, *, tokens=TOKENS, dtype=torch.float64, checkpoint=None
):
    """(metrics by step, weights, logprobs of the last batch) in one process."""
    policy = load_transformers_policy(directory, dtype=dtype, train_encoders=train_encoders)
    learner = LocalLearner(
        LocalConfig(micro_batch_tokens=tokens), policy, optimizer=OPTIMIZER, total_steps=10
    )
    if checkpoint is not None:
        learner.load(checkpoint)
    metrics = [dict(asyncio.run(learner.update(*weighed(batch)))) for batch in batches]
    columns = asyncio.run(learner.score(batches[-1], ["logprobs"]))
    return (
        metrics,
        {name: weight.clone() for name, weight in policy.canonical_weights()},
        columns["logprobs"],
        learner,
    )


def ranked(rank, shards, directory, train_encoders, pickled, saved=None):
    """On one rank: (metrics by step, blocks of weights (with whether they rest), names of what has
    a gradient)."""
    provider = DTensorModels(DTensorConfig(dp_shard=shards), torch.device("cpu"), torch.float64)
    policy = provider.load(
        ModelSource(path=str(directory), train_encoders=train_encoders)
    ).requires_grad_(True)
    spec = RoleSpec(
        optimizer={**OPTIMIZER.model_dump(mode="json"), "kind": "adamw"}, total_steps=10
    )
    learner, mesh = provider.learner(policy, spec), provider.mesh
    metrics, pictures = [], []
    for batch in pickle.loads(pickled):
        batch, terms = weighed(batch)
        plan = plan_microbatches(batch, max_tokens=TOKENS, workers=mesh.topology.data_ranks)
        micros = strip_media(
            [
                micro.batch
                for micro in distribute_microbatches(batch, plan, mesh.topology.data_ranks)[
                    mesh.topology.data_rank(mesh.coordinates)
                ]
            ]
        )
        pictures.append([sum(len(row) for row in micro.media_S) for micro in micros])
        metrics.append(dict(learner.update(micros, terms)))
    if saved is not None:
        learner.save(saved)
        learner.load(saved)
    blocks = [
        (b.name, b.shape, b.offsets, b.tensor.clone(), b.is_frozen) for b in learner.weights()
    ]
    return metrics, blocks, pictures
