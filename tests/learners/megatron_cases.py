"""What ranks of a Megatron learner do in tests: one case after the other, in the same processes,
which import it once."""

import asyncio
import gc
import traceback
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from learners.routed_cases import routed
from learners.spread_cases import SHAPE, groups
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ratchet.algorithms.base import AlgoState
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.learners.compute.microbatch_dispatch import distribute_microbatches
from ratchet.learners.compute.microbatching import plan_microbatches, select_weighted_rows
from ratchet.learners.config import LocalConfig, MegatronConfig
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.learners.local import LocalLearner
from ratchet.models.load import init_policy, load_policy
from ratchet.models.model_source import ModelSource
from ratchet.models.scalar_head import ScalarHead

OPTIMIZER = OptimizerConfig(
    lr=1e-2, eps=1e-3, max_grad_norm=0.5, weight_decay=0.1, schedule="linear"
)
SEED, TOTAL, MICRO = 3, 10, 40
SHAPES = {
    "tied": SHAPE,
    "five": replace(SHAPE, n_layers=5),
    "untied": replace(SHAPE, tied=False, qk_norm=False, qkv_bias=True, family="qwen2"),
    "biased": replace(
        SHAPE, family="llama", qk_norm=False, qkv_bias=True, out_bias=True, mlp_bias=True
    ),
    "sparse": replace(
        SHAPE,
        family="qwen3_moe",
        n_experts=4,
        experts_per_token=2,
        expert_intermediate_size=12,
        dense_layers=(1,),
    ),
}


ROUTERS = {
    "routed": {"replay": True, "measure": False},
    "balanced": {"replay": True, "balance_coef": 0.1},
}


def weighed(kind, step, dtype=torch.float32):
    """(batch with weights, terms of the policy, or of the critic for "ppo"): a step of the
    algorithm of that kind. "routed" is one of GRPO whose rows go to given experts, "balanced" one
    with a loss of routers too."""
    if kind in ROUTERS:
        return routed(ROUTERS[kind])
    algorithm = build(resolve("algorithm", {"kind": kind}))
    batch = pack(groups(step))
    zeros = torch.zeros(batch.n_tokens, dtype=dtype)
    batch = batch.fill_tokens(
        old_logprobs=zeros - 1.0, values=zeros + 0.1, ref_logprobs=zeros - 2.0
    )
    batch = batch.fill_sequences(bootstrap_values=torch.zeros(batch.n_sequences, dtype=dtype))
    batch = algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState())
    return batch, list(algorithm.losses["critic" if kind == "ppo" else "policy"])


def wanted(kind):
    return ["values"] if kind == "ppo" else ["logprobs", "entropy"]


def alone(shape, kind, steps, adapter=None, autocast=False, dtype=torch.float32):
    """What one process makes of it: (metrics by step, weights, columns)."""
    policy = init_policy(SHAPES[shape], seed=SEED) if shape in SHAPES else load_policy(Path(shape))
    policy.to(dtype)
    if dtype is torch.float64 and shape not in SHAPES:  # grouped products take no such numbers
        policy.model.set_experts_implementation("eager")
    if adapter is not None:
        policy.attach(adapter)
    head = ScalarHead(policy.hidden_size) if kind == "ppo" else None
    section = LocalConfig(micro_batch_tokens=MICRO)
    learner = LocalLearner(
        section,
        policy,
        optimizer=OPTIMIZER,
        total_steps=TOTAL,
        head=head,
        replays_routes=kind in ROUTERS,
        autocast=autocast,
    )
    metrics = []
    for step in range(steps):
        batch, terms = weighed(kind, step, dtype)
        metrics.append(dict(asyncio.run(learner.update(batch, terms))))
    weights = {
        name: tensor.clone()
        for name, tensor in (*policy.canonical_weights(), *policy.adapter_weights())
    }
    return metrics, weights, asyncio.run(learner.score(weighed(kind, 0, dtype)[0], wanted(kind)))


def run(rank, cases):
    """The results of each case, or the traceback of the first that fails."""
    found = []
    for case in cases:
        try:
            found.append(one(**case))
        except Exception:
            found.append(traceback.format_exc())
            break
    return found


def source(shape):
    """shape: a key of SHAPES, or a Hugging Face directory."""
    if shape in SHAPES:
        return ModelSource(shape=SHAPES[shape], seed=SEED)
    return ModelSource(path=shape)


