"""What ranks of a spread learner do in tests: the same model and batches on every rank, results
back as numbers."""

import asyncio
import sys
import traceback
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from learners.ranks import run_ranks

from ratchet.algorithms.base import AlgoState
from ratchet.algorithms.config.named_policy_gradients import PPOConfig
from ratchet.algorithms.policy_gradient import build_policy_gradient
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.schema import OptimizerConfig
from ratchet.data.packing import pack
from ratchet.errors import ModelError
from ratchet.learners.compute.microbatch_dispatch import distribute_microbatches, gather_columns
from ratchet.learners.compute.microbatching import plan_microbatches, select_weighted_rows
from ratchet.learners.config import DTensorConfig, LocalConfig
from ratchet.learners.distributed.fsdp import DTensorLearner, shard_model
from ratchet.learners.distributed.fsdp_models import DTensorModels, make_shard
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.param_shards import collect_param_shards, fill_param_shards
from ratchet.learners.distributed.topology import Topology
from ratchet.learners.local import LocalLearner
from ratchet.learners.optim.config import MuonConfig
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.model_source import ModelSource
from ratchet.models.parallel.sharded_policy import DistributedPolicy
from ratchet.models.scalar_head import ScalarHead
from ratchet.testing.builders import make_group, make_trajectory

VOCAB = 23
SHAPE = DecoderConfig(VOCAB, 16, 4, 4, 2, 8, 24, init_std=0.3)
UNTIED = DecoderConfig(
    VOCAB,
    16,
    4,
    4,
    2,
    8,
    24,
    init_std=0.3,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
    family="qwen2",
)
SPARSE = replace(
    SHAPE,
    family="qwen3_moe",
    n_experts=4,
    experts_per_token=2,
    expert_intermediate_size=12,
    dense_layers=(1,),
)
MUON = MuonConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5, weight_decay=0.1)
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5, weight_decay=0.1)


def groups(seed, n=5, attempts=3, longest=12):
    """Ragged: an empty completion, a lone token, equal rewards in one group."""
    rng = torch.Generator().manual_seed(seed)
    draw = lambda low, high, size=(): torch.randint(low, high, size, generator=rng)  # noqa: E731
    made = []
    for g in range(n):
        prompt = draw(0, VOCAB, (int(draw(1, 9)),)).tolist()
        rows = []
        for a in range(attempts):
            length = int(draw(1, longest)) if (g, a) != (0, 0) else 0
            reward = 1.0 if g == 1 else float(draw(0, 2))
            rows.append(
                make_trajectory(
                    prompt, draw(0, VOCAB, (length,)).tolist(), reward=reward, attempt=a
                )
            )
        made.append(make_group(f"g{g}", rows))
    return made


def weighed(seed):
    """(batch with weights and every column, terms of the policy and the critic): a step of PPO."""
    algorithm = build_policy_gradient(PPOConfig())
    batch = pack(groups(seed))
    zeros = torch.zeros(batch.n_tokens, dtype=torch.float64)
    batch = batch.fill_tokens(
        old_logprobs=zeros - 1.0, values=zeros + 0.1, ref_logprobs=zeros - 2.0
    )
    batch = batch.fill_sequences(
        bootstrap_values=torch.zeros(batch.n_sequences, dtype=torch.float64)
    )
    batch = algorithm.weigh(algorithm.advantage(batch, AlgoState()), AlgoState())
    return batch, [*algorithm.losses["policy"], *algorithm.losses["critic"]]


def whole_weights(policy, head):
    found = {
        name: tensor.clone()
        for name, tensor in (*policy.canonical_weights(), *policy.adapter_weights())
    }
    return {**found, "head.weight": head.weight.detach().clone()}


@contextmanager
def unrounded():
    """Leaves float64 what transformers casts to float32, as in norms and routers. Such a rounding
    makes 1e-7 of another order of sums, so that a fault of 1e-6 could not be seen."""
    with pytest.MonkeyPatch.context() as patched:
        for owner, name in ((torch.Tensor, "float"), (torch.Tensor, "to"), (F, "softmax")):
            patched.setattr(owner, name, _leave_float64(getattr(owner, name)))
        yield


