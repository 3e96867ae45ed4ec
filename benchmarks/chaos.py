"""Kill runs at every failpoint and at random times, resume each until it ends, and compare it with
an uninterrupted run.

Compared are weights, learner state and data position by bit, metrics without times, and the set of
files.

    python benchmarks/chaos.py [--passages 4] [--random 50] [--seed 0] [--recipes grpo,stages]
    [--folder DIRECTORY]

Prints one JSON line for each recipe, and the table of docs/reliability.md. The exit status is 1 if a
resumed run differs; the differing run then stays in the folder.
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
# The kill of a resumed run: in the middle of each recipe, in `stages` within the second stage.
RESUME_AFTER = "step.update:4:kill"


@dataclass(frozen=True)
class Result:
    """The result of one recipe.

    passages: how often the uninterrupted run or the resumed one passed each failpoint, whichever is
      more.
    """

    recipe: str
    passages: Counter[str]
    verdicts: list[TrialVerdict]

    def format_cells(self, point: str) -> str:
        """Return this recipe's cells of the table's row for a failpoint."""
        verdicts = [verdict for verdict in self.verdicts if verdict.trial.point == point]
        kills, equal = (
            sum(verdict.n_starts - 1 for verdict in verdicts),
            sum(not verdict.differences for verdict in verdicts),
        )
        return (
            f"{self.passages[point] or ''} | {kills} | {equal} of {len(verdicts)}"
            if verdicts
            else "0 | |"
        )


def make_table(results: Sequence[Result]) -> str:
    """Return a table with a row for each failpoint, and one for the random times."""
    names = "".join(f" {result.recipe}: passages | kills | bit-equal |" for result in results)
    lines = [f"| Killed at |{names}", "| --- |" + " ---: | ---: | ---: |" * len(results)]
    points = dict.fromkeys(verdict.trial.point for result in results for verdict in result.verdicts)
    for point in sorted(points, key=lambda point: (point == "random", point)):
        name = "random times" if point == "random" else f"`{point}`"
        lines.append(f"| {name} | {' | '.join(result.format_cells(point) for result in results)} |")
    return "\n".join(lines)


def measure(name: str, folder: Path, *, passages: int, at_random: int, seed: int) -> Result:
    """Measure one recipe, and print its JSON line and the runs that differ.

    passages: maximum number of killed passages of each failpoint.
    at_random: number of runs that are killed at random times.
    """
    folder.mkdir(parents=True)
    recipe = folder / f"{name}.yaml"
    recipe.write_text(yaml.safe_dump({"name": name, **RECIPES[name]}), encoding="utf-8")
    start = time.monotonic()
    with chaos(recipe, folder, resume_after=RESUME_AFTER) as chaos_test:
        trials = chaos_test.list_failpoint_trials(
            passages, resume_after=RESUME_AFTER
        ) + chaos_test.draw_random_trials(at_random, seed=seed)
        verdicts = list(chaos_test.run_trials(trials))
        counts = Counter(chaos_test.resumed_failpoints) | Counter(chaos_test.failpoints)
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
        "seconds": round(time.monotonic() - start, 1),
    }
    print(json.dumps(numbers), flush=True)
    return Result(name, counts, verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--passages",
        type=int,
        default=4,
        help="maximum number of killed passages of each failpoint",
    )
    parser.add_argument(
        "--random",
        type=int,
        default=50,
        help="number of runs of each recipe that are killed at random times",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the random times")
    parser.add_argument("--recipes", default=",".join(RECIPES), help="names, joined by commas")
    parser.add_argument("--folder", type=Path, help="folder of the runs; default: a temporary one")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-chaos-") as temporary:
        root = options.folder or Path(temporary)
        numbers = {"passages": options.passages, "at_random": options.random, "seed": options.seed}
        results = [measure(name, root / name, **numbers) for name in options.recipes.split(",")]
        print(f"\n{make_table(results)}")
        return int(any(verdict.differences for result in results for verdict in result.verdicts))


if __name__ == "__main__":
    sys.exit(main())
