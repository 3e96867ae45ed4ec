"""Parse rows of preference data in all common formats: a prompt, and judgements of answers.

Every error says what to change in the row, with the column names of the file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from ratchet.data.formats.media_columns import read_content as read_parts
from ratchet.data.jsonl import DataRow, describe_type
from ratchet.environments.datasets.usual_columns import (
    INPUT_COLUMN,
    explain_ambiguous,
    join_input,
    list_candidates,
    summarize_columns,
)
from ratchet.errors import DataError
from ratchet.types import ChatRole, Comparison, LabelledAnswer, Message, Role

Messages = tuple[Message, ...]
# The text and the label of each step.
LabelledSteps = tuple[tuple[str, float], ...]
GOOD_STEP = 0.5  # a step counts as correct if its label is above this
# A comparison of two answers, a reward for one, or a label for each step of one.
Judgement = Comparison | LabelledAnswer | LabelledSteps

# Conversations in one string, as in HH-RLHF (arXiv:2204.05862): "\n\nHuman: ...\n\nAssistant: ...".
ROLE_BY_SPEAKER: Mapping[str, Role] = {"Human": "user", "Assistant": "assistant"}
SPEAKER_PATTERN = re.compile(r"\n\n(Human|Assistant):")


@dataclass(frozen=True, slots=True)
class PreferenceRow:
    """A parsed row of preference data."""

    where: str
    """The file and the line, for errors."""
    line: int
    prompt: Messages
    judgement: Judgement
    columns: tuple[str, ...]
    """Names of the columns that are not null, as in the file."""


@dataclass(frozen=True, slots=True)
class PreferenceReader:
    """A parser of rows of preference data."""

    column_names: Mapping[str, str]
    """The file's column names, by usual name."""
    separator: str
    """The text appended to each step."""
    has_media: bool = False
    """True if messages may have media parts, whose files the caller fills in."""

    def read(self, row: DataRow, where: str) -> PreferenceRow:
        """Parse a row. Raises DataError unless it fits exactly one format with usable values."""
        return _PreferenceParser(self, where, row).parse()


