"""Who gets an accelerator's memory: the KV cache's budget, and a learner that is offloaded."""

import asyncio
import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from commands.replay.test_command import trained
from rehearsal.cuda_learners import CASES, Case, make_learner, update
from rehearsal.cuda_runs import RECIPE
from rehearsal.device_counts import COMPLETION, PROMPT, ROWS, VOCAB, make_rows
from support.pretend_cuda import DEVICE_BYTES
from support.pretend_cuda.counting import counting
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.model_shape.presets import get_preset
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import EvaluationConfig, OptimizerConfig
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.kernels import bfloat16
from ratchet.learners.config import LocalConfig
from ratchet.learners.device_memory import count_update_bytes
from ratchet.learners.distributed.param_shards import get_local_tensor
from ratchet.learners.local import LocalLearner
from ratchet.learners.offload import Offloader
from ratchet.learners.optim.config import AdamW8bitConfig, MuonConfig
from ratchet.models.flops import DecoderCost
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.training.build import make_run
from ratchet.training.stage import EnvSetup, Policy, StageSpec
from ratchet.types import Sampling
from ratchet.utils.datasheets import USABLE_MEMORY_SHARE

DEVICE = "cuda:1"
TOKENIZER = character_tokenizer("0123456789=")
OPTIMIZERS = {
    "adamw": OptimizerConfig(lr=1e-3),
    "moving average": OptimizerConfig(lr=1e-3, ema_decay=0.9),
    "muon": MuonConfig(lr=1e-3),
    "adamw_8bit": AdamW8bitConfig(lr=1e-3),
}
# The models of each algorithm beside the policy, and how many of all models train.
SMALL = LocalConfig(micro_batch_tokens=64)
ALGORITHMS = {
    "no other model": ({"kind": "grpo"}, 0, 1),
    "a reference": ({"kind": "grpo", "kl": {"coef": 0.1}}, 1, 1),
    "a reference and a critic": ({"kind": "ppo", "kl": {"coef": 0.1}}, 2, 2),
}


def count_used_bytes():
    """Return the bytes that live tensors have on DEVICE.

    A device's autograd thread may hold the tensors of one backward pass until its next one. This
    next one is of no bytes.
    """
    gc.collect()
    empty = torch.zeros(0, device=DEVICE, requires_grad=True)
    torch.autograd.grad(empty * 2, empty, torch.zeros(0, device=DEVICE))
    return torch.cuda.memory_allocated(1)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_learner_knows_what_updates_allocate(name):
    learner = make_learner(Case(optimizer=OPTIMIZERS[name]), DEVICE)
    used_bytes = count_used_bytes()
    later_bytes = learner.count_later_bytes()
    update(learner, CASES["ppo with a critic"], [0])
    gradient_bytes = sum(p.nbytes for _, p in learner.forwards[0].parameters())
    assert count_used_bytes() - used_bytes + gradient_bytes == later_bytes
    assert learner.count_later_bytes() == gradient_bytes


def make_stage(keys, adapter=None, learner=SMALL, **generator):
    model = init_policy(get_preset("tiny", TOKENIZER.vocab_size), seed=0, device=DEVICE)
    policy = Policy.create(model, TOKENIZER, generator=EngineConfig(**generator))
    setup = EnvSetup(build(resolve("environment", {"kind": "sorting"})))
    spec = StageSpec(
        "a",
        1,
        1,
        evaluation=EvaluationConfig(tasks=0),
        adapter=adapter,
        learner=learner,
        sampling=Sampling(max_new_tokens=8),
    )
    run = make_run(policy, setup, build(resolve("algorithm", keys)), spec)
    assert isinstance(policy.generator, EmbeddedEngine)
    return run, policy.generator.core, model


@pytest.mark.parametrize("name", ALGORITHMS)
def test_the_kv_cache_leaves_room_for_all_models_of_the_stage(name):
    keys, others, trained = ALGORITHMS[name]
    bfloat16.set_enabled(True, on_cpu=False)  # the engine copies the layers' matrices
    used_bytes = count_used_bytes()
    run, core, model = make_stage(keys)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    copied = sum(
        p.numel() for name, p in model.named_parameters() if ".layers." in name and p.dim() > 1
    )
    weights = count_used_bytes() - used_bytes
    # Scalar heads are small.
    assert weights == pytest.approx((1 + others) * 4 * parameters, rel=0.02)
    update_bytes = count_update_bytes(SMALL, DecoderCost(model.shape), "cuda", 8)
    later = 12 * trained * parameters + 2 * copied + update_bytes
    usable = USABLE_MEMORY_SHARE * (DEVICE_BYTES - torch.cuda.memory_allocated(1))
    assert usable - core.limits.kv_bytes == pytest.approx(later, rel=0.01)
    assert run.roles


