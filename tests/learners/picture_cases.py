"""What learners do with pictures in tests, in one process and on ranks."""

import asyncio
import pickle

import pytest
import torch
from learners.spread_cases import assembled, unrounded

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import GRPOConfig
from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.algorithms.sft import build_sft
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import ModelError
from ratchet.learners.compute.microbatch_dispatch import (
    distribute_microbatches,
    gather_columns,
    strip_media,
)
from ratchet.learners.compute.microbatching import plan_microbatches
from ratchet.learners.config import DTensorConfig, LocalConfig
from ratchet.learners.distributed.fsdp_models import DTensorModels
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.distributed.topology import Topology, build_topology
from ratchet.learners.local import LocalLearner
from ratchet.models.load import load_transformers_policy
from ratchet.models.model_source import ModelSource
from ratchet.models.transformers import language_inputs
from ratchet.models.transformers.division import divide_by_tokens

OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5, weight_decay=0.1)
TOKENS = 70  # of a micro-batch


def weighed(batch, losses="sft"):
    """The batch with its weights, and the terms of the policy's loss."""
    if losses == "grpo":
        algorithm = build_policy_gradient(GRPOConfig())
        old = torch.zeros(batch.n_tokens, dtype=torch.float64) - 1.0
        batch = batch.fill_tokens(old_logprobs=old)
    else:
        algorithm = build_sft(SFTConfig())
    batch = algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState())
    return batch, list(algorithm.losses["policy"])


@unrounded()
def local(
    directory,
    train_encoders,
    batches,
    *,
    tokens=TOKENS,
    dtype=torch.float64,
    checkpoint=None,
    losses="sft",
    adapter=None,
):
    """(metrics by step, weights, logprobs of the last batch) in one process."""
    policy = load_transformers_policy(directory, dtype=dtype, train_encoders=train_encoders)
    if isinstance(adapter, tuple):
        policy.freeze(adapter)
    elif adapter is not None:
        policy.attach(adapter)
    learner = LocalLearner(
        LocalConfig(micro_batch_tokens=tokens), policy, optimizer=OPTIMIZER, total_steps=10
    )
    if checkpoint is not None:
        learner.load(checkpoint)
    metrics = [dict(asyncio.run(learner.update(*weighed(batch, losses)))) for batch in batches]
    columns = asyncio.run(learner.score(batches[-1], ["logprobs"]))
    return (
        metrics,
        {
            name: weight.clone()
            for name, weight in (*policy.canonical_weights(), *policy.adapter_weights())
        },
        columns["logprobs"],
        learner,
    )


@unrounded()
def ranked(
    rank,
    options,
    directory,
    train_encoders,
    pickled,
    saved=None,
    losses="sft",
    adapter=None,
    checkpoint=None,
):
    """On one rank: (metrics by step, blocks of weights (with whether they rest), pictures by
    micro-batch of each step, (rows, columns) of the last batch). checkpoint: where to go on."""
    provider = DTensorModels(DTensorConfig(**options), torch.device("cpu"), torch.float64)
    frozen, adapter = (adapter, None) if isinstance(adapter, tuple) else ((), adapter)
    policy = provider.load(
        ModelSource(path=str(directory), train_encoders=train_encoders, freeze=frozen)
    ).requires_grad_(True)
    spec = RoleSpec(
        optimizer={**OPTIMIZER.model_dump(mode="json"), "kind": "adamw"},
        total_steps=10,
        adapter=adapter,
    )
    learner, mesh = provider.learner(policy, spec), provider.mesh

    def own_micros(batch):
        plan = plan_microbatches(batch, max_tokens=TOKENS, workers=mesh.topology.data_ranks)
        parts = distribute_microbatches(
            batch, plan, mesh.topology.data_ranks, multiple=mesh.topology.pipeline
        )
        return parts[mesh.topology.data_rank(mesh.coordinates)]

    if checkpoint is not None:
        learner.load(checkpoint)
    metrics, pictures = [], []
    batches = pickle.loads(pickled)
    for batch in batches:
        batch, terms = weighed(batch, losses)
        micros = strip_media([micro.batch for micro in own_micros(batch)])
        pictures.append([sum(len(row) for row in micro.media_S) for micro in micros])
        metrics.append(dict(learner.update(micros, terms)))
    if saved is not None:
        learner.save(saved)
        learner.load(saved)
    micros = own_micros(batches[-1])
    columns = learner.score(strip_media([micro.batch for micro in micros]), ["logprobs"])
    blocks = [
        (b.name, b.shape, b.offsets, b.tensor.clone(), b.is_frozen) for b in learner.weights()
    ]
    return metrics, blocks, pictures, ([micro.rows for micro in micros] if columns else [], columns)


def ranked_each(rank, cases):
    """`ranked` with the arguments of each case."""
    return [ranked(rank, *arguments) for arguments in cases]


def close(found, expected, bound=1e-6):
    """Towers attend with numbers that transformers turns in float32."""
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(
            found[name],
            weight,
            rtol=bound,
            atol=bound / 10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


def check_ranks(results, options, expected, last_batch):
    """What ranks gave (`ranked`) against what one process did (`local`)."""
    metrics, weights, logprobs, _ = expected
    topology = build_topology(DTensorConfig(**options))
    for (found, *_), at in zip(results, topology.coordinates(), strict=True):
        for step, wanted in enumerate(metrics) if topology.is_reporting_rank(at) else ():
            assert found[step] == pytest.approx(wanted, rel=1e-6, abs=1e-9), step
    blocks_by_rank = [[block[:4] for block in blocks] for _, blocks, *_ in results]
    close(assembled([(None, blocks, None, None) for blocks in blocks_by_rank]), weights)
    plan = [rows for *_, (own, _) in results for rows in own]
    columns = [part for *_, (_, parts) in results for part in parts]
    scored = gather_columns(last_batch, plan, columns)["logprobs"]
    torch.testing.assert_close(scored, logprobs, rtol=1e-6, atol=1e-8)


def refused_features(rank, directory):
    """What a rank says of a model whose image features come in another order than its tokens."""
    group = Mesh(Topology(context=2), "cpu").context
    policy = load_transformers_policy(directory, dtype=torch.float64)
    select = language_inputs._select_tokens

    def reversed_features(named, index_U):
        changed = select(named, index_U)
        if features := changed.get("deepstack_visual_embeds"):
            changed["deepstack_visual_embeds"] = [x.flip(0) for x in features]
        return changed

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(language_inputs, "_select_tokens", reversed_features)
        with pytest.raises(ModelError) as caught:
            divide_by_tokens(policy, group)
    return str(caught.value)
