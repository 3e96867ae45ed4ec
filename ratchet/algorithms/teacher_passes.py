"""Teacher roles of distillation, for all tasks or for each task tag, and their scoring passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ratchet.algorithms.base import Pass, Role
from ratchet.algorithms.config.base import Teacher, WeightedTeacher


def build_teacher_passes(
    teacher: Teacher,
    columns: Mapping[str, str],
    *,
    aligned: bool = False,
    top_k: int = 0,
    temperature: float = 1.0,
) -> tuple[dict[str, Role], tuple[Pass, ...]]:
    """Return the teachers' roles, and the passes that fill the batch's columns.

    A role is named "teacher", or "teacher/<tag>" if each tag has its own teacher. Tags with the
    same model share one role, named after the first of these tags. Tasks without a tag have the tag
    "".

    Args:
        columns: Name of each column in the batch, by the name of the learner's output.
        aligned: True if the teachers' tokenizers differ from the policy's.
        top_k: As in `Pass`.
        temperature: As in `Pass`.
    """
    path_by_tag: Mapping[str | None, str] = (
        {None: teacher} if isinstance(teacher, str) else {**teacher}
    )
    role_by_path: dict[str, str] = {}
    for tag, path in path_by_tag.items():
        role_by_path.setdefault(path, f"teacher/{tag}" if tag else "teacher")
    roles = {name: Role(path=path, aligned=aligned) for path, name in role_by_path.items()}
    passes = (
        Pass(role_by_path[path], output, column, tag=tag, top_k=top_k, temperature=temperature)
        for tag, path in path_by_tag.items()
        for output, column in columns.items()
    )
    return roles, tuple(passes)


def build_weighted_passes(
    teachers: Sequence[WeightedTeacher],
    columns: Mapping[str, str],
    *,
    aligned: bool,
    temperature: float = 1.0,
) -> tuple[dict[str, Role], tuple[Pass, ...]]:
    """Return the roles of several teachers that score every row, and their passes.

    The role of teacher i is named "teacher/i", and its columns end with "_i", from 1 on.

    Args:
        teachers: The teachers.
        columns: As in `build_teacher_passes`, without the ending.
        aligned: As in `build_teacher_passes`.
        temperature: As in `Pass`.
    """
    names = [f"teacher/{i}" for i in range(1, len(teachers) + 1)]
    roles = {
        name: Role(path=teacher.path, aligned=aligned)
        for name, teacher in zip(names, teachers, strict=True)
    }
    passes = (
        Pass(name, output, f"{column}_{i}", temperature=temperature)
        for i, name in enumerate(names, start=1)
        for output, column in columns.items()
    )
    return roles, tuple(passes)
