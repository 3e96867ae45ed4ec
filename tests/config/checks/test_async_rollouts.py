"""Attempts ahead of their step, and drawn again: what can't be is refused when the recipe is read,
with what to change."""

import re

import pytest

from ratchet.config.loader import load_config
from ratchet.errors import ConfigError

RECIPE = """
model: {preset: tiny}
tokenizer: {kind: characters}
environment: {kind: sorting}
algorithm: {kind: grpo}
"""
WRONG = {
    "rollouts={max_staleness: 1, redundant_groups: 2}": "rollouts.max_staleness trains on every group that was started, so rollouts.redundant_groups saves no time: remove rollouts.redundant_groups",
    "rollouts={group_filter: {kind: reward_std, above: 0.1}, redundant_groups: 2}": "rollouts.group_filter trains on every group that was started",
    "rollouts={group_filter: {kind: reward_std, above: 0.1}, tail_batching: 2}": "rollouts.group_filter waits for every group that was started",
    "rollouts={dynamic_sampling: true, redundant_groups: 2}": "rollouts.dynamic_sampling trains on every group that was started",
    "rollouts={order: ready}": "with rollouts.max_staleness=0 only the groups of one step are in flight: set rollouts.max_staleness to 1 or more",
    "rollouts={max_replaced: 2}": "rollouts.max_replaced has no effect without rollouts.dynamic_sampling or rollouts.group_filter: set rollouts.dynamic_sampling=true",
    "rollouts={max_staleness: 1} algorithm={kind: sft}": "rollouts.max_staleness=1 has no effect, because algorithm sft generates no attempts",
    "rollouts={dynamic_sampling: true} algorithm={kind: on_policy_distillation, teacher: x, "
    "group_size: 2}": "compares "
    "rewards, and algorithm on_policy_distillation reads none: remove rollouts.dynamic_sampling",
    "rollouts={dynamic_sampling: true} algorithm={kind: remax}": "algorithm.group_size=1: raise algorithm.group_size, or remove rollouts.dynamic_sampling",
    "rollouts={tail_batching: 2, max_staleness: 1}": "rollouts.tail_batching trains on slow groups in steps of their own, and rollouts.max_staleness already avoids waiting for them, with rollouts.order=ready: remove one of the two",
    "rollouts={tail_batching: 2, dynamic_sampling: true}": "rollouts.dynamic_sampling waits for every group that was started",
    "rollouts={tail_batching: 2, redundant_groups: 1}": "rollouts.redundant_groups starts more groups too",
    "rollouts={tail_batching: 2, redundant_attempts: 1}": "rollouts.redundant_attempts drops long attempts",
    "rollouts={tail_batching: 2} algorithm={kind: sft}": "rollouts.tail_batching=2 has no effect, because algorithm sft generates no attempts",
    "rollouts.adaptive={staleness: 1}": "rollouts.max_staleness=0 allows none: set rollouts.max_staleness to 1 or more",
    "rollouts={max_staleness: 1, adaptive: {}}": "neither staleness nor mismatch is set: set one of them",
    "rollouts={max_staleness: 2, adaptive: {staleness: 2}}": "rollouts.adaptive.staleness=2 is never exceeded under rollouts.max_staleness=2: lower adaptive.staleness, or raise max_staleness",
    "rollouts={max_staleness: 2, adaptive: {mismatch: 0.1}}": "measured by the rollout correction, which is off",
    "rollouts={max_staleness: 2, adaptive: {mismatch: 0.1}, replay: {}} algorithm={kind: "
    "decoupled_ppo}": "would include the old groups of rollouts.replay, whose age does not depend on the number in flight: set adaptive.staleness instead",
    "rollouts={max_staleness: 2, adaptive: {staleness: 0}}": "rollouts.adaptive.staleness",
    "rollouts={max_staleness: 2, adaptive: {staleness: 1}} algorithm={kind: sft}": "has no effect, because algorithm sft generates no attempts",
    "rollouts={max_staleness: -1}": "rollouts.max_staleness",
    "rollouts.replay={}": "importance sampling, and algorithm grpo has none: set algorithm.correction: {weight: token}",
    "rollouts.replay={} algorithm={kind: grpo, correction: {weight: none, mask: token}}": "which needs importance sampling",
    "rollouts={max_staleness: 4, replay: {}} algorithm={kind: decoupled_ppo}": "rollouts.replay.max_age=4 leaves nothing to replay: a group",
    "rollouts.replay={} algorithm={kind: remax, correction: {}}": "rollouts.replay.priority=spread "
    "compares the rewards",
    "rollouts.replay={capacity: 2}": "capacity=2 holds fewer than groups=8",
    "rollouts.replay={} algorithm={kind: sft}": "rollouts.replay={...} has no effect, because algorithm sft generates no attempts",
    "curriculum={}": "curriculum chooses among a fixed number of tasks, and examples=null is an endless stream: set examples to at most the number",
    "examples=9 curriculum={} algorithm={kind: sft}": "curriculum.prefer=learnable reads the success of attempts, and algorithm sft",
    "examples=9 curriculum={difficulty: level} steps=9": "curriculum.full_by_step=50 is more than the "
    "stage's steps=9",
    "examples=9 curriculum={prefer: even}": "prefer=even without difficulty has no effect",
    "examples=9 curriculum={start_share: 0.5}": "start_share has no effect without difficulty",
    "examples=9 curriculum={prefer: even, difficulty: level, memory: 0.1}": "memory has no effect without prefer",
}


@pytest.mark.parametrize("overrides", WRONG)
def test_what_cannot_be_is_refused(overrides, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE)
    with pytest.raises(ConfigError) as caught:
        load_config(path, re.split(r" (?=[a-z.]+=)", overrides))
    assert WRONG[overrides] in str(caught.value)


@pytest.mark.parametrize(
    ("rollouts", "prefetches"),
    [
        ("{max_staleness: 2, order: ready, dynamic_sampling: true, redundant_attempts: 1}", True),
        ("{max_staleness: 2, adaptive: {staleness: 1, mismatch: 0.02}}", True),
        ("{tail_batching: 2, replay: {}}", False),
    ],
)
def test_what_can_be_is_read(rollouts, prefetches, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text(RECIPE.replace("grpo", "decoupled_ppo") + f"rollouts: {rollouts}\n")
    assert load_config(path).stages[0].rollouts.prefetches == prefetches
