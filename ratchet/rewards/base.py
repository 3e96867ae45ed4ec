"""Base classes of rewards that judge each trajectory by itself, and an adapter for functions."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ratchet.errors import ConfigError, DataError
from ratchet.protocols import Reward
from ratchet.types import (
    Cancelled,
    Failed,
    Message,
    Outcome,
    Scored,
    Task,
    Trajectory,
    Truncated,
    is_finite_number,
)
from ratchet.utils.user_code import (
    format_user_error,
    get_current_task,
    guard_process,
    is_closing,
    is_user_error,
)
from ratchet.utils.user_parts import add_missing_members

# The parts of a mapping sum to the reward; the parts of Scored need not.
Verdict = float | Mapping[str, float] | Scored
RewardFunction = Callable[[Trajectory, Task], Verdict | Awaitable[Verdict]]

IMMUTABLE_TYPES = frozenset({str, int, float, bool, bytes, type(None)})  # need no copy
ROUNDING = 1e-9  # a sum of parts may exceed a bound by this much


class PerTrajectory(Reward):
    """A reward that judges the trajectories of a group one by one.

    A trajectory that can't be judged fails without the rest of its group.
    """

    name: str  # a verdict that is a single number is logged under this name
    # A verdict outside these bounds is a bug of the reward: the attempt fails. None: no bounds.
    bounds: tuple[float, float] | None = None
    compares_attempts = False  # each attempt is judged by its own call, as soon as it ends

    @property
    def label(self) -> str:
        """Return the name of the reward in error messages."""
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @abstractmethod
    def judge(self, trajectory: Trajectory, task: Task) -> Verdict | Awaitable[Verdict]:
        """Return the reward, or its named parts.

        `trajectory.messages` is the whole conversation, the judged message last.
        `trajectory.outcome` is None, or Truncated if a budget cut the trajectory off.
        """

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Return an outcome for each trajectory.

        The outcome is Scored, or Truncated with a reward if the trajectory was cut off. It is
        Failed("reward") if judging raised an exception, or if the reward is not finite or is out of
        bounds. A trajectory that had failed or was cancelled keeps its outcome.
        """
        # `compares_attempts` is False, so most calls have one trajectory, which needs no asyncio
        # task.
        if len(trajectories) == 1:
            return [await self._judge_one(trajectories[0], task)]
        return await asyncio.gather(
            *(self._judge_one(trajectory, task) for trajectory in trajectories)
        )

    async def _judge_one(self, trajectory: Trajectory, task: Task) -> Outcome:
        if isinstance(trajectory.outcome, Failed | Cancelled):
            return trajectory.outcome
        running_task = get_current_task()
        try:
            with guard_process(f"reward {self.label}"):
                verdict = self.judge(trajectory, task)
                if not isinstance(verdict, float) and inspect.isawaitable(verdict):
                    verdict = await verdict
            total, parts = self._check_verdict(verdict)
        # Users write rewards: a bug in one must cost an attempt, not the run.
        except BaseException as error:
            if not is_user_error(error) or is_closing(error, running_task):
                raise
            text = format_user_error()
            # An exception that a reward keeps and raises again gathers the frames of every attempt.
            error.__traceback__ = None
            return Failed("reward", f"reward {self.label}, task '{task.id}':\n{text}")
        outcome_type = Truncated if isinstance(trajectory.outcome, Truncated) else Scored
        return outcome_type(total, parts)

    def _check_verdict(self, verdict: Any) -> tuple[float, dict[str, float]]:
        """Return the total and the named parts of a verdict. Raises DataError for a bad one."""
        total: Any = None
        parts: Mapping[str, Any]
        if isinstance(verdict, Scored):
            total, parts = verdict.reward, verdict.parts
        else:
            parts = verdict if isinstance(verdict, Mapping) else {self.name: verdict}
        values = list(parts.values()) if total is None else [*parts.values(), total]
        # Only `float` tells what is computed with: `__add__` may be user code.
        if (
            not values
            or not all(map(is_finite_number, values))
            or not math.isfinite(sum(map(float, values)))
        ):
            raise DataError(
                f"reward {self.label} returned {repr(verdict)[:200]}: it must return a finite "
                "float, or a dict of named parts that are finite floats"
            )
        total = sum(values) if total is None else total
        if (
            self.bounds is not None
            and not self.bounds[0] - ROUNDING <= total <= self.bounds[1] + ROUNDING
        ):
            low, high = self.bounds
            raise DataError(
                f"reward {self.label} returned {total}, outside its declared bounds {low} to {high}"
            )
        return float(total), {str(name): float(value) for name, value in parts.items()}


