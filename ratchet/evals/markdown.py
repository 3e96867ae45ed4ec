"""Write Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def format_table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table; white space in a cell becomes one space, and `|` is escaped."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(
        "| " + " | ".join(_format_cell(cell) for cell in line) + " |" for line in lines
    )


def _format_cell(value: object) -> str:
    return re.sub(r"\s+", " ", str(value)).replace("|", "\\|")
