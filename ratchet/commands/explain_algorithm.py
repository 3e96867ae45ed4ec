"""`ratchet explain-algorithm`: an algorithm's parts, with equations, sources and keys."""

from __future__ import annotations

import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from ratchet.algorithms.base import Algorithm, no_advantage
from ratchet.algorithms.config.base import AlgorithmConfig
from ratchet.config.base import Section
from ratchet.config.from_words import section_from_words
from ratchet.config.resolve import build
from ratchet.errors import ConfigError

WIDTH = 100
# Values for keys that have no default, so that the algorithm can be shown; nothing is loaded.
SOURCE = re.compile(r"arXiv|https?://|\(\w+, \d{4}\)")  # as docstrings cite a paper
PLACEHOLDERS = ("teacher=path/of/a/model", "fixed_length=1024")


def explain_algorithm(kind: str, overrides: Sequence[str] = ()) -> str:
    """Return a page about the algorithm `kind`, made from the algorithm that a run would build.

    Args:
        kind: A built-in name, or the import path of a config class.
        overrides: `key=value`, with keys relative to the recipe's `algorithm` section.

    Raises:
        ConfigError: The kind is unknown, or a key or value is wrong.
    """
    section = _complete_section(kind, overrides)
    algorithm = build(section)
    if not isinstance(section, AlgorithmConfig) or not isinstance(algorithm, Algorithm):
        raise ConfigError(f"algorithm={kind} builds no Algorithm. Name one of `ratchet check`'s.")
    title = " ".join((type(section).__doc__ or "").split())
    blocks = [
        "\n".join(textwrap.wrap(f"{kind}: {title}", WIDTH)),
        _block("Learns from", [_data(algorithm)]),
        _block("Scored before the update, without gradient", _passes(algorithm)),
        _block("Advantage, in this order", _advantage(algorithm)),
        _block("Loss, minimised", _terms(algorithm)),
        _block("Keys", _keys(section)),
    ]
    return "\n\n".join(block for block in blocks if block)


def _complete_section(kind: str, overrides: Sequence[str]) -> Section:
    """Return the config section of `kind`, with placeholders for keys that must be set."""
    try:
        return section_from_words("algorithm", kind, overrides)
    except ConfigError:
        for placeholder in PLACEHOLDERS:
            with suppress(ConfigError):
                return section_from_words("algorithm", kind, [*overrides, placeholder])
        raise


def _block(heading: str, entries: Sequence[str]) -> str:
    """Return a heading with indented entries, or "" without entries."""
    lines = [
        line
        for entry in entries
        for line in textwrap.wrap(
            entry.strip(), WIDTH, initial_indent=_indent(entry), subsequent_indent="      "
        )
    ]
    return "\n".join([heading, *lines]) if entries else ""


def _indent(entry: str) -> str:
    return " " * (2 + len(entry) - len(entry.lstrip()))


def _data(algorithm: Algorithm) -> str:
    if algorithm.source != "rollouts":
        return f"{algorithm.source}; micro-batches never split a {algorithm.unit}"
    attempts = f"{algorithm.group_size} sampled attempts at each prompt"
    greedy = ", and a greedy one as the baseline" if algorithm.greedy_baseline else ""
    return f"rollouts: {attempts}{greedy}; optimizer steps a batch: {algorithm.updates_per_batch}"


def _passes(algorithm: Algorithm) -> list[str]:
    return [f"{item.produces}: {item.output} of the {item.role}" for item in algorithm.passes]


def _advantage(algorithm: Algorithm) -> list[str]:
    if algorithm.advantage is no_advantage:
        return []
    return [_described(function, options) for function, options in _unfolded(algorithm.advantage)]


def _terms(algorithm: Algorithm) -> list[str]:
    entries = []
    for role, terms in algorithm.losses.items():
        for term in terms:
            if term.coef == 0:  # only measured
                continue
            factor = "" if term.coef == 1 else f"{term.coef:g} x "
            entries.append(f"{role}, {factor}{term.name}:")
            entries += [f"  {_described(*pair)}" for pair in _unfolded(term.fn)]
            entries += [
                f"  aggregated by {_described(*pair)}" for pair in _unfolded(term.weighting)
            ]
    return entries


def _unfolded(function: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Yield each function that a `functools.partial` of functions is made of, with its options."""
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    inner = options.pop("transforms", ()) or [part for part, _ in options.pop("parts", ())]
    wrapped = options.pop("fn", None)
    if not inner:
        yield function, options
    for part in (*inner, *([wrapped] if wrapped else ())):
        yield from _unfolded(part)


def _described(function: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Return a function's name, its options and the beginning of its docstring, up to a source."""
    named = ", ".join(f"{key}={value}" for key, value in options.items())
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(function) or "")
    kept = paragraphs if SOURCE.search(paragraphs[0]) is None else paragraphs[:1]
    text = " ".join(" ".join(kept[:2]).split())
    return f"{function.__name__}({named}): {text}"


def _keys(section: Section) -> list[str]:
    entries = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        words = f" {field.description}" if field.description else ""
        entries.append(f"{name}={_shown(value)}{words and '  #'}{words}")
    return entries


def _shown(value: object) -> str:
    if isinstance(value, Section):
        inner = ", ".join(f"{key}: {_shown(item)}" for key, item in dict(value).items())
        return f"{{{inner}}}"
    if isinstance(value, tuple):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return "null" if value is None else str(value)
