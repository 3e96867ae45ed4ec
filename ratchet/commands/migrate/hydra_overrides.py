"""Read Hydra overrides (`a.b=c`) from the command lines of a shell script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ratchet.commands.migrate.numbers import parse_hydra_word
from ratchet.commands.migrate.shell import LITERAL_DOLLAR, Variables, split_commands, split_words
from ratchet.errors import ConfigError

# An override with its optional sign: ++ and + add a key, ~ removes one.
OVERRIDE = re.compile(r"(\+\+|\+|~)?([A-Za-z_][\w@/-]*(?:\.[\w@/-]+)*)=(.*)", re.DOTALL)
# The removal of a key, without a value (`~a.b`).
REMOVAL = re.compile(r"~([A-Za-z_]\w*(?:\.\w+)+)")
# A key with a dot that is being set, anywhere in a line.
KEY = re.compile(r"(?<![\w.$/])([A-Za-z_]\w*(?:\.\w+)+)=")
# An override after a space: the value comes from an unquoted variable with several overrides.
SEVERAL_OVERRIDES = re.compile(r"\s[+~]*[A-Za-z_]\w*(?:\.\w+)+=")
# The home directory and the working directory where a path begins: alone, or in a list.
_PATH_START = r"(?:^|(?<=[\[,'\"\s]))"
HOME_DIRECTORY = re.compile(rf"{_PATH_START}\$(?:HOME|\{{HOME\}})/")
WORKING_DIRECTORY = re.compile(rf"{_PATH_START}\$(?:PWD|\{{PWD\}}|\(pwd\))/")
# The beginning of an array of the shell (`NAME=(`).
ARRAY = re.compile(r"\s*(?:(?:local|declare|readonly|typeset)\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)\+?=\(")
# A word that is a variable alone; its value is split into words.
WORDS_OF_VARIABLE = re.compile(r"\$(?:\w+|\{\w+\})")
# An argument of the script, such as $1. Its value is unknown.
SCRIPT_ARGUMENT = re.compile(r"\$\{?\d+\}?")
# Commands that print their words. Overrides among these have no effect.
PRINTING_COMMANDS = ("echo", "printf")
# Shell builtins whose `name=value` words are not overrides.
SHELL_BUILTINS = ("export", "local", "declare", "readonly", "unset", "set", "alias")
# The option of a shell whose argument is a command line (`bash -lc "..."`).
COMMAND_OPTION = re.compile(r"-\w*c")
SHELLS = ("bash", "sh", "zsh")
REMOVED_NOTE = "removes the key there: remove it from the recipe too"
ESCAPED = re.compile(r"\\([\\()\[\]{}:=, \t])")
BRACKETS = {"[": "]", "{": "}", "(": ")"}
MAX_DEPTH = 32
MAX_SCRIPT_CHARS = 400_000


class UnreadableOverride(ValueError):
    """The error for an override whose text is not a single value. The message says why."""


@dataclass
class Script:
    """The overrides of a script."""

    nested: dict[str, Any] = field(default_factory=dict)
    """The values, as nested sections."""
    unresolved: dict[str, str] = field(default_factory=dict)
    """The overrides that can't be read: key -> text and reason."""
    repeated: dict[str, str] = field(default_factory=dict)
    """The overrides that a later override replaced: key -> replaced value as text."""
    variables: Variables = field(default_factory=Variables)
    """The script's own shell variables."""
    undotted: dict[str, str] = field(default_factory=dict)
    """Overrides whose key has no dot; such a key may choose a config file of Hydra."""

    _has_command: bool = False
    _array_keys: set[str] = field(default_factory=set)  # keys whose value stands in an array

    def read(self, text: str) -> None:
        """Read the overrides of a script, with the script's own variables replaced by their values.

        Raises ConfigError if the script is too long, if there is no override, or if a key is both a
        value and a section.
        """
        if len(text) > MAX_SCRIPT_CHARS:
            raise ConfigError(f"is longer than {MAX_SCRIPT_CHARS:,} characters, the limit")
        in_array = is_used = False
        for line in split_commands(text):
            if not in_array and (array := ARRAY.match(line)) is not None:
                in_array, line = True, line[array.end() :]
                self.variables.values[array[1]] = f"${array[1]}"
                is_used = re.search(rf"\$\{{?{array[1]}\b", text) is not None
            if in_array:
                in_array = line.count(")") <= line.count("(")
                words = line if in_array else line.rpartition(")")[0]
                if is_used:
                    self._read_line(words, in_array=True)
            elif self._has_command and OVERRIDE.match(line.strip()) and KEY.match(line.strip()):
                # The line begins with an override, which the shell would run as a command. So a
                # comment or a missing \ has ended the command in the line before.
                for match in KEY.finditer(line):
                    self.unresolved[match[1]] = (
                        "begins a line that belongs to no command: end the line before with \\"
                    )
            elif not self.variables.read(line):
                self._read_line(line, in_array=False)
        for key, content in self.undotted.items():
            if isinstance(self.nested.get(key), dict):
                self.unresolved[key] = (
                    f"{content}: chooses a config file, which is not read: import that file, and "
                    "set these keys over it"
                )
            else:
                self._set_key(key, content)
        if not self.nested and not self.unresolved:
            raise ConfigError("holds no override of the form a.b=value")

    def _read_line(self, line: str, in_array: bool) -> None:
        """Read all commands of a line."""
        try:
            words = split_words(self.variables.compute(line))
        except ValueError:
            for match in KEY.finditer(line):
                self.unresolved[match[1]] = (
                    "is in a line with a quote that ends in another line: write the override in "
                    "its own line"
                )
            return
        # Words that consist of ; & | separate commands.
        for is_separator, group in groupby(words, lambda word: not word.strip(";&|")):
            command = list(group)
            if not is_separator and command[0] not in PRINTING_COMMANDS:
                self._read_words(self._split_variables(command, in_array), in_array)

    def _split_variables(self, words: list[str], in_array: bool) -> list[str]:
        """Return the words; a word that is only a variable is replaced by the variable's words."""
        is_command = in_array or _is_python(words)
        expanded_words: list[str] = []
        for word in words:
            value = self.variables.substitute(word)
            if (
                not is_command
                or not WORDS_OF_VARIABLE.fullmatch(word)
                or SCRIPT_ARGUMENT.fullmatch(word)
            ):
                expanded_words.append(word)
            elif "$" in value or "`" in value:
                self.unresolved[word] = "a variable of the shell, whose words the file doesn't give"
            else:
                expanded_words += value.replace(LITERAL_DOLLAR, "$").split()
        return expanded_words

    def _read_words(self, words: list[str], in_array: bool) -> None:
        """Read the words of one command, or of a line within an array.

        A key without a dot (`model_engine=megatron`) looks like a variable of the shell. It only
        counts as an override in an array, or among the arguments of a Python program.
        """
        is_command = _is_python(words)
        self._has_command = self._has_command or (is_command and not in_array)
        allows_plain_keys = in_array or is_command
        # `A=b python ...`: words before the name of the program set variables of the shell.
        has_program_name = in_array
        for index, word in enumerate(words):
            key, equals, text = word.partition("=")
            word = f"{self._expand(key)}={text}" if equals else word
            has_program_name = has_program_name or ("=" not in word and word != "env")
            option, _, name = word.partition("=")
            if option in ("--config-name", "--config-path", "--config-dir", "--config"):
                self.nested[option] = name or (words[index + 1] if index + 1 < len(words) else "")
            elif (match := REMOVAL.fullmatch(word)) is not None:
                self.unresolved[f"~{match[1]}"] = REMOVED_NOTE
            elif match := OVERRIDE.fullmatch(word):
                if match[1] == "~":
                    self.unresolved[f"~{match[2]}"] = REMOVED_NOTE
                elif "." in match[2] or "/" in match[2]:
                    self._set_key(match[2], self._expand(match[3]), in_array)
                elif allows_plain_keys and has_program_name and words[0] not in SHELL_BUILTINS:
                    self.undotted[match[2]] = self._expand(match[3])
            elif _is_command_line(words, index):
                self._read_line(word, in_array=False)
            elif allows_plain_keys and equals and re.search(r"\.|\$", key) and key[:1] != "-":
                self.unresolved[key] = "is not the plain text of a key: write it out"

    def _expand(self, text: str) -> str:
        """Return a text with the known shell variables replaced by their values.

        LITERAL_DOLLAR stays.
        """
        return self.variables.substitute(text)

    def _set_key(self, key: str, text: str, in_array: bool = False) -> None:
        """Set a key to the value of a text, or record in `unresolved` why that can't be done."""
        self.unresolved.pop(key, None)
        if "HOME" not in self.variables.values:  # the script leaves it as it is
            text = HOME_DIRECTORY.sub("~/", text)
        text = WORKING_DIRECTORY.sub("", text)
        has_shell_syntax = "`" in text or "$" in text  # not LITERAL_DOLLAR
        text = text.replace(LITERAL_DOLLAR, "$")
        if has_shell_syntax or ("$" in text and not text.startswith("${")):
            self.unresolved[key] = (
                f"{text}: a variable of the shell, whose value the file doesn't give"
            )
            return
        if SEVERAL_OVERRIDES.search(text):
            self.unresolved[key] = (
                f"{text}: the shell splits it into several overrides: write each one by itself"
            )
            return
        if in_array and self.variables.is_conditional:
            self.unresolved[key] = f"{text}: stands in an array that a condition or a loop changes"
            return
        try:
            value = parse(text)
        except UnreadableOverride as error:
            self.unresolved[key] = f"{text}: {error}"
            return
        *parents, last = key.split(".")
        section = self.nested
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ConfigError(f"{key}: {parent} is set to a value and to a section")
        if last in section and section[last] != value:
            if in_array != (key in self._array_keys):
                self.unresolved[key] = (
                    f"{text}, and {section[last]} in {'the command' if in_array else 'an array'}: "
                    "leave one out"
                )
                del section[last]
                return
            self.repeated[key] = str(section[last])
        section[last] = value
        if in_array:
            self._array_keys.add(key)


