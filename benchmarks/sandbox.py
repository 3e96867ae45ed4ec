"""Executions a second in the sandbox, beside a bare interpreter (`python -I -S -c`, no protection
at all) in the same run.

    python benchmarks/sandbox.py [--slots 2] [--runs 200] [--rounds 5] [--at-most
    namespaces|landlock]

All read a number and print its double, as many at once as there are slots, in turn, round after
round: what disturbs one side of a round disturbs the others too. The third side is the reward
`code`, over a sandbox of its own. Prints one JSON line (the ratios are the medians over the rounds;
ratio above 1: the sandbox is faster than bare; reward_ratio: of the reward to the sandbox alone)
and a table. Exits 1 below --floor executions a second.
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


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--floor", type=float, default=0.0)
    parser.add_argument("--at-most", choices=["namespaces", "landlock"], default="namespaces")
    return parser


async def rate(once: Callable[[], Awaitable[None]], runs: int) -> float:
    async def one() -> None:
        await once()

    start = time.perf_counter()
    await asyncio.gather(*[one() for _ in range(runs)])
    return runs / (time.perf_counter() - start)


def bare() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", SOURCE],
        input=STDIN,
        capture_output=True,
        env={},
        check=True,
    )
    assert done.stdout == ANSWER


async def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    sandbox = LocalSandbox(slots=chosen.slots, at_most=Isolation[chosen.at_most.upper()])
    threads = ThreadPoolExecutor(chosen.slots)
    seconds: list[float] = []

    async def ours() -> None:
        result = await sandbox.run(SOURCE, STDIN, Limits(wall_s=60))
        assert output_matches(result, ANSWER), result
        seconds.append(result.seconds)

    async def theirs() -> None:
        await asyncio.get_running_loop().run_in_executor(threads, bare)

    reward = Code(CodeConfig(workers=chosen.slots, timeout_s=20))
    task = Task(
        "double", (), meta={"tests": [{"stdin": STDIN.decode(), "stdout": ANSWER.decode()}]}
    )

    async def judged() -> None:
        (outcome,) = await reward.score([answered(task, SOURCE)], task)
        assert isinstance(outcome, Scored), outcome
        assert outcome.reward == 1.0, outcome

    sides: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (ours, theirs, judged)
    for side in sides:
        await rate(side, 2 * chosen.slots)  # each slot starts its fork server
    seconds.clear()
    rounds = [[await rate(side, chosen.runs) for side in sides] for _ in range(chosen.rounds)]
    sandbox.close()
    reward.sandbox.close()
    threads.shutdown()
    cuts = statistics.quantiles(seconds, n=20)
    return {
        "benchmark": "sandbox",
        "isolation": sandbox.isolation.name.lower(),
        "slots": chosen.slots,
        "runs": chosen.runs,
        "rounds": chosen.rounds,
        "sandbox_per_s": round(statistics.median(r[0] for r in rounds), 1),
        "bare_per_s": round(statistics.median(r[1] for r in rounds), 1),
        "reward_per_s": round(statistics.median(r[2] for r in rounds), 1),
        "ratio": round(statistics.median(r[0] / r[1] for r in rounds), 2),
        "reward_ratio": round(statistics.median(r[2] / r[0] for r in rounds), 2),
        "p50_ms": round(cuts[9] * 1000, 2),
        "p95_ms": round(cuts[18] * 1000, 2),
    }


def main() -> int:
    chosen = options().parse_args()
    found = asyncio.run(measure(chosen))
    print(json.dumps(found))
    print(f"\n{'':12} {'executions/s':>14}")
    for side in ("sandbox", "bare", "reward"):
        print(f"{side:12} {found[side + '_per_s']:14}")
    print(
        f"{'ratio':12} {found['ratio']:14}   (of {found['isolation']}, p50 {found['p50_ms']} ms, "
        f"p95 {found['p95_ms']} ms)"
    )
    return int(found["sandbox_per_s"] < chosen.floor)


if __name__ == "__main__":
    sys.exit(main())
