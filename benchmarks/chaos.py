"""Kills trainings at every failpoint and at random times, resumes each until it ends, and compares
it with one that nobody killed: weights, learner state and data position by bit, metrics but for
times, and no file left over.

    python benchmarks/chaos.py [--passages 4] [--random 50] [--seed 0] [--recipes grpo,stages]
    [--folder DIRECTORY]

Prints one JSON line a recipe and a table (that of docs/reliability.md); the exit status is 1 when a
run came back differently, and that run then stays in the folder.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import yaml

from ratchet.testing.kill_and_resume import TrialVerdict, chaos

TINY: dict[str, Any] = {
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "optimizer": {"lr": 0.01},
    "logging": {"progress": "off"},
    "evaluation": {"every": 2, "tasks": 8},
}
SFT = {"name": "sft", "algorithm": {"kind": "sft"}, "steps": 3, "batch_size": 8, "examples": 20}
GRPO = {
    "name": "rl",
    "algorithm": {"kind": "grpo", "group_size": 4, "kl": {"coef": 0.01}},
    "batch_size": 6,
}
RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {**TINY, "checkpoint": {"every": 1, "keep": 2}, "stages": [{**GRPO, "steps": 5}]},
    "stages": {
        **TINY,
        "checkpoint": {"every": 2, "keep": 1, "background": True},
        "optimizer": {"lr": 0.01, "ema_decay": 0.8},
        "stages": [SFT, {**GRPO, "steps": 3, "rollouts": {"max_staleness": 1, "order": "ready"}}],
    },
}
# in the middle of either recipe; of the second, in its second stage
RESUME_AFTER = "step.update:4:kill"


@dataclass(frozen=True)
class Result:
    """passages: of each failpoint, in the run that nobody killed or in the resumed one."""

    recipe: str
    passages: Counter[str]
    verdicts: list[TrialVerdict]

    def cells(self, point: str) -> str:
        rows = [verdict for verdict in self.verdicts if verdict.trial.point == point]
        kills, equal = (
            sum(verdict.n_starts - 1 for verdict in rows),
            sum(not verdict.differences for verdict in rows),
        )
        return (
            f"{self.passages[point] or ''} | {kills} | {equal} of {len(rows)}" if rows else "0 | |"
        )


def table(results: Sequence[Result]) -> str:
    """One row a failpoint, and one for the random times."""
    names = "".join(f" {result.recipe}: passages | kills | bit-equal |" for result in results)
    lines = [f"| Killed at |{names}", "| --- |" + " ---: | ---: | ---: |" * len(results)]
    points = dict.fromkeys(verdict.trial.point for result in results for verdict in result.verdicts)
    for point in sorted(points, key=lambda point: (point == "random", point)):
        name = "random times" if point == "random" else f"`{point}`"
        lines.append(f"| {name} | {' | '.join(result.cells(point) for result in results)} |")
    return "\n".join(lines)


def measure(name: str, folder: Path, *, passages: int, at_random: int, seed: int) -> Result:
    """Prints one recipe's line, and what came back differently."""
    folder.mkdir(parents=True)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, **RECIPES[name]}), encoding="utf-8")
    began = time.monotonic()
    with chaos(recipe, folder, resume_after=RESUME_AFTER) as under_test:
        trials = under_test.list_failpoint_trials(
            passages, resume_after=RESUME_AFTER
        ) + under_test.draw_random_trials(at_random, seed=seed)
        verdicts = list(under_test.run_trials(trials))
        counts = Counter(under_test.resumed_failpoints) | Counter(under_test.failpoints)
    different = [verdict for verdict in verdicts if verdict.differences]
    for verdict in different:
        print(f"{verdict.trial.kills}: {'; '.join(verdict.differences)}")
    numbers = {
        "recipe": name,
        "failpoints": len({verdict.trial.point for verdict in verdicts} - {"random"}),
        "trials": len(verdicts),
        "kills": sum(verdict.n_starts - 1 for verdict in verdicts),
        "missed": sum(verdict.has_missed for verdict in verdicts),
        "different": len(different),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(numbers), flush=True)
    return Result(name, counts, verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--passages", type=int, default=4, help="of each failpoint, at most")
    parser.add_argument(
        "--random",
        type=int,
        default=50,
        help="trainings that are killed at random times, of each recipe",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random times")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("--folder", type=Path, help="where runs go; default: a temporary one")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-chaos-") as temporary:
        root = chosen.folder or Path(temporary)
        numbers = {"passages": chosen.passages, "at_random": chosen.random, "seed": chosen.seed}
        results = [measure(name, root / name, **numbers) for name in chosen.recipes.split(",")]
        print(f"\n{table(results)}")
        return int(any(verdict.differences for result in results for verdict in result.verdicts))


if __name__ == "__main__":
    sys.exit(main())
