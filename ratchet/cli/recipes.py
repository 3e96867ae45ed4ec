"""The commands `ratchet recipes ...`. They import little, like `ratchet.cli.main`."""

from __future__ import annotations

import os
import re
import textwrap
from pathlib import Path
from typing import Annotated

import typer

from ratchet.cli.errors import say
from ratchet.errors import ConfigError
from ratchet.recipes import list_recipes, read_summary, require_recipe
from ratchet.utils.atomic_files import atomic_path

recipes = typer.Typer()
# A line of a YAML file that only recipes have.
TRAINS = re.compile(r"^(algorithm|stages|extends):", re.MULTILINE)
Name = Annotated[str, typer.Argument(help="Name of a recipe, as `ratchet recipes` lists it.")]


@recipes.callback(invoke_without_command=True)
def list_them(context: typer.Context) -> None:
    """List, show and copy the recipes that come with Ratchet (alone: list)."""
    if context.invoked_subcommand is None:
        say("\n".join(describe_recipes(list_recipes())))
        say("\nnext: ratchet train NAME, or `ratchet recipes copy NAME` for a file to change")


@recipes.command()
def show(name: Name) -> None:
    """Print a recipe."""
    say(require_recipe(name).read_text(encoding="utf-8").rstrip())


@recipes.command()
def copy(
    name: Name,
    to: Annotated[
        str,
        typer.Argument(help="The new file, or its directory; default: NAME.yaml here."),
    ] = ".",
) -> None:
    """Copy a recipe, to be changed."""
    source = require_recipe(name)
    target = Path(to)
    if target.is_dir() or to.endswith("/"):
        target /= source.name
    if os.path.lexists(target):
        raise ConfigError(f"{target} exists already and is not replaced: name another file")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as draft:
            draft.write_bytes(source.read_bytes())
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {error.strerror}") from error
    say(f"{target}\nnext: ratchet train {target}")


def describe_choices() -> str:
    """Return what `ratchet train` could train here: files, Ratchet's recipes, the next command."""
    local_recipes = {p.name: p for p in list_recipes(Path()).values() if _is_recipe(p)}
    shipped = textwrap.fill(", ".join(list_recipes()), 98)
    lines = ["no recipe is named, and no run to continue (--resume RUN)", ""]
    if local_recipes:
        lines += ["recipes in this directory:", *describe_recipes(local_recipes), ""]
    lines += ["recipes that come with Ratchet (`ratchet recipes` describes them):", shipped, ""]
    return "\n".join([*lines, f"next: ratchet train {next(iter(local_recipes), 'quickstart')}"])


def _is_recipe(path: Path) -> bool:
    """True if a YAML file can be read and trains something, unlike those of other programs."""
    try:
        return TRAINS.search(path.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


def describe_recipes(paths: dict[str, Path]) -> list[str]:
    """Return a line for each recipe: its name, and what it is."""
    width = max(map(len, paths), default=0)
    return [f"{name:{width}}  {read_summary(path)}".rstrip() for name, path in paths.items()]
