"""Teacher roles and their scoring passes: one teacher for all tasks, or one for each tag."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.algorithms.base import Pass, Role
from ratchet.algorithms.config.base import Teacher


def build_teacher_passes(
    teacher: Teacher, columns: Mapping[str, str], *, aligned: bool = False, top_k: int = 0
) -> tuple[dict[str, Role], tuple[Pass, ...]]:
    """Return the teachers' roles, and the passes that fill the batch's columns.

    A role is named "teacher", or "teacher/<tag>" if there is one for each tag. A model that several
    tags name is one role, named after the first of them. Tasks without a tag have the tag "".

    Args:
        columns: Name of each column in the batch, by its name in the learner's output.
    """
    by_tag: Mapping[str | None, str] = {None: teacher} if isinstance(teacher, str) else {**teacher}
    names: dict[str, str] = {}  # role names by model path
    for tag, path in by_tag.items():
        names.setdefault(path, f"teacher/{tag}" if tag else "teacher")
    roles = {name: Role(path=path, aligned=aligned) for path, name in names.items()}
    passes = (
        Pass(names[path], output, column, tag=tag, top_k=top_k)
        for tag, path in by_tag.items()
        for output, column in columns.items()
    )
    return roles, tuple(passes)
