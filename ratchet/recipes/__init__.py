"""The recipes that come with Ratchet, and how a recipe is found by its name."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from pathlib import Path

from ratchet.errors import ConfigError

RECIPES_DIR = Path(__file__).parent
SUFFIX = ".yaml"


def list_recipes(directory: Path = RECIPES_DIR) -> dict[str, Path]:
    """Return the paths of the recipes in a directory by name; default: Ratchet's own."""
    paths = sorted(directory.glob(f"*{SUFFIX}"))
    return {path.stem: path for path in paths if path.is_file()}


def find_recipe(recipe: str | Path, directory: Path = Path()) -> Path:
    """Return the path of a recipe.

    Args:
        recipe: A path relative to `directory`, or a name without a suffix: NAME.yaml in
            `directory`, or else the recipe of this name that comes with Ratchet. A text with a
            slash is a path; `Path` drops that of "./quickstart".
        directory: The directory that paths are relative to.

    Returns the path as it was given if there is no such recipe.
    """
    path = directory / recipe
    if os.sep in str(recipe) or path.suffix or os.path.isfile(path):
        return path
    file_name = f"{path.name}{SUFFIX}"
    candidates = (path.parent / file_name, RECIPES_DIR / file_name)
    return next(filter(os.path.isfile, candidates), path)


def require_recipe(name: str) -> Path:
    """Return the path of a recipe of Ratchet. Raises ConfigError with the nearest name."""
    recipes = list_recipes()
    if name not in recipes:
        raise ConfigError(
            f"no recipe named '{name}' comes with Ratchet{suggest_recipe(name) or '.'} "
            "`ratchet recipes` lists them"
        )
    return recipes[name]


def suggest_recipe(name: str) -> str:
    """Return ": did you mean NAME?" with the nearest name of Ratchet's recipes, or ""."""
    near = get_close_matches(name, list_recipes(), n=1)
    return f": did you mean `{near[0]}`, a recipe that comes with Ratchet?" if near else ""


def read_summary(path: Path) -> str:
    """Return the first sentence of the comment that a recipe begins with; "" without one."""
    lines: list[str] = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        if not line.startswith("# ") or (lines and line.startswith("# needs:")):
            break
        lines.append(line.removeprefix("# "))
    # A sentence ends where the next one begins, with a capital letter; "Dr. GRPO" is a name.
    return re.split(r"(?<!Dr\.)(?<=[.!?])\s+(?=[A-Z])", " ".join(lines))[0].strip()
