"""Alternative column names of published files, which need no `columns` in a recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ratchet.data.jsonl import is_text_or_number
from ratchet.utils.summarize import summarize_names

# Names that files use instead of the usual name. A file with two of them is ambiguous.
ALTERNATIVE_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "problem", "query", "input"),
    "answer": ("output", "response", "completion"),
    "messages": ("conversations",),
}
# Columns of other libraries (TRL, NeMo RL, verl) with what a reward compares with: the answer, but
# no response.
REFERENCE_COLUMNS = ("ground_truth", "expected_answer", "reward_model.ground_truth")
# In rows with an instruction, this column has the text that the instruction is about. It may be
# empty.
INPUT_COLUMN = "input"
MAX_COLUMNS = 12  # the number of columns that an error names
MAX_NAME_CHARS = 100  # a longer name of a column is a value, in a file without names


def summarize_columns(columns: Iterable[str]) -> str:
    """Return a row's columns for an error, "" if it has none."""
    return summarize_names(columns, MAX_COLUMNS)


def list_candidates(
    usual_name: str, columns: Collection[str], used_columns: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the columns that may be the column with the usual name `usual_name`.

    If a column has the usual name itself, it is the only candidate.

    Args:
        usual_name: prompt, answer or messages; any other name has no candidate but itself.
        columns: The columns of a row.
        used_columns: Columns that the recipe names for another purpose.
    """
    if usual_name in columns:
        return (usual_name,)
    names = tuple(
        name
        for name in ALTERNATIVE_NAMES.get(usual_name, ())
        if name in columns and name not in used_columns
    )
    return tuple(name for name in names if name != INPUT_COLUMN) or names


def find_reference(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return name and text of the column of another library with what a reward compares with.

    Both are "" if there is none, or only one without text, such as the tests of a program.
    """
    for name in REFERENCE_COLUMNS:
        column, _, key = name.partition(".")
        value = values.get(column)
        if key:
            value = value.get(key) if isinstance(value, Mapping) else None
        if is_text_or_number(value) and str(value).strip():
            return name, str(value)
    return "", ""


def join_input(
    instruction: str, values: Mapping[str, Any], used_columns: Collection[str] = ()
) -> str:
    """Return an instruction, followed by the column `input` if the row has one with text."""
    input_text = values.get(INPUT_COLUMN)
    if INPUT_COLUMN in used_columns or not isinstance(input_text, str) or not input_text.strip():
        return instruction
    return f"{instruction}\n\n{input_text}"


def explain_ambiguous(usual_name: str, candidates: Sequence[str]) -> str:
    """Return the error text for several candidates, with the recipe line that chooses one."""
    names = f"{', '.join(candidates[:-1])} and {candidates[-1]}"
    return (
        f"columns {names} may each be the {usual_name}: set one, columns: {{{usual_name}: "
        f"{candidates[0]}}}"
    )


def explain_no_prompt(values: Mapping[str, Any]) -> str:
    """Return the error text for a row without a prompt, with the recipe line that names one.

    values: the columns of the row that are not null.
    """
    columns = [*values]
    if len(columns) == 1 and _holds_rows(values[columns[0]]):
        return (
            f"no column 'prompt', but a list of objects in '{columns[0]}': if these are the rows, "
            "write that list alone into the file"
        )
    if any(
        name.isdecimal() or name.endswith("?") or len(name) > MAX_NAME_CHARS for name in columns
    ):
        return (
            "no column 'prompt', and the names of the columns look like a row themselves: "
            f"{summarize_columns(columns)}. Put a line of names before it, such as prompt,answer"
        )
    for name, value in values.items():
        keys = list(value) if isinstance(value, Mapping) else []
        if {"prompt", *ALTERNATIVE_NAMES["prompt"]} & set(keys):
            return (
                f"no column 'prompt', but one in the object '{name}' ({summarize_columns(keys)}): "
                "write the keys of that object as columns"
            )
    accepted_names = (
        *ALTERNATIVE_NAMES["prompt"],
        "messages",
        *ALTERNATIVE_NAMES["messages"],
        "text",
    )
    answers = [
        name for name in columns if name in ("answer", "solution", *ALTERNATIVE_NAMES["answer"])
    ]
    others = [name for name in columns if name not in answers]
    line = f"prompt: {others[0] if others else '...'}"
    if len(others) > 1 and not answers:
        line += f", answer: {others[1]}"
    return (
        f"no column 'prompt'; the row has {summarize_columns(columns) or 'no columns'}, and none "
        f"of {', '.join(accepted_names)}: name yours in `columns`: {{{line}}}"
    )


def _holds_rows(value: Any) -> bool:
    """True for a list of objects, unless they are the messages of a conversation."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(item, dict) and not {"role", "from"} & item.keys() for item in value)
    )
