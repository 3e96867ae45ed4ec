"""`ratchet eval`: greedy and sampled accuracy on held-out tasks."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ratchet.build import build_arena, make_manager
from ratchet.evals.accuracy import Evaluator
from ratchet.experience.seeds import seed_for
from ratchet.tools.target import open_target, require_config
from ratchet.types import Sampling


def evaluate_target(
    path: Path, *, recipe: Path | None, tasks: int | None, samples: int, temperature: float | None, seed: int
) -> None:
    """Prints the table. Tasks, reward and sampling are those of the recipe's last stage unless overridden."""
    target = open_target(path, recipe)
    stage = require_config(target).stages[-1]
    arena = build_arena(stage)
    sampling = target.policy.ends(Sampling(**dict(stage.sampling)))
    sampling = replace(
        sampling, temperature=temperature or stage.evaluation.temperature or sampling.temperature, seed=seed_for(seed, "eval")
    )
    held_out = list(itertools.islice(arena.environment.tasks("test", seed=seed), tasks or stage.evaluation.tasks))
    manager = make_manager(target.policy, arena, arena.yardstick or arena.reward)
    evaluator = Evaluator(manager, held_out, sampling, samples=samples)
    accuracy = asyncio.run(evaluator.run())
    table = Table(
        "held-out tasks", "greedy", f"sampled (mean of {samples} at temperature {sampling.temperature:g})", "truncated"
    )
    sampled = "-" if accuracy.sampled is None else f"{accuracy.sampled:.1%}"
    table.add_row(str(accuracy.tasks), f"{accuracy.greedy:.1%}", sampled, f"{accuracy.truncated_share:.1%}")
    console = Console()
    console.print(table)
    if accuracy.failed:
        console.print(f"{accuracy.failed} attempts failed and are left out")
