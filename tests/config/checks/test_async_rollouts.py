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
    "rollouts={max_staleness: 1, redundant_groups: 2}": "rollouts.max_staleness keeps every group "
    "that was begun, and "
    "rollouts.redundant_groups draws some to be late: remove it",
    "rollouts={dynamic_sampling: true, redundant_groups: 2}": "rollouts.dynamic_sampling keeps "
    "every group that was begun",
    "rollouts={order: ready}": "rollouts.max_staleness=0 begins those of one: set it to 1 or more",
    "rollouts={max_replaced: 2}": "rollouts.max_replaced is read by rollouts.dynamic_sampling "
    "alone: set that to true",
    "rollouts={max_staleness: 1} algorithm={kind: sft}": "rollouts.max_staleness=1 is of attempts, "
    "and algorithm sft draws",
    "rollouts={dynamic_sampling: true} algorithm={kind: on_policy_distillation, teacher: x, "
    "group_size: 2}": "compares "
    "rewards, and algorithm on_policy_distillation reads none: remove it",
    "rollouts={dynamic_sampling: true} algorithm={kind: remax}": "algorithm.group_size=1: raise "
    "it, or remove this",
    "rollouts={max_staleness: 1} cluster={kind: local, colocated: true} learner={kind: dtensor} "
    "generator={kind: vllm}": "work "
    "by turns, so nothing is drawn ahead: set rollouts.max_staleness=0",
    "rollouts={tail_batching: 2, max_staleness: 1}": "rollouts.tail_batching gives slow groups "
    "steps of their own, and "
    "rollouts.max_staleness does not wait for the slowest either, with rollouts.order=ready: "
    "remove one of both",
    "rollouts={tail_batching: 2, dynamic_sampling: true}": "rollouts.dynamic_sampling takes every "
    "group that was begun",
    "rollouts={tail_batching: 2, redundant_groups: 1}": "rollouts.redundant_groups begins more "
    "groups too",
    "rollouts={tail_batching: 2, redundant_attempts: 1}": "rollouts.redundant_attempts leaves long "
    "attempts out for good",
    "rollouts={tail_batching: 2} algorithm={kind: sft}": "rollouts.tail_batching=2 is of attempts, "
    "and algorithm sft draws",
    "rollouts.adaptive={staleness: 1}": "rollouts.max_staleness=0 allows none: set it to 1 or more",
    "rollouts={max_staleness: 1, adaptive: {}}": "neither staleness nor mismatch is to be held: "
    "set one of them",
    "rollouts={max_staleness: 2, adaptive: {staleness: 2}}": "rollouts.adaptive.staleness=2 is "
    "never exceeded under "
    "rollouts.max_staleness=2: lower it, or raise that",
    "rollouts={max_staleness: 2, adaptive: {mismatch: 0.1}}": "measured by the rollout correction, "
    "and there is none",
    "rollouts={max_staleness: 2, adaptive: {mismatch: 0.1}, replay: {}} algorithm={kind: "
    "decoupled_ppo}": "would count groups "
    "of rollouts.replay, which are old however few are under way: set adaptive.staleness in its "
    "place",
    "rollouts={max_staleness: 2, adaptive: {staleness: 0}}": "rollouts.adaptive.staleness",
    "rollouts={max_staleness: 2, adaptive: {staleness: 1}} algorithm={kind: sft}": "is of attempts, and algorithm sft draws",
    "rollouts={max_staleness: -1}": "rollouts.max_staleness",
    "rollouts.replay={}": "algorithm grpo does not weigh it by how likely it is now: set "
    "algorithm.correction: {weight: token}",
    "rollouts.replay={} algorithm={kind: grpo, correction: {weight: none, mask: token}}": "does not weigh it by how likely",
    "rollouts={max_staleness: 4, replay: {}} algorithm={kind: decoupled_ppo}": "rollouts.replay.max_age=4 is over when a group",
    "rollouts.replay={} algorithm={kind: remax, correction: {}}": "rollouts.replay.priority=spread "
    "compares the rewards",
    "rollouts.replay={capacity: 2}": "capacity=2 keeps fewer than groups=8",
    "rollouts.replay={} algorithm={kind: sft}": "rollouts.replay={...} is of attempts, and "
    "algorithm sft draws none",
    "curriculum={}": "curriculum chooses among tasks that are known, and examples=null is a stream "
    "without end: set examples",
    "examples=9 curriculum={} algorithm={kind: sft}": "curriculum.prefer=learnable reads how "
    "attempts went, and algorithm sft",
    "examples=9 curriculum={difficulty: level} steps=9": "curriculum.full_by_step=50 is more than the "
    "stage's steps=9",
    "examples=9 curriculum={prefer: even}": "prefer=even without difficulty prefers nothing",
    "examples=9 curriculum={start_share: 0.5}": "start_share is read with difficulty alone",
    "examples=9 curriculum={prefer: even, difficulty: level, memory: 0.1}": "memory is read with "
    "prefer alone",
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
