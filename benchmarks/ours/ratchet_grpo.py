"""Time whole GRPO steps of Ratchet, as in `ratchet train`.

A step has rollouts, rewards, packing, one optimizer step, the weight sync and the writing of
metrics. Arguments and output are those of ../peers/protocol.py.
"""

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

HOST = ("pack", "rewards", "recording")  # timed here; the loop itself times the other phases
phases = protocol.Phases()


class TokenPrompts(SingleTurn):
    """An environment of random prompts, written as numbers that `Numbers` converts to tokens."""

    name = "tokens"

    def __init__(self, usable: Sequence[int]) -> None:
        self.usable = usable

    def tasks(self, split: str, *, seed: int, start: int = 0) -> Iterator[rt.Task]:
        for index in range(start, (options.warmup + options.steps) * options.prompts):
            rng = random.Random(f"{options.seed}/{index}")
            text = " ".join(str(rng.choice(self.usable)) for _ in range(options.prompt_tokens))
            yield rt.Task(f"tokens/{index}", (rt.Message("user", text),))


class Numbers(Renderer):
    """A renderer that reads the numbers of a prompt as token ids. It has no stop ids."""

    stop_ids = ()

    def __init__(self) -> None: ...

    def prompt(self, messages: Sequence[rt.Message], tools: Any = None) -> list[int]:
        return [int(word) for word in messages[-1].text.split()]

    def parse(self, tokens: Sequence[int], stop: Any = None) -> rt.Message:
        return rt.Message("assistant")


def reward(trajectory: rt.Trajectory, task: rt.Task) -> float:
    """Return the same reward as the peer's: it is cheap, and differs within a group."""
    return float((trajectory.tokens[options.prompt_tokens :] % 2).sum())


def watch(run: Any) -> None:
    """Time generation, and the host's work that is no phase of the loop."""
    engine = run.weight_sync.generator
    engine.core.step = phases.timed("generate", engine.core.step)
    run.metrics.flush = phases.timed("recording", run.metrics.flush)
    ratchet.training.run.measure_groups = phases.timed(
        "recording", ratchet.training.run.measure_groups
    )
    ratchet.training.loop.pack = phases.timed("pack", ratchet.training.loop.pack)


def compute_phase_medians(steps: common.Steps) -> dict[str, float]:
    """Return the median seconds of each phase of a step.

    "scheduling" is the time of sampling without the engine's steps and the rewards. Differences are
    computed within each step and not between medians, because the medians of a step and of its
    phases may come from different steps.
    """
    seconds_by_step: list[dict[str, float]] = []
    timed_steps = phases.steps[options.warmup : options.warmup + options.steps]
    for timed, metrics, step_s in zip(timed_steps, steps.metrics, steps.seconds, strict=True):
        seconds = (
            dict.fromkeys(("generate", *HOST), 0.0)
            | timed
            | {"update": metrics["time/update_s"] or 0.0}
        )
        seconds["scheduling"] = (
            (metrics["time/sample_s"] or 0.0) - seconds["generate"] - seconds["rewards"]
        )
        seconds["other"] = step_s - sum(seconds.values())
        seconds_by_step.append(seconds)
    return {
        name: round(statistics.median(seconds[name] for seconds in seconds_by_step), 5)
        for name in seconds_by_step[0]
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
            rt.GRPOConfig(group_size=options.group_size, weighting="token_mean"),  # like the peers
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
        # Sampling 1, the update's forward 1 and its backward 2, in units of a forward pass.
        gflop=4 * work.forward_gflop(policy.model.decoder.config),
        phases_s=compute_phase_medians(steps),
        startup_s=round(steps.startup_s, 2),
    )


asyncio.run(main())