def _is_python(words: list[str]) -> bool:
    """True if the words run a Python program."""
    return any(word in ("-m", "run") or word.endswith(".py") for word in words)


def _is_command_line(words: list[str], index: int) -> bool:
    """True if the word is a command line that a shell runs (`bash -c "..."`)."""
    return (
        index > 1
        and words[index - 2].rpartition("/")[2] in SHELLS
        and COMMAND_OPTION.fullmatch(words[index - 1]) is not None
    )


# --- the value of one override


def parse(text: str, depth: int = 0) -> Any:
    """Return the value of an override's text by Hydra's grammar.

    The value is a list, a section, quoted text, or a primitive.

    Raises UnreadableOverride if the text is several values (a sweep) or a function, is nested too
    deep, or has quotes or brackets that don't match.
    Source: https://hydra.cc/docs/advanced/override_grammar/basic/.
    """
    text = text.strip()
    if depth > MAX_DEPTH:
        raise UnreadableOverride("is nested too deep to be read")
    if text[:1] in ("'", '"'):
        if len(text) < 2 or text[-1] != text[0] or re.search(rf"(?<!\\){text[0]}", text[1:-1]):
            raise UnreadableOverride("its quotes don't match")
        return re.sub(rf"\\([\\{text[0]}])", r"\1", text[1:-1])
    if text.startswith("[") and text.endswith("]"):
        return [parse(item, depth + 1) for item in _split_items(text[1:-1])]
    if text.startswith("{") and text.endswith("}"):
        return {
            key: parse(value, depth + 1)
            for key, value in map(_split_pair, _split_items(text[1:-1]))
        }
    if len(list(_split_items(text))) > 1:
        raise UnreadableOverride("is several values, for several runs: give one")
    if re.fullmatch(r"[A-Za-z_]\w*\(.*\)", text):
        raise UnreadableOverride("is a function of Hydra: set its result")
    return ESCAPED.sub(r"\1", text) if ESCAPED.search(text) else parse_hydra_word(text)


def _split_pair(text: str) -> tuple[str, str]:
    """Return (key, text of the value) of an entry of a section.

    Raises UnreadableOverride without a colon.
    """
    key, colon, value = text.partition(":")
    if not colon:
        raise UnreadableOverride("a section needs key: value")
    return str(parse(key)), value


def _split_items(text: str) -> Iterator[str]:
    """Yield the parts of a text between its commas.

    A comma does not separate if it is escaped, or inside quotes, brackets or an interpolation.
    Raises UnreadableOverride if quotes or brackets don't match.
    """
    open_brackets: list[str] = []  # the closing bracket of each open one, innermost last
    start = 0
    quote = ""
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote and text[index - 1] != "\\" else quote
        elif character in "'\"":
            quote = character
        elif character in BRACKETS:
            open_brackets.append(BRACKETS[character])
        elif open_brackets and character == open_brackets[-1]:
            open_brackets.pop()
        elif character == "," and not open_brackets and text[index - 1 : index] != "\\":
            yield text[start:index]
            start = index + 1
    if open_brackets or quote:
        raise UnreadableOverride("its quotes or brackets don't match")
    if text[start:].strip() or start:
        yield text[start:]