class FunctionReward(PerTrajectory):
    """A reward that calls `(trajectory, task) -> float | dict of named parts`, plain or async."""

    def __init__(self, function: RewardFunction, name: str = "") -> None:
        unwrapped: Any = function
        while isinstance(unwrapped, functools.partial):
            unwrapped = unwrapped.func
        # A callable object is named after its class.
        definition = unwrapped if hasattr(unwrapped, "__qualname__") else type(unwrapped)
        self.function = function
        self.name = name or definition.__name__
        self._label = f"{definition.__module__}:{definition.__qualname__}"

    @property
    def label(self) -> str:
        return self._label

    def judge(self, trajectory: Trajectory, task: Task) -> Verdict | Awaitable[Verdict]:
        return self.function(trajectory, copy_task(task))


class AnswerReward(PerTrajectory):
    """A reward that judges the text of the last message; a truncated trajectory earns 0."""

    def judge(self, trajectory: Trajectory, task: Task) -> Verdict | Awaitable[Verdict]:
        text = answer_text(trajectory)  # raises if there is none, even for a truncated trajectory
        return 0.0 if isinstance(trajectory.outcome, Truncated) else self.grade(text, task)

    @abstractmethod
    def grade(self, text: str, task: Task) -> Verdict | Awaitable[Verdict]:
        """Return the reward of a text.

        Wrong or malformed text earns 0. Raise an exception only if the task itself is broken.
        """


class FinalAnswer(AnswerReward):
    """An answer reward that extracts the answer from the text, also for majority voting."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """Return the answer in a canonical form, so that equivalent answers are equal texts.

        None if the text has no answer.
        """

    def extract_final_answer(self, trajectory: Trajectory, task: Task) -> str | None:
        return (
            None
            if isinstance(trajectory.outcome, Truncated)
            else self.answer(answer_text(trajectory)) or None
        )


def answer_text(trajectory: Trajectory) -> str:
    """Return the text of the assistant's last message. Raises DataError if it wrote none."""
    for message in reversed(trajectory.messages):
        if message.role == "assistant":
            return message.text
    raise DataError("the trajectory has no assistant message to judge")


def list_policy_messages(trajectory: Trajectory) -> list[Message]:
    """Return the messages that the policy wrote.

    Assistant messages of the prompt, such as worked examples, are left out. If a conversation was
    not played, only its last assistant message counts. Raises DataError if there is none.
    """
    n_turns = int(trajectory.metrics.get("turns", 0)) or len(trajectory.turns) or 1
    replies = [message for message in trajectory.messages if message.role == "assistant"]
    if not replies:
        raise DataError("the trajectory has no assistant message to judge")
    return replies[-n_turns:]


def copy_task(task: Task) -> Task:
    """Return a copy of the task whose mutable parts belong to one attempt.

    User code may change these parts in place, which must affect neither other attempts nor other
    rewards. This takes a third of the time of `replace` with deep copies.
    """
    answer = task.answer if type(task.answer) in IMMUTABLE_TYPES else copy.deepcopy(task.answer)
    is_flat = type(task.meta) is dict and IMMUTABLE_TYPES.issuperset(map(type, task.meta.values()))
    meta = dict(task.meta) if is_flat else copy.deepcopy(task.meta)
    return Task(task.id, task.messages, answer, task.environment, task.seed, task.tag, meta)


def as_reward(reward: Reward | RewardFunction, name: str = "") -> Reward:
    """Return `reward` with all members of `Reward`, or a function as a FunctionReward.

    Raises ConfigError for anything else.
    """
    # A user's class need not derive from `Reward`.
    if hasattr(reward, "score"):
        return add_missing_members(reward, Reward)
    if not callable(reward):
        raise ConfigError(
            f"{reward!r} is not a reward: give a function (trajectory, task) -> float, or an "
            "object with `score`"
        )
    return FunctionReward(reward, name)
