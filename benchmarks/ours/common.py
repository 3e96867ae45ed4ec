"""Functions that the drivers of this folder share: arguments, the policy, and timed training steps.

Call `start` before importing anything that loads torch.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
QUICKSTART = ROOT / "ratchet" / "recipes" / "quickstart.yaml"
# So that the checkout need not be installed.
sys.path[:0] = [str(ROOT / "benchmarks" / "peers"), str(ROOT / "benchmarks"), str(ROOT)]

import protocol

import ratchet as rt
from ratchet.config.base import Section
from ratchet.executors.freeze import has_compiled_kernels, prepare_process, use_kernels
from ratchet.learners.config import LocalConfig


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Return the driver's options, after preparing this process like a run."""
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="workers that each compute a part of a batch; 0: one per thread",
    )
    options = parser.parse_args()
    options.workers = options.workers or options.threads if options.device == "cpu" else 1
    protocol.quiet_offline(options.threads)
    prepare_process(options.threads)
    use_kernels(
        options.device == "cpu" and has_compiled_kernels(),
        rounds_products=protocol.is_bfloat16(options),
        device=options.device,
    )
    return options


def make_policy(options: argparse.Namespace, **keys: Any) -> rt.Policy:
    """Return the shared model with the embedded engine. keys: arguments of `Policy.create`."""
    model = rt.load_policy(options.model, device=options.device)
    return rt.Policy.create(model, rt.load_tokenizer(options.model), **keys)


@dataclass
class Steps:
    """The timed steps.

    seconds: time from the end of the previous step to the end of each step.
    metrics: metrics of each step.
    startup_s: time from the start of the process to the end of the first step.
    """

    seconds: list[float] = field(default_factory=list)
    metrics: list[Mapping[str, float | None]] = field(default_factory=list)
    startup_s: float = 0.0


async def train(
    options: argparse.Namespace,
    policy: rt.Policy,
    setup: rt.EnvSetup,
    algorithm: Section,
    *,
    groups: int,
    prepare: Callable[[Any], None] = lambda run: None,
    observers: Sequence[Callable[..., None]] = (),
) -> Steps:
    """Train like `ratchet train`, and return the timed steps.

    groups: number of groups in a step.
    prepare: called with the run before its first step.
    """
    spec = rt.StageSpec(
        "bench",
        options.warmup + options.steps,
        groups,
        rt.Sampling(max_new_tokens=options.new_tokens),
        rt.OptimizerConfig(lr=1e-4),
        LocalConfig(workers=options.workers),
        rt.EvaluationConfig(tasks=0),
        seed=options.seed,
    )
    run = rt.make_run(policy, setup, rt.build(algorithm), spec)
    steps, marks = Steps(), [time.perf_counter()]

    def mark(step: int, numbers: Mapping[str, float | None]) -> None:
        synchronize(options)
        marks.append(time.perf_counter())
        steps.metrics.append(dict(numbers))

    run.observers = (*observers, mark)
    prepare(run)
    await rt.train(run)
    steps.seconds = [after - before for before, after in itertools.pairwise(marks)][
        options.warmup :
    ]
    steps.metrics = steps.metrics[options.warmup :]
    steps.startup_s = marks[1] - protocol.STARTED
    return steps


def synchronize(options: argparse.Namespace) -> None:
    """Wait for the accelerator, so that all timed work has ended."""
    if options.device != "cpu":
        import torch

        torch.cuda.synchronize(options.device)


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """Return the facts that all drivers of this folder report."""
    import torch

    cpu = torch.backends.cpu.get_cpu_capability()
    return {
        "peer": "ratchet",
        "version": rt.__version__,
        "torch": torch.__version__,
        "cpu_capability": cpu,
    }


def emit(options: argparse.Namespace, seconds: Sequence[float], **more: Any) -> None:
    protocol.emit(options, seconds, **facts(options), **more)
