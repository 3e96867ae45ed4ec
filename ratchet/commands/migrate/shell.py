"""Parse commands and simple variables of a shell script, as far as reading overrides needs it.

A simple variable is set by an unconditional `NAME=value`. Other lines may set the variable under a
condition, in a loop, by arithmetic or by `read`. Such a line is recognised by the variable's name
without a $. From this line on the variable's value counts as unknown, so that its earlier value is
not used by mistake. After `source` and `eval` all values are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from ratchet.commands.migrate.numbers import compute_whole

LITERAL_DOLLAR = "\ue000"  # replaces a $ that begins no variable: escaped or in single quotes
# The places where a command can begin.
_START = r"(?:^|[;&|(){!]|\b(?:then|else|do|if|elif|while|until|time)\b)\s*"
_NAME = r"[A-Za-z_]\w*"
# A part of a value: a quoted string, or a character without special meaning.
_VALUE_PART = r"\"[^\"`\\]*\"|'[^']*'|[^\s;&|()<>'\"\\`]"
# A line that only assigns one variable.
SINGLE_ASSIGNMENT = re.compile(rf"(?:export\s+)?({_NAME})=((?:{_VALUE_PART})*)\s*;?\s*")
# One or more assignments at the beginning of a command.
ASSIGNMENTS = re.compile(
    rf"{_START}(?:(?:export|local|declare|readonly|typeset)\s+(?:-\w+\s+)*)?"
    rf"((?:{_NAME}\+?=(?:\"[^\"]*\"|'[^']*'|[^\s;&|'\"])*\s*)+)"
)
# ${NAME:=default}
DEFAULT_SET = re.compile(rf"\$\{{({_NAME}):?=")
# A name without a $ that is not part of an override's key or of a path, such as in `read NAME`.
BARE_NAME = re.compile(rf"(?<![\w.$/{{-])({_NAME})(?![\w.])")
# Builtins, loops and arithmetic commands that set the variables that they name.
SETS_NAMES = re.compile(
    rf"{_START}(?:{_NAME}=\S*\s+)*(?<![$(])"
    r"(?:(?:for|select|read|let|getopts|mapfile|readarray|printf)\s|\(\()(?P<names>[^;]*)"
)
# Commands that run another file or a text as shell code, which may set any variable.
RUNS_OTHER_CODE = re.compile(rf"{_START}(?:source|\.|eval|trap)\s")
ONLY_EXPORTS = re.compile(rf"(?:export|readonly)(?:\s+{_NAME})+\s*;?")
# The start of a here-document whose command only writes the document.
WRITTEN_DOCUMENT = re.compile(r"^\s*(?:cat|tee|echo)\b.*(?<!<)<<-?\s*(['\"]?)(\w+)\1")
# The beginning and the end of a condition or a loop.
OPENING = re.compile(rf"{_START}(?:if|for|while|until|case|select)\b")
CLOSING = re.compile(r"(?:^|;)\s*(?:fi|done|esac)\b")
# The beginning and the end of a function, group or subshell of several lines.
BLOCK_OPENING = re.compile(rf"{_START}[{{(]\s*$")
BLOCK_CLOSING = re.compile(r"\s*[})]")
OPERATORS = ";&|<>"
MAX_CHARS = 1 << 16  # maximum length of a value; a script can double a variable at each line
# $NAME, ${NAME}, ${NAME-default} or ${NAME:-default}, whose default may name variables
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:(:?)-((?:[^{}$]|\$\{\w+\}|\$\w+)*))?\}|(\w+))")
# $((...)) with at most one pair of parentheses around each part
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]{0,200}\)){1,200})\)\)")


def split_commands(text: str) -> Iterator[str]:
    """Yield the commands of a script: its lines without comments.

    A line that ends with a backslash is joined to the next one.
    """
    parts: list[str] = []
    document_end = ""
    for line in text.split("\n"):
        if document_end:
            document_end = "" if line.strip() == document_end else document_end
            continue
        code = _strip_comment(line)
        # A backslash at the end of a comment does not continue the line.
        continuation = re.search(r"\\\s*$", code) if code == line else None
        parts.append(code[: continuation.start()] if continuation else code)
        if not continuation:
            command = " ".join(parts)
            if (document := WRITTEN_DOCUMENT.match(command)) is not None:
                document_end = document[2]
            yield command
            parts = []
    if parts:
        yield " ".join(parts)


def _strip_comment(line: str) -> str:
    """Return the line up to its comment. Only a # at the start of a word begins a comment."""
    previous = " "
    for index, character, quote in _scan_characters(line):
        if character == "#" and not quote and (previous.isspace() or previous in ";&|()"):
            return line[:index]
        previous = character
    return line


def _ends_in_quotes(line: str) -> bool:
    return [quote for _, _, quote in _scan_characters(f"{line} ")][-1] != ""


def _scan_characters(line: str) -> Iterator[tuple[int, str, str]]:
    """Yield (index, character, quote) for each character of a line.

    `quote` is the quotation mark around the character, or "" outside of quotes. An escaped
    character is yielded as "x", so that it is not taken for syntax.
    """
    quote, escaped = "", False
    for index, character in enumerate(line):
        yield index, "x" if escaped else character, quote
        if escaped or (character == "\\" and quote != "'"):
            escaped = not escaped
        elif quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character


