"""The command `ratchet explain-algorithm`: show an algorithm's parts, equations, sources, keys."""

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
from ratchet.config.yaml_tree import write_flow
from ratchet.errors import ConfigError

WIDTH = 100
SOURCE = re.compile(r"arXiv|https?://|\(\w+, \d{4}\)")  # a citation in a docstring
# Values for keys that have no default, so that the algorithm can be built. Nothing is loaded.
PLACEHOLDERS = ("teacher=path/of/a/model", "fixed_length=1024")


def explain_algorithm(kind: str, overrides: Sequence[str] = ()) -> str:
    """Return a page that describes the algorithm `kind`, read from the object that a run builds.

    Args:
        kind: A built-in name, or the import path of a config class.
        overrides: `key=value`, with keys relative to the recipe's `algorithm` section.

    Raises:
        ConfigError: The kind is unknown, or a key or value is wrong.
    """
    section = _complete_section(kind, overrides)
    algorithm = build(section)
    if not isinstance(section, AlgorithmConfig) or not isinstance(algorithm, Algorithm):
        raise ConfigError(
            f"algorithm={kind} builds no Algorithm. Give a built-in name, or the import path of an "
            "AlgorithmConfig."
        )
    title = " ".join((type(section).__doc__ or "").split())
    blocks = [
        "\n".join(textwrap.wrap(f"{kind}: {title}", WIDTH)),
        _format_block("Learns from", [_describe_data(algorithm)]),
        _format_block("Scored before the update, without gradient", _list_passes(algorithm)),
        _format_block("Advantage, in this order", _list_advantage_steps(algorithm)),
        _format_block("Loss, minimised", _list_terms(algorithm)),
        _format_block("Keys", _list_keys(section)),
    ]
    return "\n\n".join(block for block in blocks if block)


def _complete_section(kind: str, overrides: Sequence[str]) -> Section:
    """Return the config section of `kind`.

    If a required key is missing, one of PLACEHOLDERS fills it.
    """
    try:
        return section_from_words("algorithm", kind, overrides)
    except ConfigError:
        for placeholder in PLACEHOLDERS:
            with suppress(ConfigError):
                return section_from_words("algorithm", kind, [*overrides, placeholder])
        raise


def _format_block(heading: str, entries: Sequence[str]) -> str:
    """Return a heading with its entries indented below it, or "" if there are no entries."""
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


def _describe_data(algorithm: Algorithm) -> str:
    if algorithm.source != "rollouts":
        return f"{algorithm.source}; micro-batches never split a {algorithm.unit}"
    attempts = f"{algorithm.group_size} sampled attempts at each prompt"
    greedy = ", and a greedy one as the baseline" if algorithm.greedy_baseline else ""
    return f"rollouts: {attempts}{greedy}; optimizer steps a batch: {algorithm.updates_per_batch}"


def _list_passes(algorithm: Algorithm) -> list[str]:
    return [
        f"{scoring_pass.produces}: {scoring_pass.output} of the {scoring_pass.role}"
        for scoring_pass in algorithm.passes
    ]


def _list_advantage_steps(algorithm: Algorithm) -> list[str]:
    if algorithm.advantage is no_advantage:
        return []
    return [
        _describe_function(function, options) for function, options in _unfold(algorithm.advantage)
    ]


def _list_terms(algorithm: Algorithm) -> list[str]:
    entries = []
    for role, terms in algorithm.losses.items():
        for term in terms:
            if term.coef == 0:  # adds nothing to the loss and only reports metrics
                continue
            factor = "" if term.coef == 1 else f"{term.coef:g} x "
            entries.append(f"{role}, {factor}{term.name}:")
            entries += [
                f"  {_describe_function(*function_and_options)}"
                for function_and_options in _unfold(term.fn)
            ]
            entries += [
                f"  aggregated by {_describe_function(*function_and_options)}"
                for function_and_options in _unfold(term.weighting)
            ]
    return entries


def _unfold(function: Callable[..., Any]) -> Iterator[tuple[Callable[..., Any], dict[str, Any]]]:
    """Yield the functions that `function` is composed of, each with its options.

    If a `functools.partial` has the keyword `transforms` or `parts`, the functions in that keyword
    are yielded in place of the function that it wraps. A function in its keyword `fn` comes last.
    """
    options: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        options = {**function.keywords, **options}
        function = function.func
    components = options.pop("transforms", ()) or [part for part, _ in options.pop("parts", ())]
    wrapped = options.pop("fn", None)
    if not components:
        yield function, options
    for part in (*components, *([wrapped] if wrapped else ())):
        yield from _unfold(part)


def _describe_function(function: Callable[..., Any], options: Mapping[str, Any]) -> str:
    """Return a function's name, its options and the beginning of its docstring.

    The first paragraph is quoted, and the second too unless the first already cites a source.
    """
    arguments = ", ".join(f"{key}={value}" for key, value in options.items())
    paragraphs = re.split(r"\n\s*\n", inspect.getdoc(function) or "")
    quoted_paragraphs = paragraphs if SOURCE.search(paragraphs[0]) is None else paragraphs[:1]
    text = " ".join(" ".join(quoted_paragraphs[:2]).split())
    return f"{function.__name__}({arguments}): {text}"


def _list_keys(section: Section) -> list[str]:
    entries = []
    values = section.model_dump(mode="json")
    for name in type(section).model_fields:
        description = section.describe_field(name)
        comment = f"  # {description}" if description else ""
        entries.append(f"{name}={write_flow(values[name])}{comment}")
    return entries
