"""Load a recipe file as a `RunConfig`, and dump it.

A stage's key at the top level is the default of all stages. A recipe without `stages` has one
stage. `extends: other.yaml` (relative to the file), or `extends: quickstart` (a recipe that comes
with Ratchet), starts from another recipe, without its `name`. Overrides (`a.b.c=value`, with the
value in YAML) are applied last. They address a stage by name or position, as in
`stages.grpo.steps`. Data, models and modules that are not in the current directory are looked up
in the directory of the file (`ratchet.config.recipe_dir`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ratchet.config.checks.stages import conflicts
from ratchet.config.diagnostics import (
    REDACTED,
    RecipeProblem,
    combine_problems,
    explain_validation_error,
    is_secret,
    locate,
)
from ratchet.config.layers import apply_layer, expand, merge_overrides
from ratchet.config.recipe_dir import add_import_dirs, resolve_paths
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import (
    COMMAND_LINE,
    Budget,
    Node,
    ValueOrigin,
    check_key_path,
    read_file,
    read_text,
    write_text,
)
from ratchet.errors import ConfigError
from ratchet.recipes import find_recipe, list_recipes
from ratchet.utils.terminal_text import shorten_text

EXTENDS = "extends"
MAX_FILES = 32  # longest chain of `extends`, the recipe itself included
WHICH_MODEL = ("preset", "overrides", "path", "revision")  # keys of `model`


def load_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    model_path: str | None = None,
    model_option: str = "",
) -> RunConfig:
    """Return the resolved and checked configuration of a recipe.

    Args:
        path: The recipe's path, or its name (`ratchet.recipes.find_recipe`).
        overrides: Keys to set, as key=value.
        model_path: The model to start from, in place of the recipe's preset or path.
        model_option: The option of the command line that gave `model_path`, such as "--from".
            Overrides that choose a model too are then an error; "" allows them.

    Raises:
        ConfigError: The recipe has problems. The error lists all of them.
    """
    problems: list[RecipeProblem] = []
    budget = Budget()
    path = find_recipe(path)
    root = _read_with_bases(path, problems, budget)
    if overrides:
        override_tree = _parse_overrides(overrides, problems, budget)
        root = apply_layer(root, override_tree, problems)
        model = override_tree.get("model")
        model_keys = [
            key for key in WHICH_MODEL if model and model.is_section and key in model.value
        ]
        if model_option and model_keys:
            key = f"model.{model_keys[0]}"
            raise ConfigError(
                f"command line: {key}: {model_option} says which model to start from, and its "
                f"shape: remove {model_option}, or the override of {key}"
            )
    if model_path is not None:
        root.value["model"] = _with_model_path(root.get("model"), model_path)
    if "name" not in root.value:
        stem = re.sub(r"[^\w.+-]+", "-", path.stem).lstrip("_.+-") or "run"
        root.value["name"] = Node(stem, root.origin.below("name"))
    return _validate(expand(add_import_dirs(root), problems), problems)


def _with_model_path(model: Node | None, path: str) -> Node:
    """Return the model's section with this path, without other keys that choose a model."""
    origin = ValueOrigin(COMMAND_LINE, None, "model")
    values = model.value if model is not None and model.is_section else {}
    children = {key: node for key, node in values.items() if key not in WHICH_MODEL}
    return Node({**children, "path": Node(path, origin.below("path"))}, origin)


def dump_config(config: RunConfig) -> str:
    """Return YAML that loads to an equal object, except that secrets are redacted.

    Secrets are the values of keys such as `api_key` and `password`.
    """
    return write_text(dump_plain(config))


def dump_plain(config: RunConfig) -> dict[str, Any]:
    """Return the content of `dump_config` as dicts, lists and scalars, as YAML would load them."""
    return _redact(config.model_dump(mode="json"))


