"""The command `ratchet new`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from ratchet.cli.errors import say
from ratchet.errors import ConfigError


def new(
    kind: Annotated[
        Literal["project", "recipe", "environment", "reward", "harbor-task"],
        typer.Argument(help="What to create."),
    ],
    name: Annotated[
        str | None,
        typer.Argument(
            help="Name of the new project, recipe, environment, reward or task, and of its file "
            "or directory. With --like, the default is the value of --like."
        ),
    ] = None,
    like: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE",
            help="Recipe to start from: an algorithm (sft, dpo, grpo), or the name of a shipped "
            "recipe.",
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="With --like: rows to train on, as csv, jsonl, parquet."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --like: a Hugging Face directory, or a Hub id."),
    ] = None,
    reward: Annotated[
        str | None,
        typer.Option(metavar="FILE.py:F", help="With --like: a function, or a kind of reward."),
    ] = None,
    teacher: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="With --like, for distillation: the teacher's model."),
    ] = None,
) -> None:
    """Create a project, a recipe, an environment, a reward or a task of your own, as small files
    that run.

    --like, --data and --model together write a recipe for your own file and model.
    """
    from ratchet.commands.new.command import RecipeRequest, scaffold, scaffold_recipe

    if name is not None:
        name = name.removesuffix(".yaml" if kind == "recipe" else ".py")
    options = {"like": like, "data": data, "model": model, "reward": reward, "teacher": teacher}
    if any(options.values()):
        if kind != "recipe":
            option = next(f"--{key}" for key, value in options.items() if value)
            raise ConfigError(f"{option} is for a new recipe, not a new {kind}: remove it")
        if not like or not data or not model:
            missing = next(f"--{key}" for key in ("like", "data", "model") if not options[key])
            raise ConfigError(f"{missing} is missing: --like, --data and --model go together")
        files, command = scaffold_recipe(name, RecipeRequest(like, data, model, reward, teacher))
    elif name is None:
        raise ConfigError(f"the name is missing: ratchet new {kind} NAME")
    else:
        files, command = scaffold(kind, name)
    say("\n".join([*map(str, files), f"next: {command}"]))
