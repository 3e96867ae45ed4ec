"""Throughput of synchronous and asynchronous runs on Ray, whose generators take simulated times
with a heavy tail and whose learner takes a fixed one; all else is real: actors, router, weight sync,
scheduler, loop.

python benchmarks/async.py [--steps 12] [--cluster ray]

The bound is what the slower side alone would take: all that the driver does in a step but to wait
for groups (the update, the push of weights, ...), or the seconds of the very requests that the
counted steps trained on, over all slots. Steps at the beginning, which find the generators empty,
and at the end, for which nothing new is begun, are not counted. The best possible is the share of
the bound that a long run reaches whose generators lose no time
(`ratchet.testing.simulated.compute_best_step_ends`): what bounded staleness and a heavy tail leave.
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

# one request in a hundred takes over six times the mean
WORKERS, SLOTS, MEAN_S, SIGMA = 2, 4, 1.0, 1.0
# a step's requests need BATCH x ATTEMPTS x MEAN_S / (WORKERS x SLOTS) = 2 s of all slots
BATCH, ATTEMPTS = 4, 4
LONG = 2000  # steps of the simulation that says what is possible

# seconds of an update
CASES = {"generation is slower": 1.2, "they are alike": 2.0, "training is slower": 4.0}
MODES = {
    "synchronous": {},
    "max_staleness 4": {"max_staleness": 4, "order": "ready"},
    "max_staleness 8": {"max_staleness": 8, "order": "ready"},
}


def around(rollouts: dict[str, Any]) -> int:
    """Steps at either end that are not counted: as many as may be under way."""
    return rollouts.get("max_staleness", 0) + 1


def recipe(cluster: str, rollouts: dict[str, Any], steps: int) -> dict[str, Any]:
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
        "steps": steps + 2 * around(rollouts),
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
    """Seconds of a step, of what the driver does in it but to wait for groups, and of all slots for
    its requests: means of the counted steps."""
    from ratchet.config.schema import RunConfig
    from ratchet.executors.freeze import freeze
    from ratchet.experience.sources.prompt_ledger import PromptLedger
    from ratchet.testing.simulated import SlowLearner
    from ratchet.training.from_config import (
        build_executor,
        build_policy,
        build_run,
        start_processes,
    )
    from ratchet.training.loop import train

    config = freeze(RunConfig.model_validate(recipe(cluster, rollouts, steps)))
    executor = build_executor(config)
    found: list[tuple[float, float]] = []
    counted = range(around(rollouts), around(rollouts) + steps)
    try:
        policy = start_processes(config, executor, build_policy(config))
        with tempfile.TemporaryDirectory() as directory:
            ledger = PromptLedger(Path(directory) / "ledger.jsonl")
            run = build_run(config, 0, policy, directory=Path(directory), ledger=ledger)
            run.roles = {name: SlowLearner(role, update_s) for name, role in run.roles.items()}
            run.observers = (
                lambda step, now: found.append(
                    (now["time/step_s"] or 0.0, now["time/sample_s"] or 0.0)
                ),
            )
            await train(run)
            await run.close()
            await policy.close()
            ledger.close()
            asked = seconds_asked(Path(directory) / "ledger.jsonl", config.seed, counted)
    finally:
        executor.close()
    whole, waited = (statistics.fmean(found[step][i] for step in counted) for i in range(2))
    return whole, whole - waited, asked / (WORKERS * SLOTS) / steps


def seconds_asked(ledger: Path, seed: int, steps: range) -> float:
    """Of all requests that these steps trained on."""
    from ratchet.experience.seeds import derive_seed
    from ratchet.experience.sources.prompt_ledger import read_ledger
    from ratchet.testing.simulated import draw_seconds

    base = derive_seed(seed, "simulated", "rollouts")
    trained = [
        line["id"]
        for line in read_ledger(ledger)
        if line["event"] == "trained" and line["step"] in steps
    ]
    assert len(trained) == BATCH * len(steps)
    seeds = (derive_seed(base, name, attempt) for name in trained for attempt in range(ATTEMPTS))
    return sum(draw_seconds(own, MEAN_S, SIGMA) for own in seeds)


def possible(rollouts: dict[str, Any], busy_s: float) -> float:
    """The share of the bound that is left where generators lose no time, and the driver is busy for
    so many seconds a step."""
    from ratchet.experience.async_rollouts.staleness_scheduler import StalenessScheduler
    from ratchet.experience.seeds import derive_seed
    from ratchet.testing.simulated import compute_best_step_ends, draw_seconds

    def seconds(group: int, attempt: int) -> float:
        return draw_seconds(derive_seed("possible", group, attempt), MEAN_S, SIGMA)

    scheduler = StalenessScheduler(
        groups_per_step=BATCH, end_step=LONG, **{"max_staleness": 0, **rollouts}
    )
    ends = compute_best_step_ends(
        scheduler, attempts=ATTEMPTS, slots=WORKERS * SLOTS, update_s=busy_s, seconds=seconds
    )
    generating = sum(
        seconds(group, attempt) for group in range(BATCH * LONG) for attempt in range(ATTEMPTS)
    )
    return max(busy_s, generating / (WORKERS * SLOTS) / LONG) / (ends[-1] / LONG)


async def main(arguments: argparse.Namespace) -> None:
    rows = []
    for case, update_s in CASES.items():
        synchronous = 0.0
        for mode, rollouts in MODES.items():
            mean, busy, generating = await measure(
                arguments.cluster, rollouts, update_s, arguments.steps
            )
            bound = max(busy, generating)
            synchronous = synchronous or mean
            row = {
                "case": case,
                "mode": mode,
                "step_s": mean,
                "driver_s": busy,
                "generators_s": generating,
            }
            shares = {"of_bound": bound / mean, "possible": possible(rollouts, busy)}
            rows.append(row | {"speedup": synchronous / mean, **shares})
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
    parser.add_argument("--steps", type=int, default=12, help="that are counted")
    parser.add_argument("--cluster", choices=["ray", "local"], default="ray")
    sys.exit(asyncio.run(main(parser.parse_args())))
