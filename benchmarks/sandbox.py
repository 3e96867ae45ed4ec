"""Compare the executions per second of the sandbox with those of an unprotected interpreter.

    python benchmarks/sandbox.py [--slots 2] [--runs 200] [--rounds 5]
    [--at-most namespaces|landlock]

Three sides run the same program, which reads a number and prints its double: the sandbox, a bare
interpreter (`python -I -S -c`), and the reward `code` with its own sandbox. Each runs as many
programs at once as there are slots. The sides take turns in each round, so that other programs on
the machine disturb all of them alike.

Prints one JSON line and a table. Ratios are medians over the rounds. ratio: sandbox to bare, above 1
if the sandbox is faster. reward_ratio: reward to sandbox. The exit status is 1 if the sandbox runs
fewer than --floor executions per second.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ratchet.rewards.code.reward import Code, CodeConfig
from ratchet.sandbox import Isolation, Limits, LocalSandbox, output_matches
from ratchet.testing import answered
from ratchet.types import Scored, Task

SOURCE, STDIN, ANSWER = "print(int(input()) * 2)", b"21\n", b"42\n"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--runs", type=int, default=200, help="programs of a side in a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--floor", type=float, default=0.0, help="minimum executions per second")
    parser.add_argument("--at-most", choices=["namespaces", "landlock"], default="namespaces")
    return parser


async def measure_rate(run_once: Callable[[], Awaitable[None]], runs: int) -> float:
    """Return the executions per second of `runs` runs."""

    async def one() -> None:
        await run_once()

    start = time.perf_counter()
    await asyncio.gather(*[one() for _ in range(runs)])
    return runs / (time.perf_counter() - start)


def run_bare() -> None:
    process = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SOURCE],
        input=STDIN,
        capture_output=True,
        env={},
        check=True,
    )
    assert process.stdout == ANSWER


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    sandbox = LocalSandbox(slots=options.slots, at_most=Isolation[options.at_most.upper()])
    threads = ThreadPoolExecutor(options.slots)
    seconds: list[float] = []

    async def run_sandboxed() -> None:
        result = await sandbox.run(SOURCE, STDIN, Limits(wall_s=60))
        assert output_matches(result, ANSWER), result
        seconds.append(result.seconds)

    async def run_unprotected() -> None:
        await asyncio.get_running_loop().run_in_executor(threads, run_bare)

    reward = Code(CodeConfig(workers=options.slots, timeout_s=20))
    task = Task(
        "double", (), meta={"tests": [{"stdin": STDIN.decode(), "stdout": ANSWER.decode()}]}
    )

    async def judge() -> None:
        (outcome,) = await reward.score([answered(task, SOURCE)], task)
        assert isinstance(outcome, Scored), outcome
        assert outcome.reward == 1.0, outcome

    sides: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (
        run_sandboxed,
        run_unprotected,
        judge,
    )
    for side in sides:
        await measure_rate(side, 2 * options.slots)  # each slot starts its fork server
    seconds.clear()
    rounds = [
        [await measure_rate(side, options.runs) for side in sides] for _ in range(options.rounds)
    ]
    sandbox.close()
    reward.sandbox.close()
    threads.shutdown()
    cuts = statistics.quantiles(seconds, n=20)
    return {
        "benchmark": "sandbox",
        "isolation": sandbox.isolation.name.lower(),
        "slots": options.slots,
        "runs": options.runs,
        "rounds": options.rounds,
        "sandbox_per_s": round(statistics.median(r[0] for r in rounds), 1),
        "bare_per_s": round(statistics.median(r[1] for r in rounds), 1),
        "reward_per_s": round(statistics.median(r[2] for r in rounds), 1),
        "ratio": round(statistics.median(r[0] / r[1] for r in rounds), 2),
        "reward_ratio": round(statistics.median(r[2] / r[0] for r in rounds), 2),
        "p50_ms": round(cuts[9] * 1000, 2),
        "p95_ms": round(cuts[18] * 1000, 2),
    }


def main() -> int:
    options = make_parser().parse_args()
    results = asyncio.run(measure(options))
    print(json.dumps(results))
    print(f"\n{'':12} {'executions/s':>14}")
    for side in ("sandbox", "bare", "reward"):
        print(f"{side:12} {results[side + '_per_s']:14}")
    print(
        f"{'ratio':12} {results['ratio']:14}   (of {results['isolation']}, p50 {results['p50_ms']} ms, "
        f"p95 {results['p95_ms']} ms)"
    )
    return int(results["sandbox_per_s"] < options.floor)


if __name__ == "__main__":
    sys.exit(main())
