"""Bases for environments of one prompt and one answer. They only serve tasks: judging the answer is
a reward's work.

`Procedural` makes tasks from a pure function, `SupervisedSource` serves them from data.
"""

from __future__ import annotations

import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.types import Message, Split, Task

TRIES = 10_000  # fruitless draws in a row after which a procedural environment counts as exhausted


def held_out(prompt: str) -> bool:
    """Return True if a prompt belongs to the test split: one in ten, by a hash of its own text.

    No seed, no position and no size of the data enters, so a prompt never changes sides and the
    splits can't overlap. BLAKE2 rather than a CRC: the parity of a CRC is a parity of the text's
    bits, so one in ten by it would be a biased pick.
    """
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest(), "big") % 10 == 0


class Problem(NamedTuple):
    """key: what tells it from others, and says which split it is of, where its prompt alone does
    not."""

    prompt: str
    answer: str
    meta: Mapping[str, Any] = {}
    seed: int = 0
    key: str = ""

    @property
    def identity(self) -> str:
        return self.key or self.prompt


class SingleTurn(ABC):
    """The episode is: the task's messages, one answer, end. `name` begins the ids of its tasks and
    is their tag."""

    name: str
    replayable = True

    @abstractmethod
    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]: ...

    def demonstration(self, task: Task) -> Sequence[Message]:
        return (Message("assistant", str(task.answer)),)

    async def reset(self, task: Task) -> Sequence[Message]:
        return task.messages

    async def step(self, message: Message) -> Step:
        return Step(done=True)

    async def close(self) -> None:
        return None


class Procedural(SingleTurn):
    """Endless tasks from one pure function, `sample`.

    Train task i is a function of (seed, i) alone, so restarting costs nothing; its prompts may
    repeat. Test tasks are distinct prompts, the same for every seed, so that accuracies compare
    between runs; they end where the held-out space does (the last few prompts of a small one may be
    left out, always the same).
    """

    @abstractmethod
    def sample(self, rng: random.Random) -> Problem | None:
        """One problem drawn with `rng`, the only source of chance; None where this draw gave none
        (it is tried again)."""

    def messages(self, problem: Problem) -> tuple[Message, ...]:
        return (Message("user", problem.prompt),)

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Raises DataError, while iterating, when TRIES draws in a row give no training prompt."""
        return (
            self._train(seed, start)
            if split == "train"
            else itertools.islice(self._test(), start, None)
        )

    def _train(self, seed: int, start: int) -> Iterator[Task]:
        for index in itertools.count(start):
            rng = random.Random(f"{self.name}/train/{seed}/{index}")
            problem = next((p for p in self._draws(rng) if not held_out(p.identity)), None)
            if problem is None:
                raise DataError(
                    f"environment '{self.name}' found no training prompt in {TRIES} draws: widen "
                    "its settings"
                )
            yield self._task("train", index, problem)

    def _test(self) -> Iterator[Task]:
        rng = random.Random(f"{self.name}/test")
        seen: set[str] = set()
        while True:
            problem = next(
                (p for p in self._draws(rng) if held_out(p.identity) and p.identity not in seen),
                None,
            )
            if problem is None:
                return
            yield self._task("test", len(seen), problem)
            seen.add(problem.identity)

    def _draws(self, rng: random.Random) -> Iterator[Problem]:
        for _ in range(TRIES):
            problem = self.sample(rng)
            if isinstance(problem, Problem):
                yield problem
            elif problem is not None:
                raise DataError(
                    f"{type(self).__name__}.sample returned {problem!r:.80}, it must be a Problem "
                    "or None"
                )

    def _task(self, split: Split, index: int, problem: Problem) -> Task:
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
    """Tasks from data: train without end, in an order shuffled anew for each pass; test once, in
    the data's order.

    A task's id names its row, so a row met again in a later pass has the id that it had before.
    """

    @abstractmethod
    def rows(self, split: Split) -> Sequence[Task]:
        """All tasks of a split; called again and again, so an implementation keeps them."""

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        """Raises DataError, before iterating, when the split is empty."""
        rows = self.rows(split)
        if not rows:
            raise DataError(f"environment '{self.name}' has no rows for its {split} split")
        return self._passes(rows, seed, start) if split == "train" else iter(rows[start:])

    def _passes(self, rows: Sequence[Task], seed: int, start: int) -> Iterator[Task]:
        first, skip = divmod(start, len(rows))
        for epoch in itertools.count(first):
            order = random.Random(f"{self.name}/train/{seed}/{epoch}").sample(
                range(len(rows)), len(rows)
            )
            yield from (rows[i] for i in order[skip:])
            skip = 0
