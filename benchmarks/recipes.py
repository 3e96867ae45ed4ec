"""Trains recipes in full and holds what they reach to what their headers say.

    python benchmarks/recipes.py [NAMES...] [--seed N] [--tolerance 5.0] [--rotate K [--day N]]

Three kinds of header line are read: `#   seed N: A -> B %` (held-out accuracy before and after the last stage, by
`ratchet train recipes/X.yaml seed=N`), and `# needs: recipes/Y.yaml -> DIRECTORY` (where the recipe looks for the model that Y
trains). Y is trained first, with its own seed, and the recipe is pointed to it. A line `#   python -m MODULE DIRECTORY` makes a
model that the recipe starts from: it is run, and the recipe is pointed to what it wrote. Prints a table and one JSON line; the exit
status is 1 when a result misses its header downwards by more than the tolerance, in percentage points.
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

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
MEASURED = re.compile(r"^#\s+seed (\d+): ([\d.]+) -> ([\d.]+) %", re.MULTILINE)
MAKES = re.compile(r"^#\s+python -m ([\w.]+) (\S+)$", re.MULTILINE)
NEEDS = re.compile(r"^# needs: recipes/([\w.+-]+)\.yaml -> (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class Header:
    """What a recipe says of itself. measured: (before, after) in per cent, by seed. needs: a
    recipe's name, by the directory in which this one looks for its model. makes: the module that
    writes a model, by that directory."""

    name: str
    measured: dict[int, tuple[float, float]]
    needs: dict[str, str]
    makes: dict[str, str]


@dataclass(frozen=True)
class Result:
    """In per cent; difference: after, against the header (None where that says nothing of this
    seed)."""

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


def measured_recipes(recipes: Path = RECIPES) -> list[str]:
    """Names of the recipes that state a result, in order."""
    return sorted(path.stem for path in recipes.glob("*.yaml") if read_header(path).measured)


def rotated(names: Sequence[str], count: int, day: int) -> list[str]:
    """`count` of them, other ones each day, so that all have had their turn after len / count
    days."""
    count = min(count, len(names))
    return [names[(day * count + i) % len(names)] for i in range(count)]


def today() -> int:
    return datetime.datetime.now(datetime.UTC).date().toordinal()


def ordered(names: Sequence[str], recipes: Path = RECIPES) -> list[str]:
    """With those that they need put in before them; each once."""
    order: list[str] = []

    def visit(name: str) -> None:
        for needed in read_header(recipes / f"{name}.yaml").needs.values():
            visit(needed)
        if name not in order:
            order.append(name)

    for name in names:
        visit(name)
    return order


def pointed_to(path: Path, models: dict[str, str]) -> list[str]:
    """Overrides for each key of the recipe whose value is one of the directories (the keys of
    `models`)."""
    recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
    stages = recipe.pop("stages", {})
    by_name = stages if isinstance(stages, dict) else {stage["name"]: stage for stage in stages}
    found = [*_places(recipe, ""), *_places(by_name, "stages.")]
    return [f"{key}={models[value]}" for key, value in found if value in models]


def _places(node: Any, at: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from _places(value, f"{at}{key}.")
    elif isinstance(node, str):
        yield at.removesuffix("."), node


def run_recipes(
    names: Sequence[str],
    work: Path,
    *,
    seed: int = 0,
    extra: Sequence[str] = (),
    recipes: Path = RECIPES,
) -> list[Result]:
    """Trains each in `work`, those that they need first. extra: further overrides for all of them.
    Results of `names` alone."""
    models: dict[str, str] = {}
    results = []
    for name in ordered(names, recipes):
        path, run = recipes / f"{name}.yaml", work / name
        header = read_header(path)
        chosen = [f"seed={seed}"] if name in names else []
        found = {directory: models[needed] for directory, needed in header.needs.items()}
        for directory, module in header.makes.items():
            found[directory] = str(work / f"{name}-start")
            subprocess.run([sys.executable, "-m", module, found[directory]], check=True)
        teachers = pointed_to(path, found)
        overrides = [
            "logging.progress=off",
            "logging.tensorboard=false",
            *chosen,
            *teachers,
            *extra,
        ]
        status = start_run(
            path, overrides, run, command=f"ratchet train {path} {' '.join(chosen)}".strip()
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
        (r.recipe, *map(_shown, (r.before, r.after, r.header)), _shown(r.difference, "+"))
        for r in results
    ]
    widths = [max(len(row[i]) for row in (heading, *rows)) for i in range(len(heading))]
    return "\n".join(
        f"{row[0]:{widths[0]}}  "
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in (heading, *rows)
    )


def _shown(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Trains recipes and holds them to their headers.")
    parser.add_argument(
        "names", nargs="*", help="recipes without .yaml; by default all that state a result"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--tolerance", type=float, default=5.0, help="percentage points below the header that pass"
    )
    parser.add_argument(
        "--rotate", type=int, default=None, metavar="K", help="only K of them, other ones each day"
    )
    parser.add_argument(
        "--day", type=int, default=None, help="day number for --rotate; by default today's"
    )
    chosen = parser.parse_args(arguments)
    names = list(dict.fromkeys(chosen.names)) or measured_recipes()
    missing = [name for name in names if not (RECIPES / f"{name}.yaml").is_file()]
    if missing:
        parser.error(f"there is no recipes/{missing[0]}.yaml")
    if chosen.rotate is not None:
        names = rotated(names, chosen.rotate, today() if chosen.day is None else chosen.day)
    with tempfile.TemporaryDirectory() as work:
        results = run_recipes(names, Path(work), seed=chosen.seed)
    missed = [result.recipe for result in results if result.misses(chosen.tolerance)]
    print(table(results))
    print(
        json.dumps(
            {
                "tolerance": chosen.tolerance,
                "missed": missed,
                "results": [asdict(result) for result in results],
            }
        )
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
