"""Error messages for recipes: file and line, key, value, and the fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ratchet.config.key_paths import STAGES, Key, keys, list_children, model_at
from ratchet.config.peer_names import PEER_NAMES
from ratchet.errors import ConfigError, link_symptom
from ratchet.utils.terminal_text import shorten_text

if TYPE_CHECKING:
    from ratchet.config.yaml_tree import Node, ValueOrigin

Location = Sequence[str | int]

MAX_SHOWN = 20  # problems of one recipe that get a full message
MAX_CHARS = 1000  # characters of one problem's path, and of its message
MAX_VALUE_CHARS = 80


@dataclass(frozen=True, slots=True)
class RecipeProblem:
    """One error in a recipe: the place of the key, and the message that is printed after it."""

    origin: ValueOrigin
    message: str

    def __str__(self) -> str:
        key = f"{shorten_text(self.origin.path, MAX_CHARS)}: " if self.origin.path else ""
        return f"{self.origin}: {key}{shorten_text(self.message, MAX_CHARS)}"


def combine_problems(problems: Iterable[RecipeProblem]) -> ConfigError:
    """Return one error with the first MAX_SHOWN problems by file and line, and a count of the rest.

    Equal problems (a wrong default that several stages use) are shown once.
    """
    ordered = sorted(set(problems), key=lambda p: (*_place_in_files(p.origin), p.message))
    lines = [str(p) for p in ordered[:MAX_SHOWN]]
    if len(ordered) == 1:
        return ConfigError(lines[0])
    summary = [f"and {len(ordered) - MAX_SHOWN:,} more"] if len(ordered) > MAX_SHOWN else []
    return ConfigError("\n  ".join([f"{len(ordered):,} problems:", *lines, *summary]))


def _place_in_files(origin: ValueOrigin) -> tuple[str, int, str]:
    return origin.file, origin.line or 0, origin.path


def locate(tree: Node, location: Location) -> tuple[Node, list[str]]:
    """Return the deepest node on the path to a location, and the rest of the path below it.

    The rest is empty if the recipe has the location.
    """
    node = tree
    for index, part in enumerate(location):
        inner: Any = node.value
        if isinstance(inner, list) and isinstance(part, int) and part < len(inner):
            node = inner[part]
        elif isinstance(inner, dict) and part in inner:
            node = inner[str(part)]
        else:
            return node, [str(p) for p in location[index:]]
    return node, []


def explain_validation_error(
    error: ValidationError, tree: Node, model: type[Any]
) -> Iterator[RecipeProblem]:
    """Yield pydantic's errors as problems of the recipe.

    A value that fits no branch of a union is one problem. Only the first MAX_SHOWN problems get
    full messages, since a search for the nearest known name takes milliseconds.
    """
    details_by_place: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] != "default_factory_not_called":
            details_by_place.setdefault(_locate_error(tree, detail), []).append(detail)
    located_details = [
        (*_find_origin(tree, place), place, details) for place, details in details_by_place.items()
    ]
    located_details.sort(key=lambda item: _place_in_files(item[0]))
    for index, (origin, missing, place, details) in enumerate(located_details):
        yield RecipeProblem(
            origin,
            _write_message(origin, missing, place, details, tree, model)
            if index < MAX_SHOWN
            else "is wrong too",
        )


def _find_origin(tree: Node, place: Location) -> tuple[ValueOrigin, list[str]]:
    node, missing = locate(tree, place)
    origin = node.origin
    for key in missing:
        origin = origin.below(key)
    return origin, missing


def _write_message(
    origin: ValueOrigin,
    missing: list[str],
    place: Location,
    details: Sequence[Mapping[str, Any]],
    tree: Node,
    model: type[Any],
) -> str:
    """Return the message of one problem. `missing`: the keys of `place` that the recipe lacks."""
    first, *alternatives = dict.fromkeys(_describe_expectation(detail) for detail in details)
    expected = " or ".join([first, *(text.removeprefix("must be ") for text in alternatives)])
    value = locate(tree, place)[0].value
    if details[0]["type"] == "extra_forbidden":
        return _write_unknown_key_message(str(place[-1]), place[:-1], tree, model)
    if details[0]["type"] == "missing":
        return _write_missing_message(place, tree, model)
    if missing or details[0]["type"] in SELF_CONTAINED or isinstance(value, dict | list):
        return expected
    return f"{_format_value(origin.path, value)} {expected}"


def _locate_error(tree: Node, detail: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the error's location without the labels that pydantic adds for union branches."""
    location = tuple(detail["loc"])
    if detail["type"] in ("missing", "extra_forbidden"):
        return location
    node, missing = locate(tree, location)
    return location if not missing or node.is_section else location[: len(location) - len(missing)]


SECRET_SUFFIXES = (
    "api_key",
    "access_key",
    "secret",
    "password",
    "api_token",
    "access_token",
    "auth_token",
)
REDACTED = "<redacted>"


def is_secret(key: str) -> bool:
    return key.endswith(SECRET_SUFFIXES)


def _format_value(path: str, value: Any) -> str:
    """Return a value as YAML writes it; secrets are redacted."""
    if is_secret(path):
        return REDACTED
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return shorten_text(repr(value), MAX_VALUE_CHARS)


# --- messages for pydantic's error types

SELF_CONTAINED = ("kind", "value_error")  # error types whose messages already name the value

