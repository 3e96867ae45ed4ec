"""Parse rows of preference data in the published formats: a prompt, and judgements of answers.

Every error says what to change in the row, and names its columns as the file does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from ratchet.data.formats.media_columns import read_content
from ratchet.data.jsonl import TYPE_NAMES, DataRow
from ratchet.errors import DataError
from ratchet.types import Comparison, Judged, Message, Role

Messages = tuple[Message, ...]
LabelledSteps = tuple[tuple[str, float], ...]
About = Comparison | Judged | LabelledSteps

# Conversations in one string, as in HH-RLHF (arXiv:2204.05862): "\n\nHuman: ...\n\nAssistant: ...".
SPEAKERS: Mapping[str, Role] = {"Human": "user", "Assistant": "assistant"}
SPEAKER = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A parsed row.

    Attributes:
        where: The file and the line, for errors.
        about: The judgement of answers: a comparison, one reward, or a label for each step.
        has: Names of the columns that are not null, as in the file.
    """

    where: str
    line: int
    prompt: Messages
    about: About
    has: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RowReader:
    """A parser of rows.

    Attributes:
        names: The file's column names, by usual name.
        separator: The text appended to each step.
        media: True if messages may have media parts; the caller fills in their files.
    """

    names: Mapping[str, str]
    separator: str
    media: bool = False

    def read(self, row: DataRow, where: str) -> PreferenceRow:
        """Parse a row. Raises DataError unless it fits exactly one format with usable values."""
        return _RowOf(self, where, row).entry()


