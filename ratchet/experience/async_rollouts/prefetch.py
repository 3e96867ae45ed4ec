"""A source wrapper for asynchronous (off-policy) rollouts with bounded staleness.

Groups begin before the step that trains on them. Groups without a training signal can be replaced
by others (dynamic sampling).

Attempts continue while the learner works and across weight syncs; each token keeps the version of
the weights that drew it. If the generator reads the learner's own tensors, it is paused from the
moment a step has its groups until the weights are pushed. If the two take turns on an accelerator,
attempts are interrupted then, and continue with the new weights when the next step needs groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from ratchet.data.codec import from_plain, to_plain
from ratchet.errors import link_symptom
from ratchet.experience.async_rollouts.group_filter import GroupFilter
from ratchet.experience.async_rollouts.resumable_generator import CURRENT_GROUP, ResumableGenerator
from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup, StalenessScheduler
from ratchet.experience.rollout.metrics import measure_staleness
from ratchet.experience.sources.rollouts import RolloutSource
from ratchet.protocols import Source
from ratchet.types import Group

DuringUpdate = Literal["continue", "pause", "interrupt"]
MISMATCH = "batch/correction/kl"  # the metric that `ConcurrencyController` compares with its target

log = logging.getLogger(__name__)


def has_learning_signal(
    group: Group,
    *,
    by_parts: bool = False,
    mean_reward_range: tuple[float, float] | None = None,
) -> bool:
    """True if the rewards in a group differ; otherwise no attempt is better than another.

    Rewards are compared as judged, before the algorithm's shaping: DAPO (arXiv:2503.14476) eq. 8
    counts right answers, without a penalty for length.

    Args:
        group: The group.
        by_parts: Compare each named part of the rewards too, for algorithms that read parts.
        mean_reward_range: The mean reward over attempts must be between these two; None: no
            bounds.
    """
    rows = [row for row in group.trajectories if row.use == "train" and row.reward is not None]
    if mean_reward_range is not None and rows:
        reward_by_attempt = {row.attempt: row.reward for row in rows if row.reward is not None}
        low, high = mean_reward_range
        if not low < fmean(reward_by_attempt.values()) < high:
            return False
    if by_parts:
        return len({(row.reward, *sorted(row.reward_parts.items())) for row in rows}) > 1
    return len({row.reward for row in rows}) > 1


class PrefetchingSource(Source):
    """A source that prefetches groups of another source.

    Args:
        source: The source of rollouts.
        scheduler: Decides which groups begin and which are trained on.
        generator: The generator that the source's attempts call.
        during_update: What requests do while the learner works. "continue": they go on. "pause":
            the generator, which reads the learner's tensors, stops and keeps them. "interrupt": it
            has none, because the learner has its accelerator.
        replayable: True if attempts can be replayed (`Environment.replayable`). Otherwise attempts
            in flight start again when the run resumes.
        has_signal: Returns True for a group with a training signal; other groups are replaced. None
            replaces no group.
        group_filter: Returns True for a group that trains, and has a state in checkpoints; other
            groups are replaced. It sees the groups that have a training signal.
        max_replaced: Maximum number of replacements in a step, per group of the step. After that
            groups without a signal are kept.
    """

    def __init__(
        self,
        source: RolloutSource,
        scheduler: StalenessScheduler,
        generator: ResumableGenerator,
        *,
        during_update: DuringUpdate,
        replayable: bool,
        has_signal: Callable[[Group], bool] | None = None,
        group_filter: GroupFilter | None = None,
        max_replaced: int = 1,
    ) -> None:
        self.source = source
        self.scheduler = scheduler
        self.generator = generator
        self.during_update = during_update
        self.replayable = replayable
        self.has_signal = has_signal
        self.group_filter = group_filter
        self.max_replaced = max_replaced
        self._tasks: dict[ScheduledGroup, asyncio.Task[None]] = {}
        # Groups of a restored run whose attempts start again with the next draw.
        self._to_restart: list[ScheduledGroup] = []
        self._task_done = asyncio.Event()
        self._version = 0
        self._waited = False  # True if the latest draw had to wait
        self._n_replaced = 0  # groups replaced since the last step
        self._has_kept_refused = False  # True once a group trained that has no signal

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return the groups of a step, and begin new ones.

        Errors that are not the failure of a single attempt, such as a generator error, are raised.
        """
        assert n == self.scheduler.groups_per_step, "the scheduler plans steps of another size"
        self._version = version
        self._n_replaced = 0
        self._waited = False
        if self.during_update == "pause":
            await self.generator.inner.resume()
        self.generator.resume_requests()
        for scheduled in self._to_restart:
            self._play(scheduled)
        self._to_restart = []
        self._begin(self.scheduler.count_startable(version))
        while (chosen_groups := self.scheduler.choose(version)) is None:
            self._waited = True
            self._task_done.clear()
            await self._task_done.wait()
            self._raise_failures()
        if self.during_update == "pause":
            await self.generator.inner.pause()
        elif self.during_update == "interrupt":
            await self.generator.interrupt_running()
        return [scheduled.group for scheduled in chosen_groups if scheduled.group is not None]

    def ack(self, ids: Sequence[str], step: int) -> None:
        self.source.ack(ids, step)

    def nack(self, ids: Sequence[str], reason: str) -> None:
        self.source.nack(ids, reason)

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        metrics = self.source.measure(groups)
        concurrency = self.scheduler.concurrency
        if concurrency is None:
            return metrics
        return {
            **metrics,
            "adaptive/groups": float(concurrency.groups),
            "adaptive/waited": float(self._waited),
        }

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Change the number of groups in flight from the next draw on."""
        if self.scheduler.concurrency is not None:
            staleness = measure_staleness(groups, step).get("staleness_mean", 0.0)
            self.scheduler.concurrency.update(
                waited=self._waited, staleness=staleness, mismatch=measured.get(MISMATCH)
            )

    async def snapshot(self) -> Mapping[str, Any]:
        """Return the state for a checkpoint.

        Attempts in flight are interrupted and continue with the next draw.
        """
        if self._tasks and self.replayable:
            await self.generator.interrupt_requests(lambda: self.source.manager.n_playing)
        return {
            "source": await self.source.snapshot(),
            "issues": [self._to_state(scheduled) for scheduled in self.scheduler.unfinished],
            "arrived": [scheduled.id for scheduled in self.scheduler.ready_groups],
            "level": None
            if self.scheduler.concurrency is None
            else self.scheduler.concurrency.level,
            # It is read last: groups may pass the filter while the source's state is awaited.
            "filter": None if self.group_filter is None else self.group_filter.state_dict(),
        }

    def _to_state(self, scheduled: ScheduledGroup) -> dict[str, Any]:
        """Return an unfinished group as plain values for a checkpoint."""
        trajectories = None if scheduled.group is None else to_plain(scheduled.group.trajectories)
        journal = (
            {}
            if scheduled.group is not None
            else {str(seed): to_plain(completion) for seed, completion in scheduled.journal.items()}
        )
        return {
            "id": scheduled.id,
            "version": scheduled.version,
            "ready": trajectories,
            "journal": journal,
        }

    async def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Attempts in flight are replayed up to the checkpoint and wait there for the next draw.
        Attempts that can't be replayed start again with the next draw.
        """
        await self.source.restore(state["source"])
        await self.generator.interrupt_requests(lambda: 0)
        in_flight = []
        for entry in state["issues"]:
            scheduled = self.scheduler.begin(entry["version"], *self.source.claim(entry["id"]))
            scheduled.journal = {
                int(seed): from_plain(completion) for seed, completion in entry["journal"].items()
            }
            if entry["ready"] is None:
                in_flight.append(scheduled)
            else:
                scheduled.group = Group(scheduled.id, scheduled.task, from_plain(entry["ready"]))
        scheduled_by_id = {scheduled.id: scheduled for scheduled in self.scheduler.unfinished}
        self.scheduler.ready_groups = [scheduled_by_id[group_id] for group_id in state["arrived"]]
        if self.scheduler.concurrency is not None and state["level"] is not None:
            self.scheduler.concurrency.level = state["level"]
        if self.group_filter is not None:
            self.group_filter.load_state_dict(state.get("filter"))
        if not self.replayable:
            if in_flight:
                log.warning(
                    "%d groups start again because their environment can't be replayed",
                    len(in_flight),
                )
            self._to_restart = in_flight
            return
        for scheduled in in_flight:
            self._play(scheduled)
        await self.generator.interrupt_requests(lambda: self.source.manager.n_playing)

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._tasks = {}
        if self.during_update == "pause":
            await self.generator.inner.resume()

    # --- groups in flight

    def _begin(self, count: int) -> None:
        for group_id, task in self.source.take(count, version=self._version):
            self._play(self.scheduler.begin(self._version, group_id, task))

    def _play(self, scheduled: ScheduledGroup) -> None:
        self._tasks[scheduled] = asyncio.create_task(self._run_group(scheduled))
        self._tasks[scheduled].add_done_callback(lambda _: self._task_done.set())

    async def _run_group(self, scheduled: ScheduledGroup) -> None:
        """Play a group, then mark it ready, or replace it if it has no training signal."""
        CURRENT_GROUP.set(scheduled if self.replayable else None)
        (group,) = await self.source.make([(scheduled.id, scheduled.task)], scheduled.version)
        is_refused = not self._passes_filters(group)
        if is_refused and self._n_replaced < self.max_replaced * self.scheduler.groups_per_step:
            self._n_replaced += 1
            self.scheduler.drop(scheduled)
            self.source.discard([scheduled.id], "filtered", reason="no training signal")
            self._begin(1)
        else:
            if is_refused and not self._has_kept_refused:
                self._has_kept_refused = True
                log.warning(
                    "group %s trains although dynamic_sampling or group_filter refuses it, because "
                    "rollouts.max_replaced=%d times the groups of a step were replaced. Raise it, "
                    "or refuse fewer groups. Further such groups are not named. %s",
                    group.id,
                    self.max_replaced,
                    link_symptom("the-reward-is-flat"),
                )
            self.scheduler.mark_ready(scheduled, group)
            self.source.ledger.note("ready", [scheduled.id])
        scheduled.journal.clear()
        del self._tasks[scheduled]

    def _passes_filters(self, group: Group) -> bool:
        if self.has_signal is not None and not self.has_signal(group):
            return False
        return self.group_filter is None or self.group_filter(group)

    def _raise_failures(self) -> None:
        """Raise the error of a group that failed as a whole."""
        for task in self._tasks.values():
            if task.done():
                task.result()