EXPECTATIONS = {
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be text",
    "path_type": "must be the path of a file",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "tuple_type": "must be a list",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} items, has {actual_length}",
    "too_long": "must have at most {max_length} items, has {actual_length}",
    "string_too_short": "must not be empty",
    "dict_type": "must be a section: keys and values",
    "model_type": "must be a section: keys and values",
    "value_error": "{error}",
}


def _describe_expectation(detail: Mapping[str, Any]) -> str:
    """Return what the value must be, in place of the message of one of pydantic's errors."""
    context = {k: f"{v:g}" if isinstance(v, float) else v for k, v in detail.get("ctx", {}).items()}
    template = EXPECTATIONS.get(detail["type"])
    text = detail["msg"] if template is None else template.format(**context)
    if detail["type"] == "literal_error" and isinstance(detail["input"], str):
        allowed = str(context["expected"]).replace("'", "").replace(" or ", ", ").split(", ")
        suggestions = get_close_matches(detail["input"], allowed, n=1)
        text += f"; did you mean '{suggestions[0]}'?" if suggestions else ""
    return text


def _write_missing_message(place: Location, tree: Node, model: type[Any]) -> str:
    owner = model_at(model, place[:-1], tree)
    if owner is None or place[-1] not in owner.model_fields:
        return "is missing"
    description = owner.describe_field(str(place[-1]))
    return "is missing" + (f" ({description.rstrip('.')})" if description else "")


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    matches = get_close_matches(word, names, n=1)
    return f"; did you mean '{matches[0]}'?" if matches else f"; there are {', '.join(names)}"


# --- unknown keys


def _write_unknown_key_message(key: str, place: Location, tree: Node, model: type[Any]) -> str:
    """Return the message about an unknown key.

    The message has one hint, the first of these that applies: the recipe's name of another
    library's key; the kinds that have the key; the sections that have it; the nearest known key;
    the list of all keys known at this place.
    """
    siblings = list_children(model, place, tree)
    hint = (
        _hint_at_peer_name(key, place, tree, model)
        or _hint_at_other_kinds(key, place, model)
        or _hint_at_section(key, place, model)
        or _hint_at_spelling(key, siblings, model)
    )
    if not hint:
        hint = f"known here: {', '.join(siblings)}. {link_symptom('a-key-is-unknown')}"
    return f"unknown key; {hint}"


def _write_path(place: Location, key: str) -> str:
    sections = [str(part) for part in place if isinstance(part, str) and part != STAGES]
    return ".".join([*sections, key])


def _hint_at_peer_name(key: str, place: Location, tree: Node, model: type[Any]) -> str:
    """Return the recipe's name of another library's key, if a stage's kinds have that key."""
    stages: Any = tree.value.get(STAGES) if isinstance(tree.value, dict) else None
    count = len(stages.value) if stages is not None and isinstance(stages.value, list) else 0
    # A key at the top may be meant for any stage.
    roots = [place[:2]] if place[:1] == (STAGES,) else [(), *((STAGES, i) for i in range(count))]
    names = [
        f"'{path}'"
        for path in PEER_NAMES.get(key, ())
        if any(_has_key(path, root, tree, model) for root in roots)
    ]
    return f"it is called {' or '.join(names)} here" if names else ""


def _has_key(path: str, root: Location, tree: Node, model: type[Any]) -> bool:
    *sections, name = path.split(".")
    owner = model_at(model, [*root, *sections], tree)
    # If the recipe chooses no kind, `model_at` returns `Section`, which has no keys. The default
    # kind may have the key.
    return owner is not None and (not owner.model_fields or name in [*owner.model_fields, "kind"])


def _hint_at_other_kinds(key: str, place: Location, model: type[Any]) -> str:
    """Return the kinds of the section that have the key; "" if none has it."""
    matching_keys = [known for known in keys(model) if known.recipe_path == _write_path(place, key)]
    kinds = sorted({known.kinds.rpartition(", ")[2] for known in matching_keys} - {""})
    return f"only these kinds have it: {', '.join(kinds)}" if kinds else ""


def _hint_at_section(key: str, place: Location, model: type[Any]) -> str:
    namesakes = [known for known in keys(model) if known.name == key]
    return f"it belongs in {_list_keys(namesakes)}" if namesakes else ""


def _hint_at_spelling(key: str, siblings: Sequence[str], model: type[Any]) -> str:
    if similar_siblings := get_close_matches(key, siblings, n=1):
        return f"did you mean '{similar_siblings[0]}'?"
    all_keys = keys(model)
    names = get_close_matches(key, {known.name for known in all_keys}, n=1, cutoff=0.75)
    near_keys = [known for known in all_keys if known.name in names]
    return f"did you mean {_list_keys(near_keys)}?" if near_keys else ""


def _list_keys(candidates: Sequence[Key]) -> str:
    """Return the least nested keys as text, each with its kind if only one kind has it."""
    depth = min(key.recipe_path.count(".") for key in candidates)
    kinds: dict[str, set[str]] = {}
    for key in candidates:
        if key.recipe_path.count(".") == depth:
            kinds.setdefault(key.recipe_path, set()).add(key.kinds)
    shown = [
        f"'{path}'"
        + (f" (kind {min(path_kinds)})" if len(path_kinds) == 1 and min(path_kinds) else "")
        for path, path_kinds in kinds.items()
    ]
    return " or ".join(shown[:3]) + (" ..." if len(shown) > 3 else "")