class _RowOf:
    """The values of one row, by usual column name; a null counts as absent."""

    def __init__(self, reader: RowReader, where: str, row: DataRow) -> None:
        self.reader, self.where, self.line = reader, where, row.line
        self.has = tuple(name for name, value in row.values.items() if value is not None)
        values = {usual: row.values.get(name) for usual, name in reader.names.items()}
        self.values = {usual: value for usual, value in values.items() if value is not None}

    def entry(self) -> PreferenceRow:
        formats = [
            names
            for names in (("chosen", "rejected"), ("completion",), ("completions",))
            if self.values.keys() & names
        ]
        if not formats:
            chosen, rejected, *others = (
                self.name(n) for n in ("chosen", "rejected", "completion", "completions")
            )
            expected = f"{chosen} and {rejected}, or {' or '.join(others)}"
            self.refuse(
                f"no column with an answer, which are {expected}; {self.columns()}: name yours in "
                "`columns`"
            )
        if len(formats) > 1:
            present = " and ".join(
                self.name(next(n for n in names if n in self.values)) for names in formats
            )
            self.refuse(f"columns {present} belong to two formats: remove one of them")
        prompt, about = {"chosen": self.pair, "completion": self.judged, "completions": self.steps}[
            formats[0][0]
        ]()
        return PreferenceRow(self.where, self.line, prompt, about, self.has)

    # --- the formats

    def pair(self) -> tuple[Messages, Comparison]:
        chosen, rejected = (
            self.said(column, self.need(column)) for column in ("chosen", "rejected")
        )
        both = f"{self.name('chosen')} and {self.name('rejected')}"
        if chosen == rejected:
            self.refuse(f"{both} are the same: remove the row")
        prompt = self.prompt() if "prompt" in self.values else ()
        whole = [self.is_whole(said, prompt) for said in (chosen, rejected)]
        if whole[0] != whole[1]:
            self.refuse(
                f"one of {both} is a whole conversation, the other an answer alone: write both "
                "alike"
            )
        if not whole[0]:
            if not prompt:
                self.refuse(
                    f"no column {self.name('prompt')}, and {both} are answers alone; "
                    f"{self.columns()}: add the prompt"
                )
            return prompt, self.scored(
                self.answer("chosen", chosen), self.answer("rejected", rejected)
            )
        assert isinstance(chosen, tuple)
        assert isinstance(rejected, tuple)
        return self.parted(prompt, chosen, rejected, both)

    def parted(
        self, given: Messages, chosen: Messages, rejected: Messages, both: str
    ) -> tuple[Messages, Comparison]:
        """Split two whole conversations after their common beginning, which is the prompt."""
        common = 0
        while common < min(len(chosen), len(rejected)) and chosen[common] == rejected[common]:
            common += 1
        prompt = chosen[:common]
        if not prompt:
            self.refuse(f"{both} begin with different messages: they must answer the same prompt")
        if common == min(len(chosen), len(rejected)):
            self.refuse(
                f"one of {both} ends where the other goes on: give each a last answer of its own"
            )
        if given and not any(prompt[i : i + len(given)] == given for i in range(common)):
            self.refuse(
                f"{both} don't both hold what {self.name('prompt')} says: make it what they begin "
                "with, or drop it"
            )
        return prompt, self.scored(
            self.answer("chosen", chosen[common:]), self.answer("rejected", rejected[common:])
        )

    def scored(self, chosen: Messages, rejected: Messages) -> Comparison:
        columns = ("score_chosen", "score_rejected")
        if not self.values.keys() & columns:
            return Comparison(chosen, rejected)
        better, worse = (self.number(column, self.need(column)) for column in columns)
        return Comparison(chosen, rejected, rewards=(better, worse))

    def judged(self) -> tuple[Messages, Judged]:
        prompt, completion = self.prompt(), self.said("completion", self.need("completion"))
        if self.is_whole(completion, prompt):
            if completion[: len(prompt)] != prompt:
                self.refuse(
                    f"{self.name('completion')} doesn't begin with {self.name('prompt')}: give the "
                    "answer alone"
                )
            completion = completion[len(prompt) :]
        answer = self.answer("completion", completion)
        return prompt, Judged(answer, self.number("label", self.need("label")))

    def steps(self) -> tuple[Messages, LabelledSteps]:
        prompt, texts, labels = self.prompt(), self.items("completions"), self.items("labels")
        if len(texts) != len(labels):
            lengths = (
                f"{self.name('completions')} has {len(texts)} steps, {self.name('labels')} "
                f"{len(labels)} labels"
            )
            self.refuse(f"{lengths}: give each step one label")
        steps = []
        for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
            if not isinstance(text, str) or not text:
                self.refuse(
                    f"item {index} of {self.name('completions')} is {_kind(text)}, must be the "
                    "text of a step"
                )
            value = self.number("labels", label, index)
            if not 0 <= value <= 1:
                self.refuse(
                    f"item {index} of {self.name('labels')} is {label}, must be true, false or "
                    "between 0 and 1"
                )
            steps.append((self.text(text, "completions") + self.reader.separator, value))
        return prompt, tuple(steps)

    # --- parts of the formats

    def prompt(self) -> Messages:
        messages = self.said("prompt", self.need("prompt"))
        if messages == "":
            self.refuse(f"{self.name('prompt')} is empty: write what is to be answered")
        if isinstance(messages, str):
            return (Message("user", messages),)
        if messages[-1] == Message("assistant"):  # "...\n\nAssistant:" asks for the answer
            messages = messages[:-1]
        if not messages:
            self.refuse(f"{self.name('prompt')} holds no message: write what is to be answered")
        if messages[-1].role == "assistant":
            self.refuse(
                f"{self.name('prompt')} ends with a message of the assistant: end it with what is "
                "to be answered"
            )
        return messages

    def is_whole(self, said: str | Messages, prompt: Messages) -> bool:
        """True for a conversation from its beginning, False for a continuation of the prompt."""
        return not isinstance(said, str) and (not prompt or said[0].role != "assistant")

    def answer(self, column: str, said: str | Messages) -> Messages:
        if isinstance(said, str):
            open_transcript = str(self.values["prompt"]).endswith("\n\nAssistant:")
            return (Message("assistant", said.removeprefix(" ") if open_transcript else said),)
        if not said or said[-1].role != "assistant":
            self.refuse(
                f"{self.name(column)} ends without an answer of the assistant: drop what follows "
                "its last one"
            )
        if said[0].role != "assistant":
            self.refuse(
                f"{self.name(column)} goes on from the prompt as '{said[0].role}': an answer "
                "begins as 'assistant'"
            )
        return said

    def said(self, column: str, value: Any) -> str | Messages:
        """Return the text, or the messages of an array or a transcript."""
        if isinstance(value, str):
            text = self.text(value, column)
            return _transcript(text) if SPEAKER.match(text) else text
        if not isinstance(value, list):
            self.refuse(
                f"{self.name(column)} is {_kind(value)}, must be a string or an array of messages"
            )
        if not value:
            self.refuse(f"{self.name(column)} is an empty array: give it messages")
        return tuple(self.message(column, index, item) for index, item in enumerate(value))

    def message(self, column: str, index: int, item: Any) -> Message:
        where = f"message {index} of {self.name(column)}"
        if not isinstance(item, dict):
            self.refuse(
                f'{where} is {_kind(item)}, must be an object such as {{"role": "user", "content": '
                f'"..."}}'
            )
        parts = item.get("content")
        if self.reader.media and isinstance(parts, list):
            content = read_content(parts, f"{self.where}: {where}")
            text = "".join(part.value for part in content if part.type == "text")
            item = {**item, "content": text}
        else:
            content = ()
        for key in ("role", "content"):
            if not isinstance(item.get(key), str):
                what = (
                    f"has no '{key}'" if key not in item else f"has {_kind(item[key])} as '{key}'"
                )
                self.refuse(f"{where} {what}: write it as a string")
        extra = next(
            (key for key, value in item.items() if key not in ("role", "content") and value), None
        )
        if extra is not None:
            self.refuse(
                f"{where} has '{extra}', which would be lost: only 'role' and 'content' are read; "
                "remove it"
            )
        if item["role"] not in get_args(Role):
            self.refuse(
                f"{where} has the role '{item['role']}', must be one of {', '.join(get_args(Role))}"
            )
        text = self.text(item["content"], column)
        return Message(
            item["role"], content if any(part.type != "text" for part in content) else text
        )

    def items(self, column: str) -> list[Any]:
        value = self.need(column)
        if not isinstance(value, list) or not value:
            what = "an empty array" if value == [] else _kind(value)
            self.refuse(f"{self.name(column)} is {what}, must be an array with one item a step")
        return value

    def number(self, column: str, value: Any, index: int | None = None) -> float:
        where = self.name(column) if index is None else f"item {index} of {self.name(column)}"
        is_label = column in ("label", "labels")
        if not isinstance(value, int | float) or (isinstance(value, bool) and not is_label):
            self.refuse(
                f"{where} is {_kind(value)}, must be "
                f"{'true, false or a number' if is_label else 'a number'}"
            )
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            self.refuse(f"{where} is too large: write a number below 1e308")
        return number

    def text(self, text: str, column: str) -> str:
        if any("\ud800" <= c <= "\udfff" for c in text):
            self.refuse(
                f"{self.name(column)} holds half of a surrogate pair (\\ud800 to \\udfff), which "
                "is no text: remove it"
            )
        return text

    def need(self, column: str) -> Any:
        if column not in self.values:
            self.refuse(
                f"no column {self.name(column)}; {self.columns()}: add it, or name yours in "
                "`columns`"
            )
        return self.values[column]

    def name(self, column: str) -> str:
        return f"'{self.reader.names[column]}'"

    def columns(self) -> str:
        return f"the row has {', '.join(self.has) or 'no columns'}"

    def refuse(self, what: str) -> NoReturn:
        raise DataError(f"{self.where}: {what}")


def _transcript(text: str) -> Messages:
    _, *parts = SPEAKER.split(text)
    return tuple(
        Message(SPEAKERS[speaker], said.removeprefix(" "))
        for speaker, said in zip(parts[::2], parts[1::2], strict=True)
    )


def _kind(value: Any) -> str:
    if value == "":
        return "empty"
    return "null" if value is None else TYPE_NAMES[type(value)]
