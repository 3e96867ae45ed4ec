"""The command `ratchet import`: convert a peer's configuration to a recipe.

A peer is another library. The conversion report lists the peer's keys that could not simply be
taken over. It is printed to the terminal, and written as comments at the top of the recipe.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from ratchet.commands.migrate.importer import ImportResult, Item, read_config
from ratchet.config.diagnostics import REDACTED, is_secret
from ratchet.config.yaml_tree import write_text
from ratchet.errors import ConfigError
from ratchet.utils.atomic_files import atomic_path
from ratchet.utils.terminal_text import escape_controls, make_console

WIDTH = 128  # characters of a line of the conversion report
MAX_VALUE_CHARS = 48  # maximum characters of a value in the conversion report


def import_file(
    file: Path, peer: str | None, out: Path | None, *, with_inert: bool = False
) -> None:
    """Convert a peer's configuration, write the recipe and print the conversion report.

    Args:
        file: The peer's configuration.
        peer: Name of the peer; None detects it from the keys.
        out: The file for the recipe; None: standard output.
        with_inert: True also lists the keys without effect on results.

    Raises:
        ConfigError: The file can't be read, or `out` exists or can't be written. The error is also
            raised, after the recipe is written, if the recipe can't run yet.
    """
    if out is not None and os.path.lexists(out):
        raise ConfigError(
            f"{out} exists already, and is not overwritten: give another --out, or remove it"
        )
    result = read_config(file, peer)
    text = format_recipe(result, file.name, with_inert=with_inert)
    terminal_lines = [
        f"{file}: {result.peer.title}, {result.method}",
        *_format_taken_over(result),
        *format_conversion_report(result, with_inert=with_inert),
    ]
    if out is None:
        _print(terminal_lines, sys.stderr)
        sys.stdout.write(text)
    else:
        try:
            with atomic_path(out) as draft:
                draft.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out={out} can't be written: {error.strerror}") from error
        _print([*terminal_lines, "", f"next: ratchet check {out}"], sys.stderr)
    if result.problems:
        raise ConfigError(
            "; ".join(
                f"{problem.origin.path or 'recipe'}: {problem.message}"
                for problem in result.problems
            )
        )


def _print(lines: Iterable[str], file: IO[str]) -> None:
    console = make_console(file, soft_wrap=True)
    for line in lines:
        console.print(line, markup=False, highlight=False)


def format_recipe(result: ImportResult, name: str, *, with_inert: bool = True) -> str:
    """Return the recipe as YAML, below comments with the source file and the conversion report."""
    heading = [
        f"From {name}, a configuration of {result.peer.title} ({result.method}), by `ratchet "
        "import`."
    ]
    comments = "\n".join(
        f"# {escape_controls(line)}".rstrip()
        for line in [*heading, *format_conversion_report(result, with_inert=with_inert)]
    )
    return f"{comments}\n{write_text(result.recipe)}"


def format_conversion_report(result: ImportResult, *, with_inert: bool = True) -> Iterator[str]:
    """Yield the lines of the conversion report: the keys that could not simply be taken over.

    First come keys without a counterpart, which the user must decide on; then keys that mean
    something else, and keys without effect. Keys that the import chose itself, keys that could not
    be read and problems of the recipe follow.

    Args:
        with_inert: True lists the keys without effect; False gives only their number.
    """
    yield from _format_section(
        "Decide on these, which have no counterpart", _join_by_note(result.dropped)
    )
    yield from _format_section("Means something else here", _join_by_note(result.different))
    inert = "Without effect on results here"
    if with_inert:
        yield from _format_section(inert, _join_by_note(result.inert))
    elif result.inert:
        keys = "1 key" if len(result.inert) == 1 else f"{len(result.inert)} keys"
        yield from ["", f"{inert}: {keys} (listed with --all)"]
    chosen = ", ".join(f"{key}={_shorten(value)}" for key, value in result.chosen.items())
    yield from _format_section(
        "Not in the file, and chosen by the import",
        [(chosen, "check that they are what you want")] if chosen else [],
    )
    yield from _format_section("Could not be resolved", list(result.unresolved.items()))
    yield from _format_section(
        "Set more than once in the file: the last value counts, not these",
        [(f"{key}={_shorten(text)}", "") for key, text in result.repeated.items()],
    )
    yield from _format_section(
        "Null in the file, so there is nothing to take over",
        [(", ".join(result.null_keys), "")] if result.null_keys else [],
    )
    yield from _format_section(
        "To be fixed before the recipe can run",
        [(problem.origin.path or "recipe", problem.message) for problem in result.problems],
    )


def _format_taken_over(result: ImportResult) -> Iterator[str]:
    """Yield the section of keys that mean the same here."""
    lines = [f"  {_describe(item)}" for item in result.same]
    if lines:
        yield from ["", "Taken over:", *lines]


def _join_by_note(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Return (keys, note) pairs, in which keys with the same note are joined."""
    keys_by_note: dict[str, list[str]] = {}
    for item in items:
        keys_by_note.setdefault(item.note, []).append(_describe(item))
    return [(", ".join(keys), note) for note, keys in keys_by_note.items()]


def _describe(item: Item) -> str:
    """Return a text such as `peer_key=1 (the default there) -> recipe_key=1`."""
    recipe_keys = ", ".join(f"{key}={_shorten(value)}" for key, value in item.recipe_keys.items())
    default_mark = " (the default there)" if item.is_default else ""
    target = ""
    if recipe_keys:
        target = f" -> {recipe_keys}"
    elif item.covered_by:
        target = f" (with {item.covered_by})"
    return f"{item.peer_key}={_show_value(item)}{default_mark}{target}"


def _show_value(item: Item) -> str:
    """Return the value of a key. Secrets are redacted, because they must not reach the recipe."""
    return REDACTED if is_secret(item.peer_key) else _shorten(item.value)


def _shorten(value: Any) -> str:
    """Return a value on one line of at most MAX_VALUE_CHARS characters, all of them printable."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= MAX_VALUE_CHARS else f"{text[: MAX_VALUE_CHARS - 3]}..."


def _format_section(title: str, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield a titled section of (keys, note) pairs as wrapped lines; nothing without pairs."""
    if not pairs:
        return
    yield from ["", f"{title}:"]
    for keys, note in pairs:
        yield from textwrap.wrap(
            f"{keys}: {note}" if note else keys,
            WIDTH - 2,
            initial_indent="  ",
            subsequent_indent="      ",
            break_long_words=False,
            break_on_hyphens=False,
        )