def made(shape, kind, options, adapter=None, dtype=torch.float32):
    from ratchet.learners.megatron.models import MegatronModels

    section = MegatronConfig(micro_batch_tokens=MICRO, **options)
    models = MegatronModels(section, torch.device("cpu"), dtype)
    policy = models.load(source(shape))
    optimizer = {"kind": "adamw", **OPTIMIZER.model_dump(mode="json", exclude={"kind"})}
    spec = RoleSpec(
        optimizer=optimizer,
        total_steps=TOTAL,
        has_scalar_head=kind == "ppo",
        replays_routes=kind in ROUTERS,
        adapter=adapter,
    )
    return models.learner(policy, spec)


def step_of(learner, kind, step, dtype=torch.float32):
    batch, terms = weighed(kind, step, dtype)
    return dict(learner.update([micro.batch for micro in micros_of(learner, batch, terms)], terms))


def one(
    shape,
    kind,
    options,
    first=0,
    steps=3,
    saved_to=None,
    loaded_from=None,
    adapter=None,
    takes_turns=False,
    exported_to=None,
    dtype=torch.float32,
):
    """takes_turns: the learner is offloaded before and after each step, and saved offloaded."""
    from ratchet.models.megatron.build import destroy_process_groups

    learner = made(shape, kind, options, adapter, dtype)
    if loaded_from is not None:
        learner.load(Path(loaded_from))
    metrics = []
    for step in range(first, first + steps):
        if takes_turns:
            leave_device(learner)
            learner.onload()
        metrics.append(step_of(learner, kind, step, dtype))
    micros = micros_of(learner, weighed(kind, 0, dtype)[0])
    columns = learner.score([micro.batch for micro in micros], wanted(kind))
    if takes_turns:
        leave_device(learner)
    blocks = [(b.name, b.shape, b.offsets, b.tensor.clone()) for b in learner.weights()]
    if saved_to is not None:
        learner.save(Path(saved_to))
    if exported_to is not None:
        learner.export(Path(exported_to))
    destroy_process_groups()
    return metrics, blocks, [micro.rows for micro in micros] if columns else [], columns


def leave_device(learner):
    """Offload, and hold the learner to it: no memory is left where its tensors lay, or their
    gradients, and what it sends is what it sent."""
    from ratchet.learners.megatron.offload import list_gradient_buffers, list_learner_tensors

    sent = [block.tensor.clone() for block in learner.weights()]
    memory = [
        tensor.untyped_storage()
        for tensor in (
            *list_learner_tensors(learner.model, learner.optimizer),
            *list_gradient_buffers(learner.chunks),
            *(
                p.main_grad
                for chunk in learner.chunks
                for p in chunk.parameters()
                if p.requires_grad
            ),
        )
    ]
    assert all(storage.nbytes() for storage in memory)
    for _ in range(2):  # twice: two roles may have one learner
        learner.offload()
    assert not any(storage.nbytes() for storage in memory)
    for block, before in zip(learner.weights(), sent, strict=True):
        assert torch.equal(block.tensor, before), block.name


def apart(rank, shape, options, adapter, directory):
    """Where columns come out, those of (the base, the model with the adapter off, with it, with it
    before the first step)."""
    from ratchet.learners.megatron.models import MegatronModels

    models = MegatronModels(
        MegatronConfig(micro_batch_tokens=MICRO, **options), torch.device("cpu"), torch.float32
    )
    policy = models.load(source(shape))
    batch, terms = weighed("grpo", 0)

    def columns(learner):
        found = learner.score([micro.batch for micro in micros_of(learner, batch)], ["logprobs"])
        return torch.cat([micro["logprobs"] for micro in found]) if found else None

    base = columns(models.learner(policy, RoleSpec()))
    optimizer = {"kind": "adamw", **OPTIMIZER.model_dump(mode="json", exclude={"kind"})}
    learner = models.learner(
        policy, RoleSpec(optimizer=optimizer, total_steps=TOTAL, adapter=adapter)
    )
    first = columns(learner)
    for _ in range(3):
        learner.update([micro.batch for micro in micros_of(learner, batch, terms)], terms)
    with policy.without_adapter():
        off = columns(learner)
    on = columns(learner)
    for part in ("all", "base", "adapter"):
        learner.export(Path(directory) / part, part=part)
    return None if base is None else (base, off, on, first)


def closes(rank, options):
    """(number of process groups, threads of gloo): before a learner starts, while it lives, after
    it closed, and after another one did."""
    from ratchet.models.megatron.build import destroy_process_groups

    def count():
        gc.collect()
        threads = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
        groups = torch.distributed.distributed_c10d._world.pg_map
        return len(groups), sum("gloo" in name for name in threads)

    counts = [count()]
    for _ in range(2):
        learner = made("tied", "sft", options)
        step_of(learner, "sft", 0)
        counts.append(count())
        del learner
        destroy_process_groups()
        counts.append(count())
    return counts


