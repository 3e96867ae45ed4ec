"""Run mutation tests of the maths: make one small edit at a time, and print those that no test
notices.

    python benchmarks/mutants.py [FILES...] [--only KIND] [--match TEXT] [--sample N --seed K]
    [--part K/N] [--jobs N] [--list]

A mutant is the source with one edit. Prints a line for each surviving mutant and each stale entry of
EQUIVALENT, and a JSON summary. The exit status is 1 if there are such lines, and 2 if the tests fail
without a mutant.
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
from mutation.find import Mutant, list_mutants
from mutation.targets import FUNCTIONS, targets
from mutation.trial import Killers, Result, Trial, preload, run

REPOSITORY = Path(__file__).resolve().parent.parent
MIN_TIMEOUT_S = 30  # processor seconds
FEW_EXAMPLES = 10  # examples of a property in the first round


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options().parse_args(arguments)
    root = options.root.resolve()
    tests = _tests(options, root)
    all_mutants = [mutant for file in tests for mutant in _mutants(root, file)]
    all_keys = {mutant.key for mutant in all_mutants}
    stale = [key for key in EQUIVALENT if key[0] in tests and key not in all_keys]
    mutants = [
        mutant
        for mutant in all_mutants
        if mutant.key not in EQUIVALENT
        and (options.only is None or mutant.kind in options.only)
        and options.match in str(mutant)
    ]
    if options.sample is not None and options.sample < len(mutants):
        indices = random.Random(options.seed).sample(range(len(mutants)), options.sample)
        mutants = [mutants[i] for i in sorted(indices)]
    part, parts = options.part
    mutants = mutants[len(mutants) * part // parts : len(mutants) * (part + 1) // parts]
    if options.list:
        print(*mutants, sep="\n")
        return 0
    for file, function, edit in stale:
        print(f"stale entry of EQUIVALENT: {file} {function} {edit}")
    tests_by_file = {file: tests[file] for file in dict.fromkeys(mutant.file for mutant in mutants)}
    start = time.monotonic()
    timeouts = _measure_timeouts(tests_by_file, root, options.jobs)
    if timeouts is None:
        return 2
    summary = _try_mutants(mutants, tests_by_file, timeouts, root, options)
    summary |= {
        "equivalent": sum(mutant.key in EQUIVALENT for mutant in all_mutants),
        "stale": len(stale),
        "seconds": round(time.monotonic() - start),
    }
    print(json.dumps(summary))
    return 1 if summary["survived"] or stale else 0


def _mutants(root: Path, file: str) -> list[Mutant]:
    """Return the mutants of a file, or only those of its `FUNCTIONS` if there are any."""
    mutants = list_mutants((root / file).read_text(encoding="utf-8"), file)
    functions = FUNCTIONS.get(file, ())
    absent = set(functions) - {mutant.function for mutant in mutants}
    if absent:
        raise SystemExit(
            f"{file} has no function {', '.join(sorted(absent))}. Correct FUNCTIONS in "
            "benchmarks/mutation/targets.py"
        )
    return [mutant for mutant in mutants if not functions or mutant.function in functions]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="*", help="paths from the root; default: all the maths")
    parser.add_argument(
        "--tests",
        nargs="+",
        help="test files to use instead of those in benchmarks/mutation/targets.py",
    )
    parser.add_argument("--root", type=Path, default=REPOSITORY, help="root of the tree under test")
    parser.add_argument(
        "--only", action="append", choices=KINDS, help="kinds of edits; may be repeated"
    )
    parser.add_argument("--match", default="", help="only mutants whose printed line has this text")
    parser.add_argument(
        "--sample", type=int, help="number of mutants to try, drawn at random; default: all"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--part", type=_part, default=(0, 1), help="K/N: the Kth of N parts of them, from 0"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument(
        "--timeout",
        type=int,
        help="processor seconds for a mutant; default: five times the tests' own",
    )
    parser.add_argument("--list", action="store_true", help="print the mutants without trying them")
    parser.add_argument(
        "--verbose", action="store_true", help="also print which test killed each mutant"
    )
    return parser


def _part(text: str) -> tuple[int, int]:
    part, parts = map(int, text.split("/"))
    if not 0 <= part < parts:
        raise ValueError(text)
    return part, parts


def _tests(options: argparse.Namespace, root: Path) -> dict[str, tuple[Path, ...]]:
    """Return the test files of each file.

    Missing test files are left out. Exits if a file then has none.
    """
    table: Mapping[str, Sequence[str]] = targets()
    named = {file: options.tests or table.get(file, ()) for file in options.files or table}
    chosen_tests = {
        file: tuple(root / t for t in tests if (root / t).exists()) for file, tests in named.items()
    }
    for file, existing_tests in chosen_tests.items():
        if not existing_tests:
            raise SystemExit(
                f"no tests for {file}: add it to benchmarks/mutation/targets.py, or name them with "
                "--tests"
            )
        if not (root / file).exists():
            raise SystemExit(f"{root / file} does not exist")
    return chosen_tests


def _measure_timeouts(
    tests: Mapping[str, tuple[Path, ...]], root: Path, jobs: int
) -> dict[str, int] | None:
    """Return the timeout of a mutant of each file, in processor seconds.

    The tests run once without a mutant; None if they fail. The libraries that they import are then
    loaded in this process.
    """
    timeouts: dict[str, int] = {}
    trials = (
        (file, Trial(_get_module_name(file), root / file, None, paths, 3600))
        for file, paths in tests.items()
    )
    have_passed = True
    for file, result in run(trials, root, jobs):
        timeouts[file] = max(MIN_TIMEOUT_S, round(5 * result.cpu_s))
        if result.is_killed:
            have_passed = False
            print(
                f"{file}: its tests fail without a mutant (status {result.status}) {result.killer}"
            )
        preload(result.modules, root)
    return timeouts if have_passed else None


def _try_mutants(
    mutants: Sequence[Mutant],
    tests: Mapping[str, tuple[Path, ...]],
    timeouts: Mapping[str, int],
    root: Path,
    options: argparse.Namespace,
) -> dict[str, int]:
    """Try the mutants in two rounds, print the survivors, and return the counts.

    The first round uses a few examples of each property, which kill most mutants. The second round
    uses all examples, for the mutants that are left.
    """
    killers = Killers()
    counts = {"mutants": len(mutants), "killed": 0, "timeouts": 0, "survived": 0}

    def trials(alive: Sequence[Mutant], examples: int | None) -> Iterator[tuple[Mutant, Trial]]:
        for mutant in alive:
            file, function = mutant.file, mutant.function
            limit = options.timeout or timeouts[file]
            first, second = killers.get(f"{file}:{function}"), killers.get(file)
            hint = function.rpartition(".")[2]
            yield (
                mutant,
                Trial(
                    _get_module_name(file),
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
        for mutant, result in run(trials(alive, examples), root, options.jobs):
            killers.add(result.killer, mutant.file, f"{mutant.file}:{mutant.function}")
            counts["killed"] += result.is_killed
            counts["timeouts"] += result.status is None
            if not result.is_killed:
                survivors.append(mutant)
                if examples is None:
                    print(mutant, flush=True)
            elif options.verbose:
                print(f"killed by {_cause(result)}: {mutant}", flush=True)
        alive = survivors
    return counts | {"survived": len(alive)}


def _cause(result: Result) -> str:
    return result.killer or ("its timeout" if result.status is None else f"status {result.status}")


def _get_module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


if __name__ == "__main__":
    sys.exit(main())
