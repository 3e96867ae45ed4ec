"""Make wrong answers to tasks with a single correct answer.

The synthetic environments use them for preference pairs and labels.
"""

from __future__ import annotations

import random

from ratchet.types import Comparison, LabelledAnswer, Message, Task


def add_mistake(answer: str, rng: random.Random) -> str:
    """Return the answer with one mistake.

    Either two neighbouring characters are swapped, or one character is replaced by another
    character of the answer or by a digit.
    """
    index = rng.randrange(len(answer))
    swapped = answer[:index] + answer[index : index + 2][::-1] + answer[index + 2 :]
    if swapped != answer and rng.random() < 0.5:
        return swapped
    alternatives = sorted({*answer, *"0123456789"} - {answer[index]})
    return answer[:index] + rng.choice(alternatives) + answer[index + 1 :]


class SingleAnswer:
    """A mixin for environments in which only the text of `task.answer` is correct.

    It provides preference pairs, labelled answers and step labels. The mistake in a wrong answer
    depends only on the task.
    """

    def comparison(self, task: Task) -> Comparison:
        wrong = add_mistake(str(task.answer), random.Random(f"mistake/{task.id}"))
        return Comparison(
            self._to_messages(str(task.answer)), self._to_messages(wrong), rewards=(1.0, 0.0)
        )

    def labelled_answer(self, task: Task) -> LabelledAnswer:
        """Return the correct answer for about half of the tasks, else a wrong one.

        The choice depends only on the task.
        """
        pair = self.comparison(task)
        is_correct = random.Random(f"label/{task.id}").random() < 0.5
        return (
            LabelledAnswer(pair.chosen, 1.0) if is_correct else LabelledAnswer(pair.rejected, 0.0)
        )

    def steps(self, task: Task) -> list[tuple[str, float]]:
        """Return the answer of `labelled_answer` in steps of one character: (character, label).

        The label is 1.0 up to the first wrong character, and 0.0 from there on.
        """
        text = self.labelled_answer(task).messages[0].text
        answer = str(task.answer)
        return [(text[i], float(text[: i + 1] == answer[: i + 1])) for i in range(len(text))]

    def _to_messages(self, text: str) -> tuple[Message, ...]:
        return (Message("assistant", text),)
