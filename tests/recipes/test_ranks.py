"""The quick-start's steps come out the same whoever computes them: one process, or ranks that share
rows, tokens, weights or experts. The same on Ray: tests/executors/test_ray.py."""

from functools import cache

import pytest
from recipes.replayed import TOPOLOGIES, after_sft, assert_alike, made

from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import LocalExecutor
from ratchet.training.from_config import build_policy

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def executor():
    started = LocalExecutor(LocalClusterConfig(), threads=1, device="cpu")
    yield started
    started.close()


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    """(the recipe, what one process made of it), by the kind of model."""

    @cache
    def of(kind):
        config = after_sft(kind, tmp_path_factory.mktemp(kind) / "model")
        return config, made(config)

    return of


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_the_same_steps(name, executor, embedded):
    kind, learner = TOPOLOGIES[name]
    config, wanted = embedded(kind)
    assert_alike(made(config, executor, wanted.groups, **learner), wanted)


def test_the_groups_are_worth_learning_from(embedded):
    config, wanted = embedded("dense")
    rewards = [row["rollout/reward"] for row in wanted.metrics]
    assert 0.02 < rewards[0] < 0.98
    assert all(row["policy/grad_norm"] > 0.01 for row in wanted.metrics)
    before = dict(build_policy(config).model.canonical_weights())
    moved = [
        float((tensor - before[name]).norm() / before[name].norm())
        for name, tensor in wanted.weights.items()
    ]
    assert max(moved) > 0.01  # a thousand times what may differ


def test_a_step_is_drawn_alike_as_long_as_the_weights_are(executor, embedded):
    """Later ones need not be: another order of sums is another last bit, and one token of many
    falls otherwise."""
    config, wanted = embedded("dense")
    once = config.model_copy(update={"stages": (config.stages[0].model_copy(update={"steps": 1}),)})
    found = made(once, executor, dp_shard=2)
    rows = [
        [row for group in drawn for row in group.trajectories]
        for drawn in (found.groups[0], wanted.groups[0])
    ]
    for ours, theirs in zip(*rows, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.reward == theirs.reward
    assert found.metrics[0]["rollout/reward"] == wanted.metrics[0]["rollout/reward"]


def test_fewer_groups_than_ranks(executor, embedded):
    """Ranks without rows compute fillers, which weigh nothing: all of them meet in every layer."""
    config, _ = embedded("dense")
    # one holds all
    learner = config.stages[0].learner.model_copy(update={"micro_batch_tokens": 10_000})
    few = config.model_copy(
        update={
            "stages": (
                config.stages[0].model_copy(
                    update={"steps": 3, "batch_size": 4, "learner": learner}
                ),
            )
        }
    )
    wanted = made(few)
    assert_alike(made(few, executor, wanted.groups, dp_shard=4, micro_batch_tokens=10_000), wanted)
