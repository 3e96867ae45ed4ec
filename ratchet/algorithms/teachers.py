"""The roles of teachers: one for all tasks, or one for each tag."""

from __future__ import annotations

from ratchet.algorithms.base import Role
from ratchet.algorithms.config.base import Teacher


def teacher_roles(teacher: Teacher, *, aligned: bool = False) -> dict[str, Role]:
    """ "teacher", or "teacher/<tag>" for each tag."""
    by_tag = {"": teacher} if isinstance(teacher, str) else teacher
    return {f"teacher/{tag}" if tag else "teacher": Role(path=path, aligned=aligned) for tag, path in by_tag.items()}
