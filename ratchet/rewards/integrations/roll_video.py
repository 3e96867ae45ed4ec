"""Reward answers about videos as ROLL does for the data of Video-R1, by the kind of question.

Source: `accuracy_reward` and `format_reward` of ROLL's `video_r1_reward_worker.py`, after Feng et
al. (2025), arXiv:2503.21776. ROUGE: Lin (2004), without the stemmer that is used there.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import ClassVar

from pydantic import Field

from ratchet.config.base import Section
from ratchet.errors import DataError
from ratchet.rewards.answers.final_answer import extract_first_tagged
from ratchet.rewards.answers.similarity import MAX_UNITS, compute_common_subsequence_length
from ratchet.rewards.base import AnswerReward
from ratchet.types import Scored, Task


class VideoR1Config(Section):
    """A reward of ROLL, from 0 to 2: the answer by its kind of question, and the tags' form."""

    builds: ClassVar[str] = "ratchet.rewards.integrations.roll_video:VideoR1"

    kind_column: str = Field("reward_model", min_length=1)
    """Column with the kind of question: multiple choice, free-form, numerical, OCR or
    regression."""


# The patterns take time linear in the text: an unclosed box matches too, without the second group.
BOXED = re.compile(r"\\boxed{([^}\n]*+)(}?)")
FORM_START = "<think>"
FORM_MIDDLE = re.compile(r"</think>\s*+<answer>")
FORM_END = "</answer>"
MAX_NUMBER_CHARS = 64
EPSILON = 1e-9


class VideoR1(AnswerReward):
    """A reward for the text between `<answer>` and `</answer>`, or the whole text without them.

    The parts are `accuracy`, from 0 to 1, and `format`: 1 for thinking and answer in their tags and
    nothing else. A number that can't be read earns 0 (ROLL's worker stops for a regression). A task
    whose own answer earns 0 can't be judged: a regression to 0, a number that can't be read, or a
    choice that does not begin with its letter, such as "(A)".
    """

    name = "video_r1"
    bounds = (0.0, 2.0)

    def __init__(self, config: VideoR1Config) -> None:
        self.config = config

    def grade(self, text: str, task: Task) -> Scored:
        """Return the reward.

        Raises DataError if the task has an unknown kind, or no answer that can earn anything.
        """
        kind = task.meta.get(self.config.kind_column)
        judge = JUDGES.get(kind) if isinstance(kind, str) else None
        if judge is None:
            raise DataError(
                f"{task.where}: {self.config.kind_column}={kind!r:.40} is not known, must be one "
                f"of {', '.join(JUDGES)}"
            )
        if task.answer is None or not str(task.answer).strip():
            raise DataError(f"{task.where} has no answer. Name it by environment.columns.answer")
        gold = _extract_answer(str(task.answer))
        if not judge(gold, gold):
            raise DataError(
                f"{task.where}: its answer {gold!r:.80} can't be judged as {kind}: not even the "
                "same answer earns anything. Correct it, or drop the row"
            )
        accuracy = judge(_extract_answer(text), gold)
        is_formatted = float(_has_form(text))
        return Scored(accuracy + is_formatted, {"accuracy": accuracy, "format": is_formatted})


def _extract_answer(text: str) -> str:
    answer = extract_first_tagged(text)
    return text if answer is None else answer.strip()


def _has_form(text: str) -> bool:
    """True if the text is <think>...</think> <answer>...</answer> and nothing else."""
    return (
        text.startswith(FORM_START)
        and text.endswith(FORM_END)
        and FORM_MIDDLE.search(text, len(FORM_START), len(text) - len(FORM_END)) is not None
    )


def judge_choice(answer: str, gold: str) -> float:
    """Return 1 if the first characters are equal, of the last `\\boxed{}` if there is one.

    A mark as the first character, as in "(A)", says nothing about the choice and is never equal.
    """
    first, second = (_extract_box(text).strip().strip(".")[:1] for text in (answer, gold))
    return float(second.isalnum() and first == second)


def _extract_box(text: str) -> str:
    contents = [content for content, closing_brace in BOXED.findall(text) if closing_brace]
    return contents[-1] if contents else text


def judge_free_form(answer: str, gold: str) -> float:
    """Return the mean F1 of single words, pairs of words and the longest common subsequence."""
    words, gold_words = (re.findall(r"[a-z0-9]+", text.lower()) for text in (answer, gold))
    words = words[:MAX_UNITS]
    return fmean(
        (
            _compute_ngram_f1(words, gold_words, 1),
            _compute_ngram_f1(words, gold_words, 2),
            _compute_f1(
                compute_common_subsequence_length(words, gold_words[:MAX_UNITS]),
                len(words),
                len(gold_words),
            ),
        )
    )


def _compute_ngram_f1(words: Sequence[str], gold_words: Sequence[str], size: int) -> float:
    ngrams, gold_ngrams = (
        Counter(zip(*(sequence[index:] for index in range(size)), strict=False))
        for sequence in (words, gold_words)
    )
    return _compute_f1((ngrams & gold_ngrams).total(), ngrams.total(), gold_ngrams.total())


def _compute_f1(n_common: int, n_first: int, n_second: int) -> float:
    return 2 * n_common / (n_first + n_second) if n_common else 0.0


def judge_number(answer: str, gold: str) -> float:
    """Return 1 for numbers that are equal in two decimals and in whether they have any."""
    has_decimals = [("." in text) or ("," in text) for text in (answer, gold)]
    number, gold_number = _read_number(answer), _read_number(gold)
    if has_decimals[0] != has_decimals[1] or number is None or gold_number is None:
        return 0.0
    return float(round(number, 2) == round(gold_number, 2))


def judge_words(answer: str, gold: str) -> float:
    """Return 1 less the word error rate: the edits between the words, per word of the task's."""
    words, gold_words = answer.split(), gold.split()
    if len(words) >= 2 * max(1, len(gold_words)):  # the rate is 1 or more
        return 0.0
    distances = list(range(len(gold_words) + 1))
    for count, word in enumerate(words, 1):
        diagonal, distances[0] = distances[0], count
        for index, gold_word in enumerate(gold_words, 1):
            substitution = diagonal + (word != gold_word)
            diagonal = distances[index]
            distances[index] = min(substitution, diagonal + 1, distances[index - 1] + 1)
    return max(0.0, 1 - distances[-1] / max(1, len(gold_words)))


def judge_regression(answer: str, gold: str) -> float:
    """Return 1 less the difference relative to the task's number, at least 0."""
    number, gold_number = _read_number(answer), _read_number(gold)
    if number is None or gold_number is None:
        return 0.0
    difference = (abs(number - gold_number) + EPSILON) / (abs(gold_number) + EPSILON)
    return 1 - min(1.0, difference)


def _read_number(text: str) -> float | None:
    try:
        number = float(text.replace(",", "")) if len(text) <= MAX_NUMBER_CHARS else math.nan
    except ValueError:
        return None
    return number if math.isfinite(number) else None


JUDGES: Mapping[str, Callable[[str, str], float]] = {
    "multiple choice": judge_choice,
    "free-form": judge_free_form,
    "numerical": judge_number,
    "OCR": judge_words,
    "regression": judge_regression,
}