def _leave_float64(function):
    def call(x, *arguments, **options):
        module = sys._getframe(1).f_globals["__name__"]
        if x.dtype == torch.float64 and module.startswith("transformers.models."):
            if function.__name__ == "float":
                return x
            double = {torch.float32: torch.float64}
            arguments = [double.get(a, a) if isinstance(a, torch.dtype) else a for a in arguments]
            options |= {"dtype": torch.float64} if options.get("dtype") is torch.float32 else {}
        return function(x, *arguments, **options)

    return call


def restrict(policy, adapter):
    """Train an adapter alone, or all but the weights that patterns freeze; None: everything."""
    if isinstance(adapter, tuple):
        policy.freeze(adapter)
    elif adapter is not None:
        policy.attach(adapter)


def first(shape, dtype, adapter=None):
    """The whole policy and its head, before the first step. shape: a path is of a model that
    transformers runs."""
    if isinstance(shape, Path):
        from ratchet.models.transformers.policy import TransformersPolicy

        policy = TransformersPolicy.load(shape, dtype=dtype)
    else:
        policy = init_policy(shape, seed=3, dtype=dtype)
    restrict(policy, adapter)
    return policy, ScalarHead(policy.hidden_size).to(dtype).init_weights(4, std=0.3)


@unrounded()
def alone(
    shape, steps, dtype=torch.float64, autocast=False, adapter=None, workers=1, optimizer=OPTIMIZER
):
    """What one process makes of it: (metrics by step, weights, columns of the last batch)."""
    policy, head = first(shape, dtype, adapter)
    config = LocalConfig(micro_batch_tokens=40, workers=workers)
    learner = LocalLearner(
        config, policy, optimizer=optimizer, total_steps=10, head=head, autocast=autocast
    )
    metrics = []
    for step in range(steps):
        batch, terms = weighed(step)
        metrics.append(dict(asyncio.run(learner.update(batch, terms))))
    columns = asyncio.run(learner.score(weighed(0)[0], WANTED, top_k=3))
    return metrics, whole_weights(policy, head), columns


CPU = torch.device("cpu")
WANTED = ["logprobs", "entropy", "values", "scores", "topk_logprobs", "topk_ids"]


def make_config(topology, options):
    return DTensorConfig(pipeline_parallel=topology.get("pipeline", 1), **options)


def made(mesh, shape, dtype, config, autocast=False, adapter=None, optimizer=OPTIMIZER):
    whole, head = first(shape, dtype, adapter)
    weights = whole_weights(whole, head)
    shard = make_shard(config, mesh)
    if isinstance(shape, Path):
        from ratchet.models.transformers.division import divide

        # An adapter is attached once the model is divided.
        policy = whole if adapter is None else first(shape, dtype)[0]
        divide(policy, shard, "cpu")
    else:
        policy = DistributedPolicy(shape, shard, device="cpu", dtype=dtype)
    for module in policy.local_stages or [policy]:
        shard_model(module, module.layers(), mesh, autocast=autocast)
    restrict(policy, adapter)
    shard_model(head, [], mesh)
    learner = DTensorLearner(
        config,
        mesh,
        policy,
        device=CPU,
        optimizer=optimizer,
        total_steps=10,
        head=head,
        autocast=autocast,
    )

    def read(name, offsets, sizes):
        return weights[name][tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))]

    if isinstance(shape, Path) and adapter is None:
        # A division keeps the bits that were loaded, under the names that they have in files.
        for shard in learner.param_shards:
            for block in shard.blocks(shard.local) if not shard.name.startswith("head.") else ():
                assert torch.equal(
                    block.tensor, read(block.name, block.offsets, block.tensor.shape)
                )
    fill_param_shards(learner.param_shards, read)
    return learner


