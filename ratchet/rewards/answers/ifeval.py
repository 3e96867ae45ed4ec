"""A reward for following instructions, for IFEval (arXiv:2311.07911) and data in its form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, ClassVar, Literal

from ratchet.config.base import Section
from ratchet.errors import DataError, MissingDependency
from ratchet.rewards.answers.ifeval_checks import follows_instruction
from ratchet.rewards.base import AnswerReward, Verdict
from ratchet.rewards.integrations.roll_ifeval import cut_thinking, follows_function
from ratchet.types import Task
from ratchet.utils.safe_read import parse_json


class IFEvalConfig(Section):
    """A reward for following a task's verifiable instructions (IFEval, arXiv:2311.07911)."""

    builds: ClassVar[str] = "ratchet.rewards.answers.ifeval:IFEval"

    credit: Literal["all", "share"] = "all"
    """all: 1 if all instructions are followed, else 0; share: the share of the instructions that
    are followed."""
    loose: bool = False
    """True to judge the text also without asterisks, first line or last line, as in the paper. An
    instruction counts as followed if one of these forms follows it."""


class IFEval(AnswerReward):
    """A reward for followed instructions.

    It reads `instruction_id_list` and `kwargs` from the task's `meta`, or else from its answer; or
    `func_name` and its arguments from the answer (see `ratchet.rewards.integrations.roll_ifeval`).
    """

    name = "ifeval"
    bounds = (0.0, 1.0)

    def __init__(self, config: IFEvalConfig) -> None:
        """Raise MissingDependency without langdetect, which three of the instructions need."""
        self.config = config
        if find_spec("langdetect") is None:
            raise MissingDependency("langdetect", extra="rewards", needed_for="reward ifeval")

    def grade(self, text: str, task: Task) -> Verdict:
        """Return 1 if all instructions are followed, else 0.

        With credit "share", return a part for each instruction; they sum to the share followed.
        """
        readings = list_loose_readings(text) if self.config.loose else [text]
        constraint = {} if "instruction_id_list" in task.meta else _parse_row(task.answer)
        if "func_name" in constraint:
            return float(
                any(
                    follows_function(cut_thinking(reading), constraint, task.id)
                    for reading in readings
                )
            )
        ids, arguments = list_instructions(task)
        followed = [
            any(
                follows_instruction(reading, instruction, instruction_arguments)
                for reading in readings
            )
            for instruction, instruction_arguments in zip(ids, arguments, strict=True)
        ]
        if self.config.credit == "all":
            return float(all(followed))
        parts = dict.fromkeys(ids, 0.0)
        for instruction, is_followed in zip(ids, followed, strict=True):
            parts[instruction] += is_followed / len(ids)
        return parts


def list_loose_readings(text: str) -> list[str]:
    """Return the paper's eight readings: with or without first line, last line and asterisks."""
    lines = text.split("\n")
    cuts = ["\n".join(piece).strip() for piece in (lines[1:], lines[:-1], lines[1:-1])]
    return [reading for cut in (text, *cuts) for reading in (cut, cut.replace("*", ""))]


def list_instructions(task: Task) -> tuple[Sequence[str], Sequence[Mapping[str, Any]]]:
    """Return a task's instruction ids and the arguments of each.

    Raises DataError if it has no ids, or not as many arguments as ids.
    """
    row = task.meta if "instruction_id_list" in task.meta else _parse_row(task.answer)
    ids, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if not ids:
        raise DataError(
            f"task '{task.id}' has no instruction_id_list in its meta or its answer, and no "
            "func_name in its answer"
        )
    arguments = (
        [{}] * len(ids)
        if arguments is None
        else [one_arguments or {} for one_arguments in arguments]
    )
    if len(arguments) != len(ids):
        raise DataError(
            f"task '{task.id}' has {len(ids)} instructions, but kwargs for {len(arguments)}"
        )
    return ids, arguments


def _parse_row(answer: Any) -> Mapping[str, Any]:
    if isinstance(answer, str):
        try:
            answer = parse_json(answer)
        except ValueError:
            return {}
    return answer if isinstance(answer, Mapping) else {}
