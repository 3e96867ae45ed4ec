"""Read conversations from OpenAssistant's format (arXiv:2304.07327).

Each row is one message, and names its parent message and its tree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ratchet.data.jsonl import DataRow, list_names
from ratchet.data.row_filters import read_number
from ratchet.data.tables import Table
from ratchet.errors import DataError

REQUIRED_COLUMNS = ("message_id", "parent_id", "message_tree_id", "text", "role")


class ConversationTrees:
    """A table of the best conversation of each tree.

    A conversation begins with the tree's first message, follows the reply that people ranked first
    at each step, and ends with the assistant's last message. Trees without an answer of the
    assistant are left out. The object holds row indices, not text.

    Raises DataError for a row that lacks a column of this format, and if no tree has an answer.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        # The replies to each message, by its id; a reply is (rank, row index, message id).
        children: dict[str, list[tuple[float, int, str]]] = {}
        roots: list[tuple[int, str]] = []  # (row index, message id) of each tree's first message
        is_assistant: list[bool] = []
        for index in range(len(table)):
            values = table.row(index).values
            missing = next((name for name in REQUIRED_COLUMNS if name not in values), None)
            if missing is not None:
                raise DataError(
                    f"{table.where(index)}: no column '{missing}'; the row has {list_names(values)}"
                )
            is_assistant.append(values["role"] == "assistant")
            parent, rank = values["parent_id"], values.get("rank")
            if values.get("deleted"):
                continue
            if parent is None:
                roots.append((index, values["message_id"]))
            else:
                reply = (
                    float("inf") if rank is None else read_number(rank, "rank", table.where(index)),
                    index,
                    values["message_id"],
                )
                children.setdefault(parent, []).append(reply)
        paths = (_find_best_path(root, children, is_assistant) for root in roots)
        self.paths = [path for path in paths if path]
        if not self.paths:
            raise DataError(
                f"{table.where(0)}: no tree of this file has an answer of the assistant"
            )

    @property
    def block_sizes(self) -> Sequence[int]:
        return (len(self),)

    def __len__(self) -> int:
        return len(self.paths)

    def row(self, index: int) -> DataRow:
        """Return the columns of the conversation's first message, plus `messages`."""
        rows = [self.table.row(position) for position in self.paths[index]]
        messages: list[Mapping[str, Any]] = [
            {"role": row.values["role"], "content": row.values["text"]} for row in rows
        ]
        return DataRow(rows[0].line, {**rows[0].values, "messages": messages}, rows[0].unit)

    def where(self, index: int) -> str:
        return self.table.where(self.paths[index][0])


def _find_best_path(
    root: tuple[int, str],
    children: Mapping[str, list[tuple[float, int, str]]],
    is_assistant: Sequence[bool],
) -> list[int]:
    """Return the row indices of a tree's best conversation; [] if it has no answer."""
    index, message_id = root
    path = [index]
    while replies := children.get(message_id):
        _, index, message_id = min(replies)
        path.append(index)
        if len(path) > len(is_assistant):
            break  # the parent ids form a cycle
    while path and not is_assistant[path[-1]]:
        path.pop()
    return path