def split_words(line: str) -> list[str]:
    """Return the words of a command line, without their quotes.

    Operators such as ; and | are words of their own. Redirections (`2>file`) are left out. A $ that
    is escaped or in single quotes becomes LITERAL_DOLLAR. Unlike `shlex`, this takes linear time.

    Raises ValueError if a quote is not closed.
    """
    words: list[str] = []
    is_redirect_target = False  # True if the next word is the target of a redirection
    for word, is_operator in _scan_words(line):
        is_redirection = is_operator and ("<" in word or ">" in word)
        if not is_redirection and (is_operator or not is_redirect_target):
            words.append(word)
        is_redirect_target = is_redirection
    return words


def _scan_words(line: str) -> Iterator[tuple[str, bool]]:
    """Yield (word, True if it is an operator) for each word of a line."""
    word: list[str] = []
    has_word = False  # an empty pair of quotes is a word too
    operator = ""
    escaped = False
    for index, character, quote in _scan_characters(line):
        raw_character = line[index]
        is_quote_mark = character in "'\"" and (not quote or quote == character)
        is_operator = character in OPERATORS and not quote
        if operator and not is_operator:
            yield operator, True
            operator = ""
        if is_operator or (character.isspace() and not quote):
            # Digits before a redirection are its descriptor.
            if has_word and not (raw_character in "<>" and "".join(word).isdecimal()):
                yield "".join(word), False
            word, has_word = [], False
            operator += raw_character if is_operator else ""
            continue
        has_word = True
        if character == "\\" and quote != "'":
            escaped = True
            continue
        if escaped and quote and raw_character not in '"\\$`':
            word.append("\\")  # inside of quotes a backslash only escapes these characters
        if raw_character == "$" and (escaped or quote == "'"):
            raw_character = LITERAL_DOLLAR
        if not is_quote_mark:
            word.append(raw_character)
        escaped = False
    if _ends_in_quotes(line):
        raise ValueError("a quote is not closed")
    if has_word:
        yield "".join(word), False
    if operator:
        yield operator, True


@dataclass
class Variables:
    """The variables of a script, up to the line that was read last."""

    # Values by name. An unknown value is a reference to the variable itself ($NAME).
    values: dict[str, str] = field(default_factory=dict)
    _depth: int = 0  # number of conditions and loops around the line
    _n_blocks: int = 0  # number of functions, groups and subshells around the line

    def read(self, line: str) -> bool:
        """Record the variables that a line sets. Return True if it only sets a single variable."""
        line = self.compute(line)
        self._depth += len(OPENING.findall(line))
        self._n_blocks += BLOCK_OPENING.search(line) is not None
        assignment = SINGLE_ASSIGNMENT.fullmatch(line)
        if assignment is not None and self._depth == self._n_blocks == 0:
            self.values[assignment[1]] = self.substitute("".join(split_words(assignment[2])))
        else:
            assignments = [match[1] for match in ASSIGNMENTS.finditer(line)]
            names = [
                name for text in assignments for name in re.findall(rf"(?<!\S)({_NAME})\+?=", text)
            ]
            names += DEFAULT_SET.findall(line)
            for match in SETS_NAMES.finditer(line):
                names += BARE_NAME.findall(match["names"])
            if RUNS_OTHER_CODE.search(line):
                names += self.values
            elif not ONLY_EXPORTS.fullmatch(line.strip()):
                names += self.values.keys() & set(BARE_NAME.findall(line))
            self.values.update({name: f"${name}" for name in names})
        self._depth = max(0, self._depth - len(CLOSING.findall(line)))
        if BLOCK_CLOSING.match(line):
            self._n_blocks = max(0, self._n_blocks - 1)
        return assignment is not None

    def substitute(self, text: str) -> str:
        """Return a text with its known variables replaced by their values. LITERAL_DOLLAR is kept.

        If the values together exceed MAX_CHARS, the remaining variables are not replaced.
        """
        remaining_chars = MAX_CHARS

        def fill(match: re.Match[str]) -> str:
            nonlocal remaining_chars
            value = self._get_value(match)
            remaining_chars -= len(value)
            return value if remaining_chars >= 0 else match[0]

        return VARIABLE.sub(fill, text)

    def compute(self, line: str) -> str:
        """Return the line with arithmetic such as $((1024 * 2)) replaced by its result.

        Arithmetic with an unknown variable stays.
        """
        return ARITHMETIC.sub(self._compute_match, line)

    def _compute_match(self, match: re.Match[str]) -> str:
        names = re.compile(rf"(?<![\w$]){_NAME}")
        # The shell computes the value of a bare name first.
        text = self.substitute(names.sub(lambda name: f"(${name[0]})", match[1])).strip()
        value = compute_whole(text)
        return match[0] if value is None else str(value)

    def _get_value(self, match: re.Match[str]) -> str:
        name, default = match[1] or match[4], match[3]
        if default is not None:
            # Variables in the default are replaced, but a default within it would need a parser.
            default = re.sub(
                r"\$(?:\{(\w+)\}|(\w+))",
                lambda inner: self.values.get(inner[1] or inner[2], inner[0]),
                default,
            )
        value = self.values.get(name, match[0] if default is None else default)
        return default if default is not None and match[2] and not value else value

    @property
    def is_conditional(self) -> bool:
        """True between the beginning and the end of a condition or a loop."""
        return self._depth > 0
