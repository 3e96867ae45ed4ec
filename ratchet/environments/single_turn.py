"""Base classes of environments with one prompt and one answer.

They only provide tasks, and a reward judges the answers. `Procedural` generates tasks with a pure
function, and `Rows` takes them from data.
"""

from __future__ import annotations

import itertools
import random
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from ratchet.errors import DataError
from ratchet.protocols import Environment
from ratchet.types import Message, Split, Step, Task

# A procedural environment counts as exhausted after this many unsuccessful draws in a row.
MAX_DRAWS = 10_000


def is_held_out(prompt: str) -> bool:
    """True if a prompt belongs to the test split: one prompt in ten, by a hash of its text.

    The split depends only on the text, so a prompt never changes its split and splits can't
    overlap. The hash is BLAKE2. A CRC would give a biased choice, because its lowest bit is the
    parity of some bits of the text.
    """
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big") % 10 == 0


class Problem(NamedTuple):
    """A question and its answer, which become a task."""

    prompt: str
    answer: str
    meta: Mapping[str, Any] = {}
    seed: int = 0
    key: str = ""
    """Text that identifies the problem and determines its split; "" to use the prompt. A game whose
    first message is always the same needs a key: its secret, for example."""

    @property
    def identity(self) -> str:
        return self.key or self.prompt


class SingleTurn(Environment):
    """An environment whose episode ends after one answer to the task's messages."""

    name: str
    """The tag of the tasks, and the prefix of their ids."""
    replayable = True

    def demonstration(self, task: Task) -> Sequence[Message]:
        return (Message("assistant", str(task.answer)),)

    async def reset(self, task: Task) -> Sequence[Message]:
        return task.messages

    async def step(self, message: Message) -> Step:
        return Step(done=True)


class Procedural(SingleTurn):
    """An environment that generates its tasks with a pure function, `sample`.

    Training tasks are endless. Task i depends only on (seed, i), so a run can resume at any task.
    Prompts may repeat.

    Test tasks have distinct prompts that do not depend on the seed, so that the accuracies of runs
    can be compared. They end after MAX_DRAWS draws without a new held-out problem, so a rare
    problem may be missing.
    """

    @abstractmethod
    def sample(self, rng: random.Random) -> Problem | None:
        """Return a problem drawn with `rng`, the only source of randomness; None to draw again."""

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        return (Message("user", problem.prompt),)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return the tasks of a split from task `start` on.

        Iterating raises DataError if MAX_DRAWS draws in a row give no training prompt.
        """
        return (
            self._draw_train_tasks(seed, start)
            if split == "train"
            else itertools.islice(self._draw_test_tasks(), start, None)
        )

    def _draw_train_tasks(self, seed: int, start: int) -> Iterator[Task]:
        for index in itertools.count(start):
            rng = random.Random(f"{self.name}/train/{seed}/{index}")
            problem = next(
                (p for p in self._draw_problems(rng) if not is_held_out(p.identity)), None
            )
            if problem is None:
                raise DataError(
                    f"environment '{self.name}' found no training prompt in {MAX_DRAWS} draws: "
                    "widen its settings, or give each Problem a `key` if all have the same prompt"
                )
            yield self._make_task("train", index, problem)

    def _draw_test_tasks(self) -> Iterator[Task]:
        rng = random.Random(f"{self.name}/test")
        used_identities: set[str] = set()
        while True:
            problem = next(
                (
                    p
                    for p in self._draw_problems(rng)
                    if is_held_out(p.identity) and p.identity not in used_identities
                ),
                None,
            )
            if problem is None:
                return
            yield self._make_task("test", len(used_identities), problem)
            used_identities.add(problem.identity)

    def _draw_problems(self, rng: random.Random) -> Iterator[Problem]:
        for _ in range(MAX_DRAWS):
            problem = self.sample(rng)
            if isinstance(problem, Problem) and isinstance(problem.identity, str):
                yield problem
            elif isinstance(problem, Problem):
                raise DataError(
                    f"{type(self).__name__}.sample returned {problem!r:.80}. Its prompt and key "
                    "must be text"
                )
            elif problem is not None:
                raise DataError(
                    f"{type(self).__name__}.sample returned {problem!r:.80}, must be a Problem or "
                    "None"
                )

    def _make_task(self, split: Split, index: int, problem: Problem) -> Task:
        return Task(
            id=f"{self.name}/{split}/{index}",
            messages=self.messages(problem),
            answer=problem.answer,
            environment=self.name,
            seed=problem.seed,
            tag=self.name,
            meta=problem.meta,
        )


class Rows(SingleTurn):
    """An environment that takes its tasks from data.

    Training tasks are endless, and reshuffled in each pass. Test tasks come once, in the data's
    order. A task's id names its row, so a row has the same id in every pass.
    """

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Task]:
        """Return all tasks of a split. It is called often, so implementations should cache them."""

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Return the tasks of a split from task `start` on.

        Raises DataError, before iterating, if the split is empty.
        """
        rows = self.rows(split)
        if not rows:
            raise DataError(f"environment '{self.name}' has no rows for its {split} split")
        return self._repeat_rows(rows, seed, start) if split == "train" else iter(rows[start:])

    def task_count(self) -> int:
        return len(self.rows("train"))

    def _repeat_rows(self, rows: Sequence[Task], seed: int, start: int) -> Iterator[Task]:
        first_epoch, n_skipped = divmod(start, len(rows))
        for epoch in itertools.count(first_epoch):
            order = random.Random(f"{self.name}/train/{seed}/{epoch}").sample(
                range(len(rows)), len(rows)
            )
            yield from (rows[i] for i in order[n_skipped:])
            n_skipped = 0
