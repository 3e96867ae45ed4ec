"""What the record of steps costs: the quick-start's GRPO stage with and without it, in turn, on the
same batches; and how long a large record takes to open.

    python benchmarks/recording.py [--rounds 5] [--steps 32] [--opened 1000]

Prints a table and one JSON line. cost: by how much longer the steps take with a record, the median
over rounds, each the ratio of two runs one after the other. The time to write what is left at the
end is counted, as a checkpoint waits for that. cpu_cost: the same of the processor's time, with the
recorder's thread: what it costs where no other core is free, and what still says something on a
machine that others keep busy.
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
from ratchet.training.from_config import build_policy, build_run
from ratchet.training.loop import train
from ratchet.training.metering import make_meter
from ratchet.types import Group

QUICKSTART = Path(__file__).resolve().parent.parent / "recipes" / "quickstart.yaml"
OVERRIDES = ["evaluation.tasks=0", "evaluation.every=0", "checkpoint.every=0"]
ATTEMPTS, TOKENS = 1024, 16  # of a step of the record that is opened


def taught(config: RunConfig) -> dict[str, torch.Tensor]:
    """The weights after the supervised stage."""
    policy = build_policy(config)
    asyncio.run(train(build_run(config, 0, policy)))
    return policy.model.state_dict()


class Taken(NamedTuple):
    wall_s: float
    cpu_s: float  # of all threads


def seconds(
    config: RunConfig, weights: dict[str, torch.Tensor], steps: int, folder: Path | None
) -> Taken:
    """Of so many steps, recorded where there is a folder; after two that warm up."""
    policy = build_policy(config)
    policy.model.load_state_dict(weights)
    run = build_run(config, 1, policy)
    recorder = (
        None if folder is None else Recorder(RecordConfig(), folder, seed=0, in_background=False)
    )
    start = run.first_step + 2
    asyncio.run(train(replace(run, recorder=recorder, end_step=start)))
    run = replace(run, recorder=recorder, first_step=start, end_step=start + steps)
    started, worked = time.perf_counter(), time.process_time()
    asyncio.run(train(run))
    if recorder is not None:
        recorder.flush()
    taken = Taken(time.perf_counter() - started, time.process_time() - worked)
    if recorder is not None:
        recorder.close()
    return taken


def measuring(
    config: RunConfig, weights: dict[str, torch.Tensor], steps: int, folder: Path
) -> dict[str, float]:
    """Shares of the processor time of so many measured steps."""
    policy = build_policy(config)
    policy.model.load_state_dict(weights)
    taken = dict.fromkeys(("attempts", "meter", "trace"), 0.0)

    def counted(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def count(*arguments: Any, **named: Any) -> Any:
            started = time.thread_time()
            try:
                return function(*arguments, **named)
            finally:
                taken[part] += time.thread_time() - started

        return count

    def spread(groups: Sequence[Group]) -> list[Any]:
        """Drain them into the metrics, as the run does."""
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
        ratchet.training.run.iterate_attempt_samples = counted("attempts", spread)
        meter.begin, meter.measure = counted("meter", meter.begin), counted("meter", meter.measure)
        meter.flop_counter.add = counted("meter", meter.flop_counter.add)
        trace.add_span, trace.add_attempt = (
            counted("trace", trace.add_span),
            counted("trace", trace.add_attempt),
        )
        trace.flush = counted("trace", trace.flush)
        started = time.process_time()
        asyncio.run(train(run))
        whole = time.process_time() - started
    ratchet.training.run.iterate_attempt_samples = iterate_attempt_samples
    return {part: seconds / whole for part, seconds in taken.items()}


def opened(steps: int, folder: Path) -> dict[str, float]:
    """Seconds to open a record of so many steps of 1,024 trajectories, and to read one of them."""
    rng = np.random.default_rng(0)
    groups = [_group(f"g/{i}", rng) for i in range(ATTEMPTS // 8)]
    batch = pack(groups)
    batch = batch.fill_tokens(
        advantages=batch.rollout_logprobs_T.double(), old_logprobs=batch.rollout_logprobs_T
    )
    recorder = Recorder(RecordConfig(), folder, seed=0)
    for step in range(1, steps + 1):
        recorder.add(step, "rl", groups, batch, lambda b: b.rollout_logprobs_T.double(), {})
    recorder.close()
    started = time.perf_counter()
    record = Record(folder)
    record.table()
    scalars = time.perf_counter() - started
    started = time.perf_counter()
    record.step(steps // 2 + 1)
    mib = sum(file.size for file in record.files) / 2**20
    return {
        "scalars_s": scalars,
        "one_step_s": time.perf_counter() - started,
        "files": len(record.files),
        "mib": mib,
    }


def _group(name: str, rng: np.random.Generator) -> Group:
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
    parser.add_argument("--steps", type=int, default=32)  # as many as a file has
    parser.add_argument("--opened", type=int, default=1000)
    options = parser.parse_args()
    config = freeze(load_config(QUICKSTART, OVERRIDES))
    prepare_process(config.threads)
    weights, found = taught(config), dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        pairs = list[tuple[Taken, Taken]]()  # without, with
        for at in range(options.rounds):
            folders = [None, Path(name) / f"round-{at}"]
            taken = {
                folder: seconds(config, weights, options.steps, folder)
                for folder in folders[:: 1 if at % 2 else -1]
            }
            pairs.append((taken[None], taken[folders[1]]))
            walls = [1000 * side.wall_s / options.steps for side in pairs[-1]]
            cpus = [1000 * side.cpu_s / options.steps for side in pairs[-1]]
            said = (
                "a step takes {:.1f} ms, recorded {:.1f} ms; of the processor {:.1f} and {:.1f} ms"
            )
            print(f"round {at + 1}: {said.format(*walls, *cpus)}")
        found["cost"] = (
            statistics.median(recorded.wall_s / plain.wall_s for plain, recorded in pairs) - 1
        )
        found["cpu_cost"] = (
            statistics.median(recorded.cpu_s / plain.cpu_s for plain, recorded in pairs) - 1
        )
        found["step_s"] = statistics.median(plain.wall_s for plain, _ in pairs) / options.steps
        found["measuring"] = measuring(config, weights, options.steps, Path(name) / "measured")
        found["opened"] = opened(options.opened, Path(name) / "opened") if options.opened else None
    print(
        f"a record costs {found['cost']:+.1%} of a step's time, {found['cpu_cost']:+.1%} of its "
        "processor time"
    )
    print(
        "measuring takes",
        ", ".join(f"{share:.2%} ({part})" for part, share in found["measuring"].items()),
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main()
