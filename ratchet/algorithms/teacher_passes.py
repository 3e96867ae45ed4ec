"""The roles of teachers, and the passes that ask them: one teacher for all tasks, or one for each
tag."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.algorithms.base import Pass, Role
from ratchet.algorithms.config.base import Teacher


def asked_of(
    teacher: Teacher, columns: Mapping[str, str], *, aligned: bool = False, top_k: int = 0
) -> tuple[dict[str, Role], tuple[Pass, ...]]:
    """(the role "teacher", or "teacher/<tag>"; what fills `columns`, by the name that a learner
    knows them by). A model that several tags name is one role, called after the first of them; the
    tag "" is that of tasks without one."""
    by_tag: Mapping[str | None, str] = {None: teacher} if isinstance(teacher, str) else {**teacher}
    names: dict[str, str] = {}  # by path
    for tag, path in by_tag.items():
        names.setdefault(path, f"teacher/{tag}" if tag else "teacher")
    roles = {name: Role(path=path, aligned=aligned) for path, name in names.items()}
    passes = (
        Pass(names[path], wanted, column, tag=tag, top_k=top_k)
        for tag, path in by_tag.items()
        for wanted, column in columns.items()
    )
    return roles, tuple(passes)
