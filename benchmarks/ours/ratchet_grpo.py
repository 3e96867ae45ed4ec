"""Times whole GRPO steps of Ratchet on the path that `ratchet train` takes: rollouts by group, rewards, packing, one optimizer
step, handing over the weights. Arguments and output are those of ../peers/protocol.py."""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "peers"))
import protocol

parser = protocol.arguments("GRPO steps of Ratchet")
options = parser.parse_args()
protocol.quiet_offline(options.threads)

import torch

import ratchet as rt
from ratchet.data.renderer import Renderer
from ratchet.environments.single_turn import SingleTurn
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import Engine

torch.set_num_threads(options.threads)
STEPS = options.warmup + options.steps


class TokenPrompts(SingleTurn):
    """Tasks whose prompt is written as numbers: random tokens, as the peer gets them."""

    name = "tokens"

    def __init__(self, usable: Sequence[int]) -> None:
        self.usable = usable

    def tasks(self, split: str, *, seed: int, start: int = 0) -> Iterator[rt.Task]:
        if split == "test":
            return
        for index in range(start, STEPS * options.prompts):
            rng = random.Random(f"{seed}/{index}")
            text = " ".join(str(rng.choice(self.usable)) for _ in range(options.prompt_tokens))
            yield rt.Task(f"tokens/{index}", (rt.Message("user", text),))


class Numbers(Renderer):
    """Reads such a prompt back; nothing ends a completion early."""

    stop_ids = ()

    def __init__(self) -> None: ...

    def prompt(self, messages: Sequence[rt.Message], tools: Any = None) -> list[int]:
        return [int(word) for word in messages[-1].text.split()]

    def parse(self, tokens: Sequence[int], stop: Any = None) -> rt.Message:
        return rt.Message("assistant")


def reward(trajectory: rt.Trajectory, task: rt.Task) -> float:
    """The peer's: cheap, and different within a group."""
    return float((trajectory.tokens[options.prompt_tokens :] % 2).sum())


async def main() -> None:
    model = rt.load_policy(options.model)
    usable = range(model.vocab_size)
    policy = rt.Policy(model, rt.load_tokenizer(options.model), Numbers(), Engine(EngineConfig(), model))
    plan = rt.Plan(
        "bench",
        STEPS,
        options.prompts,
        rt.Sampling(max_new_tokens=options.new_tokens),
        rt.OptimizerConfig(lr=1e-4),
        seed=options.seed,
    )
    algorithm = rt.construct(rt.GRPOConfig(group_size=options.group_size))
    run = rt.make_run(policy, rt.Arena(TokenPrompts(usable), rt.as_reward(reward)), algorithm, plan)
    metrics: list[dict[str, Any]] = []
    marks = [time.perf_counter()]
    run.observers = (lambda step, numbers: (metrics.append(dict(numbers)), marks.append(time.perf_counter())),)
    await rt.train(run)
    assert all(m["rollout/generated_tokens"] == options.prompts * options.group_size * options.new_tokens for m in metrics)
    seconds = [after - before for before, after in itertools.pairwise(marks)]
    phases = {name: sorted(m[f"time/{name}_s"] for m in metrics[options.warmup :]) for name in ("sample", "update")}
    protocol.emit(
        options,
        seconds[options.warmup :],
        peer="ratchet",
        version=rt.__version__,
        torch=torch.__version__,
        cpu_capability=torch.backends.cpu.get_cpu_capability(),
        case="grpo_step",
        parameters=sum(p.numel() for p in model.parameters()),
        phases_s={name: round(values[len(values) // 2], 4) for name, values in phases.items()},
        startup_s=round(marks[1] - protocol.STARTED, 2),
    )


asyncio.run(main())
