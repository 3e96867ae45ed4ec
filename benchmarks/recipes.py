"""Train recipes in full, and compare their results with those in their headers.

    python benchmarks/recipes.py [NAMES...] [--seed N] [--tolerance 5.0] [--rotate K [--day N]]
        [--override KEY=VALUE]

Three kinds of header lines are read:
- `#   seed N: A -> B %`: held-out accuracy before and after the last stage, of the command
  `ratchet train X seed=N`.
- `# needs: Y -> DIRECTORY`: the recipe reads the model that recipe Y trains. Y is
  trained first, with its own seed, and DIRECTORY is replaced by the path of its model.
- `#   python -m MODULE DIRECTORY`: the command writes a model that the recipe starts from. It is
  run, and DIRECTORY is replaced by the path of that model.

Prints a table and one JSON line. The exit status is 1 if a result is lower than its header says by
more than the tolerance, in percentage points.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml

from ratchet.training.start import start_run

RECIPES = Path(__file__).resolve().parent.parent / "ratchet" / "recipes"
MEASURED = re.compile(r"^#\s+seed (\d+): ([\d.]+) -> ([\d.]+) %", re.MULTILINE)
MAKES = re.compile(r"^#\s+python -m ([\w.]+) (\S+)$", re.MULTILINE)
NEEDS = re.compile(r"^# needs: ([\w.+-]+) -> (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Header:
    """The header of a recipe.

    measured: (before, after) in per cent, by seed.
    needs: name of the recipe that trains a model, by the directory in which this recipe reads it.
    makes: module that writes a model, by the directory in which this recipe reads it.
    """

    name: str
    measured: dict[int, tuple[float, float]]
    needs: dict[str, str]
    makes: dict[str, str]


@dataclass(frozen=True)
class Result:
    """The result of a recipe, in per cent.

    header: the accuracy after the last stage that the header states; None: none for this seed.
    difference: `after` - `header`; None if either is None.
    """

    recipe: str
    seed: int
    before: float | None
    after: float | None
    header: float | None
    difference: float | None

    def misses(self, tolerance: float) -> bool:
        return self.header is not None and (self.difference is None or self.difference < -tolerance)


def read_header(path: Path) -> Header:
    text = path.read_text(encoding="utf-8")
    measured = {
        int(seed): (float(before), float(after)) for seed, before, after in MEASURED.findall(text)
    }
    needs, makes = (
        {directory: name for name, directory in line.findall(text)} for line in (NEEDS, MAKES)
    )
    return Header(path.stem, measured, needs, makes)


def list_measured_recipes(recipes: Path = RECIPES) -> list[str]:
    """Return the names of the recipes whose headers state a result, in order."""
    return sorted(path.stem for path in recipes.glob("*.yaml") if read_header(path).measured)


def rotate(names: Sequence[str], count: int, day: int) -> list[str]:
    """Return `count` names, others each day, so that each name comes every len / count days."""
    count = min(count, len(names))
    return [names[(day * count + i) % len(names)] for i in range(count)]


def today() -> int:
    return datetime.datetime.now(datetime.UTC).date().toordinal()


def add_needed(names: Sequence[str], recipes: Path = RECIPES) -> list[str]:
    """Return the names, and before each the recipes that it needs; each name once."""
    order: list[str] = []

    def visit(name: str) -> None:
        for needed in read_header(recipes / f"{name}.yaml").needs.values():
            visit(needed)
        if name not in order:
            order.append(name)

    for name in names:
        visit(name)
    return order


def replace_directories(path: Path, models: dict[str, str]) -> list[str]:
    """Return overrides that replace directories in a recipe.

    models: the replacement of each directory.
    """
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    stages = recipe.pop("stages", {})
    by_name = stages if isinstance(stages, dict) else {stage["name"]: stage for stage in stages}
    texts = [*_list_texts(recipe, ""), *_list_texts(by_name, "stages.")]
    return [f"{key}={models[value]}" for key, value in texts if value in models]


def _list_texts(node: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Yield (dotted key, value) of each text in nested mappings."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _list_texts(value, f"{prefix}{key}.")
    elif isinstance(node, str):
        yield prefix.removesuffix("."), node


def run_recipes(
    names: Sequence[str],
    work: Path,
    *,
    seed: int = 0,
    extra: Sequence[str] = (),
    recipes: Path = RECIPES,
) -> list[Result]:
    """Train recipes and those that they need, and return the results of `names`.

    work: directory of the runs.
    extra: further overrides of all recipes.
    """
    models: dict[str, str] = {}
    results = []
    for name in add_needed(names, recipes):
        path, run = recipes / f"{name}.yaml", work / name
        header = read_header(path)
        seed_override = [f"seed={seed}"] if name in names else []
        model_by_directory = {
            directory: models[needed] for directory, needed in header.needs.items()
        }
        for directory, module in header.makes.items():
            start_model = model_by_directory[directory] = str(work / f"{name}-start")
            subprocess.run([sys.executable, "-m", module, start_model], check=True)
        overrides = [
            "logging.progress=off",
            "logging.tensorboard=false",
            *seed_override,
            *replace_directories(path, model_by_directory),
            *extra,
        ]
        status = start_run(
            path, overrides, run, command=f"ratchet train {path} {' '.join(seed_override)}".strip()
        )
        if status:
            raise SystemExit(status)
        models[name] = str(run / "model")
        if name in names:
            results.append(_result(header, seed, run))
    return results


def _result(header: Header, seed: int, run: Path) -> Result:
    stage = json.loads((run / "summary.json").read_text(encoding="utf-8"))["stages"][-1]
    before, after = (
        None if stage[key] is None else round(100 * stage[key], 1)
        for key in ("accuracy_before", "accuracy_after")
    )
    stated = header.measured[seed][1] if seed in header.measured else None
    difference = None if after is None or stated is None else round(after - stated, 1)
    return Result(header.name, seed, before, after, stated, difference)


def table(results: Sequence[Result]) -> str:
    heading = ("recipe", "before", "after", "header", "difference")
    rows = [
        (r.recipe, *map(_format, (r.before, r.after, r.header)), _format(r.difference, "+"))
        for r in results
    ]
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    return "\n".join(
        f"{row[0]:{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in (heading, *rows)
    )


def _format(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train recipes, and compare their results with their headers."
    )
    parser.add_argument(
        "names", nargs="*", help="recipes, without .yaml; default: all whose headers state a result"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tolerance",
        type=float,
        default=5.0,
        help="percentage points by which a result may be lower than its header",
    )
    parser.add_argument(
        "--rotate",
        type=int,
        default=None,
        metavar="K",
        help="train only K of them, others each day",
    )
    parser.add_argument(
        "--day", type=int, default=None, help="day number for --rotate; default: today's"
    )
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override of all recipes, such as precision=bfloat16; may be repeated",
    )
    options = parser.parse_args(arguments)
    names = list(dict.fromkeys(options.names)) or list_measured_recipes()
    missing = [name for name in names if not (RECIPES / f"{name}.yaml").is_file()]
    if missing:
        parser.error(f"there is no recipe {missing[0]}")
    if options.rotate is not None:
        names = rotate(names, options.rotate, today() if options.day is None else options.day)
    with tempfile.TemporaryDirectory() as work:
        results = run_recipes(names, Path(work), seed=options.seed, extra=options.override)
    missed = [result.recipe for result in results if result.misses(options.tolerance)]
    print(table(results))
    print(
        json.dumps(
            {
                "tolerance": options.tolerance,
                "missed": missed,
                "results": [asdict(result) for result in results],
            }
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
