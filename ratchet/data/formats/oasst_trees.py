"""Conversations from OpenAssistant's form (arXiv:2304.07327): a row a message, which names its
parent and its tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.data.jsonl import DataRow, names
from ratchet.data.row_filters import number_in
from ratchet.data.tables import Table
from ratchet.errors import DataError

NAMED = ("message_id", "parent_id", "message_tree_id", "text", "role")


class Trees:
    """The best conversation of each tree: from its first message on, the answer that people ranked
    first, up to the last of the assistant's. A tree without an answer is none. Holds the numbers of
    the rows, not their text.

    Raises DataError for a row without the columns of this form.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        children: dict[str, list[tuple[float, int, str]]] = {}
        roots: list[tuple[int, str]] = []
        roles: list[bool] = []
        for index in range(len(table)):
            values = table.row(index).values
            absent = next((name for name in NAMED if name not in values), None)
            if absent is not None:
                raise DataError(
                    f"{table.where(index)}: no column '{absent}'; the row has {names(values)}"
                )
            roles.append(values["role"] == "assistant")
            parent, rank = values["parent_id"], values.get("rank")
            if values.get("deleted"):
                continue
            if parent is None:
                roots.append((index, values["message_id"]))
            else:
                place = (
                    float("inf") if rank is None else number_in(rank, "rank", table.where(index)),
                    index,
                    values["message_id"],
                )
                children.setdefault(parent, []).append(place)
        paths = (_best(root, children, roles) for root in roots)
        self.paths = [path for path in paths if path]
        if not self.paths:
            raise DataError(
                f"{table.where(0)}: no tree of this file has an answer of the assistant's"
            )

    @property
    def blocks(self) -> Sequence[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self.paths)

    def row(self, index: int) -> DataRow:
        """The columns of its first message, and `messages`."""
        rows = [self.table.row(place) for place in self.paths[index]]
        messages: list[Mapping[str, Any]] = [
            {"role": row.values["role"], "content": row.values["text"]} for row in rows
        ]
        return DataRow(rows[0].line, {**rows[0].values, "messages": messages}, rows[0].unit)

    def where(self, index: int) -> str:
        return self.table.where(self.paths[index][0])


def _best(
    root: tuple[int, str],
    children: Mapping[str, list[tuple[float, int, str]]],
    roles: Sequence[bool],
) -> list[int]:
    index, name = root
    path = [index]
    while answers := children.get(name):
        _, index, name = min(answers)
        path.append(index)
        if len(path) > len(roles):
            break  # messages that are each other's parents
    while path and not roles[path[-1]]:
        path.pop()
    return path