def test_automatic_sizes_are_those_of_the_device_and_are_logged(caplog):
    caplog.set_level(logging.INFO, "ratchet")
    run, core, _ = make_stage({"kind": "grpo"}, learner=LocalConfig())
    learner = run.roles["policy"]
    assert isinstance(learner, LocalLearner)
    assert learner.config.micro_batch_tokens == 16384
    kv_gib = core.limits.kv_bytes / 2**30
    for text in ("learner.micro_batch_tokens=auto became 16384", f"became {kv_gib:.2f}: gradients"):
        assert text in caplog.text


@pytest.mark.parametrize("recomputes", [False, True])
def test_an_update_takes_no_more_than_is_counted(recomputes):
    """Of layers whose activations are more than what PyTorch keeps of any operation."""
    shape = DecoderConfig(VOCAB, 256, 6, 8, 2, 32, 768, init_std=0.2)
    model = init_policy(shape, seed=0, device=DEVICE)
    tokens = PROMPT + ROWS * COMPLETION
    section = LocalConfig(micro_batch_tokens=tokens, activation_checkpointing=recomputes)
    learner = LocalLearner(section, model, optimizer=OptimizerConfig(), autocast=True)
    batch, terms = make_rows(1)
    asyncio.run(learner.update(batch, terms))  # makes the moments
    torch.cuda.reset_peak_memory_stats(1)
    used_bytes = count_used_bytes()
    asyncio.run(learner.update(batch, terms))
    taken = torch.cuda.max_memory_allocated(1) - used_bytes
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    counted = count_update_bytes(section, DecoderCost(shape), "cuda", tokens) + gradients
    assert taken <= counted < 3 * taken


def test_an_adapters_learner_leaves_more_to_the_cache():
    _, whole, _ = make_stage({"kind": "grpo"})
    _, adapted, _ = make_stage({"kind": "grpo"}, Adapter(LoRAConfig(rank=2, alpha=4.0), seed=0))
    assert adapted.limits.kv_bytes > whole.limits.kv_bytes


def test_a_budget_of_the_recipe_stays():
    _, core, _ = make_stage({"kind": "ppo"}, kv_cache_gib=0.01)
    assert core.limits.kv_bytes == int(0.01 * 2**30)


def test_an_offload_waits_once_and_keeps_its_memory():
    learner = make_learner(CASES["ppo with a critic"], DEVICE)
    update(learner, CASES["ppo with a critic"], [0])

    def move(method):
        with counting() as events:
            asyncio.run(method())
        return events

    def get_addresses():
        return [parameter.data_ptr() for parameter in learner.model.parameters()]

    before = {name: p.clone() for name, p in learner.model.named_parameters()}
    away, back = move(learner.offload), move(learner.onload)
    assert (away.count("sync"), back.count("sync")) == (1, 0), back.describe("sync")
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())
    move(learner.offload)
    first = get_addresses()
    move(learner.onload)
    assert get_addresses() != first
    move(learner.offload)
    move(learner.offload)  # the reference of a LoRA run is the same learner
    assert get_addresses() == first
    move(learner.onload)
    move(learner.offload)
    assert get_addresses() == first


def test_memory_that_cannot_be_locked_is_not_locked(monkeypatch):
    learner = make_learner(CASES["ppo with a critic"], DEVICE)
    empty_like = torch.empty_like

    def refuse_locking(tensor, *, pin_memory=False, **options):
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory")
        return empty_like(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", refuse_locking)
    before = {name: p.cpu().clone() for name, p in learner.model.named_parameters()}
    asyncio.run(learner.offload())
    assert all(torch.equal(p, before[name]) for name, p in learner.model.named_parameters())


def test_a_stage_begins_without_the_learners_of_the_last_one(tmp_path, monkeypatch):
    """Their optimizer state would take twice the weights' memory through the whole stage."""
    policies, alive = [], []
    build_learner = LocalLearner.__init__

    def record(self, *arguments, **options):
        alive.append([reference() is not None for reference in policies])
        policies.append(weakref.ref(self))
        build_learner(self, *arguments, **options)

    monkeypatch.setattr(LocalLearner, "__init__", record)
    trained(tmp_path / "run", RECIPE)
    assert alive == [[], [False]]


def test_shards_of_fsdp_are_offloaded_to_memory_that_is_kept(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(DEVICE)
    torch.cuda.set_device(1)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fully_shard(model, mesh=init_device_mesh("cuda", (1,)), reshard_after_forward=True)
        shards = list(model.parameters())
        offloader, x = Offloader([model], None), torch.ones(2, 8, device=DEVICE)
        before, addresses = model(x).detach().clone(), []
        for _ in range(2):
            offloader.offload()
            assert {get_local_tensor(shard).device.type for shard in shards} == {"cpu"}
            addresses.append([get_local_tensor(shard).data_ptr() for shard in shards])
            offloader.onload()
            assert torch.equal(model(x), before)
        assert addresses[0] == addresses[1]
        assert all(a is b for a, b in zip(model.parameters(), shards, strict=True))
    finally:
        dist.destroy_process_group()
        torch.cuda.set_device(0)
