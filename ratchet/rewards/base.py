"""The base of rewards that judge each trajectory by itself, and the adapter that makes one of a
plain function."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ratchet.errors import ConfigError, DataError
from ratchet.protocols import HasFinalAnswers, Reward
from ratchet.types import Cancelled, Failed, Outcome, Scored, Task, Trajectory, Truncated, finite

# named parts sum to the reward; those of Scored need not
Verdict = float | Mapping[str, float] | Scored
RewardFunction = Callable[[Trajectory, Task], Verdict | Awaitable[Verdict]]

ROUNDING = 1e-9  # parts that sum to a bound may pass it by this


class PerTrajectory(ABC):
    """Scores the trajectories of a group one by one; one that can't be judged fails alone.

    `name` is what a verdict of a single number is logged under, `label` what messages call the
    reward. A verdict outside `bounds`, where they are declared, is the reward's own bug.
    """

    name: str
    bounds: tuple[float, float] | None = None
    together = False  # see `Reward`

    @property
    def label(self) -> str:
        return f"{type(self).__module__}:{type(self).__qualname__}"

    @abstractmethod
    def judge(self, trajectory: Trajectory, task: Task) -> Verdict | Awaitable[Verdict]:
        """The reward, or its named parts. `trajectory.messages` is the whole conversation, the
        judged message last; `trajectory.outcome` is None, or Truncated when a budget cut it off."""

    async def score(self, trajectories: Sequence[Trajectory], task: Task) -> Sequence[Outcome]:
        """Scored, or Truncated with a reward where the trajectory was cut off; Failed("reward")
        where judging raised or gave no finite number; what had already failed or was cancelled
        stays as it is."""
        if len(trajectories) == 1:  # the usual case needs no task of its own
            return [await self._outcome(trajectories[0], task)]
        return await asyncio.gather(
            *(self._outcome(trajectory, task) for trajectory in trajectories)
        )

    async def _outcome(self, trajectory: Trajectory, task: Task) -> Outcome:
        if isinstance(trajectory.outcome, Failed | Cancelled):
            return trajectory.outcome
        try:
            verdict = self.judge(trajectory, task)
            if not isinstance(verdict, float) and inspect.isawaitable(verdict):
                verdict = await verdict
            total, parts = self._judged(verdict)
        # the episode boundary: a reward is anyone's code, and its bug must cost one attempt, not
        # the run
        except Exception:
            return Failed(
                "reward", f"reward {self.label}, task '{task.id}':\n{traceback.format_exc()}"
            )
        kind = Truncated if isinstance(trajectory.outcome, Truncated) else Scored
        return kind(total, parts)

    def _judged(self, verdict: Any) -> tuple[float, dict[str, float]]:
        total: Any = None
        named: Mapping[str, Any]
        if isinstance(verdict, Scored):
            total, named = verdict.reward, verdict.parts
        else:
            named = verdict if isinstance(verdict, Mapping) else {self.name: verdict}
        values = list(named.values()) if total is None else [*named.values(), total]
        if not values or not all(map(finite, values)) or not math.isfinite(sum(values)):
            raise DataError(
                f"reward {self.label} returned {repr(verdict)[:200]}: it must return a finite "
                "float, "
                "or a dict of named parts that are finite floats"
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
        return float(total), {str(name): float(value) for name, value in named.items()}


class FunctionReward(PerTrajectory):
    """Adapts `(trajectory, task) -> float | dict of named parts`, plain or async, to the Reward
    protocol."""

    def __init__(self, function: RewardFunction, name: str = "") -> None:
        plain: Any = function
        while isinstance(plain, functools.partial):
            plain = plain.func
        # an object with __call__ has its class's name
        named = plain if hasattr(plain, "__qualname__") else type(plain)
        self.function = function
        self.name = name or named.__name__
        self._label = f"{named.__module__}:{named.__qualname__}"

    @property
    def label(self) -> str:
        return self._label

    def judge(self, trajectory: Trajectory, task: Task) -> Verdict | Awaitable[Verdict]:
        return self.function(trajectory, task)


class AnswerReward(PerTrajectory):
    """Judges the text of the final answer; a trajectory that was cut off before it finished earns
    0."""

    def judge(self, trajectory: Trajectory, task: Task) -> Verdict | Awaitable[Verdict]:
        text = answer_text(trajectory)
        return 0.0 if isinstance(trajectory.outcome, Truncated) else self.grade(text, task)

    @abstractmethod
    def grade(self, text: str, task: Task) -> Verdict | Awaitable[Verdict]:
        """Wrong and malformed text is 0, never an exception: an exception says that the task itself
        is broken."""


class FinalAnswer(AnswerReward):
    """One that reads the answer out of the text, and so can say which it is (`HasFinalAnswers`)."""

    @abstractmethod
    def answer(self, text: str) -> str | None:
        """Return the answer in one spelling for what means the same; None if there is none."""

    def vote(self, trajectory: Trajectory, task: Task) -> str | None:
        return (
            None
            if isinstance(trajectory.outcome, Truncated)
            else self.answer(answer_text(trajectory)) or None
        )


def voter(reward: Reward | None, task: Task) -> HasFinalAnswers | None:
    """Return the part of a reward that names the answers of attempts at this task; None if there is
    none."""
    if isinstance(reward, HasFinalAnswers):
        return reward
    delegate = getattr(reward, "voter", None)
    return None if delegate is None else delegate(task)


def answer_text(trajectory: Trajectory) -> str:
    """Text of the last assistant message. Raises DataError where there is none."""
    for message in reversed(trajectory.messages):
        if message.role == "assistant":
            return message.text
    raise DataError("the trajectory has no assistant message to judge")


def as_reward(reward: Reward | RewardFunction, name: str = "") -> Reward:
    """`reward` itself where it already follows the protocol; a function adapted. Raises ConfigError
    for anything else."""
    if isinstance(reward, Reward):
        return reward
    if not callable(reward):
        raise ConfigError(
            f"{reward!r} is no reward: give a function (trajectory, task) -> float, or an object "
            "with `score`"
        )
    return FunctionReward(reward, name)
