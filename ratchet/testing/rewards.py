"""Check any Reward with one call: `check_reward(reward, task, good="85", bad="86")`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.config.from_words import section_from_words
from ratchet.config.resolve import build
from ratchet.protocols import Reward
from ratchet.rewards.base import as_reward
from ratchet.rewards.weighted_sum import NOT_APPLICABLE
from ratchet.testing.harness import (
    BrokenRule,
    DeadlineCaller,
    break_services,
    kill_processes,
    list_children,
    require,
    run_supervised,
)
from ratchet.types import Failed, Message, Outcome, Scored, Task, Trajectory, Truncated

DEADLINE_S = 30.0
FAULT_DEADLINE_S = 2.0  # deadline of a call while services are out of reach
RECOVERY_CALLS = 3  # calls within which a reward must recover from a fault
SAMPLE = Task("check/0", (Message("user", "37+48="),), answer="85")
TEXTS = ("85", "86")


def conversation(messages: Sequence[Message], outcome: Outcome | None = None) -> Trajectory:
    """Return a trajectory without tokens, for a reward that judges its last message."""
    return replace(Trajectory.supervised([], [], messages=tuple(messages)), outcome=outcome)


def answered(task: Task, text: str, outcome: Outcome | None = None) -> Trajectory:
    """Return a trajectory of the task's messages, answered with `text`."""
    return conversation((*task.messages, Message("assistant", text)), outcome)


