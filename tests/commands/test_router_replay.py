"""A run of a mixture of experts whose learner replays the sampler's routes, and runs that can't."""

import asyncio

import pytest

from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError, RatchetError
from ratchet.training.from_config import build_policy, check_stages
from ratchet.training.loop import train
from ratchet.training.stage_from_config import build_run

SPARSE = {
    "preset": "tiny-moe",
    "overrides": {"hidden_size": 32, "expert_intermediate_size": 24, "n_experts": 8},
}


STAGE = {
    "name": "rl",
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 4},
    "evaluation": {"tasks": 4},
    "steps": 2,
    "batch_size": 4,
}


def recipe(*, model=SPARSE, router=None, **stage):
    algorithm = {
        "kind": "grpo",
        "group_size": 4,
        "router": {"replay": True} if router is None else router,
    }
    return RunConfig.model_validate({
        "threads": 1,
        "device": "cpu",
        "model": model,
        "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
        "stages": [{**STAGE, "algorithm": algorithm, **stage}],
    })  # fmt: skip


def played(config):
    rows = []
    run = build_run(
        config,
        0,
        build_policy(config),
        observers=[lambda step, metrics: rows.append(dict(metrics))],
    )
    asyncio.run(train(run))
    return rows


def test_two_steps_of_grpo_with_replay_and_both_losses():
    found = played(recipe(router={"replay": True, "balance_coef": 1e-3, "z_coef": 1e-4}))
    steps = [row for row in found if "policy/loss" in row]
    assert len(steps) == 2
    for row in steps:
        assert row["policy/policy_gradient/sampler_gap"] < 1e-5
        assert row["policy/router/rerouted"] < 0.01
        assert row["policy/router"] == pytest.approx(1e-3 * row["policy/router/balance"])
        assert row["policy/router_z"] > 0


def test_mini_batches_replay_against_the_first_pass():
    algorithm = {
        "kind": "gspo",
        "group_size": 4,
        "router": {"replay": True},
        "minibatches": 2,
        "kl": {"coef": 0.1},
    }
    steps = [row for row in played(recipe(algorithm=algorithm)) if "policy/loss" in row]
    assert len(steps) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"preset": "tiny"}}, "this model has none. Remove algorithm.router"),
        (
            {"model": {"preset": "tiny"}, "router": {"z_coef": 0.1}},
            "this model has none. Remove algorithm.router",
        ),
        (
            {"learner": {"kind": "dtensor", "context_parallel": 2}},
            "learner.context_parallel=2 splits .* Set router.measure=false",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_run(changes, message):
    config = recipe(**changes)
    with pytest.raises(ConfigError, match=message):
        check_stages(config, build_policy(config))


def test_a_generator_that_records_nothing_is_refused(monkeypatch):
    config = recipe()
    policy = build_policy(config)
    policy.generator.records_routes = False
    with pytest.raises(
        ConfigError,
        match=r"Engine does not record. Set generator.kind=engine, or for vLLM .*, or algorithm.router.replay=false",
    ):
        check_stages(config, policy)
    with pytest.raises(ConfigError, match="does not record"):
        build_run(config, 0, policy)


@pytest.mark.parametrize(
    ("router", "message"),
    [
        ({"measure": False}, "neither replays nor measures"),
        ({"measure": False, "replay": True, "z_coef": 0.1}, "measure=false contradicts"),
        ({"balance_coef": -1.0}, "greater than or equal to 0"),
    ],
)
def test_wrong_sections(router, message):
    with pytest.raises((RatchetError, ValueError), match=message):
        recipe(router=router)
