"""Read the contents of a row: a prompt with an answer, a solution or judged answers.

A conversation is split into a prompt and a solution. A row of plain text has no prompt, and its
text is the solution. Every error names the file, the row and the column (by its name in the file).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ratchet.config.media_limits import MediaLimits
from ratchet.data.chat.messages import read_messages, read_tools
from ratchet.data.formats.media_columns import MEDIA_COLUMNS, MediaPlacer, list_media, read_column
from ratchet.data.jsonl import DataRow, describe_type, is_text_or_number
from ratchet.data.row_filters import KeepConfig, fill_template, find_value, read_number
from ratchet.environments.datasets.config import (
    PREFERENCE_COLUMNS,
    DatasetConfig,
    PreferencesConfig,
)
from ratchet.environments.datasets.preference_rows import Judgement, Messages, PreferenceReader
from ratchet.environments.datasets.usual_columns import (
    INPUT_COLUMN,
    explain_ambiguous,
    explain_no_prompt,
    find_reference,
    join_input,
    list_candidates,
    summarize_columns,
)
from ratchet.errors import DataError
from ratchet.types import MediaKind, Message, Part

JUDGED_ANSWER_COLUMNS = ("chosen", "rejected", "completions")


@dataclass(frozen=True, slots=True)
class RowContents:
    """The contents of a row."""

    where: str
    """The file and the row, for errors."""
    prompt: Messages
    values: Mapping[str, Any]
    """The whole row, for rewards that read further columns."""
    id: str = ""
    answer: str | None = None
    """The text that rewards compare with."""
    solution: Messages = ()
    """The messages that are trained on."""
    judgement: Judgement | None = None
    """A comparison of two answers, the reward of one answer, or a label for each step of one."""
    tools: tuple[Mapping[str, Any], ...] = ()
    difficulty: float | None = None
    tag: str = ""
    """The row's domain, from the column that `columns.tag` names; "" without one."""
    answer_candidates: tuple[str, ...] = ()
    """Columns that may each be the answer, if there are several."""
    columns: tuple[str, ...] = field(default=())
    """Names of the columns that are not null, as in the file."""


class DatasetRowReader:
    """A reader of rows, set up by a configuration and the preset that it names."""

    def __init__(self, config: DatasetConfig) -> None:
        preset = config.dataset_preset
        self.config = config
        self.column_names = config.column_names
        # Usual names for which the recipe or the preset names a column: every row must have it.
        self.declared_usual_names = frozenset(config.columns) | (
            frozenset(preset.columns) if preset else frozenset()
        )
        self.configured_file_columns = frozenset(config.columns.values())
        # The columns of a preset are known, so no alternative names (such as question for prompt)
        # are tried.
        self.accepts_alternative_names = preset is None
        self.template = (
            config.prompt if config.prompt is not None else preset.prompt if preset else ""
        )
        self.answer_marker = (
            config.answer_after
            if config.answer_after is not None
            else preset.answer_after
            if preset
            else ""
        )
        media = config.media
        limits = MediaLimits(
            max_side=media.max_side,
            max_pixels=media.max_pixels,
            max_mib=media.max_mib,
            urls=media.urls,
        )
        self.media_placer = MediaPlacer(config.root, limits)
        self.filters = (
            *(
                KeepConfig.model_validate(dict(row_filter))
                for row_filter in (preset.keep if preset else ())
            ),
            *config.keep,
        )

    def passes_filters(self, row: DataRow, where: str) -> bool:
        return all(row_filter.keeps(row.values, where) for row_filter in self.filters)

    def read(self, row: DataRow, where: str) -> RowContents:
        """Return a row's contents, with its media in the prompt.

        Raises DataError if the row lacks a declared column, or has a value that can't be used.
        """
        parser = _RowParser(self, row, where)
        contents = parser.parse()
        prompt = self.media_placer.place(contents.prompt, parser.parse_media(), where)
        if self.config.needs_media and not list_media(prompt):
            columns = summarize_columns(contents.columns)
            raise DataError(
                f"{where}: no image and no clip; the row has {columns}: name the column of "
                f"its media in `columns`: {{images: ...}}"
            )
        return replace(contents, prompt=prompt)

    def read_again(self, row: DataRow, where: str) -> RowContents:
        """Return the contents of a row that was rebuilt from a task's `meta`.

        They have no media: these are only in the task's messages.
        """
        return _RowParser(self, row, where).parse()


