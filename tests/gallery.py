"""docs/gallery.md and its chart, made of the recipes, of what their heads say that they reached, and
of tests/gallery_curves.json: `python tests/gallery.py` writes both anew. With runs of recipes
(`python tests/gallery.py runs/NAME ...`) it takes their curves into tests/gallery_curves.json first."""

from __future__ import annotations

import functools
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

from ratchet.algorithms.config.policy_gradient import PolicyGradientConfig
from ratchet.config.loader import load_config
from ratchet.config.resolve import section_class
from ratchet.observe.progress import sparkline
from ratchet.observe.sinks import read_jsonl
from ratchet.recipes import list_recipes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "gallery.md"
CHART = ROOT / "docs" / "images" / "gallery.svg"
CURVES = ROOT / "tests" / "gallery_curves.json"
N_POINTS = 16  # of a curve; each is the mean of equally many steps
HEAD = """\
# Gallery of recipes

<!-- Made by `python tests/gallery.py` of the recipes. -->

Each recipe, what it teaches, and the held-out accuracy that it reached with seed 0, before and after its last stage. The first comment of a recipe's file has
the commit, the machine and further seeds. All but `grpo_gsm8k` start from random weights; most take one or two minutes of one core, those of several turns
and of pictures up to ten. `python benchmarks/recipes.py NAME` measures one again.

The seconds are those of seed 0 on one core that the recipe's file has, which says whether evaluation is among them. A curve is of `ratchet train NAME`, over the steps of the last
stage: the mean reward of the attempts, or the training loss, from its lowest to its highest value. `python tests/gallery.py runs/NAME` takes it from a run.

```
ratchet train NAME                                 # other keys: seed=1
ratchet report runs/NAME                           # its curves and rollouts
ratchet new recipe --like NAME --data FILE --model DIR
```

![Held-out accuracy of the recipes before and after their last stage](images/gallery.svg)

"""
SECTIONS = ("Learning from reward", "Demonstrations, pairs and labels", "Learning from a teacher")
COLUMNS = "| Recipe | What it teaches | Algorithm | Held-out accuracy | Curve | Seconds |"
REACHED = re.compile(r"^#   seed 0: ([\d.]+) -> ([\d.]+) %", re.MULTILINE)
SECONDS = re.compile(r"^#   seed 0: .*?(\d+) s\b", re.MULTILINE)
NEEDS = re.compile(r"^# needs: (\S+) -> (\S+)", re.MULTILINE)
MEASURED = re.compile(r"(?:greedy )?accuracy on ((?:all )?[\d,]+ held-out [\w -]+?)(?:[:,.\n]|$)")

ROW, WIDTH, LEFT, RIGHT = 20, 760, 190, 710  # pixels


class Recipe(NamedTuple):
    """A recipe of the gallery.

    Attributes:
        algorithm: The kind of its last stage.
        lesson: The first sentences of the comment that its file begins with.
        shares: Held-out accuracy in percent before and after the last stage; None if the comment
            says in another form what it reached.
        measured_on: The held-out tasks.
        needs: A recipe that must have been trained before.
        seconds: Time of its training with seed 0, as its comment has it; "" if it has none.
    """

    name: str
    algorithm: str
    lesson: str
    shares: tuple[float, float] | None
    measured_on: str
    needs: str
    seconds: str


@functools.cache
def read_recipes() -> list[Recipe]:
    """Return all recipes by name."""
    return [read_recipe(path) for path in list_recipes().values()]


def read_recipe(path: Path) -> Recipe:
    head = "".join(re.findall(r"^#.*\n", path.read_text(encoding="utf-8"), flags=re.MULTILINE))
    patterns = (REACHED, NEEDS, MEASURED, SECONDS)
    reached, needs, measured, seconds = (pattern.search(head) for pattern in patterns)
    paragraph = re.split(r"\n#\n|\n# needs:|\n#   |\n# Data:", head)[0]
    lesson = " ".join(line.removeprefix("#").strip() for line in paragraph.splitlines())
    return Recipe(
        path.stem,
        load_config(path).stages[-1].algorithm.kind,
        lesson,
        None if reached is None else (float(reached[1]), float(reached[2])),
        "" if measured is None else measured[1],
        "" if needs is None else needs[1],
        "" if seconds is None else seconds[1],
    )