class _PreferenceParser:
    """A parser of one row. Its methods take usual column names. A null counts as absent."""

    def __init__(self, reader: PreferenceReader, where: str, row: DataRow) -> None:
        self.reader = reader
        self.where = where
        self.line = row.line
        self.columns = tuple(name for name, value in row.values.items() if value is not None)
        values = {usual: row.values.get(name) for usual, name in reader.column_names.items()}
        self.values = {usual: value for usual, value in values.items() if value is not None}
        if reader.column_names.get("prompt") == "prompt" and "prompt" not in row.values:
            self._find_prompt(row.values)

    def _find_prompt(self, columns: Mapping[str, Any]) -> None:
        """Read the prompt from a column with an alternative name, unless the answers contain it.

        Answers that are whole conversations contain their prompt.
        """
        answer = self.values.get("chosen", self.values.get("completion"))
        if isinstance(answer, list):
            message = answer[0] if answer else None
            needs_prompt = isinstance(message, dict) and message.get("role") == "assistant"
        else:
            needs_prompt = not (isinstance(answer, str) and SPEAKER_PATTERN.match(answer))
        if not needs_prompt:
            return
        candidates = list_candidates("prompt", columns, self.reader.column_names.values())
        if len(candidates) > 1:
            self.refuse(explain_ambiguous("prompt", candidates))
        for name in candidates:
            value = columns[name]
            if isinstance(value, str) and name != INPUT_COLUMN:
                value = join_input(value, columns)
            if value is not None:
                self.values["prompt"] = value

    def parse(self) -> PreferenceRow:
        formats = [
            names
            for names in (("chosen", "rejected"), ("completion",), ("completions",))
            if self.values.keys() & names
        ]
        if not formats:
            chosen, rejected, *others = (
                self.quote(n) for n in ("chosen", "rejected", "completion", "completions")
            )
            expected = f"{chosen} and {rejected}, or {' or '.join(others)}"
            self.refuse(
                f"no column has an answer ({expected}); {self.list_columns()}: name yours in "
                "`columns`"
            )
        if len(formats) > 1:
            present = " and ".join(
                self.quote(next(n for n in names if n in self.values)) for names in formats
            )
            self.refuse(f"columns {present} belong to two formats: remove one of them")
        parsers = {
            "chosen": self.parse_pair,
            "completion": self.parse_labelled_answer,
            "completions": self.parse_steps,
        }
        prompt, judgement = parsers[formats[0][0]]()
        return PreferenceRow(self.where, self.line, prompt, judgement, self.columns)

    # --- the formats

    def parse_pair(self) -> tuple[Messages, Comparison]:
        chosen, rejected = (
            self.read_content(column, self.require(column)) for column in ("chosen", "rejected")
        )
        both_names = f"{self.quote('chosen')} and {self.quote('rejected')}"
        if chosen == rejected:
            self.refuse(f"{both_names} are the same: remove the row")
        prompt = self.read_prompt() if "prompt" in self.values else ()
        is_conversation = self.is_conversation(chosen, prompt)
        if is_conversation != self.is_conversation(rejected, prompt):
            self.refuse(
                f"one of {both_names} is a whole conversation, the other only an answer: write "
                "both in the same way"
            )
        if not is_conversation:
            if not prompt:
                self.refuse(
                    f"no column {self.quote('prompt')}, and {both_names} are only answers; "
                    f"{self.list_columns()}: add the prompt"
                )
            return prompt, self.make_comparison(
                self.to_answer("chosen", chosen), self.to_answer("rejected", rejected)
            )
        assert isinstance(chosen, tuple)
        assert isinstance(rejected, tuple)
        return self.split_conversations(prompt, chosen, rejected, both_names)

    def split_conversations(
        self, declared_prompt: Messages, chosen: Messages, rejected: Messages, both_names: str
    ) -> tuple[Messages, Comparison]:
        """Split two whole conversations after their common beginning, which is the prompt.

        Args:
            declared_prompt: The row's prompt, which must be part of both; () if it has none.
            both_names: The names of the two columns, for errors.
        """
        n_common = 0
        while n_common < min(len(chosen), len(rejected)) and chosen[n_common] == rejected[n_common]:
            n_common += 1
        prompt = chosen[:n_common]
        if not prompt:
            self.refuse(
                f"{both_names} begin with different messages: they must answer the same prompt"
            )
        if n_common == min(len(chosen), len(rejected)):
            self.refuse(
                f"one of {both_names} is the beginning of the other: give each another last answer"
            )
        n_declared = len(declared_prompt)
        if n_declared and not any(
            prompt[i : i + n_declared] == declared_prompt for i in range(n_common)
        ):
            self.refuse(
                f"{both_names} do not contain {self.quote('prompt')}: set it to their common "
                "beginning, or drop it"
            )
        return prompt, self.make_comparison(
            self.to_answer("chosen", chosen[n_common:]),
            self.to_answer("rejected", rejected[n_common:]),
        )

    def make_comparison(self, chosen: Messages, rejected: Messages) -> Comparison:
        """Return the comparison of two answers, with their scores if the row has them."""
        columns = ("score_chosen", "score_rejected")
        if not self.values.keys() & columns:
            return Comparison(chosen, rejected)
        better, worse = (self.read_number(column, self.require(column)) for column in columns)
        return Comparison(chosen, rejected, rewards=(better, worse))

    def parse_labelled_answer(self) -> tuple[Messages, LabelledAnswer]:
        prompt = self.read_prompt()
        completion = self.read_content("completion", self.require("completion"))
        if self.is_conversation(completion, prompt):
            if completion[: len(prompt)] != prompt:
                self.refuse(
                    f"{self.quote('completion')} doesn't begin with {self.quote('prompt')}: give "
                    "only the answer"
                )
            completion = completion[len(prompt) :]
        answer = self.to_answer("completion", completion)
        return prompt, LabelledAnswer(answer, self.read_number("label", self.require("label")))

    def parse_steps(self) -> tuple[Messages, LabelledSteps]:
        prompt = self.read_prompt()
        texts = self.read_items("completions")
        labels = self.read_items("labels")
        if len(texts) != len(labels):
            lengths = (
                f"{self.quote('completions')} has {len(texts)} steps, {self.quote('labels')} "
                f"{len(labels)} labels"
            )
            self.refuse(f"{lengths}: give each step one label")
        steps = []
        for index, (text, label) in enumerate(zip(texts, labels, strict=True)):
            if not isinstance(text, str) or not text:
                self.refuse(
                    f"item {index} of {self.quote('completions')} is {_describe_value(text)}, must "
                    "be the text of a step"
                )
            value = self.read_number("labels", label, index)
            if not 0 <= value <= 1:
                self.refuse(
                    f"item {index} of {self.quote('labels')} is {label}, must be true, false or "
                    "between 0 and 1"
                )
            steps.append((self.check_text(text, "completions") + self.reader.separator, value))
        return prompt, tuple(steps)

    # --- parts of the formats

    def read_prompt(self) -> Messages:
        messages = self.read_content("prompt", self.require("prompt"))
        if messages == "":
            self.refuse(f"{self.quote('prompt')} is empty: write a prompt")
        if isinstance(messages, str):
            return (Message("user", messages),)
        if messages[-1] == Message("assistant"):  # "...\n\nAssistant:" asks for the answer
            messages = messages[:-1]
        if not messages:
            self.refuse(f"{self.quote('prompt')} has no message: write a prompt")
        if messages[-1].role == "assistant":
            self.refuse(
                f"{self.quote('prompt')} ends with a message of the assistant: end it with a user "
                "message"
            )
        return messages

    def is_conversation(self, content: str | Messages, prompt: Messages) -> bool:
        """True for a whole conversation, False for a continuation of the prompt."""
        return not isinstance(content, str) and (not prompt or content[0].role != "assistant")

    def to_answer(self, column: str, content: str | Messages) -> Messages:
        """Return the content of a column as the assistant's answer to the prompt."""
        if isinstance(content, str):
            is_transcript = str(self.values["prompt"]).endswith("\n\nAssistant:")
            return (Message("assistant", content.removeprefix(" ") if is_transcript else content),)
        if not content or content[-1].role != "assistant":
            self.refuse(
                f"{self.quote(column)} ends without an answer of the assistant: drop what follows "
                "the last answer"
            )
        if content[0].role != "assistant":
            self.refuse(
                f"{self.quote(column)} continues the prompt with a message of '{content[0].role}': "
                "an answer begins with one of 'assistant'"
            )
        return content

    def read_content(self, column: str, value: Any) -> str | Messages:
        """Return the text, or the messages of an array or a transcript."""
        if isinstance(value, str):
            text = self.check_text(value, column)
            return _read_transcript(text) if SPEAKER_PATTERN.match(text) else text
        if not isinstance(value, list):
            self.refuse(
                f"{self.quote(column)} is {_describe_value(value)}, must be a string or an array "
                "of messages"
            )
        if not value:
            self.refuse(f"{self.quote(column)} is an empty array: give it messages")
        return tuple(self.read_message(column, index, item) for index, item in enumerate(value))

    def read_message(self, column: str, index: int, item: Any) -> Message:
        where = f"message {index} of {self.quote(column)}"
        if not isinstance(item, dict):
            self.refuse(
                f'{where} is {_describe_value(item)}, must be an object such as {{"role": "user", '
                f'"content": '
                f'"..."}}'
            )
        parts = item.get("content")
        if self.reader.has_media and isinstance(parts, list):
            content = read_parts(parts, f"{self.where}: {where}")
            text = "".join(part.value for part in content if part.type == "text")
            item = {**item, "content": text}
        else:
            content = ()
        for key in ("role", "content"):
            if not isinstance(item.get(key), str):
                problem = (
                    f"has no '{key}'"
                    if key not in item
                    else f"has {_describe_value(item[key])} as '{key}'"
                )
                self.refuse(f"{where} {problem}: write it as a string")
        extra = next(
            (key for key, value in item.items() if key not in ("role", "content") and value), None
        )
        if extra is not None:
            self.refuse(
                f"{where} has '{extra}', which would be lost: only 'role' and 'content' are read; "
                "remove it"
            )
        if item["role"] not in get_args(ChatRole):
            self.refuse(
                f"{where} has the role '{item['role']}', must be one of "
                f"{', '.join(get_args(ChatRole))}"
            )
        text = self.check_text(item["content"], column)
        return Message(
            item["role"], content if any(part.type != "text" for part in content) else text
        )

    def read_items(self, column: str) -> list[Any]:
        value = self.require(column)
        if not isinstance(value, list) or not value:
            content = "an empty array" if value == [] else _describe_value(value)
            self.refuse(f"{self.quote(column)} is {content}, must be an array with one item a step")
        return value

    def read_number(self, column: str, value: Any, index: int | None = None) -> float:
        where = self.quote(column) if index is None else f"item {index} of {self.quote(column)}"
        is_label = column in ("label", "labels")
        if not isinstance(value, int | float) or (isinstance(value, bool) and not is_label):
            self.refuse(
                f"{where} is {_describe_value(value)}, must be "
                f"{'true, false or a number' if is_label else 'a number'}"
            )
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if math.isinf(number):
            self.refuse(f"{where} is too large: write a number below 1e308")
        if math.isnan(number):  # a table's way to write a missing number
            self.refuse(f"{where} is NaN: write a number, or drop the row")
        return number

    def check_text(self, text: str, column: str) -> str:
        if any("\ud800" <= c <= "\udfff" for c in text):
            self.refuse(
                f"{self.quote(column)} holds half of a surrogate pair (\\ud800 to \\udfff), which "
                "is not text: remove it"
            )
        return text

    def require(self, column: str) -> Any:
        if column not in self.values:
            self.refuse(
                f"no column {self.quote(column)}; {self.list_columns()}: add it, or name yours in "
                "`columns`"
            )
        return self.values[column]

    def quote(self, column: str) -> str:
        return f"'{self.reader.column_names[column]}'"

    def list_columns(self) -> str:
        return f"the row has {summarize_columns(self.columns) or 'no columns'}"

    def refuse(self, problem: str) -> NoReturn:
        raise DataError(f"{self.where}: {problem}")


def find_good_answer(judgement: Judgement) -> Messages | None:
    """Return the chosen answer, or the only one if it or all of its steps are labelled as good."""
    match judgement:
        case Comparison(chosen=chosen):
            return chosen
        case LabelledAnswer(messages=messages, reward=reward) if reward > 0:
            return messages
        case tuple(steps) if all(label > GOOD_STEP for _, label in steps):
            return (Message("assistant", "".join(text for text, _ in steps)),)
    return None


def _read_transcript(text: str) -> Messages:
    """Return the messages of a conversation in one string."""
    _, *parts = SPEAKER_PATTERN.split(text)
    return tuple(
        Message(ROLE_BY_SPEAKER[speaker], content.removeprefix(" "))
        for speaker, content in zip(parts[::2], parts[1::2], strict=True)
    )


def _describe_value(value: Any) -> str:
    if value == "":
        return "empty"
    return describe_type(value)
