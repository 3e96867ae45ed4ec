"""Teacher roles and their scoring passes: one teacher for all tasks, or one for each tag."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.algorithms.base import Pass, Role
from ratchet.algorithms.config.base import Teacher


def build_teacher_passes(
    teacher: Teacher, columns: Mapping[str, str], *, aligned: bool = False, top_k: int = 0
) -> tuple[dict[str, Role], tuple[Pass, ...]]:
    """Return the roles of the teachers and the passes that fill `columns`.

    columns: the batch's name of each column, by the learner's name of it.

    The role is "teacher", or "teacher/<tag>" for each tag. A model that several tags name is one
    role, called after the first of them. The tag "" is that of tasks without one.
    """
    by_tag: Mapping[str | None, str] = {None: teacher} if isinstance(teacher, str) else {**teacher}
    names: dict[str, str] = {}  # by path
    for tag, path in by_tag.items():
        names.setdefault(path, f"teacher/{tag}" if tag else "teacher")
    roles = {name: Role(path=path, aligned=aligned) for path, name in names.items()}
    passes = (
        Pass(names[path], output, column, tag=tag, top_k=top_k)
        for tag, path in by_tag.items()
        for output, column in columns.items()
    )
    return roles, tuple(passes)
