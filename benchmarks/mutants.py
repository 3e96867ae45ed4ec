"""Breaks the maths, one small edit at a time, and shows which edits no test notices.

python benchmarks/mutants.py [FILES...] [--only KIND] [--match TEXT] [--sample N --seed K] [--jobs
N] [--list]

Prints a line for each survivor and a JSON summary; exits 1 when there are survivors, 2 when the
tests fail without a mutant.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from mutation.edits import KINDS
from mutation.equivalent import EQUIVALENT
from mutation.find import Mutant, find
from mutation.targets import FUNCTIONS, targets
from mutation.trial import Killers, Result, Trial, preload, run

REPOSITORY = Path(__file__).resolve().parent.parent
LEAST_TIMEOUT_S = 30
FEW_EXAMPLES = 10


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = _options().parse_args(arguments)
    root = chosen.root.resolve()
    tests = _tests(chosen, root)
    found = [mutant for file in tests for mutant in _mutants(root, file)]
    stale = [
        key for key in EQUIVALENT if key[0] in tests and key not in {mutant.key for mutant in found}
    ]
    wanted = [
        m
        for m in found
        if m.key not in EQUIVALENT and (chosen.only is None or m.kind in chosen.only)
    ]
    wanted = [m for m in wanted if chosen.match in str(m)]
    if chosen.sample is not None and chosen.sample < len(wanted):
        picked = random.Random(chosen.seed).sample(range(len(wanted)), chosen.sample)
        wanted = [wanted[i] for i in sorted(picked)]
    if chosen.list:
        print(*wanted, sep="\n")
        return 0
    for file, function, edit in stale:
        print(f"stale entry of EQUIVALENT: {file} {function} {edit}")
    needed = {file: tests[file] for file in dict.fromkeys(mutant.file for mutant in wanted)}
    started = time.monotonic()
    timeouts = _baseline(needed, root, chosen.jobs)
    if timeouts is None:
        return 2
    summary = _hunt(wanted, needed, timeouts, root, chosen)
    equivalent = sum(mutant.key in EQUIVALENT for mutant in found)
    summary |= {
        "equivalent": equivalent,
        "stale": len(stale),
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(summary))
    return 1 if summary["survived"] or stale else 0


def _mutants(root: Path, file: str) -> list[Mutant]:
    """Return the mutants of a file, or only those of its `FUNCTIONS` if there are any."""
    mutants = find((root / file).read_text(encoding="utf-8"), file)
    functions = FUNCTIONS.get(file, ())
    absent = set(functions) - {mutant.function for mutant in mutants}
    if absent:
        raise SystemExit(f"{file} has no function {', '.join(sorted(absent))}. Mend FUNCTIONS")
    return [mutant for mutant in mutants if not functions or mutant.function in functions]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="from the root; without any, all the maths")
    parser.add_argument(
        "--tests", nargs="+", help="test files to use instead of those of the table"
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="of the tree under test")
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="kinds of edits; may be repeated"
    )
    parser.add_argument("--match", default="", help="only mutants whose printed line has this text")
    parser.add_argument("--sample", type=int, help="try only this many, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--timeout",
        type=int,
        help="processor seconds for a mutant; default: five times what the tests take",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants without trying them")
    parser.add_argument("--verbose", action="store_true", help="print what killed each, too")
    return parser


def _tests(chosen: argparse.Namespace, root: Path) -> dict[str, tuple[Path, ...]]:
    """The test files of each file; those of the table that don't exist are left out, but not all of
    them."""
    table: Mapping[str, Sequence[str]] = targets()
    named = {file: chosen.tests or table.get(file, ()) for file in chosen.files or table}
    chosen_tests = {
        file: tuple(root / t for t in tests if (root / t).exists()) for file, tests in named.items()
    }
    for file, found in chosen_tests.items():
        if not found:
            raise SystemExit(
                f"no tests for {file}: add it to benchmarks/mutation/targets.py, or name them with "
                "--tests"
            )
        if not (root / file).exists():
            raise SystemExit(f"{root / file} does not exist")
    return chosen_tests


def _baseline(
    tests: Mapping[str, tuple[Path, ...]], root: Path, jobs: int
) -> dict[str, int] | None:
    """Processor seconds for a mutant of each file; None when tests fail as things are. Loads the
    libraries that tests use."""
    timeouts: dict[str, int] = {}
    trials = (
        (file, Trial(_module(file), root / file, None, paths, 3600))
        for file, paths in tests.items()
    )
    healthy = True
    for file, result in run(trials, root, jobs):
        timeouts[file] = max(LEAST_TIMEOUT_S, round(5 * result.cpu_s))
        if result.killed:
            healthy = False
            print(
                f"{file}: its tests fail without a mutant (status {result.status}) {result.killer}"
            )
        preload(result.modules, root)
    return timeouts if healthy else None


def _hunt(
    mutants: Sequence[Mutant],
    tests: Mapping[str, tuple[Path, ...]],
    timeouts: Mapping[str, int],
    root: Path,
    chosen: argparse.Namespace,
) -> dict[str, int]:
    """Two rounds: a few examples of each property kill most mutants soon; what is left faces them
    all."""
    killers = Killers()
    counts = {"mutants": len(mutants), "killed": 0, "timeouts": 0, "survived": 0}

    def trials(alive: Sequence[Mutant], examples: int | None) -> Iterator[tuple[Mutant, Trial]]:
        for mutant in alive:
            file, function = mutant.file, mutant.function
            limit = chosen.timeout or timeouts[file]
            first, second = killers.of(f"{file}:{function}"), killers.of(file)
            hint = function.rpartition(".")[2]
            yield (
                mutant,
                Trial(
                    _module(file),
                    root / file,
                    mutant.code,
                    tests[file],
                    limit,
                    first,
                    hint,
                    second,
                    examples,
                ),
            )

    alive = list(mutants)
    for examples in (FEW_EXAMPLES, None):
        survivors: list[Mutant] = []
        for mutant, result in run(trials(alive, examples), root, chosen.jobs):
            killers.add(result.killer, mutant.file, f"{mutant.file}:{mutant.function}")
            counts["killed"] += result.killed
            counts["timeouts"] += result.status is None
            if not result.killed:
                survivors.append(mutant)
                if examples is None:
                    print(mutant, flush=True)
            elif chosen.verbose:
                print(f"killed by {_cause(result)}: {mutant}", flush=True)
        alive = survivors
    return counts | {"survived": len(alive)}


def _cause(result: Result) -> str:
    return result.killer or ("the clock" if result.status is None else f"status {result.status}")


def _module(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


if __name__ == "__main__":
    sys.exit(main())
