"""A replay buffer: a step also trains on groups of earlier steps.

Older weights sampled these groups, so the algorithm needs an off-policy correction.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

from ratchet.config.experience import ReplayConfig
from ratchet.data.codec import from_plain, to_plain
from ratchet.experience.seeds import derive_seed
from ratchet.experience.sources.prompt_ledger import PromptLedger
from ratchet.protocols import Source
from ratchet.types import Group


class ReplayBuffer(Source):
    """A source that adds replayed groups to the groups of another source.

    Groups are drawn without replacement, weighted by a priority (the standard deviation of their
    rewards, or 1). The drawn groups are those with the greatest keys u^(1 / priority) for uniform u
    (Efraimidis and Spirakis, 2006). u depends on the seed, the step and the group's id, so a
    resumed run draws the same groups.

    Args:
        source: The source of new groups.
        config: The recipe's section.
        ledger: Gets an entry for each replayed group.
        seed: The seed of the draws.
        post_process: Returns new groups as they train and enter the buffer
            (`Environment.post_process`).
    """

    def __init__(
        self,
        source: Source,
        config: ReplayConfig,
        *,
        ledger: PromptLedger,
        seed: int,
        post_process: Callable[[Sequence[Group]], Sequence[Group]] = list,
    ) -> None:
        self.source = source
        self.config = config
        self.ledger = ledger
        self.seed = seed
        self.post_process = post_process
        self._unacknowledged: dict[str, Group] = {}
        self._buffer: dict[str, Group] = {}  # in the order in which groups entered it

    async def draw(self, n: int, version: int) -> list[Group]:
        """Return n groups of the source, followed by the replayed ones."""
        new_groups = self.post_process(await self.source.draw(n, version))
        oldest_allowed = version - self.config.max_age
        self._buffer = {
            group_id: group
            for group_id, group in self._buffer.items()
            if _get_oldest_version(group) >= oldest_allowed
        }
        groups = [*new_groups, *self._sample_replayed(version)]
        self._unacknowledged |= {group.id: group for group in groups}
        return groups

    def _sample_replayed(self, step: int) -> list[Group]:
        """Return the groups of the buffer that a step replays."""

        def key(group: Group) -> float:
            u = 1 - random.Random(derive_seed(self.seed, step, group.id)).random()
            return math.log(u) / self._compute_priority(group)

        return sorted(self._buffer.values(), key=key, reverse=True)[: self.config.groups]

    def _compute_priority(self, group: Group) -> float:
        """Return the group's weight in the draw. A group with priority 0 is never replayed."""
        rewards = group.rewards
        if self.config.priority == "uniform":
            return float(any(row.is_usable for row in group.trajectories))
        return pstdev(rewards) if rewards else 0.0

    def ack(self, ids: Sequence[str], step: int) -> None:
        groups = [self._unacknowledged.pop(group_id) for group_id in ids]
        self.source.ack([group.id for group in groups if not group.n_uses], step)
        for group in groups:
            if group.n_uses:
                self.ledger.note(
                    "replayed", [group.id], step=step, version=_get_oldest_version(group)
                )
            if self._compute_priority(group):
                # The group is not judged again, so it needs no answer and meta, whose types a
                # checkpoint may be unable to hold.
                task = replace(group.task, answer=None, meta={})
                self._buffer[group.id] = replace(group, task=task, n_uses=group.n_uses + 1)
        self._buffer = dict(list(self._buffer.items())[-self.config.capacity :])

    def nack(self, ids: Sequence[str], reason: str) -> None:
        """Return new groups to the source; replayed ones stay in the buffer."""
        self.source.nack(
            [group_id for group_id in ids if not self._unacknowledged.pop(group_id).n_uses], reason
        )

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        new_groups = [group for group in groups if not group.n_uses]
        metrics = self.source.measure(new_groups)
        uses = [group.n_uses for group in groups if group.n_uses]
        replay_metrics = {
            "replay/share": len(uses) / len(groups),
            "replay/kept": float(len(self._buffer)),
        }
        return {**metrics, **replay_metrics, **({"replay/uses_mean": fmean(uses)} if uses else {})}

    def adapt(self, groups: Sequence[Group], step: int, measured: Mapping[str, float]) -> None:
        """Pass only new groups to the source, because replayed ones are always stale."""
        self.source.adapt([group for group in groups if not group.n_uses], step, measured)

    async def snapshot(self) -> Mapping[str, Any]:
        buffer = [
            {
                "id": group.id,
                "task": to_plain(group.task),
                "trajectories": to_plain(group.trajectories),
                "uses": group.n_uses,
            }
            for group in self._buffer.values()
        ]
        return {"source": await self.source.snapshot(), "kept": buffer}

    async def restore(self, state: Mapping[str, Any]) -> None:
        await self.source.restore(state["source"])
        groups = [
            Group(
                entry["id"],
                from_plain(entry["task"]),
                from_plain(entry["trajectories"]),
                entry["uses"],
            )
            for entry in state["kept"]
        ]
        self._unacknowledged, self._buffer = {}, {group.id: group for group in groups}

    async def close(self) -> None:
        await self.source.close()


def _get_oldest_version(group: Group) -> int:
    """Return the oldest weight version that sampled a token of the group; 0 without such tokens."""
    versions_by_row = [row.versions[row.versions >= 0] for row in group.trajectories]
    return min((int(versions.min()) for versions in versions_by_row if len(versions)), default=0)
