"""The command `ratchet import`: the recipe with its account as comments, and the account on the
terminal."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ratchet.commands.migrate.importer import Imported, Item, read_config
from ratchet.config.yaml_tree import write_text
from ratchet.errors import ConfigError

WIDTH = 128
SHOWN = 48  # characters of a value


def import_file(file: Path, peer: str | None, out: Path | None) -> None:
    """Write the recipe. Raises ConfigError if nothing can be read, if `out` exists, and, after
    writing, if the result is not yet a recipe that can run."""
    if out is not None and out.exists():
        raise ConfigError(
            f"{out} is there already, and is not overwritten: give another --out, or remove it"
        )
    result = read_config(file, peer)
    text = recipe_text(result, file.name)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    console.print(f"{file}: {result.peer.title}, {result.method}")
    for line in _same(result):
        console.print(line)
    for line in account(result):
        console.print(line)
    if out is None:
        Console(highlight=False, markup=False, soft_wrap=True).print(text, end="")
    else:
        out.write_text(text, encoding="utf-8")
        console.print(f"\nnext: ratchet check {out}")
    if result.refused:
        raise ConfigError(
            "; ".join(
                f"{problem.origin.path or 'recipe'}: {problem.message}"
                for problem in result.refused
            )
        )


def recipe_text(result: Imported, name: str) -> str:
    head = [
        f"From {name}, a configuration of {result.peer.title} ({result.method}), by `ratchet "
        "import`."
    ]
    comments = "\n".join(f"# {line}".rstrip() for line in [*head, *account(result)])
    return f"{comments}\n{write_text(result.recipe)}"


def account(result: Imported) -> Iterator[str]:
    """Yield every key that means something else here, every key without a counterpart or effect,
    and what could not be read."""
    yield from _section("Means something else here", _pairs(result.different))
    yield from _section("Without counterpart", _pairs(result.without))
    yield from _section("Without effect on a result here", _pairs(result.idle))
    chosen = ", ".join(f"{key}={_short(value)}" for key, value in result.chosen.items())
    yield from _section(
        "Not in the file, and set as a beginning",
        [(chosen, "see that they are what you want")] if chosen else [],
    )
    yield from _section("Could not be resolved", [(key, why) for key, why in result.unread.items()])
    yield from _section(
        "Set more than once in the file: the last counts, not these",
        [(f"{key}={_short(text)}", "") for key, text in result.repeated.items()],
    )
    yield from _section(
        "Null there, so nothing to take over",
        [(", ".join(result.unset), "")] if result.unset else [],
    )
    yield from _section(
        "To be mended before it runs",
        [(problem.origin.path or "recipe", problem.message) for problem in result.refused],
    )


def _same(result: Imported) -> Iterator[str]:
    lines = [f"  {_said(item)}" for item in result.same]
    if lines:
        yield from ["", "Taken over:", *lines]


def _pairs(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Group keys with the same reason."""
    together: dict[str, list[str]] = {}
    for item in items:
        together.setdefault(item.note, []).append(_said(item))
    return [(", ".join(keys), note) for note, keys in together.items()]


def _said(item: Item) -> str:
    ours = ", ".join(f"{key}={_short(value)}" for key, value in item.ours.items())
    their_own = " (their default)" if item.assumed else ""
    taken = f" -> {ours}" if ours else f" (with {item.within})" if item.within else ""
    return f"{item.theirs}={_short(item.value)}{their_own}{taken}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def _section(title: str, pairs: Sequence[tuple[str, str]]) -> Iterator[str]:
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
