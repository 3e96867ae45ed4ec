"""A reward that compares the letter that an answer chooses with the task's."""

from __future__ import annotations

import re
from itertools import islice
from typing import ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.answers.final_answer import extract_marked_answer
from ratchet.rewards.base import FinalAnswer
from ratchet.types import Task


class MultipleChoiceConfig(Section):
    """A reward of 1 if the answer chooses the task's letter, else 0.

    The task's answer is "C", "(C)", or an index from 0.
    """

    builds: ClassVar[str] = "ratchet.rewards.answers.multiple_choice:MultipleChoice"

    letters: str = Field("ABCDEFGHIJ", pattern="^[A-Z]+$")
    """Letters to choose from, in order."""
    require_marker: bool = False
    r"""True: only a letter after "answer is", "answer:" or "####", in <answer> or \boxed{},
    counts."""


OPENING_MARKS = r"[*_(\[{\"'`$\\“‘]{0,4}"
CLOSING_MARKS = r"[*_)\]}\"'`$\\”’]{0,4}"
TEXT_COMMAND = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{([^{}]*)\}")


class MultipleChoice(FinalAnswer):
    """A reward for the right letter. An answer that offers alternatives ("B or C") chooses none."""

    name = "multiple_choice"
    bounds = (0.0, 1.0)

    def __init__(self, config: MultipleChoiceConfig) -> None:
        self.config = config
        letter = f"(?P<letter>[{config.letters}])(?![\\w-]|['’]\\w)"
        verb = r"(?:\s{0,3}[:=]|\s{1,3}(?i:is|was|(?:would|must|should)\sbe)(?:\s{0,3}:)?)?"
        noun = r"(?i:\b(?:answer|choice|option)\b)\*{0,2}"
        self._answer_pattern = re.compile(
            rf"{noun}(?P<verb>{verb})\*{{0,2}}\s{{0,3}}(?:(?i:option|choice)\s)?"
            rf"{OPENING_MARKS}{letter}"
        )
        self._letter_pattern = re.compile(
            rf"\s*{OPENING_MARKS}{letter}{CLOSING_MARKS}(?:[.:)]\*{{0,2}}(?:[\s\\].*)?|\s*)",
            re.DOTALL,
        )
        self._next_letter_pattern = re.compile(
            rf"{CLOSING_MARKS}\s{{0,3}}(?:[,/&;|+]\s{{0,3}}(?:(?:or|and)\s{{1,3}})?"
            rf"|\(?\b(?:or|and|plus)\b\s{{0,3}})(?:maybe\s)?(?:(?i:option|choice)\s)?"
            rf"{OPENING_MARKS}[{config.letters}](?![\w-]|['’]\w)"
        )

    def answer(self, text: str) -> str | None:
        return self.extract_choice(text)

    def grade(self, text: str, task: Task) -> float:
        return float(self.extract_choice(text) == self._read_task_letter(task))

    def extract_choice(self, text: str) -> str | None:
        """Return the letter that a text chooses; None if it has none or offers alternatives."""
        text = TEXT_COMMAND.sub(r"\1", text)
        marked = extract_marked_answer(text)
        if marked is not None:
            return self._read_single_letter(marked) or self._read_only_statement(marked)
        if self._find_last_statement(text) is not None:
            return self._read_statement(text)
        if self.config.require_marker:
            return None
        lines = text.strip().splitlines()
        return self._read_single_letter(lines[-1]) if lines else None

    def _read_statement(self, text: str) -> str | None:
        """Return the letter of the last statement; None if there is none, or an alternative."""
        text = TEXT_COMMAND.sub(r"\1", text)
        statement = self._find_last_statement(text)
        if statement is None or self._next_letter_pattern.match(text, statement.end()):
            return None
        return statement["letter"]

    def _read_only_statement(self, marked: str) -> str | None:
        """Return the letter of a mark with one statement: "<answer>The answer is B</answer>"."""
        statements = list(islice(self._answer_pattern.finditer(marked), 2))
        return self._read_statement(marked) if len(statements) == 1 else None

    def _find_last_statement(self, text: str) -> re.Match[str] | None:
        """Return the last statement such as "the answer is B", or else the last "option B".

        Remarks on other options ("option A is wrong") often follow the answer.
        """
        stated = mentioned = None
        for match in self._answer_pattern.finditer(text):
            mentioned = match
            stated = match if match["verb"] else stated
        return stated or mentioned

    def _read_single_letter(self, text: str) -> str | None:
        text = TEXT_COMMAND.sub(r"\1", text)
        match = self._letter_pattern.fullmatch(text)
        return (
            None
            if match is None or self._next_letter_pattern.match(text, match.end("letter"))
            else match["letter"]
        )

    def _read_task_letter(self, task: Task) -> str:
        """Return the task's letter. Raises DataError if the answer is no letter and no index."""
        answer, letters = task.answer, self.config.letters
        # Rows of data give their numbers as text.
        if isinstance(answer, str) and answer.isascii() and answer.isdigit() and len(answer) < 4:
            answer = int(answer)
        if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(letters):
            return letters[answer]
        gold = self._read_single_letter(answer) if isinstance(answer, str) else None
        if gold is None:
            raise DataError(
                f"task '{task.id}': its answer {str(answer)[:100]!r} is none of {letters}, nor an "
                "index from 0"
            )
        return gold
