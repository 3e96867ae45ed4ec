"""Evaluate the policy on held-out tasks, once greedily and with several sampled attempts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ratchet.evals.results import (
    AttemptEnd,
    AttemptResult,
    EvalResults,
    PromptResult,
    hash_task,
    shorten_prompt,
)
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.protocols import HasFinalAnswers
from ratchet.rewards.base import find_voter
from ratchet.types import Cancelled, Failed, Group, Sampling, Scored, Task, Trajectory, Truncated

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluator:
    """An evaluation of the policy by the rewards of its answers.

    Attributes:
        manager: The manager that plays and judges the attempts. Its rewards are `eval_rewards`, by
            default the environment's own reward, which reward shaping does not change.
        tasks: The held-out tasks.
        sampling: The sampling parameters of the sampled attempts.
        samples: Number of sampled attempts per task.
        greedy: True to add one greedy attempt per task.
        pass_threshold: The reward from which an attempt counts as passed.
    """

    manager: RolloutManager
    tasks: Sequence[Task]
    sampling: Sampling
    samples: int = 0
    greedy: bool = True
    pass_threshold: float = 1.0

    # Accuracies of two stages are compared only if their evaluators measure the same.
    measures = frozenset({"answers of the policy"})

    @property
    def managers(self) -> Sequence[RolloutManager]:
        return (self.manager,)

    async def run(self) -> EvalResults:
        """Play all attempts and return the results."""
        jobs = [(f"eval/{task.id}", task) for task in self.tasks]
        greedy: list[Group] = []
        sampled: list[Group] = []
        if self.greedy:
            greedy = await self.manager.groups(
                jobs, replace(self.sampling, temperature=0.0), attempts=1
            )
        if self.samples:
            sampled = await self.manager.groups(jobs, self.sampling, attempts=self.samples)
        prompts = [
            self._evaluate_prompt(task, greedy[i : i + 1], sampled[i : i + 1])
            for i, task in enumerate(self.tasks)
        ]
        results = EvalResults(tuple(prompts), self.pass_threshold)
        _warn_about_failures(results)
        return results

    def _evaluate_prompt(
        self, task: Task, greedy: Sequence[Group], sampled: Sequence[Group]
    ) -> PromptResult:
        voting_reward = find_voter(self.manager.reward, task)

        def attempts(groups: Sequence[Group]) -> tuple[AttemptResult, ...]:
            return tuple(
                _record_attempt(rows, voting_reward, task)
                for group in groups
                for rows in group.attempts
            )

        greedy_attempt = next(iter(attempts(greedy)), None)
        return PromptResult(
            task.id,
            task.tag,
            hash_task(task),
            voting_reward is not None,
            greedy_attempt,
            attempts(sampled),
            shorten_prompt(task),
        )


def _record_attempt(
    rows: Sequence[Trajectory], voting_reward: HasFinalAnswers | None, task: Task
) -> AttemptResult:
    """Return the record of an attempt.

    Args:
        rows: The trajectories of the attempt. The last one has the whole conversation.
        voting_reward: The reward that extracts final answers, if there is one.
        task: The task of the attempt.
    """
    row = rows[-1]
    answer = None if voting_reward is None or row.reward is None else voting_reward.vote(row, task)
    replies = [message.text for message in row.messages if message.role == "assistant"]
    detail = ""
    if isinstance(row.outcome, Failed):
        detail = f"{row.outcome.kind}: {row.outcome.detail}"
    tokens = sum(trajectory.completion_length for trajectory in rows)
    return AttemptResult(
        _describe_end(row), row.reward, answer, tokens, replies[-1] if replies else "", detail
    )


def _describe_end(row: Trajectory) -> AttemptEnd:
    if isinstance(row.outcome, Scored):
        return "scored"
    if isinstance(row.outcome, Failed):
        return "failed"
    if isinstance(row.outcome, Cancelled):
        return "cancelled"
    return "truncated" if isinstance(row.outcome, Truncated) else "unjudged"


def _warn_about_failures(results: EvalResults) -> None:
    """Log a warning if attempts have no reward."""
    attempts = [attempt for prompt in results.prompts for attempt in prompt.attempts]
    failures = [attempt for attempt in attempts if attempt.reward is None]
    if failures:
        log.warning(
            "%d of %d evaluation attempts have no reward, and are neither right nor wrong; %s",
            len(failures),
            len(attempts),
            failures[0].detail or failures[0].end,
        )
