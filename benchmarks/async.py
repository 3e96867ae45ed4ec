"""Measure the throughput of synchronous and asynchronous runs on Ray with simulated durations.

Requests of the generators take random times with a heavy tail, updates of the learner a fixed time.
All else is real: actors, router, weight sync, scheduler, loop.

    python benchmarks/async.py [--steps 12] [--cluster ray]

The bound of a step is the time of the slower side alone: either the driver's work without waiting
for groups (update, weight push, ...), or the seconds of the requests that the step trains on,
divided among all slots. Steps at the beginning, when no group is under way yet, and at the end, when
no new group is begun, are not counted. "Best possible" is the share of the bound that a long run
reaches if its generators lose no time (`ratchet.testing.simulated.compute_best_step_ends`); bounded
staleness and the heavy tail cause the rest.

Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

# With SIGMA = 1, one request in a hundred takes over six times the mean.
WORKERS, SLOTS, MEAN_S, SIGMA = 2, 4, 1.0, 1.0
# The requests of a step take BATCH x ATTEMPTS x MEAN_S / (WORKERS x SLOTS) = 2 s on all slots.
BATCH, ATTEMPTS = 4, 4
SIMULATED_STEPS = 2000  # steps of the simulation of the best possible run

# Seconds of an update, by case.
CASES = {"generation is slower": 1.2, "both are equal": 2.0, "training is slower": 4.0}
MODES = {
    "synchronous": {},
    "max_staleness 4": {"max_staleness": 4, "order": "ready"},
    "max_staleness 8": {"max_staleness": 8, "order": "ready"},
}


def count_margin_steps(rollouts: dict[str, Any]) -> int:
    """Return the number of steps at either end that are not counted: those that may be under way."""
    return rollouts.get("max_staleness", 0) + 1


def make_recipe(cluster: str, rollouts: dict[str, Any], steps: int) -> dict[str, Any]:
    slow = {
        "kind": "ratchet.testing.simulated:SlowGenerator",
        "mean_s": MEAN_S,
        "sigma": SIGMA,
        "slots": SLOTS,
    }
    stage = {
        "environment": {"kind": "sorting", "digits": 2},
        "sampling": {"max_new_tokens": 3},
        "evaluation": {"tasks": 0},
        "parity": {"first_steps": 0, "every": 0},
        "generator": {"kind": "workers", "worker": slow, "workers": WORKERS},
        "rollouts": rollouts,
        "algorithm": {"kind": "grpo", "group_size": ATTEMPTS},
        "name": "simulated",
        "steps": steps + 2 * count_margin_steps(rollouts),
        "batch_size": BATCH,
    }
    return {
        "name": "simulated",
        "threads": 1,
        "device": "cpu",
        "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
        "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
        "cluster": {"kind": cluster} | ({"object_store_mib": 128} if cluster == "ray" else {}),
        "stages": [stage],
    }


async def measure(
    cluster: str, rollouts: dict[str, Any], update_s: float, steps: int
) -> tuple[float, float, float]:
    """Return three means over the counted steps, in seconds.

    They are the duration of a step, the driver's work in it (without waiting for groups), and the
    time that all slots together need for its requests.
    """
    from ratchet.config.schema import RunConfig
    from ratchet.executors.freeze import freeze
    from ratchet.experience.sources.prompt_ledger import PromptLedger
    from ratchet.testing.simulated import SlowLearner
    from ratchet.training.from_config import build_executor, build_policy, start_processes
    from ratchet.training.loop import train
    from ratchet.training.stage_from_config import build_run

    config = freeze(RunConfig.model_validate(make_recipe(cluster, rollouts, steps)))
    executor = build_executor(config)
    times_by_step: list[tuple[float, float]] = []  # (whole step, waiting for groups)
    counted = range(count_margin_steps(rollouts), count_margin_steps(rollouts) + steps)
    try:
        policy = start_processes(config, executor, build_policy(config))
        with tempfile.TemporaryDirectory() as directory:
            ledger = PromptLedger(Path(directory) / "ledger.jsonl")
            run = build_run(config, 0, policy, directory=Path(directory), ledger=ledger)
            run.roles = {name: SlowLearner(role, update_s) for name, role in run.roles.items()}
            run.observers = (
                lambda step, metrics: times_by_step.append(
                    (metrics["time/step_s"] or 0.0, metrics["time/sample_s"] or 0.0)
                ),
            )
            await train(run)
            await run.close()
            await policy.close()
            ledger.close()
            request_s = sum_request_seconds(Path(directory) / "ledger.jsonl", config.seed, counted)
    finally:
        executor.close()
    step_s, waiting_s = (
        statistics.fmean(times_by_step[step][i] for step in counted) for i in range(2)
    )
    return step_s, step_s - waiting_s, request_s / (WORKERS * SLOTS) / steps


def sum_request_seconds(ledger: Path, seed: int, steps: range) -> float:
    """Return the seconds of all requests that these steps trained on."""
    from ratchet.experience.seeds import derive_seed
    from ratchet.experience.sources.prompt_ledger import read_ledger
    from ratchet.testing.simulated import draw_seconds

    base = derive_seed(seed, "simulated", "rollouts")
    group_ids = [
        line["id"]
        for line in read_ledger(ledger)
        if line["event"] == "trained" and line["step"] in steps
    ]
    assert len(group_ids) == BATCH * len(steps)
    seeds = (
        derive_seed(base, group_id, attempt)
        for group_id in group_ids
        for attempt in range(ATTEMPTS)
    )
    return sum(draw_seconds(request_seed, MEAN_S, SIGMA) for request_seed in seeds)


def simulate_best_share(rollouts: dict[str, Any], busy_s: float) -> float:
    """Return the share of the bound that a run reaches if its generators lose no time.

    busy_s: seconds of the driver's work in a step.
    """
    from ratchet.experience.async_rollouts.staleness_scheduler import StalenessScheduler
    from ratchet.experience.seeds import derive_seed
    from ratchet.testing.simulated import compute_best_step_ends, draw_seconds

    def seconds(group: int, attempt: int) -> float:
        return draw_seconds(derive_seed("possible", group, attempt), MEAN_S, SIGMA)

    scheduler = StalenessScheduler(
        groups_per_step=BATCH, end_step=SIMULATED_STEPS, **{"max_staleness": 0, **rollouts}
    )
    ends = compute_best_step_ends(
        scheduler, attempts=ATTEMPTS, slots=WORKERS * SLOTS, update_s=busy_s, seconds=seconds
    )
    request_s = sum(
        seconds(group, attempt)
        for group in range(BATCH * SIMULATED_STEPS)
        for attempt in range(ATTEMPTS)
    )
    bound_s = max(busy_s, request_s / (WORKERS * SLOTS) / SIMULATED_STEPS)
    return bound_s / (ends[-1] / SIMULATED_STEPS)


async def main(arguments: argparse.Namespace) -> None:
    rows = []
    for case, update_s in CASES.items():
        synchronous_s = 0.0
        for mode, rollouts in MODES.items():
            step_s, busy_s, generators_s = await measure(
                arguments.cluster, rollouts, update_s, arguments.steps
            )
            bound_s = max(busy_s, generators_s)
            synchronous_s = synchronous_s or step_s  # the first mode is the synchronous one
            row = {
                "case": case,
                "mode": mode,
                "step_s": step_s,
                "driver_s": busy_s,
                "generators_s": generators_s,
            }
            shares = {
                "of_bound": bound_s / step_s,
                "possible": simulate_best_share(rollouts, busy_s),
            }
            rows.append(row | {"speedup": synchronous_s / step_s, **shares})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(
        "| Update | Mode | Seconds a step | Driver | Generators | Against synchronous | Share of "
        "the bound | Best possible |"
    )
    print("| --- " * 8 + "|")
    for row in rows:
        shares = f"{100 * row['of_bound']:.0f} % | {100 * row['possible']:.0f} %"
        numbers = (
            f"{row['step_s']:.2f} | {row['driver_s']:.2f} | {row['generators_s']:.2f} | "
            f"{row['speedup']:.2f}x | {shares}"
        )
        print(f"| {CASES[row['case']]:g} s, {row['case']} | {row['mode']} | {numbers} |")
    print(
        json.dumps(
            {"case": "Async", "cluster": arguments.cluster, "steps": arguments.steps, "rows": rows}
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help="number of counted steps")
    parser.add_argument("--cluster", choices=["ray", "local"], default="ray")
    sys.exit(asyncio.run(main(parser.parse_args())))
