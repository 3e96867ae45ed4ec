"""Wrong answers for tasks with exactly one right one: what preferences and labels of the built-in
tasks are made of."""

from __future__ import annotations

import random

from ratchet.types import Comparison, Judged, Message, Task


def mistaken(answer: str, rng: random.Random) -> str:
    """The answer with one slip: two neighbours swapped, or one character taken from elsewhere in it
    (or another digit)."""
    place = rng.randrange(len(answer))
    swapped = answer[:place] + answer[place : place + 2][::-1] + answer[place + 2 :]
    if swapped != answer and rng.random() < 0.5:
        return swapped
    others = sorted({*answer, *"0123456789"} - {answer[place]})
    return answer[:place] + rng.choice(others) + answer[place + 1 :]


class OneRightAnswer:
    """Mixin for an environment whose `task.answer` is the only text that is right. The slip depends
    on the task alone."""

    def comparison(self, task: Task) -> Comparison:
        wrong = mistaken(str(task.answer), random.Random(f"mistake/{task.id}"))
        return Comparison(self._says(str(task.answer)), self._says(wrong), rewards=(1.0, 0.0))

    def judged(self, task: Task) -> Judged:
        """The right answer to half of the tasks, by a coin that belongs to the task."""
        pair = self.comparison(task)
        right = random.Random(f"label/{task.id}").random() < 0.5
        return Judged(pair.chosen, 1.0) if right else Judged(pair.rejected, 0.0)

    def steps(self, task: Task) -> list[tuple[str, float]]:
        """The answer that `judged` gives, a character a step: right as long as nothing before it
        was wrong."""
        text = self.judged(task).messages[0].text
        answer = str(task.answer)
        return [(text[i], float(text[: i + 1] == answer[: i + 1])) for i in range(len(text))]

    def _says(self, text: str) -> tuple[Message, ...]:
        return (Message("assistant", text),)
