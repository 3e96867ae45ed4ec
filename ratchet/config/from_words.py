"""Build a section from the command line: a kind or an import path, and `key=value` words."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from ratchet.config.diagnostics import RecipeProblem, combine_problems, explain_validation_error
from ratchet.config.layers import merge_overrides
from ratchet.config.peer_names import find_reward_kind
from ratchet.config.resolve import import_object, section_class
from ratchet.config.yaml_tree import (
    COMMAND_LINE,
    Budget,
    Node,
    check_key_path,
    read_text,
)
from ratchet.errors import ConfigError


def section_from_words(slot: str, kind: str, words: Sequence[str] = ()) -> Any:
    """Return the section of a kind or an import path.

    Args:
        slot: The slot of the section, such as "environment".
        kind: The kind, or the import path. A reward function of another library becomes the key
            `function` of the kind that calls it.
        words: The keys, with values in YAML ("timeout_s=5", "domains.maths=[{kind: math}]").

    Raises:
        ConfigError: A word is not of the form key=value, or keys or values are wrong. The error
            lists all of these problems.
    """
    library = _find_library(kind) if slot == "rewards" else None
    fixed = {"kind": kind} if library is None else {"kind": library, "function": kind}
    section = section_class(slot, fixed["kind"])
    keys = _parse_keys(words)
    try:
        return section.model_validate({**fixed, **keys.plain()})
    except ValidationError as error:
        raise combine_problems(explain_validation_error(error, keys, section)) from None


def _find_library(kind: str) -> str | None:
    """Return the kind that calls a reward function of another library; None for any other path."""
    if ":" not in kind:
        return None
    target = import_object(kind)
    return find_reward_kind(target) if inspect.isfunction(target) else None


def _parse_keys(words: Sequence[str]) -> Node:
    """Return the words as one tree of keys. Raises ConfigError like `section_from_words`."""
    parsed: dict[tuple[str, ...], Node] = {}
    problems: list[RecipeProblem] = []
    budget = Budget()
    for text in words:
        key, equals, value = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            raise ConfigError(f"{COMMAND_LINE}: override '{text}' is not of the form key=value")
        check_key_path(path)
        node, duplicates = read_text(value, COMMAND_LINE, ".".join(path), budget)
        parsed[path] = replace(node, origin=replace(node.origin, line=None))
        problems += duplicates
    keys = merge_overrides(parsed, problems)
    if problems:
        raise combine_problems(problems)
    return keys
