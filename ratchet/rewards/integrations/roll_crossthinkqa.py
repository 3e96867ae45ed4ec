"""Reward the letter of a multiple-choice answer as ROLL does for the data of CrossThinkQA."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar, Literal

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.base import PerTrajectory, Verdict, answer_text
from ratchet.rewards.integrations.roll_ifeval import cut_thinking
from ratchet.types import Scored, Task, Trajectory

# Non-empty content of \boxed{...}, up to the first closing brace.
BOXED = re.compile(r"\\boxed\{([^}]+)\}")
ANSWER_IS = "answer is"
Credit = Literal["loose", "soft", "strict"]
# Rewards by (the letter is right, the answer is boxed).
REWARDS: Mapping[str, Mapping[tuple[bool, bool], float]] = {
    "loose": {(True, True): 1.0, (True, False): 1.0, (False, True): -1.0, (False, False): -1.0},
    "soft": {(True, True): 1.0, (True, False): 0.5, (False, True): -0.5, (False, False): -1.0},
    "strict": {(True, True): 1.0, (True, False): -1.0, (False, True): -1.0, (False, False): -1.0},
}


class CrossThinkQAConfig(Section):
    """A reward of ROLL for a letter of several, from -1 to 1, also of an answer cut off."""

    builds: ClassVar[str] = "ratchet.rewards.integrations.roll_crossthinkqa:CrossThinkQA"

    credit: Credit = "loose"
    r"""A right letter outside of \boxed{} earns 1 (loose), 0.5 (soft) or -1 (strict); a wrong one
    inside earns -0.5 (soft), else -1."""


class CrossThinkQA(PerTrajectory):
    """A reward for the first capital letter of the answer.

    The answer is what stands last in `\\boxed{}`, else after the last "answer is", else the whole
    text; thinking before `</think>` is left out. The letter is right if it is the first character
    of the task's answer.

    Source: `crossthinkqa_reward_fn` of ROLL's `crossthinkqa_rule_reward_worker.py`.
    """

    name = "crossthinkqa"
    bounds = (-1.0, 1.0)

    def __init__(self, config: CrossThinkQAConfig) -> None:
        self.config = config

    def judge(self, trajectory: Trajectory, task: Task) -> Verdict:
        """Return the reward. Raises DataError if the task's answer begins with no capital letter.

        The parts tell whether the letter is right, and whether it is boxed.
        """
        expected = str(task.answer or "")[:1]
        if not expected.isupper():
            raise DataError(
                f"task '{task.id}': the answer {str(task.answer)[:40]!r} begins with no capital "
                "letter. Name its column by environment.columns.answer"
            )
        text = cut_thinking(answer_text(trajectory))
        boxes = BOXED.findall(text)
        answer = boxes[-1] if boxes else text[_find_answer(text) :]
        letter = next((character for character in answer if character.isupper()), None)
        is_right, is_boxed = letter == expected, bool(boxes)
        reward = REWARDS[self.config.credit][is_right, is_boxed]
        return Scored(reward, {"right": float(is_right), "boxed": float(is_boxed)})


def _find_answer(text: str) -> int:
    """Return where the text after the last "answer is" begins; 0 if that does not occur."""
    matches = list(re.finditer(ANSWER_IS, text, re.IGNORECASE))
    return matches[-1].end() if matches else 0
