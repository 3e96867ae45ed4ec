"""Make wrong answers to tasks with one right answer.

The built-in tasks use them for preference pairs and labels.
"""

from __future__ import annotations

import random

from ratchet.types import Comparison, Judged, Message, Task


def mistaken(answer: str, rng: random.Random) -> str:
    """Return the answer with one mistake.

    Either two neighbours are swapped, or one character is replaced by another one of the answer or
    by a digit.
    """
    place = rng.randrange(len(answer))
    swapped = answer[:place] + answer[place : place + 2][::-1] + answer[place + 2 :]
    if swapped != answer and rng.random() < 0.5:
        return swapped
    others = sorted({*answer, *"0123456789"} - {answer[place]})
    return answer[:place] + rng.choice(others) + answer[place + 1 :]


class OneRightAnswer:
    """A mixin for environments in which only the text of `task.answer` is right.

    The mistake in a wrong answer depends on the task alone.
    """

    def comparison(self, task: Task) -> Comparison:
        wrong = mistaken(str(task.answer), random.Random(f"mistake/{task.id}"))
        return Comparison(self._says(str(task.answer)), self._says(wrong), rewards=(1.0, 0.0))

    def judged(self, task: Task) -> Judged:
        """Return the right answer for about half of the tasks, else a wrong one.

        The choice depends on the task alone.
        """
        pair = self.comparison(task)
        right = random.Random(f"label/{task.id}").random() < 0.5
        return Judged(pair.chosen, 1.0) if right else Judged(pair.rejected, 0.0)

    def steps(self, task: Task) -> list[tuple[str, float]]:
        """Return the answer of `judged` with one character per step, as (character, label).

        The label is 1.0 up to the first wrong character, and 0.0 from there on.
        """
        text = self.judged(task).messages[0].text
        answer = str(task.answer)
        return [(text[i], float(text[: i + 1] == answer[: i + 1])) for i in range(len(text))]

    def _says(self, text: str) -> tuple[Message, ...]:
        return (Message("assistant", text),)
