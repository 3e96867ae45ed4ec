"""`ratchet eval`: greedy and sampled accuracy on held-out tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from ratchet.algorithms.base import Algorithm
from ratchet.assemble import build_arena, plan_of
from ratchet.build import Arena, Plan, Policy, make_evaluator, make_score_evaluator
from ratchet.config.kinds import construct
from ratchet.errors import ConfigError
from ratchet.learners.columns import SCALARS
from ratchet.learners.config import LocalConfig
from ratchet.models.heads import load_head
from ratchet.tools.target import Target, open_target, require_config

Found = TypeVar("Found")
NOTHING = "there is nothing to evaluate on: the recipe says evaluation.tasks: 0; add --tasks N"


async def _measured(policy: Policy, evaluation: Coroutine[Any, Any, Found]) -> Found:
    try:
        return await evaluation
    finally:
        await policy.close()


def _evaluate_scores(target: Target, algorithm: Algorithm, plan: Plan, arena: Arena) -> None:
    model = target.policy.model
    head = load_head(target.model, model.hidden_size)
    if head is None:
        raise ConfigError(f"{target.model} has no scalar head, and algorithm {algorithm.name} trains one: give a run of it")
    # Whatever the run trained with: this process has the whole model.
    scorer = construct(LocalConfig(), model, head=head.to(next(model.parameters()).device))
    evaluator = make_score_evaluator(target.policy, arena, algorithm, plan, scorer)
    if evaluator is None:
        raise ConfigError(NOTHING)
    found = asyncio.run(_measured(target.policy, evaluator.run()))
    numbers = found.numbers()
    table = Table("held-out tasks", *numbers)
    table.add_row(str(found.tasks), *(f"{value:.3g}" for value in numbers.values()))
    Console().print(table)


def evaluate_target(
    path: Path, *, recipe: Path | None, tasks: int | None, samples: int, temperature: float | None, seed: int
) -> None:
    """Prints the table. Tasks, yardstick and sampling are those of the recipe's last stage unless overridden."""
    target = open_target(path, recipe)
    config = require_config(target)
    last = len(config.stages) - 1
    plan = plan_of(config, last)
    settings: dict[str, float] = {"tasks": tasks or plan.evaluation.tasks, "samples": samples}
    if temperature is not None:
        settings["temperature"] = temperature
    plan = replace(
        plan, sampling=target.policy.ends(plan.sampling), evaluation=plan.evaluation.model_copy(update=settings), seed=seed
    )
    algorithm = construct(config.stages[last].algorithm)
    if SCALARS & algorithm.needs_of("policy"):
        _evaluate_scores(target, algorithm, plan, build_arena(config.stages[last]))
        return
    evaluator = make_evaluator(target.policy, build_arena(config.stages[last]), plan)
    if evaluator is None:
        raise ConfigError(NOTHING)
    sampling = evaluator.sampling
    accuracy = asyncio.run(_measured(target.policy, evaluator.run()))
    table = Table(
        "held-out tasks", "greedy", f"sampled (mean of {samples} at temperature {sampling.temperature:g})", "truncated"
    )
    sampled = "-" if accuracy.sampled is None else f"{accuracy.sampled:.1%}"
    table.add_row(str(accuracy.tasks), f"{accuracy.greedy:.1%}", sampled, f"{accuracy.truncated_share:.1%}")
    console = Console()
    console.print(table)
    if accuracy.failed:
        console.print(f"{accuracy.failed} attempts failed and are left out")
