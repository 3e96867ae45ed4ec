"""Read the contents of a row: a prompt with an answer, a solution or judged answers.

A conversation is split into a prompt and a solution. Every error names the file, the row and the
column, by its name in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ratchet.config.media_limits import MediaLimits
from ratchet.data.chat.messages import read_messages, read_tools
from ratchet.data.formats.media_columns import COLUMNS, Placing, list_media, read_column
from ratchet.data.jsonl import DataRow, describe_type
from ratchet.data.row_filters import KeepConfig, fill, number_in, value_at
from ratchet.environments.datasets.config import (
    OF_EITHER_RESPONSE,
    DatasetConfig,
    PreferencesConfig,
)
from ratchet.environments.datasets.preference_rows import About, Messages, RowReader
from ratchet.errors import DataError
from ratchet.types import MediaKind, Message, Part

OF_PAIRS = ("chosen", "rejected", "completion", "completions")


@dataclass(frozen=True, slots=True)
class Given:
    """The contents of a row.

    Attributes:
        where: The file and the row, for errors.
        values: The whole row, for rewards that read more of it.
        about: The judgement of answers: a comparison, one reward, or a label for each step.
        has: Names of the columns that are not null, as in the file.
    """

    where: str
    prompt: Messages
    values: Mapping[str, Any]
    id: str = ""
    answer: str | None = None
    solution: Messages = ()
    about: About | None = None
    tools: tuple[Mapping[str, Any], ...] = ()
    difficulty: float | None = None
    has: tuple[str, ...] = field(default=())


class DatasetRowReader:
    """A reader of rows, set up by a configuration and the preset that it names."""

    def __init__(self, config: DatasetConfig) -> None:
        published = config.published
        self.config = config
        self.names = config.names
        self.declared = frozenset(config.columns) | (
            frozenset(published.columns) if published else frozenset()
        )
        self.template = (
            config.prompt if config.prompt is not None else published.prompt if published else ""
        )
        self.mark = (
            config.answer_after
            if config.answer_after is not None
            else published.answer_after
            if published
            else ""
        )
        held = config.media
        limits = MediaLimits(
            max_side=held.max_side, max_pixels=held.max_pixels, max_mib=held.max_mib, urls=held.urls
        )
        self.placing = Placing(config.root, limits)
        self.keep = (
            *(
                KeepConfig.model_validate(dict(one))
                for one in (published.keep if published else ())
            ),
            *config.keep,
        )

    def keeps(self, row: DataRow, where: str) -> bool:
        return all(one.keeps(row.values, where) for one in self.keep)

    def read(self, row: DataRow, where: str) -> Given:
        """Return a row's contents, with its media in the prompt.

        Raises DataError if the row lacks a declared column, or has a value that can't be used.
        """
        row_of = _RowOf(self, row, where)
        contents = row_of.given()
        prompt = self.placing.place(contents.prompt, row_of.media(), where)
        if self.config.needs_media and not list_media(prompt):
            has = ", ".join(contents.has)
            raise DataError(
                f"{where}: no image and no clip; the row has {has}: name its column in `columns`: "
                f"{{images: ...}}"
            )
        return replace(contents, prompt=prompt)

    def read_again(self, row: DataRow, where: str) -> Given:
        """Return the contents of a task's row again, without media.

        Only the task's messages have the media.
        """
        return _RowOf(self, row, where).given()


class _RowOf:
    def __init__(self, reader: DatasetRowReader, row: DataRow, where: str) -> None:
        self.reader, self.row, self.where = reader, row, where
        self.has = tuple(name for name, value in row.values.items() if value is not None)

    def given(self) -> Given:
        identity, difficulty = self.get("id"), self.get("difficulty")
        common: dict[str, Any] = {
            "where": self.where,
            "values": self.row.values,
            "id": "" if identity is None else str(identity),
            "difficulty": None
            if difficulty is None
            else number_in(difficulty, self.reader.names["difficulty"], self.where),
            "has": self.has,
        }
        if self.any_of(OF_EITHER_RESPONSE) or self.any_of(OF_PAIRS):
            prompt, about = self.compared()
            return Given(prompt=prompt, about=about, answer=self.answer(), **common)
        if self.get("messages") is not None:
            return self.conversation(common)
        prompt = self.prompt()
        solution = self.text("solution")
        solution_messages = () if solution is None else (Message("assistant", solution),)
        return Given(prompt=prompt, answer=self.answer(), solution=solution_messages, **common)

    # --- Kinds of rows.

    def conversation(self, common: Mapping[str, Any]) -> Given:
        """Return a conversation's contents.

        If the assistant has the last message, that is the solution. All other messages are the
        prompt.
        """
        column = f"column '{self.reader.names['messages']}'"
        messages = read_messages(self.get("messages"), f"{self.where}: {column}")
        ends = messages[-1].role == "assistant"
        if messages[-1].role == "system":
            raise DataError(f"{self.where}: {column} ends with a system message: add what is asked")
        prompt = messages[:-1] if ends else messages
        if not prompt:
            raise DataError(
                f"{self.where}: {column} holds nothing but an answer: add what is asked before it"
            )
        tools = read_tools(
            self.get("tools"), f"{self.where}: column '{self.reader.names.get('tools', 'tools')}'"
        )
        if tools and "tools" not in self.reader.declared:
            raise DataError(
                f"{self.where}: column 'tools' would not be read: declare it, columns: {{tools: "
                f"tools}}, or call it otherwise"
            )
        return Given(
            prompt=self.with_system(prompt),
            solution=messages[-1:] if ends else (),
            answer=self.answer(),
            tools=tools,
            **common,
        )

    def compared(self) -> tuple[Messages, About]:
        """Return the prompt, built by the template if there is one, and the judged answers."""
        names = {
            usual: self.reader.names.get(usual, f"no {usual}")
            for usual in PreferencesConfig.usual_columns
        }
        values = dict(self.row.values)
        for usual, name in names.items():
            if usual in self.reader.names:
                values[name] = self.get(usual)
        if self.any_of(OF_EITHER_RESPONSE):
            names["chosen"], names["rejected"] = self.ordered()
            values |= {
                names[key]: self.row.values.get(names[key]) for key in ("chosen", "rejected")
            }
        if self.reader.template:
            values[names["prompt"]] = fill(self.reader.template, self.row.values, self.where)
        entry = RowReader(names, "\n", media=True).read(DataRow(self.row.line, values), self.where)
        return self.with_system(entry.prompt), entry.about

    def ordered(self) -> tuple[str, str]:
        """Return the columns of the better and of the worse of two responses.

        A preference below 0 is for the first.
        """
        first, second, preference = (self.reader.names[name] for name in OF_EITHER_RESPONSE)
        worth = number_in(self.need("preference"), preference, self.where)
        if worth == 0:
            raise DataError(
                f"{self.where}: column '{preference}' is 0, so neither is better: leave such rows "
                "out by "
                f"keep: [{{column: {preference}, none_of: [0]}}]"
            )
        return (first, second) if worth < 0 else (second, first)

    # --- Columns of a row.

    def prompt(self) -> Messages:
        if self.reader.template:
            return self.with_system(
                (Message("user", fill(self.reader.template, self.row.values, self.where)),)
            )
        value = self.need("prompt")
        if isinstance(value, list):
            return self.with_system(
                read_messages(value, f"{self.where}: column '{self.reader.names['prompt']}'")
            )
        text = self.text("prompt")
        if not text:
            raise DataError(
                f"{self.where}: column '{self.reader.names['prompt']}' is empty: write what is to "
                "be answered"
            )
        return self.with_system((Message("user", text),))

    def with_system(self, prompt: Messages) -> Messages:
        system = self.text("system") or self.reader.config.system
        if not system or prompt[0].role == "system":
            return prompt
        return (Message("system", system), *prompt)

    def answer(self) -> str | None:
        value, mark = self.get("answer"), self.reader.mark
        if value is None:
            if "answer" in self.reader.declared:
                self.need("answer")
            return None
        if (
            isinstance(value, list)
            and len(value) == 4
            and all(type(item) in (int, float) for item in value)
        ):
            value = json.dumps(value)  # four numbers are a bounding box
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise DataError(
                f"{self.where}: column '{self.reader.names['answer']}' is {describe_type(value)}, "
                "must "
                "be text or a number: "
                "name one inside it with dots in `columns`"
            )
        _, marker, after = str(value).rpartition(mark) if mark else ("", "yes", str(value))
        if not marker or not after.strip():
            what = f"has no answer after '{mark}'" if mark else "is empty"
            raise DataError(
                f"{self.where}: column '{self.reader.names['answer']}' {what}: add it, or drop the "
                "row by `keep`"
            )
        return after.strip()

    def media(self) -> Mapping[MediaKind, list[Part]]:
        """Return the media, by kind, of each media column that has a value or is declared."""
        parts_by_kind: dict[MediaKind, list[Part]] = {}
        for usual, kind in COLUMNS.items():
            value = self.get(usual)
            if value is not None or usual in self.reader.declared:
                parts_by_kind[kind] = read_column(
                    kind, value, f"{self.where}: column '{self.reader.names[usual]}'"
                )
        return parts_by_kind

    def text(self, usual: str) -> str | None:
        value = self.get(usual)
        if value is not None and not isinstance(value, str):
            raise DataError(
                f"{self.where}: column '{self.reader.names[usual]}' is {describe_type(value)}, "
                "must be a "
                "string"
            )
        if value is not None and any("\ud800" <= c <= "\udfff" for c in value):
            name = self.reader.names[usual]
            raise DataError(
                f"{self.where}: column '{name}' holds half of a surrogate pair (\\ud800 to "
                "\\udfff): remove it"
            )
        return value

    def any_of(self, usual: tuple[str, ...]) -> bool:
        return any(self.get(name) is not None for name in usual)

    def get(self, usual: str) -> Any:
        """Return the value of a column by its usual name, or None if the row has none.

        Raises DataError for a declared column that the row does not have.
        """
        if usual not in self.reader.names:
            return None
        name = self.reader.names[usual]
        if name not in self.row.values and usual not in self.reader.declared:
            return None
        return value_at(self.row.values, name, self.where)

    def need(self, usual: str) -> Any:
        value = self.get(usual)
        if value is None:
            name = self.reader.names.get(usual, usual)
            what = f"column '{name}' is null" if name in self.row.values else f"no column '{name}'"
            has = ", ".join(self.has) or "no columns"
            raise DataError(
                f"{self.where}: {what}; the row has {has}: name yours in `columns`: {{{usual}: "
                f"...}}"
            )
        return value
