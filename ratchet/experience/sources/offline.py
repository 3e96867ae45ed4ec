"""Groups of given text: supervised rows, pairs, labelled answers, answers in labelled steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Literal

from ratchet.data.chat.renderer import Renderer, Tools
from ratchet.errors import ConfigError, DataError
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Compares, Judges, OffersTools, Steps
from ratchet.types import Group, Message, Scored, Task, Trajectory, Turn


class Writer:
    """Renders given text as trajectories. Raises DataError for one longer than the context.

    temperature: that it counts as sampled under, as nobody knows.
    """

    def __init__(self, renderer: Renderer, *, max_context: int, temperature: float = 1.0) -> None:
        self.renderer, self.max_context, self.temperature = renderer, max_context, temperature

    def row(
        self,
        task: Task,
        answer: Sequence[Message],
        reward: float | None = None,
        *,
        train: Literal["all", "last"] = "last",
        tools: Tools | None = None,
    ) -> Trajectory:
        """The task's messages and an answer; every turn of the assistant trains, or the last.
        tools: that were offered."""
        messages = (*task.messages, *answer)
        with _of(task):
            tokens, trainable = self.renderer.supervised(messages, tools, train=train)
            media = self.renderer.media(tokens, messages)
        return self._checked(
            task, Trajectory.supervised(tokens, trainable, messages=messages, media=media), reward
        )

    def stepped(self, task: Task, steps: Sequence[tuple[str, float]]) -> Trajectory:
        """An answer whose steps are tokenized each by itself; a step is a turn, and its label that
        turn's reward."""
        with _of(task):
            tokens = list(self.renderer.prompt(task.messages))
            media = self.renderer.media(tokens, task.messages)
        first, turns = len(tokens), list[Turn]()
        for text, label in steps:
            start = len(tokens)
            tokens += self.renderer.tokenizer.encode(text)
            turns.append(Turn(start, len(tokens), label))
        trajectory = Trajectory.supervised(
            tokens, [i >= first for i in range(len(tokens))], media=media
        )
        return replace(self._checked(task, trajectory, None), turns=tuple(turns))

    def _checked(self, task: Task, trajectory: Trajectory, reward: float | None) -> Trajectory:
        if len(trajectory) > self.max_context:
            size = f"{len(trajectory)} tokens, but the model holds {self.max_context}"
            raise DataError(f"{task.where}: {size}: shorten or drop it")
        outcome = None if reward is None else Scored(reward)
        return replace(trajectory, outcome=outcome, temperature=self.temperature)


@contextmanager
def _of(task: Task) -> Iterator[None]:
    """What is wrong with a task's messages names the task."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{task.where}: {error}") from error


class Rows(StreamSource):
    """Supervised rows: each task with the messages that solve it."""

    def __init__(
        self, stream: TaskStream, name: str, writer: Writer, *, train: Literal["all", "last"]
    ) -> None:
        super().__init__(stream, name)
        self.writer = writer
        self.train: Literal["all", "last"] = train

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return [Group(name, task, (self._row(task),)) for name, task in jobs]

    def _row(self, task: Task) -> Trajectory:
        environment = self.stream.environment
        tools = (environment.tools(task) or None) if isinstance(environment, OffersTools) else None
        return self.writer.row(task, environment.demonstration(task), train=self.train, tools=tools)


class JudgedSource(StreamSource):
    """wants: the protocol that the stream's environment must follow. Raises ConfigError where it
    doesn't."""

    wants: type

    def __init__(self, stream: TaskStream, name: str, writer: Writer) -> None:
        super().__init__(stream, name)
        self.writer = writer
        if not isinstance(stream.environment, self.wants):
            method = next(name for name in vars(self.wants) if not name.startswith("_"))
            raise ConfigError(
                f"environment {type(stream.environment).__name__} has no {method}(task), which "
                "this algorithm learns from: "
                "give it one, or use an environment that has it (preferences reads them from a "
                "file)"
            )


class Pairs(JudgedSource):
    """A better and a worse answer to each task, the better one first."""

    wants = Compares

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return [Group(name, task, self.pair(task)) for name, task in jobs]

    def pair(self, task: Task) -> tuple[Trajectory, ...]:
        environment = self.stream.environment
        assert isinstance(environment, Compares)
        pair = environment.comparison(task)
        chosen, rejected = pair.rewards or (None, None)
        return self.writer.row(task, pair.chosen, chosen), replace(
            self.writer.row(task, pair.rejected, rejected), attempt=1
        )


class Labelled(JudgedSource):
    """One answer a task, with its reward; with `reference_rows` also the answer to another task of
    the draw, for KTO's reference point. Raises DataError for a draw of a single task then: there is
    no other."""

    wants = Judges

    def __init__(
        self, stream: TaskStream, name: str, writer: Writer, *, reference_rows: bool
    ) -> None:
        super().__init__(stream, name, writer)
        self.reference_rows = reference_rows

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        environment = self.stream.environment
        assert isinstance(environment, Judges)
        answers = [environment.judged(task) for _, task in jobs]
        groups = []
        for index, ((name, task), answer) in enumerate(zip(jobs, answers, strict=True)):
            rows = [self.writer.row(task, answer.messages, answer.reward)]
            if self.reference_rows:
                other = answers[_another(index, [task.messages for _, task in jobs])]
                rows.append(
                    replace(self.writer.row(task, other.messages), attempt=1, use="reference")
                )
            groups.append(Group(name, task, tuple(rows)))
        return groups


def _another(index: int, prompts: Sequence[Sequence[Message]]) -> int:
    """The next one, around the end, with another prompt."""
    for step in range(1, len(prompts)):
        other = (index + step) % len(prompts)
        if prompts[other] != prompts[index]:
            return other
    raise DataError(
        "KTO compares each answer with one to another prompt, and a draw holds no other: raise "
        "batch_size"
    )


class Stepped(JudgedSource):
    """One answer a task, in labelled steps."""

    wants = Steps

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        environment = self.stream.environment
        assert isinstance(environment, Steps)
        return [
            Group(name, task, (self.writer.stepped(task, environment.steps(task)),))
            for name, task in jobs
        ]
