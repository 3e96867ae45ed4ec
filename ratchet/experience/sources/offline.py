"""Sources of existing text: supervised rows, preference pairs, labelled answers, labelled steps."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ratchet.data.chat.renderer import Renderer, Tools
from ratchet.data.chat.task_variables import get_task_renderer
from ratchet.errors import ConfigError, DataError, RowTooLong
from ratchet.experience.rollout.history import split_turns
from ratchet.experience.sources.rollouts import StreamSource
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Environment
from ratchet.types import Group, Message, Scored, Task, TrainedTokens, Trajectory, Turn


class TextRenderer:
    """A renderer that turns existing text into trajectories.

    Raises RowTooLong for text longer than `max_context` tokens. Trajectories record `temperature`
    as their sampling temperature, because the real one is unknown.
    """

    def __init__(self, renderer: Renderer, *, max_context: int, temperature: float = 1.0) -> None:
        self.renderer = renderer
        self.max_context = max_context
        self.temperature = temperature

    def row(
        self,
        task: Task,
        answer: Sequence[Message],
        reward: float | None = None,
        *,
        train: TrainedTokens = "last",
        tools: Tools | None = None,
    ) -> Trajectory:
        """Return a trajectory of a task's messages and an answer.

        A task without messages is plain text: only its answer is used, without the chat template.

        Args:
            task: The task.
            answer: The messages that follow the task's.
            reward: The reward of the answer, if it has one.
            train: The tokens that train.
            tools: The tools that were offered.
        """
        messages = (*task.messages, *answer)
        if not task.messages:
            with _prefix_errors_with_task(task):
                text_row = self._plain_text(answer[-1].text)
            return self._finish(task, text_row, reward)
        with _prefix_errors_with_task(task):
            renderer = get_task_renderer(self.renderer, task)
            tokens, trainable = renderer.supervised(messages, tools, train=train)
            media = renderer.media(tokens, messages)
        return self._finish(
            task, Trajectory.supervised(tokens, trainable, messages=messages, media=media), reward
        )

    def _plain_text(self, text: str) -> Trajectory:
        """Return a trajectory that trains on a whole text, and on its end.

        Control tokens written in the text become those tokens. BOS is put before the text if the
        tokenizer adds it, and EOS after it. The first token does not train, because no token
        precedes it.
        """
        tokenizer = self.renderer.tokenizer
        tokens = tokenizer.encode(text, allow_special=True)
        if tokenizer.adds_bos and tokens[:1] != [tokenizer.bos_id]:
            assert tokenizer.bos_id is not None
            tokens.insert(0, tokenizer.bos_id)
        if tokenizer.eos_ids and tokens[-1:] != [tokenizer.eos_ids[0]]:
            tokens.append(tokenizer.eos_ids[0])
        return Trajectory.supervised(
            tokens,
            [i > 0 for i in range(len(tokens))],
            messages=(Message("assistant", text),),
        )

    def row_from_steps(self, task: Task, steps: Sequence[tuple[str, float]]) -> Trajectory:
        """Return a trajectory of an answer in labelled steps.

        Each step is tokenized separately and becomes a turn, with its label as the turn's reward.
        """
        with _prefix_errors_with_task(task):
            renderer = get_task_renderer(self.renderer, task)
            tokens = list(renderer.prompt(task.messages))
            media = renderer.media(tokens, task.messages)
        prompt_length = len(tokens)
        turns: list[Turn] = []
        for text, label in steps:
            start = len(tokens)
            tokens += self.renderer.tokenizer.encode(text)
            turns.append(Turn(start, len(tokens), label))
        trajectory = Trajectory.supervised(
            tokens, [i >= prompt_length for i in range(len(tokens))], media=media
        )
        return replace(self._finish(task, trajectory, None), turns=tuple(turns))

    def _finish(self, task: Task, trajectory: Trajectory, reward: float | None) -> Trajectory:
        if len(trajectory) > self.max_context:
            size = f"{len(trajectory)} tokens, but the model holds {self.max_context}"
            raise RowTooLong(f"{task.where}: {size}: shorten or drop it")
        outcome = None if reward is None else Scored(reward)
        return replace(trajectory, outcome=outcome, temperature=self.temperature)


@contextmanager
def _prefix_errors_with_task(task: Task) -> Iterator[None]:
    """Prefix DataErrors inside the block with the task's location."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{task.where}: {error}") from error


class RowSource(StreamSource):
    """A source of groups that follow from their tasks alone."""

    def __init__(self, stream: TaskStream, name: str, text_renderer: TextRenderer) -> None:
        super().__init__(stream, name)
        self.text_renderer = text_renderer

    @abstractmethod
    def rows(self, task: Task) -> tuple[Trajectory, ...]:
        """Return the rows of a task. Raises RowTooLong for a row longer than the context."""

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        return [Group(group_id, task, self.rows(task)) for group_id, task in jobs]

    def check_length(self, task: Task) -> None:
        self.rows(task)


