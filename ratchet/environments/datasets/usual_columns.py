"""The usual names of columns in published files, which need no `columns:` in a recipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Names under which files hold a column, in addition to its own. A file with two of them is
# ambiguous.
OTHER_NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("question", "instruction", "problem", "query", "input"),
    "answer": ("output", "response", "completion"),
    "messages": ("conversations",),
}
# In rows with an instruction it is the material that the instruction is about, and may be empty.
INPUT = "input"


def list_candidates(
    usual: str, columns: Collection[str], taken: Collection[str] = ()
) -> tuple[str, ...]:
    """Return the columns that may hold what is usually called `usual`.

    The usual name itself is the only candidate where it is there.

    Args:
        usual: prompt, answer or messages; any other name has no candidate but itself.
        columns: The columns of a row.
        taken: Columns that the recipe gives another meaning.
    """
    if usual in columns:
        return (usual,)
    names = tuple(
        name for name in OTHER_NAMES.get(usual, ()) if name in columns and name not in taken
    )
    return tuple(name for name in names if name != INPUT) or names


def join_input(instruction: str, values: Mapping[str, Any], taken: Collection[str] = ()) -> str:
    """Return an instruction, followed by the column `input` if the row has one with text."""
    material = values.get(INPUT)
    if INPUT in taken or not isinstance(material, str) or not material.strip():
        return instruction
    return f"{instruction}\n\n{material}"


def explain_ambiguous(usual: str, candidates: Sequence[str]) -> str:
    """Return what is wrong with several candidates, and the line that mends it."""
    names = f"{', '.join(candidates[:-1])} and {candidates[-1]}"
    return (
        f"columns {names} may each be the {usual}: say which, columns: {{{usual}: {candidates[0]}}}"
    )


def explain_no_prompt(columns: Sequence[str]) -> str:
    """Return what is missing in a row without a prompt, and the line that mends it."""
    known = (*OTHER_NAMES["prompt"], "messages", *OTHER_NAMES["messages"], "text")
    answers = [name for name in columns if name in ("answer", "solution", *OTHER_NAMES["answer"])]
    others = [name for name in columns if name not in answers]
    line = f"prompt: {others[0] if others else '...'}"
    if len(others) > 1 and not answers:
        line += f", answer: {others[1]}"
    return (
        f"no column 'prompt'; the row has {', '.join(columns) or 'no columns'}, and none of "
        f"{', '.join(known)}: name yours in `columns`: {{{line}}}"
    )
