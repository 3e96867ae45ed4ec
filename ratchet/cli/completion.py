"""What a shell completes behind `ratchet train` and other commands: recipes, runs and keys.

`ratchet --install-completion` sets it up. Each function returns the words that begin with
`incomplete`, the keys with their descriptions, which zsh and fish show.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from ratchet.recipes import list_recipes, read_summary

RUNS = "runs"  # the directory in which runs are made


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Return the paths of YAML files, and the names of Ratchet's recipes with their summaries."""
    files = _complete_path(incomplete, lambda path: path.endswith((".yaml", ".yml")))
    recipes = [
        (name, read_summary(path))
        for name, path in list_recipes().items()
        if name.startswith(incomplete)
    ]
    return [*((file, "") for file in files), *recipes]


def complete_run(incomplete: str) -> list[str]:
    """Return the paths of run directories; without an `incomplete` word those in `runs/`."""
    if not incomplete and os.path.isdir(RUNS):
        incomplete = f"{RUNS}/"
    return _complete_path(incomplete, lambda path: False)


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Return keys of a recipe as `key=`, and sections as `section.`, one level at a time."""
    from ratchet.commands.help.entries import list_entries

    match = re.match(r"stages\.[^.]+\.", incomplete)
    stage = match[0] if match else ""
    path = incomplete.removeprefix(stage)
    descriptions = {entry.path: entry.description for entry in list_entries()}
    sections = {name.rpartition(".")[0] for name in descriptions}
    return [
        (f"{stage}{name}{'.' if name in sections else '='}", text)
        for name, text in descriptions.items()
        if name.startswith(path) and name.count(".") == path.count(".")
    ]


def _complete_path(incomplete: str, is_wanted: Callable[[str], bool]) -> list[str]:
    """Return the wanted files that begin with a path, the directories that lead on, and the runs.

    A directory ends in "/", but for a run, which is complete.
    """
    head, _ = os.path.split(incomplete)
    try:
        entries: Iterable[Path] = sorted(Path(head or ".").iterdir())
    except OSError:  # there is no such directory
        return []
    paths = []
    for entry in entries:
        path = os.path.join(head, entry.name)
        if not path.startswith(incomplete) or entry.name.startswith("."):
            continue
        if (entry / "config.yaml").is_file():
            paths.append(path)
        elif entry.is_dir():
            paths.append(f"{path}/")
        elif is_wanted(path):
            paths.append(path)
    return paths
