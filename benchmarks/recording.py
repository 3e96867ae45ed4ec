"""Measure the cost of recording steps, and how long a large record takes to open.

The quick-start's GRPO stage runs with and without a record in turn, on the same batches.

    python benchmarks/recording.py [--rounds 5] [--steps 32] [--opened 1000]

Prints a table and one JSON line with these numbers:
- cost: relative increase of a step's wall time by recording: the median over the rounds of the ratio
  of two consecutive runs, minus 1. It includes writing the rest of the record at the end, because a
  checkpoint waits for that.
- cpu_cost: the same for the processor time of all threads, with that of the recorder. It is the cost
  if no other core is free, and depends less on other programs of the machine.
- measuring: shares of the processor time that metrics, meter and trace take.
- opened: seconds to open and read a large record.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

import ratchet.training.run
from ratchet.config.loader import load_config
from ratchet.config.schema import RecordConfig, RunConfig
from ratchet.data.packing import pack
from ratchet.executors.freeze import freeze, prepare_process
from ratchet.experience.rollout.metrics import iterate_attempt_samples
from ratchet.learners.compute.flop_counter import wrap_with_flop_counter
from ratchet.observe.records.reader import Record
from ratchet.observe.records.writer import Recorder
from ratchet.observe.tracing.perfetto import open_trace
from ratchet.runs.run_dir import RunDirectory
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.training.from_config import build_policy
from ratchet.training.loop import train
from ratchet.training.metering import make_meter
from ratchet.training.stage_from_config import build_run
from ratchet.types import Group

QUICKSTART = Path(__file__).resolve().parent.parent / "ratchet" / "recipes" / "quickstart.yaml"
OVERRIDES = ["evaluation.tasks=0", "evaluation.every=0", "checkpoint.every=0"]
ATTEMPTS, TOKENS = 1024, 16  # of the large record: attempts of a step, tokens of an attempt


def train_supervised(config: RunConfig) -> dict[str, torch.Tensor]:
    """Return the weights after the supervised stage."""
    policy = build_policy(config)
    asyncio.run(train(build_run(config, 0, policy)))
    return policy.model.state_dict()


class Times(NamedTuple):
    wall_s: float
    cpu_s: float  # processor time of all threads


def measure_steps(
    config: RunConfig, weights: dict[str, torch.Tensor], steps: int, folder: Path | None
) -> Times:
    """Return the times of `steps` steps, after two steps of warm-up.

    folder: directory of the record; None: nothing is recorded.
    """
    policy = build_policy(config)
    policy.model.load_state_dict(weights)
    run = build_run(config, 1, policy)
    recorder = (
        None if folder is None else Recorder(RecordConfig(), folder, seed=0, in_background=False)
    )
    start = run.first_step + 2
    asyncio.run(train(replace(run, recorder=recorder, end_step=start)))
    run = replace(run, recorder=recorder, first_step=start, end_step=start + steps)
    start_s, start_cpu_s = time.perf_counter(), time.process_time()
    asyncio.run(train(run))
    if recorder is not None:
        recorder.flush()
    times = Times(time.perf_counter() - start_s, time.process_time() - start_cpu_s)
    if recorder is not None:
        recorder.close()
    return times


def measure_shares(
    config: RunConfig, weights: dict[str, torch.Tensor], steps: int, folder: Path
) -> dict[str, float]:
    """Return the shares of the processor time that attempts' metrics, meter and trace take."""
    policy = build_policy(config)
    policy.model.load_state_dict(weights)
    seconds_by_part = dict.fromkeys(("attempts", "meter", "trace"), 0.0)

    def time_calls(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            start = time.thread_time()
            try:
                return function(*arguments, **keywords)
            finally:
                seconds_by_part[part] += time.thread_time() - start

        return call

    def add_samples(groups: Sequence[Group]) -> list[Any]:
        """Add the samples to the metrics here, so that their time is counted."""
        for labels, samples in iterate_attempt_samples(groups):
            run.metrics.add("rollout", samples, labels=labels)
        return []

    folder.mkdir()
    with open_trace(folder / "trace.json") as trace:
        assert trace is not None
        meter = make_meter(policy, config, 1, RunDirectory(folder), trace)
        count_flops = partial(wrap_with_flop_counter, counter=meter.flop_counter)
        run = build_run(config, 1, policy, wrap_roles=[count_flops], meter=meter)
        run = replace(run, end_step=run.first_step + steps)
        ratchet.training.run.iterate_attempt_samples = time_calls("attempts", add_samples)
        meter.begin, meter.measure = (
            time_calls("meter", meter.begin),
            time_calls("meter", meter.measure),
        )
        meter.flop_counter.add = time_calls("meter", meter.flop_counter.add)
        trace._add_span, trace._add_attempt = (
            time_calls("trace", trace._add_span),
            time_calls("trace", trace._add_attempt),
        )
        trace.flush = time_calls("trace", trace.flush)
        start = time.process_time()
        asyncio.run(train(run))
        total_s = time.process_time() - start
    ratchet.training.run.iterate_attempt_samples = iterate_attempt_samples
    return {part: seconds / total_s for part, seconds in seconds_by_part.items()}


def measure_opening(steps: int, folder: Path) -> dict[str, float]:
    """Write a record of `steps` steps of 1,024 trajectories, and measure how long reading takes.

    scalars_s: seconds to open the record and read the numbers of all steps.
    one_step_s: seconds to read all columns of one step.
    """
    rng = np.random.default_rng(0)
    groups = [_make_group(f"g/{i}", rng) for i in range(ATTEMPTS // 8)]
    batch = pack(groups)
    batch = batch.fill_tokens(
        advantages=batch.rollout_logprobs_T.double(), old_logprobs=batch.rollout_logprobs_T
    )
    recorder = Recorder(RecordConfig(), folder, seed=0)
    for step in range(1, steps + 1):
        recorder.add(step, "rl", groups, batch, lambda b: b.rollout_logprobs_T.double(), {})
    recorder.close()
    start = time.perf_counter()
    record = Record(folder)
    record.table()
    scalars_s = time.perf_counter() - start
    start = time.perf_counter()
    record.step(steps // 2 + 1)
    mib = sum(file.size for file in record.files) / 2**20
    return {
        "scalars_s": scalars_s,
        "one_step_s": time.perf_counter() - start,
        "files": len(record.files),
        "mib": mib,
    }


def _make_group(name: str, rng: np.random.Generator) -> Group:
    rows = [
        make_trajectory(
            [1, 2],
            rng.integers(0, 32, TOKENS - 2).tolist(),
            reward=float(rng.integers(0, 2)),
            attempt=i,
        )
        for i in range(8)
    ]
    return make_group(name, rows, tag="sorting")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=32, help="timed steps; 32 fill a file")
    parser.add_argument("--opened", type=int, default=1000, help="steps of the large record")
    options = parser.parse_args()
    config = freeze(load_config(QUICKSTART, OVERRIDES))
    prepare_process(config.threads)
    weights, results = train_supervised(config), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        pairs = list[tuple[Times, Times]]()  # (without a record, with a record)
        for index in range(options.rounds):
            folders = [None, Path(name) / f"round-{index}"]
            # The order alternates between rounds.
            times_by_folder = {
                folder: measure_steps(config, weights, options.steps, folder)
                for folder in folders[:: 1 if index % 2 else -1]
            }
            pairs.append((times_by_folder[None], times_by_folder[folders[1]]))
            plain_ms, recorded_ms = (1000 * times.wall_s / options.steps for times in pairs[-1])
            plain_cpu_ms, recorded_cpu_ms = (
                1000 * times.cpu_s / options.steps for times in pairs[-1]
            )
            print(
                f"round {index + 1}: a step takes {plain_ms:.1f} ms, recorded {recorded_ms:.1f} ms; "
                f"processor time {plain_cpu_ms:.1f} and {recorded_cpu_ms:.1f} ms"
            )
        results["cost"] = (
            statistics.median(recorded.wall_s / plain.wall_s for plain, recorded in pairs) - 1
        )
        results["cpu_cost"] = (
            statistics.median(recorded.cpu_s / plain.cpu_s for plain, recorded in pairs) - 1
        )
        results["step_s"] = statistics.median(plain.wall_s for plain, _ in pairs) / options.steps
        results["measuring"] = measure_shares(
            config, weights, options.steps, Path(name) / "measured"
        )
        results["opened"] = (
            measure_opening(options.opened, Path(name) / "opened") if options.opened else None
        )
    print(
        f"a record costs {results['cost']:+.1%} of a step's time, {results['cpu_cost']:+.1%} of its "
        "processor time"
    )
    print(
        "shares of processor time:",
        ", ".join(f"{part} {share:.2%}" for part, share in results["measuring"].items()),
    )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