def micros_of(mesh, batch, terms=None):
    part = batch if terms is None else batch.take(select_weighted_rows(batch, terms))
    plan = plan_microbatches(
        part, max_tokens=40, shares_prefixes=mesh.context is None, workers=mesh.topology.data_ranks
    )
    return distribute_microbatches(
        part, plan, mesh.topology.data_ranks, multiple=mesh.topology.pipeline
    )[mesh.topology.data_rank(mesh.coordinates)]


@unrounded()
def spread(
    rank,
    topology,
    shape,
    steps,
    options,
    dtype,
    directory=None,
    autocast=False,
    adapter=None,
    optimizer=OPTIMIZER,
    later=None,
):
    """On one rank: (metrics by step, blocks of weights, (rows, columns) of the last batch where the
    rank is_reporting_rank). later: the topology that goes on from a checkpoint after the first
    step; None: the same without a checkpoint."""
    mesh = Mesh(Topology(**topology), "cpu")
    config = make_config(topology, options)
    learner = made(mesh, shape, dtype, config, autocast, adapter, optimizer)
    metrics = []
    for step in range(steps):
        batch, terms = weighed(step)
        micros = [micro.batch for micro in micros_of(mesh, batch, terms)]
        metrics.append(dict(learner.update(micros, terms)))
        if later is not None and step == 0:
            learner.save(directory)
            mesh = Mesh(Topology(**later), "cpu")
            config = make_config(later, options)
            learner = made(mesh, shape, dtype, config, autocast, adapter, optimizer)
            learner.load(directory)
    micros = micros_of(mesh, weighed(0)[0])
    columns = learner.score([micro.batch for micro in micros], WANTED, top_k=3)
    blocks = [(b.name, b.shape, b.offsets, b.tensor.clone()) for b in learner.weights()]
    if directory is not None and later is None:
        learner.save(directory)
    return metrics, blocks, [micro.rows for micro in micros] if columns else [], columns


def spread_each(rank, cases):
    """`spread` with the arguments of each case, or the traceback of the first that fails."""
    found = []
    for arguments in cases:
        try:
            found.append(spread(rank, *arguments))
        except Exception:
            found.append(traceback.format_exc())
            break
    return found


class Together:
    """Cases of `spread` that the same ranks compute, one after the other: the first steps of a process
    take two seconds longer than later ones.

    topologies: by the name of the case. make: returns a case's arguments, by its name.
    """

    def __init__(self, topologies, make):
        self.topologies, self.make, self.found = topologies, make, {}

    def results(self, name):
        """The results of a case, by rank. Its group is computed when the first of it is asked for."""
        if name not in self.found:
            group = [other for other in self.topologies if self._ranks(other) == self._ranks(name)]
            cases = [self.make(other) for other in group]
            world = self._ranks(name)
            try:
                each = run_ranks(world, "learners.spread_cases:spread_each", cases, timeout_s=600)
                by_case = [list(found) for found in zip(*each, strict=True)]
            except (AssertionError, ValueError) as error:  # a rank died, or failed alone
                by_case = [[str(error)]]
            left = [["a case before this one failed"]] * (len(group) - len(by_case))
            self.found |= zip(group, by_case + left, strict=True)
        broken = [found for found in self.found[name] if isinstance(found, str)]
        assert not broken, "\n".join(broken)
        return self.found[name]

    def _ranks(self, name):
        return Topology(**self.topologies[name]).world_size


def assembled(results):
    """The whole weights, from every rank's blocks; each number exactly once."""
    found, seen = {}, {}
    for _, blocks, _, _ in results:
        for name, shape, offsets, tensor in blocks:
            whole = found.setdefault(name, torch.zeros(shape, dtype=tensor.dtype))
            count = seen.setdefault(name, torch.zeros(shape))
            where = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
            whole[where] = tensor
            count[where] += 1
    assert all((count == 1).all() for count in seen.values()), (
        "a block came from no rank, or from several"
    )
    return found


def columns_of(results, batch):
    plan = [rows for _, _, own, _ in results for rows in own]
    return gather_columns(batch, plan, [found for *_, columns in results for found in columns])


