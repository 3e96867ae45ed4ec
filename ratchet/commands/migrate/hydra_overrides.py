"""Hydra's overrides (`a.b=c`) among the words of a shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ratchet.commands.migrate.numbers import hydra
from ratchet.commands.migrate.shell import LITERAL, Variables, commands, split_words
from ratchet.errors import ConfigError

OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
REMOVED = re.compile(r"~([A-Za-z_]\w*(?:\.\w+)+)")
KEY = re.compile(r"(?<![\w.$/])([A-Za-z_]\w*(?:\.\w+)+)=")
ARRAY = re.compile(r"\s*(?:(?:local|declare|readonly|typeset)\s+(?:-\w+\s+)*)?[A-Za-z_]\w*\+?=\(")
PRINTING = ("echo", "printf")
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
    variables: Variables = field(default_factory=Variables)
    # keys without a dot, which may choose files of Hydra
    plain: dict[str, str] = field(default_factory=dict)

    _has_command: bool = False

    def read(self, text: str) -> None:
        """Fill in the overrides; the script's own plain variables are filled into them. Raises
        ConfigError."""
        in_array = False
        for line in commands(text):
            if not in_array and (array := ARRAY.match(line)) is not None:
                in_array, line = True, line[array.end() :]
            if in_array:
                in_array = line.count(")") <= line.count("(")
                self._read_line(line if in_array else line.rpartition(")")[0], in_array=True)
            elif self._has_command and OVERRIDE.match(line.strip()) and KEY.match(line.strip()):
                # The shell takes it for a command: a comment or a missing \ ended the one before.
                for match in KEY.finditer(line):
                    self.unread[match[1]] = (
                        "begins a line that belongs to no command: end the line before with \\"
                    )
            elif not self.variables.read(line):
                self._read_line(line, in_array=False)
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

    def _read_line(self, line: str, in_array: bool) -> None:
        try:
            words = split_words(line)
        except ValueError:
            for match in KEY.finditer(line):
                self.unread[match[1]] = (
                    "stands in a line whose quotes end in another one: write it in a line of its "
                    "own"
                )
            return
        for is_sign, group in groupby(words, lambda word: not word.strip(";&|")):
            command = list(group)
            if not is_sign and command[0] not in PRINTING:
                self._read_words(command, in_array)

    def _read_words(self, words: list[str], in_array: bool) -> None:
        """Read words; a key without a dot (`model_engine=megatron`) counts where nothing else is
        meant."""
        is_command = any(word in ("-m", "run") or word.endswith(".py") for word in words)
        self._has_command = self._has_command or (is_command and not in_array)
        plain = in_array or is_command
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
                    self._put(match[2], self._content(match[3]))
                elif plain and begun and words[0] not in NOT_COMMANDS:
                    self.plain[match[2]] = self._content(match[3])

    def _content(self, text: str) -> str:
        return self.variables.filled(text).replace(LITERAL, "$")

    def _put(self, key: str, text: str) -> None:
        self.unread.pop(key, None)
        if "`" in text or ("$" in text and not text.startswith("${")):
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
