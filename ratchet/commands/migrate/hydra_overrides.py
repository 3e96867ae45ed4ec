"""Hydra's overrides (`a.b=c`) among the words of a shell script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ratchet.commands.migrate.numbers import hydra
from ratchet.errors import ConfigError

OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
REMOVED = re.compile(r"~([A-Za-z_]\w*(?:\.\w+)+)")
KEY = re.compile(r"(?<![\w.$/])([A-Za-z_]\w*(?:\.\w+)+)=")
ASSIGNMENT = re.compile(
    r"\s*(?:export\s+)?([A-Za-z_]\w*)=(\"[^\"]*\"|'[^']*'|[^\s;#]*)\s*(?:[;#].*)?"
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+))")
ARRAY = re.compile(r"\s*[A-Za-z_]\w*\+?=\(\s*(?:#.*)?")
NOT_COMMANDS = ("export", "local", "declare", "readonly", "unset", "set", "alias")
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
PAIRS = {"[": "]", "{": "}", "(": ")"}
MAX_DEPTH = 32


class NotRead(ValueError):
    """An error: the text of an override is no single value. The message says why."""


@dataclass
class Script:
    """The overrides of a script. `unread`: by key, what can't be read and why; `repeated`: what a
    later word replaces."""

    nested: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    repeated: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    # keys without a dot, which may choose files of Hydra
    plain: dict[str, str] = field(default_factory=dict)

    def read(self, text: str) -> None:
        """Fill in the overrides; the script's own plain variables are filled into them. Raises
        ConfigError."""
        in_array = False
        for line in re.sub(r"\\\s*\n", " ", text).splitlines():
            if in_array and line.strip() == ")":
                in_array = False
                continue
            if ARRAY.fullmatch(line):
                in_array = True
                continue
            assigned = ASSIGNMENT.fullmatch(line)
            if assigned and not in_array and not line.startswith((" ", "\t")):
                self.variables[assigned[1]] = self._filled(assigned[2].strip("'\""))
                continue
            try:
                words = shlex.split(line, comments=True)
            except ValueError:
                words = []
                for match in KEY.finditer(line):
                    self.unread[match[1]] = (
                        "stands in a line whose quotes end in another one: write it in a line of "
                        "its own"
                    )
            self._read_words(words, in_array)
        for key, content in self.plain.items():
            if isinstance(self.nested.get(key), dict):
                self.unread[key] = (
                    f"{content}: chooses a file of theirs, which is not read: import it, and set "
                    "these over it"
                )
            else:
                self._put(key, content)
        if not self.nested and not self.unread:
            raise ConfigError("holds no override of the form a.b=value")

    def _read_words(self, words: list[str], in_array: bool) -> None:
        """Read words; a key without a dot (`model_engine=megatron`) counts where nothing else is
        meant."""
        plain = in_array or any(word in ("-m", "run") or word.endswith(".py") for word in words)
        begun = in_array
        for index, word in enumerate(words):
            begun = begun or "=" not in word
            option, _, name = word.partition("=")
            if option in ("--config-name", "--config-path", "--config-dir", "--config"):
                self.nested[option] = name or (words[index + 1] if index + 1 < len(words) else "")
            elif (removed := REMOVED.fullmatch(word)) is not None:
                self.unread[f"~{removed[1]}"] = "is taken out there: leave it out here"
            elif match := OVERRIDE.fullmatch(word):
                if match[1] == "~":
                    self.unread[f"~{match[2]}"] = "is taken out there: leave it out here"
                elif "." in match[2] or "/" in match[2]:
                    self._put(match[2], self._filled(match[3]))
                elif plain and begun and words[0] not in NOT_COMMANDS:
                    self.plain[match[2]] = self._filled(match[3])

    def _filled(self, text: str) -> str:
        return VARIABLE.sub(
            lambda found: self.variables.get(found[1] or found[3], found[2] or found[0]), text
        )

    def _put(self, key: str, text: str) -> None:
        self.unread.pop(key, None)
        if "$" in text and not text.startswith("${"):
            self.unread[key] = f"{text}: a variable of the shell, whose value the file doesn't give"
            return
        try:
            value = parse(text)
        except NotRead as error:
            self.unread[key] = f"{text}: {error}"
            return
        *places, last = key.split(".")
        section = self.nested
        for place in places:
            section = section.setdefault(place, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key}: {place} is set to a value and to a section")
        if last in section and section[last] != value:
            self.repeated[key] = str(section[last])
        section[last] = value


# --- one value


def parse(text: str, depth: int = 0) -> Any:
    """Return the value of an override's text by Hydra's grammar: a list, a section, quoted text, or
    a primitive.

    Raises NotRead where it is several values (a sweep), a function or unbalanced.
    Source: https://hydra.cc/docs/advanced/override_grammar/basic/.
    """
    text = text.strip()
    if depth > MAX_DEPTH:
        raise NotRead("is nested too deep to be read")
    if text[:1] in ("'", '"'):
        if len(text) < 2 or text[-1] != text[0] or re.search(rf"(?<!\\){text[0]}", text[1:-1]):
            raise NotRead("its quotes don't match")
        return re.sub(rf"\\([\\{text[0]}])", r"\1", text[1:-1])
    if text.startswith("[") and text.endswith("]"):
        return [parse(item, depth + 1) for item in _items(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        return {key: parse(value, depth + 1) for key, value in map(_pair, _items(text[1:-1]))}
    if len(list(_items(text))) > 1:
        raise NotRead("is several values, for several runs: give one")
    if re.fullmatch(r"[A-Za-z_]\w*\(.*\)", text):
        raise NotRead("is a function of Hydra: set what it works out to")
    return ESCAPED.sub(r"\1", text) if ESCAPED.search(text) else hydra(text)


def _pair(text: str) -> tuple[str, str]:
    key, colon, value = text.partition(":")
    if not colon:
        raise NotRead("a section needs key: value")
    return str(parse(key)), value


def _items(text: str) -> Iterator[str]:
    """Yield the parts between commas, without those in quotes, brackets or interpolations."""
    closing: list[str] = []
    start = 0
    quote = ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in PAIRS:
            closing.append(PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
        elif character == "," and not closing and text[index - 1 : index] != "\\":
            yield text[start:index]
            start = index + 1
    if closing or quote:
        raise NotRead("its quotes or brackets don't match")
    if text[start:].strip() or start:
        yield text[start:]
