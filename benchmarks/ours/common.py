"""What the drivers of this folder share: their arguments, the policy, steps of training with their
times.

`start` comes before anything that loads torch.
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
QUICKSTART = ROOT / "recipes" / "quickstart.yaml"
# the checkout needn't be installed
sys.path[:0] = [str(ROOT / "benchmarks" / "peers"), str(ROOT / "benchmarks"), str(ROOT)]

import protocol

import ratchet as rt
from ratchet.config.base import Section
from ratchet.executors.freeze import has_compiled_kernels, prepare_process, use_kernels
from ratchet.learners.config import LocalConfig


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The driver's options. Prepares this process as a run does."""
    parser.add_argument(
        "--workers",
        type=int,
        default=0,
        help="threads that each take parts of a batch; 0: as many as threads",
    )
    options = parser.parse_args()
    options.workers = options.workers or options.threads if options.device == "cpu" else 1
    protocol.quiet_offline(options.threads)
    prepare_process(options.threads)
    use_kernels(options.device == "cpu" and has_compiled_kernels())
    return options


def make_policy(options: argparse.Namespace, **keys: Any) -> rt.Policy:
    """The shared model with the embedded engine. keys: of `Policy.create`."""
    model = rt.load_policy(options.model, device=options.device)
    return rt.Policy.create(model, rt.load_tokenizer(options.model), **keys)


@dataclass
class Steps:
    """seconds: of each timed step, from one's end to the next one's. metrics: theirs."""

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
    """The path that `ratchet train` takes, with `groups` a step. prepare: is given the run before
    its first step."""
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
    """Waits for the accelerator, so that what is timed is done."""
    if options.device != "cpu":
        import torch

        torch.cuda.synchronize(options.device)


def facts(options: argparse.Namespace) -> dict[str, Any]:
    """What all of ours report."""
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