def read_curve(run: Path) -> dict[str, Any]:
    """Return what tests/gallery_curves.json has of a run: the metric and its means in the last stage."""
    stages = json.loads((run / "summary.json").read_text(encoding="utf-8"))["stages"]
    start = sum(stage["steps"] for stage in stages[:-1])
    rows = [row for row in read_jsonl(run / "metrics.jsonl") if row["step"] > start]
    metric = "rollout/reward" if "rollout/reward" in rows[0] else "policy/loss"
    values = [row[metric] for row in rows]
    bounds = [len(values) * i // N_POINTS for i in range(N_POINTS + 1)]
    means = [round(fmean(values[a:b]), 4) for a, b in pairwise(bounds)]
    return {"metric": metric, "steps": len(values), "means": means}


def draw_curve(name: str) -> str:
    """Return the cell with a recipe's curve; "" if tests/gallery_curves.json has none."""
    curve = json.loads(CURVES.read_text(encoding="utf-8")).get(name)
    if curve is None:
        return ""
    first, *_, last = curve["means"]
    word = "reward" if curve["metric"] == "rollout/reward" else "loss"
    return f"{word} {first:.2g} `{sparkline(curve['means'])}` {last:.2g}"


def choose_section(recipe: Recipe) -> str:
    kind = recipe.algorithm
    reward, data, teacher = SECTIONS
    if "distill" in kind:
        return teacher
    return reward if issubclass(section_class("algorithm", kind), PolicyGradientConfig) else data


def make_row(recipe: Recipe) -> str:
    """Return the recipe's row of the table."""
    kind = recipe.algorithm
    if recipe.shares is None:
        result = "see its file"
    else:
        before, after = recipe.shares
        result = f"{before:g} → {after:g} %" + (
            f" of {recipe.measured_on}" if recipe.measured_on else ""
        )
    first = f" First `ratchet train {recipe.needs}`." if recipe.needs else ""
    lesson = re.sub(r"<[^>]*>[^<]*</[^>]*>", r"`\g<0>`", recipe.lesson.replace("|", "\\|"))
    lesson = re.sub(r" ?\(docs/([\w.-]+\.md)\)", r" ([more](\1))", lesson)
    return (
        f"| `{recipe.name}` | {lesson}{first} | [{kind}](algorithms/{kind}.md) | {result} | "
        f"{draw_curve(recipe.name)} | {recipe.seconds} |"
    )


def make_page() -> str:
    """Return the gallery."""
    recipes = read_recipes()
    parts = []
    for section in SECTIONS:
        rows = [make_row(recipe) for recipe in recipes if choose_section(recipe) == section]
        table = "\n".join([COLUMNS, "|---|---|---|---|---|---|", *rows])
        parts.append(f"## {section}\n\n{table}\n")
    return HEAD + "\n".join(parts)


def make_chart() -> str:
    """Return an SVG with a line for each recipe, from its accuracy before to that after."""
    measured = [recipe for recipe in read_recipes() if recipe.shares is not None]
    height = ROW * (len(measured) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="system-ui, sans-serif" font-size="12" fill="#7a7f8c">'
    ]
    for share in range(0, 101, 20):
        x = _place(share)
        lines.append(f'<path d="M{x} {ROW}V{height - ROW}" stroke="#7a7f8c" stroke-opacity=".25"/>')
        lines.append(f'<text x="{x}" y="{height - 4}" text-anchor="middle">{share} %</text>')
    for number, recipe in enumerate(measured, start=1):
        y = ROW * number + ROW // 2
        before, after = (_place(share) for share in recipe.shares or ())
        lines += [
            f'<text x="{LEFT - 14}" y="{y + 4}" text-anchor="end">{escape(recipe.name)}</text>',
            f'<path d="M{before} {y}H{after}" stroke="#2a78d6" stroke-width="2"/>',
            f'<circle cx="{before}" cy="{y}" r="3.5" fill="#7a7f8c"/>',
            f'<circle cx="{after}" cy="{y}" r="4.5" fill="#2a78d6"/>',
        ]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _place(share: float) -> int:
    return round(LEFT + (RIGHT - LEFT) * share / 100)


if __name__ == "__main__":
    if sys.argv[1:]:
        curves = json.loads(CURVES.read_text(encoding="utf-8"))
        curves |= {Path(run).name: read_curve(Path(run)) for run in sys.argv[1:]}
        lines = (f"{json.dumps(name)}: {json.dumps(curves[name])}" for name in sorted(curves))
        CURVES.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    PAGE.write_text(make_page(), encoding="utf-8")
    CHART.write_text(make_chart(), encoding="utf-8")