class _RowParser:
    """A parser of one row.

    Its methods take usual names: Ratchet's own column names, such as "prompt". The recipe's
    `columns` maps usual names to the columns of the file.
    """

    def __init__(self, reader: DatasetRowReader, row: DataRow, where: str) -> None:
        self.reader = reader
        self.row = row
        self.where = where
        self.non_null_columns = tuple(
            name for name, value in row.values.items() if value is not None
        )

    def parse(self) -> RowContents:
        row_id, difficulty = self.get("id"), self.get("difficulty")
        # A column that happens to be called tag selects no rewards unless the recipe names it.
        tag = self.get("tag") if "tag" in self.reader.declared_usual_names else None
        common: dict[str, Any] = {
            "where": self.where,
            "values": self.row.values,
            "id": "" if row_id is None else str(row_id),
            "difficulty": None
            if difficulty is None
            else read_number(difficulty, self.reader.column_names["difficulty"], self.where),
            "tag": "" if tag is None else str(tag),
            "columns": self.non_null_columns,
        }
        if (
            self.has_any(PREFERENCE_COLUMNS)
            or self.has_any(JUDGED_ANSWER_COLUMNS)
            or self.is_labelled()
        ):
            prompt, judgement = self.parse_judged_answers()
            return RowContents(
                prompt=prompt, judgement=judgement, answer=self.parse_answer(), **common
            )
        if self.get("messages") is not None:
            return self.parse_conversation(common)
        if self.is_plain_text():
            return RowContents(
                prompt=(), solution=(Message("assistant", self.parse_plain_text()),), **common
            )
        prompt = self.parse_prompt()
        solution = self.get_text("solution")
        if solution is not None:
            messages = (Message("assistant", solution),)
            answer = self.parse_answer() or self.parse_reference()
            return RowContents(prompt=prompt, answer=answer, solution=messages, **common)
        answer = self.parse_answer()
        if answer is not None:
            return RowContents(prompt=prompt, answer=answer, **common)
        contents = self.parse_response()
        if (reference := self.parse_reference()) is not None:
            contents["answer"] = reference
        return RowContents(prompt=prompt, **contents, **common)

    # --- Kinds of rows.

    def parse_conversation(self, common: Mapping[str, Any]) -> RowContents:
        """Return a conversation's contents.

        If the assistant wrote the last message, this message is the solution, and its text is the
        answer unless the row has a column for it. All other messages are the prompt.
        """
        column = f"column '{self.reader.column_names['messages']}'"
        messages = read_messages(self.get("messages"), f"{self.where}: {column}")
        has_solution = messages[-1].role == "assistant"
        if messages[-1].role == "system":
            raise DataError(
                f"{self.where}: {column} ends with a system message: add a user message"
            )
        prompt = messages[:-1] if has_solution else messages
        if not prompt:
            raise DataError(
                f"{self.where}: {column} has only an answer: add the message that it answers"
            )
        tools = read_tools(
            self.get("tools"),
            f"{self.where}: column '{self.reader.column_names.get('tools', 'tools')}'",
        )
        if tools and "tools" not in self.reader.declared_usual_names:
            raise DataError(
                f"{self.where}: column 'tools' would not be read: declare it, columns: {{tools: "
                f"tools}}, or rename it"
            )
        answer = self.parse_answer() or self.parse_reference()
        if answer is None and has_solution:
            answer = messages[-1].text.strip() or None
        return RowContents(
            prompt=self.add_system_message(prompt),
            solution=messages[-1:] if has_solution else (),
            answer=answer,
            tools=tools,
            **common,
        )

    def parse_judged_answers(self) -> tuple[Messages, Judgement]:
        """Return the prompt, built by the template if there is one, and the judged answers."""
        # A preset may have no column for a usual name. The placeholder is then no row's column.
        names = {
            usual_name: self.reader.column_names.get(usual_name, f"no {usual_name}")
            for usual_name in PreferencesConfig.usual_columns
        }
        values = dict(self.row.values)
        for usual_name, name in names.items():
            # Leave out columns that the row lacks, so that `PreferenceReader` looks for the prompt
            # under its alternative names.
            if name in self.row.values or usual_name in self.reader.declared_usual_names:
                values[name] = self.get(usual_name)
        if self.has_any(PREFERENCE_COLUMNS):
            names["chosen"], names["rejected"] = self.order_responses()
            values |= {
                names[key]: self.row.values.get(names[key]) for key in ("chosen", "rejected")
            }
        if self.reader.template:
            values[names["prompt"]] = fill_template(
                self.reader.template, self.row.values, self.where
            )
        parsed = PreferenceReader(names, "\n", has_media=True).read(
            DataRow(self.row.line, values), self.where
        )
        return self.add_system_message(parsed.prompt), parsed.judgement

    def order_responses(self) -> tuple[str, str]:
        """Return the columns of the better and of the worse response.

        A preference below 0 means that the first is better.
        """
        first, second, preference = (self.reader.column_names[name] for name in PREFERENCE_COLUMNS)
        preference_value = read_number(self.require("preference"), preference, self.where)
        if preference_value == 0:
            raise DataError(
                f"{self.where}: column '{preference}' is 0, so neither is better: leave such rows "
                f"out with keep: [{{column: {preference}, none_of: [0]}}]"
            )
        return (first, second) if preference_value < 0 else (second, first)

    def is_labelled(self) -> bool:
        """True if the row has one answer with a label.

        A `completion` without a label is a plain answer, unless the recipe or the preset declares
        that column.
        """
        return self.get("completion") is not None and (
            "completion" in self.reader.declared_usual_names
            or "label" in self.row.values
            or self.get("label") is not None
        )

    def is_plain_text(self) -> bool:
        """True if the row is text without a prompt, as for language modelling."""
        if (
            self.get("text") is None
            or self.reader.template
            or "prompt" in self.reader.declared_usual_names
        ):
            return False
        return "text" in self.reader.declared_usual_names or self.find_column("prompt") is None

    def parse_plain_text(self) -> str:
        text = self.get_text("text")
        if not text:
            name = self.reader.column_names["text"]
            raise DataError(f"{self.where}: column '{name}' is empty: drop the row with `keep`")
        return text

    def parse_response(self) -> dict[str, Any]:
        """Return `answer` and `solution` of `RowContents`, for a row without a column `answer`.

        They come from a column with an alternative name, such as `response`.

        The solution keeps its white space, because it is trained on. The answer is stripped,
        because a reward compares with it.
        """
        candidates = self.find_candidates("answer")
        if len(candidates) != 1:
            return {"answer_candidates": candidates}
        (name,) = candidates
        value = self.row.values[name]
        column = f"{self.where}: column '{name}'"
        if value is None or value == "":
            return {}
        if isinstance(value, list):
            messages = read_messages(value, column)
            if messages[-1].role != "assistant":
                raise DataError(f"{column} ends without an answer of the assistant: add it")
            return {"solution": messages, "answer": messages[-1].text.strip() or None}
        if not is_text_or_number(value):
            raise DataError(
                f"{column} is {describe_type(value)}, must be text, a number or messages: name "
                "another in `columns`: {answer: ...}"
            )
        check_surrogates(str(value), column)
        return {
            "solution": (Message("assistant", str(value)),),
            "answer": self.cut_at_marker(str(value), f"column '{name}'"),
        }

    # --- Columns of a row.

    def parse_prompt(self) -> Messages:
        if self.reader.template:
            return self.add_system_message(
                (Message("user", fill_template(self.reader.template, self.row.values, self.where)),)
            )
        name = self.find_column("prompt")
        if (
            name is None
            and "prompt" not in self.reader.declared_usual_names
            and self.reader.accepts_alternative_names
        ):
            values = {name: self.row.values[name] for name in self.non_null_columns}
            raise DataError(f"{self.where}: {explain_no_prompt(values)}")
        value = self.require("prompt")
        if isinstance(value, list):
            return self.add_system_message(read_messages(value, f"{self.where}: column '{name}'"))
        text = self.get_text("prompt")
        if not text:
            raise DataError(f"{self.where}: column '{name}' is empty: write a prompt")
        if name != self.reader.column_names["prompt"] and name != INPUT_COLUMN:
            text = join_input(text, self.row.values, self.reader.configured_file_columns)
        return self.add_system_message((Message("user", text),))

    def add_system_message(self, prompt: Messages) -> Messages:
        system = self.get_text("system") or self.reader.config.system
        if not system or prompt[0].role == "system":
            return prompt
        return (Message("system", system), *prompt)

    def parse_answer(self) -> str | None:
        value = self.get("answer")
        if value is None:
            if "answer" in self.reader.declared_usual_names:
                self.require("answer")
            return None
        if (
            isinstance(value, list)
            and len(value) == 4
            and all(type(item) in (int, float) for item in value)
        ):
            value = json.dumps(value)  # four numbers are a bounding box
        if not is_text_or_number(value):
            raise DataError(
                f"{self.where}: column '{self.reader.column_names['answer']}' is "
                f"{describe_type(value)}, must be text or a number: name a nested value with dots "
                "in `columns`"
            )
        return self.cut_at_marker(str(value), f"column '{self.reader.column_names['answer']}'")

    def parse_reference(self) -> str | None:
        """Return the answer from a column that has the name of another library.

        It is cut at the marker `answer_after` only if it has it: most references are bare answers.
        """
        reader = self.reader
        if not reader.accepts_alternative_names or "answer" in reader.declared_usual_names:
            return None
        name, text = find_reference(self.row.values)
        if text and reader.answer_marker in text:
            return self.cut_at_marker(text, f"column '{name}'")
        return text.strip() or None

    def cut_at_marker(self, text: str, column: str) -> str:
        """Return the text after the marker `answer_after`, or all of it if no marker is configured.

        Raises DataError if the marker is missing, or if no text follows it.
        """
        marker = self.reader.answer_marker
        has_marker = not marker or marker in text
        answer = text.rpartition(marker)[2] if marker else text
        if not has_marker or not answer.strip():
            problem = f"has no answer after '{marker}'" if marker else "is empty"
            raise DataError(
                f"{self.where}: {column} {problem}: add it, or drop the row with `keep`"
            )
        return answer.strip()

    def parse_media(self) -> Mapping[MediaKind, list[Part]]:
        """Return the media by kind, for each media column that has a value or is declared."""
        parts_by_kind: dict[MediaKind, list[Part]] = {}
        for usual_name, kind in MEDIA_COLUMNS.items():
            value = self.get(usual_name)
            if value is not None or usual_name in self.reader.declared_usual_names:
                parts_by_kind[kind] = read_column(
                    kind, value, f"{self.where}: column '{self.reader.column_names[usual_name]}'"
                )
        return parts_by_kind

    def get_text(self, usual_name: str) -> str | None:
        value = self.get(usual_name)
        if value is not None and not isinstance(value, str):
            raise DataError(
                f"{self.where}: column '{self.find_column(usual_name)}' is "
                f"{describe_type(value)}, must be a string"
            )
        if value is not None:
            check_surrogates(value, f"{self.where}: column '{self.find_column(usual_name)}'")
        return value

    def has_any(self, usual_names: tuple[str, ...]) -> bool:
        return any(self.get(name) is not None for name in usual_names)

    def get(self, usual_name: str) -> Any:
        """Return the value of the column called `usual_name`; None if the row lacks the column.

        Raises DataError for a declared column that the row does not have.
        """
        name = self.find_column(usual_name)
        return None if name is None else find_value(self.row.values, name, self.where)

    def find_column(self, usual_name: str) -> str | None:
        """Return the name that this row uses for the column called `usual_name`.

        Return None if the row lacks the column.

        The prompt and the messages are also found under alternative names (`ALTERNATIVE_NAMES`).

        Raises DataError if several columns may be meant.
        """
        if usual_name not in self.reader.column_names:
            return None
        name = self.reader.column_names[usual_name]
        if name in self.row.values or usual_name in self.reader.declared_usual_names:
            return name
        candidates = (
            self.find_candidates(usual_name) if usual_name in ("prompt", "messages") else ()
        )
        if len(candidates) > 1:
            raise DataError(f"{self.where}: {explain_ambiguous(usual_name, candidates)}")
        return next(iter(candidates), None)

    def find_candidates(self, usual_name: str) -> tuple[str, ...]:
        if (
            not self.reader.accepts_alternative_names
            or usual_name in self.reader.declared_usual_names
        ):
            return ()
        return list_candidates(usual_name, self.row.values, self.reader.configured_file_columns)

    def require(self, usual_name: str) -> Any:
        value = self.get(usual_name)
        if value is None:
            name = self.find_column(usual_name) or self.reader.column_names.get(
                usual_name, usual_name
            )
            problem = (
                f"column '{name}' is null" if name in self.row.values else f"no column '{name}'"
            )
            columns = summarize_columns(self.non_null_columns) or "no columns"
            raise DataError(
                f"{self.where}: {problem}; the row has {columns}: name yours in `columns`: "
                f"{{{usual_name}: ...}}"
            )
        return value


def check_surrogates(text: str, column: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise DataError(f"{column} holds half of a surrogate pair (\\ud800 to \\udfff): remove it")
