"""Define the grammars that a completion may have to follow (structured output).

llguidance compiles them. It is imported only when a grammar is compiled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from ratchet.errors import ConfigError, MissingDependency

GrammarKind = Literal["json", "regex", "choice", "grammar"]
KINDS: tuple[GrammarKind, ...] = ("json", "regex", "choice", "grammar")
# Limits on what a request may send. Compiling takes time in proportion, and blocks other requests.
MAX_TEXT_CHARS, MAX_CHOICES = 2**16, 1024
# Largest `multipleOf` of a schema. llguidance makes a state of each remainder: 1,000,000 take 7 s.
MAX_MULTIPLE = 10_000
MAX_COMPILED = 32  # grammars that are kept compiled


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar that a whole completion must follow, thinking included.

    Attributes:
        kind: "json": a JSON schema. "regex": a regular expression of Rust's syntax, which matches
            the whole completion. "choice": a list of texts. "grammar": a Lark grammar in
            llguidance's dialect, or GBNF.
        text: The schema or the list as JSON text, the expression, or the grammar.
    """

    kind: GrammarKind
    text: str

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
        multiple = _find_large_multiple(value)
        text = json.dumps(value)  # the order of keys is the order of properties in completions
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"has a schema that is not JSON ({error})") from None
    if multiple is not None:
        raise ValueError(f"has multipleOf={multiple!r:.20}, more than {MAX_MULTIPLE:,}")
    return text


def _find_large_multiple(schema: Any) -> float | None:
    """Return a `multipleOf` above `MAX_MULTIPLE` from anywhere in a schema; None without one."""
    if isinstance(schema, Mapping):
        multiple = schema.get("multipleOf")
        if isinstance(multiple, int | float) and multiple > MAX_MULTIPLE:
            return multiple
        schema = schema.values()
    elif not isinstance(schema, list | tuple):
        return None
    multiples = map(_find_large_multiple, schema)
    return next((multiple for multiple in multiples if multiple is not None), None)


def _write_choices(value: Any) -> str:
    is_valid = (
        isinstance(value, list | tuple)
        and 0 < len(value) <= MAX_CHOICES
        and all(isinstance(choice, str) and choice for choice in value)
    )
    if not is_valid:
        raise ValueError(f"has choices that are not a list of 1 to {MAX_CHOICES} non-empty texts")
    return json.dumps(value)
