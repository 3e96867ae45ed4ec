"""Five steps of GRPO whose groups one process drew and stored: any learner is given the same ones,
by the loop of every run."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ratchet.config.loader import load_config
from ratchet.config.schema import RunConfig
from ratchet.executors.freeze import freeze
from ratchet.testing.fakes import FakeSource
from ratchet.training.from_config import build_policy, start_processes
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run
from ratchet.types import Group
from ratchet.worker_protocols import Executor

QUICKSTART = Path(__file__).resolve().parents[2] / "ratchet" / "recipes" / "quickstart.yaml"
STEPS, GROUPS = 5, 16
FLOOR = 0.05
SMALLER = {
    "dense": ["stages.sft.steps=50", "stages.sft.batch_size=64"],
    "experts": [
        "stages.sft.steps=50",
        "stages.sft.batch_size=64",
        "model.preset=tiny-moe",
        "model.overrides={}",
    ],
}
# A step of Adam is the sign of a gradient where that is small: eps is above what float32 makes of
# another order of sums.
GRPO = [
    f"stages.grpo.steps={STEPS}",
    f"stages.grpo.batch_size={GROUPS}",
    "stages.grpo.optimizer.eps=1e-3",
]
GRPO += ["stages.grpo.optimizer.warmup_steps=0", "evaluation.every=0", "evaluation.tasks=0"]

# What the ranks of a learner share out, by the keys of `learner`, and the model that it is tried
# on. One line each.
TOPOLOGIES = {
    "fsdp2": ("dense", {"dp_shard": 2}),
    "tp2": ("dense", {"tensor_parallel": 2}),
    "cp2": ("dense", {"context_parallel": 2}),
    "pp2": ("dense", {"pipeline_parallel": 2}),
    "fsdp2 x tp2": ("dense", {"dp_shard": 2, "tensor_parallel": 2}),
    "ep2": ("experts", {"dp_shard": 2, "expert_parallel": 2}),
}


@dataclass
class Made:
    """What a run made of the groups: its metrics by step, and the weights that the generator was
    sent last."""

    groups: list[list[Group]]
    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]


class Replayed(FakeSource):
    """A source that gives what was drawn before, step by step."""

    def __init__(self, drawn: list[list[Group]]) -> None:
        self.drawn = drawn

    async def draw(self, n: int, version: int) -> list[Group]:
        assert len(self.drawn[version]) == n
        return self.drawn[version]

    def ack(self, ids, step: int) -> None: ...


class Recorded(FakeSource):
    """A source that keeps what it gives."""

    def __init__(self, source) -> None:
        self.source, self.drawn = source, []

    async def draw(self, n: int, version: int) -> list[Group]:
        self.drawn.append(await self.source.draw(n, version))
        return self.drawn[-1]

    def ack(self, ids, step: int) -> None:
        self.source.ack(ids, step)


def config_of(kind: str, *more: str) -> RunConfig:
    """Ranks compute by PyTorch's operations, so the one process that they are held against does
    too."""
    return freeze(
        load_config(QUICKSTART, [*SMALLER[kind], *GRPO, "device=cpu", "kernels=torch", *more])
    )


def after_sft(kind: str, directory: Path) -> RunConfig:
    """The stage of GRPO alone, of a model that the other stage has trained."""
    config = config_of(kind)
    torch.manual_seed(0)
    policy = build_policy(config)
    run = build_run(config, 0, policy)
    asyncio.run(train(run))
    run.roles["policy"].export(directory)
    policy.tokenizer.save(directory)
    model = config.model.model_copy(
        update={"preset": None, "overrides": {}, "path": str(directory)}
    )
    return config.model_copy(update={"model": model, "stages": config.stages[1:]})


def made(
    config: RunConfig,
    executor: Executor | None = None,
    drawn: list[list[Group]] | None = None,
    **learner: int,
) -> Made:
    """learner: keys of the spread one, whose ranks `executor` starts; without it the learner is in
    this process. drawn: the groups; None: the recipe's own source draws them."""
    if executor is not None:
        section = load_config(
            QUICKSTART, ["learner.kind=dtensor", *(f"learner.{k}={v}" for k, v in learner.items())]
        )
        stage = config.stages[0].model_copy(update={"learner": section.stages[0].learner})
        config = config.model_copy(update={"stages": (stage,)})
    policy = build_policy(config)
    if executor is not None:
        policy = start_processes(config, executor, policy)
    metrics: list[dict[str, float]] = []
    try:
        run = build_run(
            config, 0, policy, observers=(lambda step, found: metrics.append(dict(found)),)
        )
        source = Recorded(run.batcher.source) if drawn is None else Replayed(drawn)
        run.batcher.source = source
        asyncio.run(train(run))
    finally:
        if policy.ranks is not None:
            policy.ranks.close()
    return Made(
        source.drawn,
        metrics,
        {name: tensor.clone() for name, tensor in policy.model.canonical_weights()},
    )


def assert_alike(found: Made, wanted: Made, relative: float = 1e-5) -> None:
    """Every metric that is not a time, of every step; and each weight, in the norm. A loss of GRPO is
    what terms of about 1, in float32, leave when they cancel: below FLOOR its error is theirs."""
    assert len(found.metrics) == len(wanted.metrics)
    assert any(
        {"policy/loss", "policy/grad_norm", "rollout/reward"} <= row.keys()
        for row in wanted.metrics
    )
    for step, (ours, theirs) in enumerate(zip(found.metrics, wanted.metrics, strict=True)):
        assert ours.keys() == theirs.keys()
        names = [
            name for name in theirs if not name.startswith(("time/", "system/", "parity/"))
        ]  # and what only rounding makes
        for name in names:
            error = abs(ours[name] - theirs[name])
            assert error <= relative * max(abs(theirs[name]), FLOOR), (
                step,
                name,
                ours[name],
                theirs[name],
            )
    assert found.weights.keys() == wanted.weights.keys()
    for name, tensor in wanted.weights.items():
        assert float((found.weights[name] - tensor).norm()) <= relative * float(tensor.norm()), name
