"""Define the grammars that a completion may have to follow (structured output).

llguidance compiles them. It is imported only when a grammar is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from math import lcm
from typing import Any, Literal

from ratchet.errors import ConfigError, MissingDependency

GrammarKind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar")
# Limits on what a request may send. Compiling takes time and memory in proportion.
MAX_TEXT_CHARS, MAX_CHOICES = 2**16, 1024
# Largest `multipleOf` of a schema. llguidance makes a state of each remainder: 1,000,000 take 7 s.
MAX_MULTIPLE = 10_000
# Largest common multiple of all `multipleOf`, in units of their last decimal place. Where schemas
# are merged, their multiples become one: 9,999 and 9,973 took more than 25 s.
MAX_COMMON_MULTIPLE = 100_000
# Largest sum of `minItems` and `maxItems`: each item is a symbol. 1,000,000 took 4 s, and 1 GiB.
MAX_ITEMS = 2**16
MAX_CLASSES = 1024  # classes such as \p{L} in regular expressions: 10,000 took 11 s, and 1.5 GiB
# Largest number of repetitions such as {1,9} in a Lark grammar: 1,500 of {0,1000000000} took 5 s.
MAX_REPETITIONS = 256
MAX_COMPILED = 32  # grammars that are kept compiled
CHARACTER_CLASS = re.compile(r"\\[pPwWdDsS]")
REPETITION = re.compile(r"[{~]\s*\d")  # also a~1..9
EMBEDDED_SCHEMA = re.compile(r"%json\s*")  # in a Lark grammar
# Keywords whose schemas llguidance merges where several are in one place.
MERGED = frozenset({"anyOf", "oneOf", "$ref", "items", "prefixItems", "minItems", "maxItems"})


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that a whole completion must follow, thinking included."""

    kind: GrammarKind
    """"json": a JSON schema. "regex": a regular expression of Rust's syntax, which matches the
    whole completion. "choice": a list of texts. "grammar": a Lark grammar in llguidance's dialect,
    or GBNF."""
    text: str
    """The schema or the list as JSON text, the expression, or the grammar."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> StructuredOutput:
        """Return the grammar of a mapping with one of the keys `KINDS`.

        The value of "json" is a schema, as an object or as JSON text, and that of "choice" a list
        of texts. Raises ValueError, which says what the mapping has or is, for anything else.
        """
        values = {name: value for name, value in mapping.items() if value is not None}
        kind: GrammarKind | None = next((kind for kind in KINDS if values.keys() == {kind}), None)
        if kind is None:
            keys = ", ".join(sorted(map(str, values))) or "none"
            raise ValueError(f"has the keys {keys}, not exactly one of {', '.join(KINDS)}")
        value = values[kind]
        if kind == "json":
            text = _write_schema(value)
        elif kind == "choice":
            text = _write_choices(value)
        elif isinstance(value, str) and value:
            text = value
        else:
            raise ValueError(f"has a {NAMES[kind]} that is empty or not text")
        if len(text) > MAX_TEXT_CHARS:
            raise ValueError(
                f"has a {NAMES[kind]} of {len(text):,} characters, more than {MAX_TEXT_CHARS:,}"
            )
        _check_cost(kind, text)
        return cls(kind, text)

    @property
    def value(self) -> Any:
        """The schema as an object, the list of choices, or the text."""
        return json.loads(self.text) if self.kind in ("json", "choice") else self.text

    def compile(self) -> str:
        """Return the grammar in llguidance's format. Equal grammars are compiled once.

        Raises:
            MissingDependency: llguidance is not installed.
            ConfigError: llguidance refuses the grammar.
        """
        return _compile(self)


@lru_cache(maxsize=MAX_COMPILED)
def _compile(structured: StructuredOutput) -> str:
    try:
        from llguidance import LLMatcher, grammar_from
    except ImportError as error:
        raise MissingDependency(
            "llguidance", extra="structured", needed_for="structured output"
        ) from error
    try:
        if structured.kind == "choice":
            choices = [json.dumps(choice, ensure_ascii=False) for choice in structured.value]
            compiled = LLMatcher.grammar_from_lark(f"start: {' | '.join(choices)}")
        else:
            compiled = grammar_from(structured.kind, structured.text)
        is_invalid, messages = LLMatcher.validate_grammar_with_warnings(compiled)
    except ValueError as error:
        compiled = ""
        is_invalid = True
        messages = [str(error)]
    if is_invalid:
        reason = " ".join(messages[0].split())  # it may quote lines of the grammar
        raise ConfigError(
            f"the {NAMES[structured.kind]} can't be followed: {reason:.500}. Correct it, or leave "
            "the part out (docs/structured-output.md lists what is supported)"
        )
    return compiled


NAMES: Mapping[GrammarKind, str] = {
    "json": "JSON schema",
    "regex": "regular expression",
    "choice": "list of choices",
    "grammar": "grammar",
}


def _write_schema(value: Any) -> str:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"has a schema that is not JSON text ({error})") from None
    if not isinstance(value, Mapping | bool):
        raise ValueError("has a schema that is not an object")
    try:
        # The order of keys is the order of properties in completions.
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"has a schema that is not JSON ({error})") from None


def _check_cost(kind: GrammarKind, text: str) -> None:
    """Raise ValueError for a grammar whose compilation would take seconds or fill the memory."""
    if kind == "choice":
        return
    n_classes = len(CHARACTER_CLASS.findall(text))
    if n_classes > MAX_CLASSES:
        raise ValueError(
            f"has {n_classes:,} classes of characters such as \\w, more than {MAX_CLASSES:,}"
        )
    n_repetitions = len(REPETITION.findall(text)) if kind == "grammar" else 0
    if n_repetitions > MAX_REPETITIONS:
        raise ValueError(
            f"has {n_repetitions:,} repetitions such as {{1,9}}, more than {MAX_REPETITIONS:,}"
        )
    for schema in _read_schemas(kind, text):
        parts = [part for part in _walk(schema) if isinstance(part, Mapping)]
        _check_multiples(parts)
        _check_items(parts)


def _read_schemas(kind: GrammarKind, text: str) -> list[Any]:
    """Return the JSON schemas of a grammar: its own, or those in a Lark grammar."""
    if kind == "json":
        return [json.loads(text)]
    if kind == "regex":
        return []
    decoder = json.JSONDecoder()
    schemas = []
    for match in EMBEDDED_SCHEMA.finditer(text):
        try:
            schemas.append(decoder.raw_decode(text, match.end())[0])
        except RecursionError:
            raise ValueError("has a schema that is nested too deeply") from None
        except ValueError:
            continue  # llguidance refuses it
    return schemas


def _walk(schema: Any) -> Iterator[Any]:
    """Yield a schema and all values in it."""
    pending = [schema]
    while pending:
        part = pending.pop()
        yield part
        if isinstance(part, Mapping):
            pending.extend(part.values())
        elif isinstance(part, list):
            pending.extend(part)


def _list_numbers(parts: Sequence[Mapping[str, Any]], *names: str) -> list[float]:
    """Return the positive numbers that the parts of a schema have under these names."""
    values = (part.get(name) for part in parts for name in names)
    return [
        value
        for value in values
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    ]


def _check_multiples(parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if a `multipleOf`, or the least common multiple of all, is too large."""
    values = _list_numbers(parts, "multipleOf")
    if values and max(values) > MAX_MULTIPLE:
        raise ValueError(f"has multipleOf={max(values)!r:.20}, more than {MAX_MULTIPLE:,}")
    multiples = [Decimal(repr(value)).normalize() for value in set(values)]
    places = max((-int(multiple.as_tuple().exponent) for multiple in multiples), default=0)
    common = 1
    for multiple in multiples:
        common = lcm(common, int(multiple.scaleb(max(places, 0))))
        if common > MAX_COMMON_MULTIPLE:
            raise ValueError(
                "has values of multipleOf whose least common multiple, without its decimal point, "
                f"is more than {MAX_COMMON_MULTIPLE:,}"
            )


def _check_items(parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ValueError if arrays have too many items, counted again for each merged branch."""
    n_items = sum(_list_numbers(parts, "minItems", "maxItems"))
    if any("allOf" in part or len(MERGED.intersection(part)) > 1 for part in parts):
        branches = (part.get(name) for part in parts for name in ("anyOf", "oneOf"))
        n_items *= 1 + sum(len(branch) for branch in branches if isinstance(branch, list))
    if n_items > MAX_ITEMS:
        raise ValueError(f"has arrays of {n_items:,} items in all, more than {MAX_ITEMS:,}")


def _write_choices(value: Any) -> str:
    is_valid = (
        isinstance(value, list | tuple)
        and 0 < len(value) <= MAX_CHOICES
        and all(isinstance(choice, str) and choice for choice in value)
    )
    if not is_valid:
        raise ValueError(f"has choices that are not a list of 1 to {MAX_CHOICES} non-empty texts")
    return json.dumps(value)
