"""Evaluate the policy on held-out tasks, by one greedy and several sampled attempts at each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ratchet.errors import TrainingError, link_symptom
from ratchet.evals.results import (
    AttemptEnd,
    AttemptResult,
    EvalResults,
    PromptResult,
    hash_task,
    shorten_prompt,
)
from ratchet.evals.stage_evaluator import ignore_progress
from ratchet.experience.rollout.failures import describe_failures
from ratchet.experience.rollout.manager import RolloutManager
from ratchet.protocols import Reward
from ratchet.types import Cancelled, Failed, Group, Sampling, Scored, Task, Trajectory, Truncated

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Evaluator:
    """An evaluation of the policy by the rewards of its answers."""

    manager: RolloutManager
    """The manager that plays and judges the attempts. Its rewards are `eval_rewards`, by default
    the environment's own reward, which reward shaping does not change."""
    tasks: Sequence[Task]
    """The held-out tasks."""
    sampling: Sampling
    """The sampling parameters of the sampled attempts."""
    samples: int = 0
    """Number of sampled attempts per task."""
    greedy: bool = True
    """True to add one greedy attempt per task."""
    pass_threshold: float = 1.0
    """The reward from which an attempt counts as passed."""

    # Accuracies of two stages are compared only if their evaluators measure the same quantities.
    measured_quantities = frozenset({"answers of the policy"})

    @property
    def managers(self) -> Sequence[RolloutManager]:
        return (self.manager,)

    @property
    def count(self) -> int:
        return len(self.tasks) * (self.samples + self.greedy)

    async def run(self, advance: Callable[[int], None] = ignore_progress) -> EvalResults:
        """Play all attempts and return the results."""
        self.manager.on_group_end = advance
        jobs = [(f"eval/{task.id}", task) for task in self.tasks]
        greedy_groups: list[Group] = []
        sampled_groups: list[Group] = []
        if self.greedy:
            greedy_groups = await self.manager.groups(
                jobs, replace(self.sampling, temperature=0.0), attempts=1
            )
        if self.samples:
            sampled_groups = await self.manager.groups(jobs, self.sampling, attempts=self.samples)
        prompts = [
            self._evaluate_prompt(task, greedy_groups[i : i + 1], sampled_groups[i : i + 1])
            for i, task in enumerate(self.tasks)
        ]
        return EvalResults(tuple(prompts), self.pass_threshold)

    def _evaluate_prompt(
        self, task: Task, greedy_groups: Sequence[Group], sampled_groups: Sequence[Group]
    ) -> PromptResult:
        reward = self.manager.reward
        answer_extractor = None if reward is None else reward.find_answer_extractor(task)

        def record_attempts(groups: Sequence[Group]) -> tuple[AttemptResult, ...]:
            return tuple(
                _record_attempt(trajectories, answer_extractor, task)
                for group in groups
                for trajectories in group.attempts
            )

        greedy_attempt = next(iter(record_attempts(greedy_groups)), None)
        return PromptResult(
            task.id,
            task.tag,
            hash_task(task),
            answer_extractor is not None,
            greedy_attempt,
            record_attempts(sampled_groups),
            shorten_prompt(task),
        )


def _record_attempt(
    trajectories: Sequence[Trajectory], answer_extractor: Reward | None, task: Task
) -> AttemptResult:
    """Return the record of an attempt.

    Args:
        trajectories: The trajectories of the attempt. The last one has the whole conversation.
        answer_extractor: The reward that extracts the final answer, which majority voting counts;
            None if no reward can.
        task: The task of the attempt.
    """
    last_trajectory = trajectories[-1]
    answer = (
        None
        if answer_extractor is None or last_trajectory.reward is None
        else answer_extractor.extract_final_answer(last_trajectory, task)
    )
    replies = [message.text for message in last_trajectory.messages if message.role == "assistant"]
    detail = ""
    if isinstance(last_trajectory.outcome, Failed):
        detail = f"{last_trajectory.outcome.kind}: {last_trajectory.outcome.detail}"
    n_tokens = sum(trajectory.completion_length for trajectory in trajectories)
    return AttemptResult(
        _describe_end(last_trajectory),
        last_trajectory.reward,
        answer,
        n_tokens,
        replies[-1] if replies else "",
        detail,
    )


def _describe_end(trajectory: Trajectory) -> AttemptEnd:
    if isinstance(trajectory.outcome, Scored):
        return "scored"
    if isinstance(trajectory.outcome, Failed):
        return "failed"
    if isinstance(trajectory.outcome, Cancelled):
        return "cancelled"
    return "truncated" if isinstance(trajectory.outcome, Truncated) else "unjudged"


def report_failures(results: EvalResults, *, is_first: bool = False) -> None:
    """Log a warning if attempts have no reward.

    Args:
        is_first: True for the evaluation before the first step, which stops the run if every
            attempt fails.

    Raises:
        TrainingError: With `is_first`, every attempt failed.
    """
    attempts = [attempt for prompt in results.prompts for attempt in prompt.attempts]
    unrewarded = [attempt for attempt in attempts if attempt.reward is None]
    failures = [
        Failed(attempt.kind, attempt.detail.partition(": ")[2])
        for attempt in attempts
        if attempt.end == "failed"
    ]
    if is_first and attempts and len(failures) == len(attempts):
        raise TrainingError(
            f"all {len(attempts)} attempts of the evaluation before the first step failed; "
            f"{describe_failures(failures)}\n{link_symptom('attempts-fail')}"
        )
    if unrewarded:
        log.warning(
            "%d of %d evaluation attempts have no reward, and are neither right nor wrong; %s",
            len(unrewarded),
            len(attempts),
            describe_failures(failures) if failures else unrewarded[0].end,
        )
