"""Times whole GRPO steps of Ratchet on the path that `ratchet train` takes: rollouts by group,
rewards, packing, one optimizer step, handing over the weights, writing the metrics. Arguments and
output are those of ../peers/protocol.py."""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import common
import protocol

options = common.start(protocol.arguments("GRPO steps of Ratchet"))

from arithmetic import forest

import ratchet as rt
import ratchet.training.loop
import ratchet.training.run
from ratchet.data.chat.renderer import Renderer
from ratchet.environments.single_turn import SingleTurn
from ratchet.observe.sinks import JsonlSink

HOST = ("pack", "rewards", "recording")  # timed here; the other phases are the loop's own
phases = protocol.Phases()


class TokenPrompts(SingleTurn):
    """Tasks whose prompt is written as numbers: random tokens, as the peer gets them."""

    name = "tokens"

    def __init__(self, usable: Sequence[int]) -> None:
        self.usable = usable

    def tasks(self, split: str, *, seed: int, start: int = 0) -> Iterator[rt.Task]:
        for index in range(start, (options.warmup + options.steps) * options.prompts):
            rng = random.Random(f"{options.seed}/{index}")
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


def watch(run: Any) -> None:
    """Times what is neither the model's arithmetic nor a phase of the loop."""
    engine = run.weight_sync.generator
    engine.core.step = phases.timed("generate", engine.core.step)
    run.metrics.flush = phases.timed("recording", run.metrics.flush)
    ratchet.training.run.measure_groups = phases.timed(
        "recording", ratchet.training.run.measure_groups
    )
    ratchet.training.loop.pack = phases.timed("pack", ratchet.training.loop.pack)


def shares(steps: common.Steps) -> dict[str, float]:
    """Medians of what each phase takes of a step, in seconds. Scheduling: what sampling takes
    beside the engine's steps and the rewards. Each step's own are subtracted from each other: the
    first steps are slower, and medians of a whole and of its parts may be of different steps."""
    each: list[dict[str, float]] = []
    timed = phases.steps[options.warmup : options.warmup + options.steps]
    for taken, numbers, whole in zip(timed, steps.metrics, steps.seconds, strict=True):
        seconds = (
            dict.fromkeys(("generate", *HOST), 0.0)
            | taken
            | {"update": numbers["time/update_s"] or 0.0}
        )
        seconds["scheduling"] = (
            (numbers["time/sample_s"] or 0.0) - seconds["generate"] - seconds["rewards"]
        )
        seconds["other"] = whole - sum(seconds.values())
        each.append(seconds)
    return {
        name: round(statistics.median(seconds[name] for seconds in each), 5) for name in each[0]
    }


async def main() -> None:
    policy = common.make_policy(options)
    policy = replace(policy, renderer=Numbers())
    judge = rt.as_reward(phases.timed("rewards", reward))
    with tempfile.TemporaryDirectory() as directory:
        write = phases.timed("recording", JsonlSink(Path(directory) / "metrics.jsonl").write)
        steps = await common.train(
            options,
            policy,
            rt.EnvSetup(TokenPrompts(range(policy.model.vocab_size)), judge),
            rt.GRPOConfig(group_size=options.group_size, weighting="token_mean"),  # as the peers
            groups=options.prompts,
            prepare=watch,
            observers=(write, lambda step, numbers: phases.next_step()),
        )
    generated = options.prompts * options.group_size * options.new_tokens
    assert all(numbers["rollout/generated_tokens"] == generated for numbers in steps.metrics)
    work = forest(
        [(options.prompt_tokens, [options.new_tokens] * options.group_size)] * options.prompts
    )
    common.emit(
        options,
        steps.seconds,
        case="grpo_step",
        parameters=sum(p.numel() for p in policy.model.parameters()),
        # sampling, the update's forward, and its backward
        gflop=4 * work.forward_gflop(policy.model.decoder.config),
        phases_s=shares(steps),
        startup_s=round(steps.startup_s, 2),
    )


asyncio.run(main())
