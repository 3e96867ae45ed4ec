"""Measure how long Ratchet trains until the quick-start's second stage reaches a held-out accuracy.

The seconds exclude evaluation. The model comes from sorting_start.py. With several threads, as many
rollout workers of one thread each play the groups.

    python benchmarks/ours/ratchet_sorting.py --model DIR --threads 2 [--steps-alone 40]
    [key=value ...]

key=value overrides the quick-start's recipe, as in `ratchet train`. With `generator.kind=engine` this
process plays the groups itself.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import common
import protocol

PHASES = ("time/step_s", "time/sample_s", "time/update_s")

parser = protocol.target_arguments("the quick-start's GRPO stage with Ratchet")
parser.add_argument(
    "--steps-alone",
    type=int,
    default=0,
    help="measure this number of steps instead of reaching the target; 0: reach the target",
)
parser.add_argument("overrides", nargs="*", help="overrides of the quick-start's recipe, key=value")
options = common.start(parser)

import ratchet as rt
from ratchet.config.loader import load_config
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import read_file, write_text
from ratchet.executors.freeze import has_compiled_kernels
from ratchet.learners.config import LocalConfig
from ratchet.training.from_config import build_executor, build_policy, start_processes
from ratchet.training.stage_from_config import build_env_setup, build_stage_spec


def make_config() -> RunConfig:
    """Return the quick-start with the given model and `threads` rollout workers."""
    values = read_file(common.QUICKSTART)[0].plain()
    values |= {
        "model": {"path": options.model},
        "tokenizer": {"kind": "auto"},
        "device": "cpu",
        "seed": options.seed,
    }
    values["precision"] = "bfloat16" if options.bf16 else "float32"
    values["kernels"] = "compiled" if has_compiled_kernels() else "torch"
    if options.threads > 1 and not any(
        override.startswith("generator") for override in options.overrides
    ):
        values["generator"] = {
            "kind": "workers",
            "workers": options.threads,
            "worker_runs": "groups",
            "worker": {"kind": "engine"},
        }
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "quickstart.yaml"
        path.write_text(write_text(values), encoding="utf-8")
        return load_config(path, options.overrides)


async def main() -> None:
    config = make_config()
    stage = config.stages[1]
    plan = replace(
        build_stage_spec(config, 1),
        learner=LocalConfig(workers=options.workers),
        evaluation=stage.evaluation.model_copy(update={"every": options.every}),
        start_step=0,
    )
    async with AsyncExitStack() as exit_stack:
        executor = build_executor(config)
        exit_stack.callback(executor.close)
        policy = start_processes(config, executor, build_policy(config))
        exit_stack.push_async_callback(policy.close)
        run = rt.make_run(policy, build_env_setup(stage), rt.build(stage.algorithm), plan)
        goal, steps = protocol.Goal(options.target), list[Mapping[str, float | None]]()

        def watch(step: int, numbers: Mapping[str, float | None]) -> None:
            steps.append(numbers)
            if len(steps) == options.steps_alone:
                run.stop.status = 0
            accuracy = numbers.get("eval/accuracy")
            if (
                accuracy is not None
                and goal.is_reached(step, run.progress.seconds, accuracy)
                and not options.steps_alone
            ):
                run.stop.status = 0  # the loop ends after this step

        run.observers = (watch,)
        await rt.train(run)
    phases = {
        name: round(statistics.median(numbers[name] or 0.0 for numbers in steps), 4)
        for name in PHASES
    }
    seconds = run.progress.seconds if options.steps_alone else goal.seconds()
    common.emit(options, [seconds], case="quickstart", curve=goal.curve, phases_s=phases)


asyncio.run(main())
