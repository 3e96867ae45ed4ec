"""Numbers that describe the groups of a step, one definition each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pstdev

from ratchet.types import Failed, Group, Owner, Truncated


def measure_groups(groups: Sequence[Group]) -> dict[str, float]:
    """Rewards and their parts (over scored attempts), lengths (policy tokens an attempt), shares of attempts truncated and
    failed (by kind), share of groups whose rewards are all equal (they carry no group-relative signal), and token counts."""
    trajectories = [t for group in groups for t in group.trajectories]
    numbers: dict[str, float] = {
        "tokens": float(sum(len(t) for t in trajectories)),
        "trained_tokens": float(sum(int(t.trainable.sum()) for t in trajectories if t.counts and t.use == "train")),
    }
    rewards = [t.reward for t in trajectories if t.reward is not None]
    if any(t.outcome is not None for t in trajectories):
        lengths = [int((t.owner == Owner.POLICY).sum()) for t in trajectories]
        kinds = Counter(t.outcome.kind for t in trajectories if isinstance(t.outcome, Failed))
        numbers |= {
            "generated_tokens": float(sum(lengths)),
            "length_mean": fmean(lengths),
            "length_max": float(max(lengths)),
            "truncated_share": fmean(isinstance(t.outcome, Truncated) for t in trajectories),
            "failed_share": sum(kinds.values()) / len(trajectories),
        }
        numbers |= {f"failed/{kind}": float(count) for kind, count in kinds.items()}
    if rewards:
        numbers |= {"reward": fmean(rewards), "reward_std": pstdev(rewards)}
        scored = [[t.reward for t in group.trajectories if t.reward is not None] for group in groups]
        numbers["no_signal_share"] = fmean(max(row) == min(row) for row in scored if row)
        names = dict.fromkeys(name for t in trajectories for name in t.reward_parts)
        for name in names:
            numbers[f"reward/{name}"] = fmean(t.reward_parts[name] for t in trajectories if name in t.reward_parts)
    return numbers
