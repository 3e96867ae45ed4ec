"""Learners on the accelerator compute what they compute on the CPU.

Models are float64: where a kernel of CUDA sums in another order, results agree to 1e-10. Whether
tensors on several devices meet is tried under autocast by the recipes (`cuda_runs.py`).
"""

import asyncio
import gc
from dataclasses import dataclass, field

import pytest
import torch
from learners.routed_cases import routed
from learners.spread_cases import OPTIMIZER, SHAPE, SPARSE, weighed
from learners.test_local import ALGORITHMS, prepared
from support.pretend_cuda.counting import counting

from ratchet.config.lora import LoRAConfig
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.config.resolve import resolve
from ratchet.config.schema import OptimizerConfig
from ratchet.errors import ConfigError
from ratchet.learners.config import LocalConfig
from ratchet.learners.local import LocalLearner
from ratchet.models.layers.varlen import choose_varlen, has_varlen
from ratchet.models.load import init_policy
from ratchet.models.lora.decoder import Adapter
from ratchet.models.scalar_head import ScalarHead

DEVICES = ("cpu", "cuda:1")
COLUMNS = ["logprobs", "entropy", "values", "scores", "topk_logprobs"]


@dataclass(frozen=True)
class Case:
    """One way to train."""

    batch: object = field(default=lambda step: weighed(step))  # step -> (batch, terms)
    config: LocalConfig = LocalConfig(micro_batch_tokens=40)
    optimizer: OptimizerConfig = OPTIMIZER
    shape: DecoderConfig = SHAPE
    adapter: Adapter | None = None
    replays_routes: bool = False
    tolerance: float = 1e-10


MUON = resolve("optimizer", {"kind": "muon", "lr": 1e-2})
CASES = {
    "sft": Case(lambda step: prepared(ALGORITHMS["sft"])),
    "grpo with a reference": Case(lambda step: prepared(ALGORITHMS["grpo"])),
    "ppo with a critic": Case(),
    "one micro-batch": Case(config=LocalConfig(micro_batch_tokens=10_000)),
    "activation checkpointing": Case(
        config=LocalConfig(micro_batch_tokens=40, activation_checkpointing=True)
    ),
    "moving average": Case(optimizer=OPTIMIZER.model_copy(update={"ema_decay": 0.9})),
    # Its products are bfloat16 on an accelerator.
    "muon": Case(optimizer=MUON, tolerance=1e-2),
    "lora with dropout": Case(adapter=Adapter(LoRAConfig(rank=2, alpha=4.0), seed=5)),
    "experts": Case(shape=SPARSE),
    "experts with replayed routes": Case(
        lambda step: routed({"replay": True}), shape=SPARSE, replays_routes=True
    ),
}


def make_learner(case, device, *, dtype=torch.float64, autocast=False):
    policy = init_policy(case.shape, seed=3, dtype=dtype, device=device)
    if case.adapter is not None:
        policy.attach(case.adapter)
    head = ScalarHead(policy.hidden_size).to(dtype).init_weights(4, std=0.3).to(device)
    return LocalLearner(
        case.config,
        policy,
        optimizer=case.optimizer,
        total_steps=10,
        head=head,
        replays_routes=case.replays_routes,
        autocast=autocast,
    )


def update(learner, case, steps):
    return [dict(asyncio.run(learner.update(*case.batch(step)))) for step in steps]


def get_results(learner, case):
    columns = asyncio.run(learner.score(case.batch(0)[0], COLUMNS, top_k=3))
    assert {column.device.type for column in columns.values()} == {"cpu"}
    weights = {name: p.detach().cpu() for name, p in learner.forwards[0].parameters()}
    return weights | dict(columns)


@pytest.mark.parametrize("name", CASES)
def test_updates_and_scores_equal_the_cpus(name):
    case = CASES[name]
    results, metrics = {}, {}
    for device in DEVICES:
        learner = make_learner(case, device)
        metrics[device] = update(learner, case, range(2))
        results[device] = get_results(learner, case)
    tolerance = case.tolerance
    for column, value in results["cpu"].items():
        torch.testing.assert_close(
            results["cuda:1"][column], value, rtol=10 * tolerance, atol=tolerance, msg=column
        )
    for step, step_metrics in enumerate(metrics["cpu"]):
        expected = pytest.approx(step_metrics, rel=100 * tolerance, abs=tolerance)
        assert metrics["cuda:1"][step] == expected


@pytest.mark.parametrize("name", ["ppo with a critic", "muon", "moving average"])
def test_training_goes_on_after_a_checkpoint_and_an_offload(name, tmp_path):
    case = CASES[name]
    learner = make_learner(case, "cuda:1")
    update(learner, case, [0])
    gc.collect()  # what earlier tests left
    used_bytes = torch.cuda.memory_allocated(1)
    asyncio.run(learner.offload())
    assert torch.cuda.memory_allocated(1) < used_bytes / 2
    assert {p.device.type for p in learner.model.parameters()} == {"cpu"}
    learner.save(tmp_path)
    asyncio.run(learner.onload())
    resumed = make_learner(case, "cuda:1")
    resumed.load(tmp_path)
    expected = update(learner, case, [1]), get_results(learner, case)
    assert update(resumed, case, [1]) == expected[0]
    results = get_results(resumed, case)
    assert all(torch.equal(results[name], value) for name, value in expected[1].items())


def test_the_kernel_for_variable_lengths_computes_what_padded_attention_does():
    """Under autocast: the kernel takes half precision only."""
    assert has_varlen(torch.device("cuda:1"))
    norms, kernels = {}, {}
    for attention in ("padded", "varlen"):
        case = Case(config=LocalConfig(micro_batch_tokens=200, attention=attention))
        learner = make_learner(case, "cuda:1", dtype=torch.float32, autocast=True)
        with counting() as events:
            (metrics,) = update(learner, case, [0])
        norms[attention] = metrics["grad_norm"]
        kernels[attention] = events.count("kernel")
    assert norms["varlen"] == pytest.approx(norms["padded"], rel=0.02)
    assert kernels["varlen"] < kernels["padded"]


def refuse_grouped_queries(*arguments, **options):
    raise ValueError("Expect query and key/value to have the same number of heads")


@pytest.mark.parametrize(
    "make_kernel",
    [
        lambda kernel: lambda q, *x, **y: kernel(2 * q, *x, **y),
        lambda kernel: refuse_grouped_queries,
    ],
    ids=["computes something else", "refuses"],
)
def test_a_kernel_that_does_something_else_is_not_used(make_kernel, monkeypatch):
    module = torch.nn.attention.varlen
    monkeypatch.setattr(module, "varlen_attn", make_kernel(module.varlen_attn))
    device = torch.device("cuda:1")
    assert not has_varlen.__wrapped__(device)
    monkeypatch.setattr("ratchet.models.layers.varlen.has_varlen", has_varlen.__wrapped__)
    with pytest.raises(ConfigError, match=r"no such kernel for cuda:1. Set learner.attention=auto"):
        choose_varlen("varlen", device)