class SupervisedSource(RowSource):
    """A source of supervised rows: each is a task with its demonstration.

    With a `history_window`, each turn of a demonstration is a row, with the prompt that the turn
    has in rollouts.
    """

    def __init__(
        self,
        stream: TaskStream,
        name: str,
        text_renderer: TextRenderer,
        *,
        train: TrainedTokens,
        history_window: int | None = None,
    ) -> None:
        super().__init__(stream, name, text_renderer)
        self.train: TrainedTokens = train
        self.history_window = history_window

    def rows(self, task: Task) -> tuple[Trajectory, ...]:
        environment = self.stream.environment
        tools = environment.tools(task) or None
        demonstration = environment.demonstration(task)
        has_end = bool(demonstration) and demonstration[-1].role == "assistant"
        if self.history_window is None or not task.messages or not has_end:
            # This refuses a demonstration without an answer at its end.
            return (self.text_renderer.row(task, demonstration, train=self.train, tools=tools),)
        turns = split_turns(demonstration)
        n_before = len(demonstration) - sum(map(len, turns))
        first = (*task.messages, *demonstration[:n_before])
        # Earlier answers train in rows of their own.
        train = "text" if self.train == "text" else "last"
        rows: list[Trajectory] = []
        for i in range(len(turns) - 1 if self.train == "last" else 0, len(turns)):
            past_turns = turns[max(0, i - self.history_window) : i]
            prompt = tuple(environment.observe(task, first, past_turns))
            answer = [message for message in turns[i] if message.role in ("assistant", "inline")]
            step = replace(task, messages=prompt)
            rows.append(self.text_renderer.row(step, answer, train=train, tools=tools))
        return tuple(rows)


class AnswerSource(RowSource):
    """A source of answers that the environment supplies.

    The constructor raises ConfigError if the stream's environment supplies none.
    """

    method: str
    """The method of the environment that returns an answer."""

    @staticmethod
    @abstractmethod
    def has_answers(environment: Environment) -> bool:
        """Return True if the environment supplies answers of this kind."""

    def __init__(self, stream: TaskStream, name: str, text_renderer: TextRenderer) -> None:
        super().__init__(stream, name, text_renderer)
        if not self.has_answers(stream.environment):
            name = type(stream.environment).__name__
            raise ConfigError(
                f"environment {name} has no {self.method}(task), which "
                "this algorithm learns from. Add it, or use an environment that has it (such as "
                "preferences, which reads a file)"
            )


class PairSource(AnswerSource):
    """A source of a better and a worse answer to each task, the better one first."""

    method = "comparison"

    @staticmethod
    def has_answers(environment: Environment) -> bool:
        return environment.has_pairs

    def rows(self, task: Task) -> tuple[Trajectory, ...]:
        pair = self.stream.environment.comparison(task)
        chosen, rejected = pair.rewards or (None, None)
        return self.text_renderer.row(task, pair.chosen, chosen), replace(
            self.text_renderer.row(task, pair.rejected, rejected), attempt=1
        )


class LabelledSource(AnswerSource):
    """A source of one answer with its reward for each task.

    With `uses_mismatched_pairs` each group also pairs its task with the answer to another prompt of
    the draw, for KTO's reference point. A draw with only one prompt then raises DataError.
    """

    method = "labelled_answer"

    @staticmethod
    def has_answers(environment: Environment) -> bool:
        return environment.has_labelled_answers

    def __init__(
        self,
        stream: TaskStream,
        name: str,
        text_renderer: TextRenderer,
        *,
        uses_mismatched_pairs: bool,
    ) -> None:
        super().__init__(stream, name, text_renderer)
        self.uses_mismatched_pairs = uses_mismatched_pairs

    def rows(self, task: Task) -> tuple[Trajectory, ...]:
        answer = self.stream.environment.labelled_answer(task)
        return (self.text_renderer.row(task, answer.messages, answer.reward),)

    async def make(self, jobs: Sequence[tuple[str, Task]], version: int) -> list[Group]:
        environment = self.stream.environment
        answers = [environment.labelled_answer(task) for _, task in jobs]
        groups = []
        for index, ((group_id, task), answer) in enumerate(zip(jobs, answers, strict=True)):
            rows = [self.text_renderer.row(task, answer.messages, answer.reward)]
            if self.uses_mismatched_pairs:
                prompts = [task.messages for _, task in jobs]
                mismatched_answer = answers[_find_other_prompt(index, prompts)]
                mismatched_row = self.text_renderer.row(task, mismatched_answer.messages)
                rows.append(replace(mismatched_row, attempt=1, use="reference"))
            groups.append(Group(group_id, task, tuple(rows)))
        return groups


def _find_other_prompt(index: int, prompts: Sequence[Sequence[Message]]) -> int:
    """Return the index of the next different prompt, cyclically.

    Raises DataError if all prompts are the same.
    """
    for step in range(1, len(prompts)):
        other = (index + step) % len(prompts)
        if prompts[other] != prompts[index]:
            return other
    raise DataError(
        "KTO compares each answer with an answer to another prompt, but a draw has only one "
        "prompt. Raise batch_size"
    )


class SteppedSource(AnswerSource):
    """A source of one answer in labelled steps for each task."""

    method = "steps"

    @staticmethod
    def has_answers(environment: Environment) -> bool:
        return environment.has_step_labels

    def rows(self, task: Task) -> tuple[Trajectory, ...]:
        return (self.text_renderer.row_from_steps(task, self.stream.environment.steps(task)),)