def check_reward(
    reward: Reward | str,
    task: Task | None = None,
    good: str | None = None,
    bad: str | None = None,
    *,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Raise AssertionError with the rule that a reward breaks.

    Args:
        reward: A reward, or its import path, `my_pkg.my_mod:thing`.
        task: The task to answer; default: the question "37+48=".
        good: An answer that must earn more than `bad`. If either is missing, this rule is not
            checked, and a made-up answer replaces it in the other rules.
        bad: See `good`.
        deadline_s: Time within which each call must end.
    """
    instance: Any = (
        as_reward(build(section_from_words("rewards", reward)))
        if isinstance(reward, str)
        else reward
    )
    for check in list_reward_checks(instance, task or SAMPLE, good, bad).values():
        run_supervised(check, deadline_s)


def list_reward_checks(
    reward: Reward, task: Task, good: str | None = None, bad: str | None = None
) -> Mapping[str, Callable[[DeadlineCaller], None]]:
    """Return the checks by name, in order. Each raises AssertionError.

    A check relies on the checks before it.
    """
    texts = (TEXTS[0] if good is None else good, TEXTS[1] if bad is None else bad)
    checks = _RewardChecks(
        reward,
        task,
        answered(task, texts[0]),
        answered(task, texts[1]),
        None not in (good, bad),
        list_children(),
    )

    def run(
        check: Callable[[_RewardChecks, DeadlineCaller], Any],
    ) -> Callable[[DeadlineCaller], None]:
        return lambda caller: asyncio.run(check(checks, caller))

    def check_protocol(caller: DeadlineCaller) -> None:
        require(
            hasattr(reward, "score"),
            f"{type(reward).__name__} lacks the method `score` of a Reward",
        )

    return {
        "protocol": check_protocol,
        "shapes and order": run(_RewardChecks.check_shapes),
        "same again": run(_RewardChecks.check_repeat),
        "cut-off answers": run(_RewardChecks.check_cut_off),
        "faults are no rewards": run(_RewardChecks.check_faults),
    }


@dataclass(frozen=True)
class _RewardChecks:
    """The reward under test with its task and two answers."""

    reward: Reward
    task: Task
    first_answer: Trajectory
    second_answer: Trajectory
    has_ranking: bool
    """True if `first_answer` must earn more than `second_answer`."""
    previous_children: set[int]
    """Child processes that existed before the checks; they are not killed."""

    async def check_shapes(self, caller: DeadlineCaller) -> None:
        high, low, twin = await self.rewards(
            caller, [self.first_answer, self.second_answer, self.first_answer]
        )
        is_ranked = high is not None and low is not None and high > low
        require(
            not self.has_ranking or is_ranked, f"the good answer earns {high}, the bad one {low}"
        )
        require(twin == high, f"the same answer earns {high} and {twin} in one group")
        swapped = await self.rewards(
            caller, [self.second_answer, self.first_answer, self.first_answer]
        )
        require(
            swapped == [low, high, high],
            "outcomes are not in the trajectories' order, or judging the same group again differs",
        )
        require(list(await self.score(caller, [])) == [], "an empty group must give no outcomes")
        await self.rewards(caller, [answered(self.task, "")])

    async def check_repeat(self, caller: DeadlineCaller) -> None:
        first = await self.rewards(
            caller, [self.first_answer, self.second_answer, self.first_answer]
        )
        second = await self.rewards(
            caller, [self.first_answer, self.second_answer, self.first_answer]
        )
        require(first == second, "judging the same group again differs")

    async def check_cut_off(self, caller: DeadlineCaller) -> None:
        (cut,) = await self.score(caller, [replace(self.first_answer, outcome=Truncated(None))])
        require(
            isinstance(cut, Truncated) or cut == NOT_APPLICABLE,
            f"a truncated trajectory must stay Truncated, not become {type(cut).__name__}",
        )

    async def check_faults(self, caller: DeadlineCaller) -> None:
        """Check that a fault gives Failed or the usual reward, never another reward.

        The faults are services out of reach and killed processes.
        """
        group = [self.first_answer, self.second_answer, self.first_answer]
        expected = await self.score(caller, group)
        with break_services():
            self.require_unchanged(
                expected, await self.score_with_timeout(caller, group), "out of reach"
            )
        await self.require_recovery(caller, group, expected)
        kill_processes(list_children() - self.previous_children)
        self.require_unchanged(expected, await self.score_or_fail(caller, group), "killed")
        await self.require_recovery(caller, group, expected)

    async def score_with_timeout(
        self, caller: DeadlineCaller, group: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        try:
            async with asyncio.timeout(FAULT_DEADLINE_S):
                return await self.score_or_fail(caller, group)
        except TimeoutError:  # endless retries count as Failed, as under a run's deadline
            return [Failed("timeout", f"nothing within {FAULT_DEADLINE_S:g} s")] * len(group)

    async def score_or_fail(
        self, caller: DeadlineCaller, group: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        try:
            return await self.score(caller, group)
        except BrokenRule:
            raise
        except Exception as error:  # raising is allowed: the attempts then fail and get no reward
            return [Failed("reward", str(error))] * len(group)

    async def require_recovery(
        self, caller: DeadlineCaller, group: Sequence[Trajectory], expected: Sequence[Outcome]
    ) -> None:
        outcomes = expected
        for _ in range(RECOVERY_CALLS):
            outcomes = await self.score_or_fail(caller, group)
            if list(outcomes) == list(expected):
                return
        require(
            False,
            f"{RECOVERY_CALLS} calls after a fault has passed, the reward gives {outcomes[0]}, not "
            f"{expected[0]}",
        )

    def require_unchanged(
        self, expected: Sequence[Outcome], outcomes: Sequence[Outcome], fault: str
    ) -> None:
        for expected_outcome, outcome in zip(expected, outcomes, strict=True):
            require(
                isinstance(outcome, Failed) or outcome == expected_outcome,
                f"with services and processes {fault} the reward gives {outcome}, without the "
                f"fault {expected_outcome}: an infrastructure fault is not a reward; let it "
                "raise, or give Failed",
            )

    async def score(
        self, caller: DeadlineCaller, trajectories: Sequence[Trajectory]
    ) -> Sequence[Outcome]:
        outcomes = await caller("score", lambda: self.reward.score(trajectories, self.task))
        require(
            isinstance(outcomes, Sequence),
            f"score gave {outcomes!r:.80}, it must be a sequence of outcomes",
        )
        require(
            len(outcomes) == len(trajectories),
            f"{len(outcomes)} outcomes for {len(trajectories)} trajectories",
        )
        return outcomes

    async def rewards(
        self, caller: DeadlineCaller, trajectories: Sequence[Trajectory]
    ) -> list[float | None]:
        """Return the rewards of finished trajectories; None where the reward does not apply."""
        totals: list[float | None] = []
        for outcome in await self.score(caller, trajectories):
            if outcome == NOT_APPLICABLE:
                totals.append(None)
                continue
            hint = (
                "; give a task that it can judge, and answers"
                if isinstance(outcome, Failed) and self.task is SAMPLE
                else ""
            )
            if not isinstance(outcome, Scored):
                raise BrokenRule(f"a finished trajectory must be Scored, not {outcome}{hint}")
            is_finite = math.isfinite(outcome.reward) and all(
                math.isfinite(part) for part in outcome.parts.values()
            )
            require(is_finite, f"{outcome} is not finite")
            totals.append(outcome.reward)
        return totals
