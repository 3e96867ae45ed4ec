"""What a shell completes behind `ratchet train` and other commands: recipes, runs and keys.

`ratchet --install-completion` sets it up. Each function returns the words that begin with
`incomplete`, the keys with their descriptions, which zsh and fish show.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from ratchet.recipes import list_recipes, read_summary

RUNS = "runs"  # the directory in which runs are made


def complete_recipe(incomplete: str) -> list[tuple[str, str]]:
    """Return YAML files, directories, and the names of Ratchet's recipes with their summaries."""
    words = []
    for path in _list_entries(incomplete):
        if path.is_dir():
            words.append((f"{path}/", ""))
        elif path.suffix in (".yaml", ".yml"):
            words.append((str(path), ""))
    for name, path in list_recipes().items():
        if name.startswith(incomplete):
            words.append((name, read_summary(path)))
    return words


def complete_run(incomplete: str) -> list[str]:
    """Return the paths of runs, and of directories that may hold some (with "/" at the end).

    Without a beginning of the word, those in `runs/`.
    """
    if not incomplete and os.path.isdir(RUNS):
        incomplete = f"{RUNS}/"
    directories = [path for path in _list_entries(incomplete) if path.is_dir()]
    return [str(path) if (path / "config.yaml").is_file() else f"{path}/" for path in directories]


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


def _list_entries(incomplete: str) -> list[Path]:
    """Return the files and directories whose paths begin with `incomplete`, without hidden ones."""
    directory, start = os.path.split(incomplete)
    try:
        entries = sorted(Path(directory).iterdir())
    except OSError:  # there is no such directory
        return []
    return [path for path in entries if path.name.startswith(start) and path.name[0] != "."]