def check_alike(results, topology, expected, *, rtol=1e-6):
    """What ranks gave against what one process did."""
    (metrics, weights, columns), topology = expected, Topology(**topology)
    for found, at in zip(results, topology.coordinates(), strict=True):
        for step in range(len(metrics)) if topology.is_reporting_rank(at) else ():
            assert found[0][step].keys() == metrics[step].keys()
            for key, value in metrics[step].items():
                assert found[0][step][key] == pytest.approx(value, rel=rtol, abs=rtol / 1000), (
                    step,
                    key,
                )
    whole = assembled(results)
    assert whole.keys() | {"head.weight"} == weights.keys()
    scored = columns_of(results, weighed(0)[0])
    for key, tensor, wanted in [(k, whole[k], weights[k]) for k in whole] + [
        (k, scored[k], columns[k]) for k in scored
    ]:
        torch.testing.assert_close(
            tensor, wanted, rtol=rtol, atol=rtol / 10, msg=lambda text, key=key: f"{key}: {text}"
        )


def precisions(rank, shape):
    """On one of two ranks under autocast: (dtype of each parameter where a layer uses it, dtypes of
    what the rank holds)."""
    mesh, seen = Mesh(Topology(shards=2), "cpu"), {}
    learner = made(mesh, shape, torch.float32, DTensorConfig(dp_shard=2), autocast=True)

    def note(path):
        return lambda module, *_: seen.update(
            {f"{path}.{n}": p.dtype for n, p in module.named_parameters(recurse=False)}
        )

    for path, module in learner.model.stages[0].decoder.named_modules():
        module.register_forward_hook(note(path))
    learner.score([micro.batch for micro in micros_of(mesh, weighed(0)[0])], ["logprobs"])
    return seen, {item.local.dtype for item in learner.param_shards}


def refusals(rank, directory, changes, sequence=False):
    """What a rank says of a model whose plan is changed by each of these tables of rules; None
    takes a rule away, and {} changes nothing."""
    from ratchet.models.transformers.division import divide_by_plan
    from ratchet.models.transformers.policy import TransformersPolicy

    group, said = Mesh(Topology(tensor=2), "cpu").tensor, []
    for rules in changes:
        policy = TransformersPolicy.load(directory)
        changed = {**policy.model.tp_plan, **rules}
        policy.model.tp_plan = {rule: style for rule, style in changed.items() if style is not None}
        with pytest.raises(ModelError) as caught:
            divide_by_plan(policy, group, "cpu", sequence=sequence)
        said.append(str(caught.value))
    return said


def refused_tokens(rank, directory):
    """What a rank says of a model whose windows its divided attention overlooks."""
    from ratchet.models.transformers.context_parallel import DividedAttention
    from ratchet.models.transformers.division import divide_by_tokens
    from ratchet.models.transformers.policy import TransformersPolicy

    policy = TransformersPolicy.load(directory)
    group = Mesh(Topology(context=2), "cpu").context
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(DividedAttention, "_get_window", lambda *_: None)
        with pytest.raises(ModelError) as caught:
            divide_by_tokens(policy, group)
    return str(caught.value)


def frozen_names(rank, directory, options, patterns):
    """Of the weights that a rank has of a model, those that patterns freeze."""
    models = DTensorModels(DTensorConfig(**options), CPU, torch.float64)
    source = ModelSource(path=str(directory), backend="transformers", freeze=patterns)
    return models.load(source).frozen_names()


def count_parameters(rank, cases):
    """How many parameters a rank holds and trains of each case: (learner's section, directory,
    backend, lora, what is frozen)."""
    counts = []
    for section, directory, backend, lora, freeze in cases:
        provider = DTensorModels(DTensorConfig(**section), CPU, torch.float32)
        source = ModelSource(path=directory, backend=backend, freeze=freeze)
        model = provider.load(source).requires_grad_(True)
        if lora is not None:
            model.attach(Adapter(lora))
        shards = collect_param_shards(model, None, provider.mesh)
        trained = [shard for shard in shards if shard.parameter.requires_grad]
        counts.append([sum(shard.local.numel() for shard in some) for some in (shards, trained)])
    return counts