def goes_on(rank, directory, shape, kind, options):
    """Three steps, and the third again from a checkpoint of two: whether all bits are the same, and
    dtypes of what is kept."""
    from ratchet.models.megatron.build import destroy_process_groups

    learner, ends = made(shape, kind, options), []
    for step in range(3):
        metrics = step_of(learner, kind, step)
        if step == 1:
            learner.save(Path(directory))
    copies = [
        p
        for made in learner.optimizer.chained_optimizers
        for p in made.optimizer.param_groups[0]["params"]
    ]
    kept = {
        "weights": {p.dtype for chunk in learner.model.chunks for p in chunk.parameters()},
        "copies": {p.dtype for p in copies},
        "gradients": {buffer.grad_dtype for chunk in learner.chunks for buffer in chunk.buffers},
    }
    ends.append((metrics, bits_of(learner)))
    destroy_process_groups()
    learner = made(shape, kind, options)
    learner.load(Path(directory))
    ends.append((step_of(learner, kind, 2), bits_of(learner)))
    destroy_process_groups()
    (first, mine), (second, again) = ends
    return {
        **kept,
        "same": first == second
        and all(torch.equal(a, b) for a, b in zip(mine, again, strict=True)),
    }


def bits_of(learner):
    """Weights, copies of them, and the optimizer's means."""
    found = [p.detach().clone() for chunk in learner.model.chunks for p in chunk.parameters()]
    for made in learner.optimizer.chained_optimizers:
        for group in made.optimizer.param_groups:
            for p in group["params"]:
                found += [
                    p.detach().clone(),
                    *(moment.clone() for _, moment in sorted(made.optimizer.state[p].items())),
                ]
    return found


class Held(TorchDispatchMode):
    """largest: bytes of the largest piece of memory that a tensor has lain in. peak: of all that
    tensors held at once, what was there before apart."""

    def __init__(self, before):
        super().__init__()
        self.largest = self.peak = self.now = 0
        self.before = {tensor.untyped_storage().data_ptr() for tensor in before}
        self.tensors = Counter()  # by the address of the memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)):
            memory = tensor.untyped_storage()
            if memory.data_ptr() not in self.before:
                self.hold(memory.data_ptr(), memory.nbytes())
                weakref.finalize(tensor, self.let_go, memory.data_ptr(), memory.nbytes())
        return out

    def hold(self, address, size):
        self.now += size * (not self.tensors[address])
        self.tensors[address] += 1
        self.largest, self.peak = max(self.largest, size), max(self.peak, self.now)

    def let_go(self, address, size):
        self.tensors[address] -= 1
        self.now -= size * (not self.tensors[address])


def held(rank, directory, options):
    """(largest piece of memory, most at once, bytes of the rank's own weights, of all weights):
    while it loads, trains, scores and saves."""
    from ratchet.learners.megatron.models import MegatronModels

    shape = replace(SHAPE, hidden_size=96, intermediate_size=256)
    models = MegatronModels(
        MegatronConfig(micro_batch_tokens=MICRO, **options), torch.device("cpu"), torch.float32
    )
    whole = sum(p.numel() * 4 for p in init_policy(shape, seed=SEED).parameters())
    weights = {
        name: tensor.clone() for name, tensor in init_policy(shape, seed=SEED).canonical_weights()
    }

    def read(name, offsets, sizes):
        return weights[name][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    with Held(weights.values()) as seen:
        policy = models._allocate(shape)
        policy.fill(read)
        learner = models.learner(policy, RoleSpec(optimizer={"kind": "adamw"}))
        batch, terms = weighed("grpo", 0)
        learner.update([micro.batch for micro in micros_of(learner, batch, terms)], terms)
        learner.score([micro.batch for micro in micros_of(learner, batch)], ["logprobs"])
        learner.save(Path(directory))
        learner.load(Path(directory))
        sent = sum(block.tensor.clone().numel() for block in learner.weights())
    assert sent
    return seen.largest, seen.peak, sum(p.numel() * 4 for p in policy.parameters()), whole


def micros_of(learner, batch, terms=None):
    topology = learner.topology
    part = batch if terms is None else batch.take(select_weighted_rows(batch, terms))
    plan = plan_microbatches(
        part, max_tokens=MICRO, shares_prefixes=topology.context == 1, workers=topology.data_ranks
    )
    return distribute_microbatches(part, plan, topology.data_ranks, multiple=topology.pipeline)[
        topology.data_rank(learner.coordinates)
    ]