def _validate(tree: Node, problems: Sequence[RecipeProblem]) -> RunConfig:
    """Return the checked configuration of a recipe.

    Raises ConfigError with `problems`, which were found while the recipe was read, and with all
    problems of its values and its combinations of keys.
    """
    try:
        config = RunConfig.model_validate(tree.plain())
    except ValidationError as error:
        origins = {problem.origin for problem in problems}
        raise combine_problems(
            [
                *problems,
                *(
                    p
                    for p in explain_validation_error(error, tree, RunConfig)
                    if p.origin not in origins
                ),
            ]
        ) from None
    all_problems = list(problems)
    for conflict in conflicts(config):
        located = [locate(tree, key) for key in conflict.keys]
        # Point to the first key that the recipe sets; the others may be defaults.
        node, missing = next(
            ((node, missing) for node, missing in located if not missing), located[0]
        )
        origin = node.origin
        for key in missing:
            origin = origin.below(key)
        all_problems.append(RecipeProblem(origin, conflict.message))
    if all_problems:
        raise combine_problems(all_problems)
    return config


def _read_with_bases(path: Path, problems: list[RecipeProblem], budget: Budget) -> Node:
    """Return a recipe merged over the recipes that it extends. Raises ConfigError."""
    layers: list[Node] = []
    chain: list[Path] = []
    extends: Node | None = None
    while True:
        try:
            resolved = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:  # a null character, or a loop of links
            raise ConfigError(f"{str(path)!r} can't be read: {error}") from error
        if resolved in chain:
            names = " -> ".join(p.name for p in (*chain[chain.index(resolved) :], resolved))
            remedy = "remove one extends"
            if resolved.stem in list_recipes():
                remedy += f", or rename {resolved.name} to extend the recipe that Ratchet brings"
            raise ConfigError(f"recipes extend each other in a circle: {names}: {remedy}")
        chain.append(resolved)
        if len(chain) > MAX_FILES:
            raise ConfigError(
                f"{path}: more than {MAX_FILES} recipes extend each other: merge some of them"
            )
        try:
            root, duplicates = read_file(path, budget)
        except ConfigError as error:
            raise ConfigError(
                f"{extends.origin}: extends: {error}" if extends is not None else str(error)
            ) from error
        problems += duplicates
        layers.append(resolve_paths(root, RunConfig.model_fields))
        extends = layers[-1].value.pop(EXTENDS, None)
        if extends is None:
            break
        if not isinstance(extends.value, str):
            raise ConfigError(
                f"{extends.origin}: extends must be the path of one recipe, relative to this file"
            )
        path = find_recipe(extends.value, path.parent)
    merged = layers.pop()
    while layers:
        layer = layers.pop()
        merged.value.pop("name", None)  # a recipe does not inherit the name of its base
        merged = replace(apply_layer(merged, layer, problems), origin=layer.origin)
    return merged


def _parse_overrides(texts: Sequence[str], problems: list[RecipeProblem], budget: Budget) -> Node:
    """Return the overrides `a.b.c=value` as one tree, without line numbers."""
    parsed: dict[tuple[str, ...], Node] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        keys = tuple(path.strip().split("."))
        if not equals or not all(keys):
            raise ConfigError(
                f"{COMMAND_LINE}: override '{shorten_text(text, 200)}' is not of the form "
                "a.b.c=value"
            )
        check_key_path(keys)
        if keys == (EXTENDS,):
            raise ConfigError(
                f"{COMMAND_LINE}: extends can't be overridden: start from the other recipe"
            )
        node, duplicates = read_text(value, COMMAND_LINE, ".".join(keys), budget)
        problems += duplicates
        parsed.pop(keys, None)  # a repeated key takes its last value and position
        parsed[keys] = _strip_lines(node)
    return merge_overrides(parsed, problems)


def _strip_lines(node: Node) -> Node:
    """Return the node without line numbers, because an override is not in a file."""
    value: Any = node.value
    if isinstance(value, dict):
        value = {key: _strip_lines(child) for key, child in value.items()}
    elif isinstance(value, list):
        value = [_strip_lines(child) for child in value]
    return Node(value, replace(node.origin, line=None))


def _redact(value: Any) -> Any:
    """Return the value with `kind` as the first key of each section, and secrets redacted."""
    if isinstance(value, Mapping):
        ordered = sorted(value.items(), key=lambda item: item[0] != "kind")
        return {k: REDACTED if is_secret(k) and v is not None else _redact(v) for k, v in ordered}
    if isinstance(value, list):
        return [_redact(item) for item in value]
    return value
