"""Complete recipes, runs and keys behind `ratchet train` and other commands in a shell.

`ratchet --install-completion` sets it up. Each function returns the words that begin with
`incomplete`, some with a description, which zsh and fish show. A shell writes a space after the
only word, so a directory or a section that is the only one is replaced by what it holds.
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
        if os.path.isdir(path):
            words.append((f"{path}/", ""))
        elif path.suffix in (".yaml", ".yml"):
            words.append((str(path), ""))
    for name, path in list_recipes().items():
        if name.startswith(incomplete):
            words.append((name, read_summary(path)))
    is_only_directory = len(words) == 1 and words[0][0].endswith("/")
    return complete_recipe(words[0][0]) if is_only_directory else words


def complete_run(incomplete: str) -> list[str]:
    """Return the paths of runs, and of directories that may hold some (with "/" at the end).

    Without a beginning of the word, those in `runs/`.
    """
    if not incomplete and os.path.isdir(RUNS):
        incomplete = f"{RUNS}/"
    # os.path.isdir returns False for an unreadable path, where Path.is_dir would raise.
    directories = [str(path) for path in _list_entries(incomplete) if os.path.isdir(path)]
    words = [d if os.path.isfile(os.path.join(d, "config.yaml")) else f"{d}/" for d in directories]
    is_only_directory = len(words) == 1 and words[0].endswith("/")
    return complete_run(words[0]) if is_only_directory else words


def complete_key(incomplete: str) -> list[tuple[str, str]]:
    """Return keys of a recipe as `key=`, and sections as `section.`, one level at a time.

    A key that is the only one is returned with its default too, if all kinds have the same.
    """
    from ratchet.commands.help.entries import KeyEntry, list_entries

    match = re.match(r"stages\.[^.]+\.", incomplete)
    stage = match[0] if match else ""
    path = incomplete.removeprefix(stage)
    all_entries = list_entries()
    entries: dict[str, KeyEntry] = {}
    for entry in all_entries:  # kinds may have the same key: the first one describes it
        entries.setdefault(entry.path, entry)
    sections = {name.rpartition(".")[0] for name in entries}
    names = [n for n in entries if n.startswith(path) and n.count(".") == path.count(".")]
    if len(names) == 1 and names[0] in sections:
        return complete_key(f"{stage}{names[0]}.")
    words = [
        (f"{stage}{name}{'.' if name in sections else '='}", entries[name].description)
        for name in names
    ]
    defaults = {entry.default for entry in all_entries if entry.path in names}
    if len(names) == len(defaults) == 1 and (default := entries[names[0]].default):
        words.append((f"{words[0][0]}{default}", "the default"))
    return words


def _list_entries(incomplete: str) -> list[Path]:
    """Return the files and directories whose paths begin with `incomplete`, without hidden ones."""
    directory, start = os.path.split(incomplete)
    try:
        entries = sorted(Path(directory).iterdir())
    except OSError:  # there is no such directory
        return []
    return [path for path in entries if path.name.startswith(start) and path.name[0] != "."]
