"""What works and is likely not meant: a warning with its fix, by `ratchet check` and `ratchet
train`."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from ratchet.commands.describe_recipe import describe
from ratchet.config.schema import RunConfig

STALE = {"max_staleness": 3}
ON_POLICY_DISTILLATION = {"kind": "on_policy_distillation", "teacher": "x"}


def warnings(algorithm: dict[str, Any], rollouts: dict[str, Any]) -> list[str]:
    stage = {
        "name": "a",
        "environment": {"kind": "sorting"},
        "algorithm": algorithm,
        "rollouts": rollouts,
    }
    config = {
        "name": "r",
        "model": {"preset": "tiny"},
        "tokenizer": {"kind": "bytes"},
        "stages": [stage],
    }
    lines = describe(RunConfig.model_validate(config)).splitlines()
    return [
        line.removeprefix("  warning").strip() for line in lines if line.startswith("  warning")
    ]


@pytest.mark.fault("R19")
@pytest.mark.parametrize(
    "algorithm",
    [{"kind": "grpo"}, {"kind": "dapo", "minibatches": 2}, ON_POLICY_DISTILLATION],
)
def test_staleness_that_nothing_corrects_is_warned_of(algorithm: dict[str, Any]):
    (warning,) = warnings(algorithm, STALE)
    assert warning == (
        "rollouts.max_staleness=3 trains on attempts of older weights, and algorithm "
        f"{algorithm['kind']} treats them as sampled "
        "by the current ones. Set algorithm.correction={}, or algorithm.old_logprobs=sampler."
    )


@pytest.mark.fault("R19")
@pytest.mark.parametrize("kind", ["grpo", "rloo", "gspo", "gmpo", "kimi", "cispo"])
@pytest.mark.parametrize("rollouts", [STALE, {"replay": {}}], ids=["stale", "replay"])
def test_the_fix_that_is_named_is_accepted(kind: str, rollouts: dict[str, Any]):
    (warning,) = warnings({"kind": kind}, rollouts)
    assert warning.startswith(
        "rollouts.replay trains" if "replay" in rollouts else "rollouts.max_staleness=3 trains"
    )
    fixes = warning.split("Set ")[1].removesuffix(".").split(", or ")
    for fix in fixes:
        key, value = fix.removeprefix("algorithm.").split("=", 1)
        assert warnings({"kind": kind, key: yaml.safe_load(value)}, rollouts) == []


def test_a_loss_without_a_ratio_is_helped_by_a_correction_alone():
    (warning,) = warnings(
        {"kind": "grpo", "loss": {"kind": "reinforce"}, "old_logprobs": "sampler"}, STALE
    )
    assert warning.endswith("Set algorithm.correction={}.")


@pytest.mark.parametrize(
    ("algorithm", "rollouts"),
    [
        ({"kind": "grpo"}, {}),
        ({"kind": "grpo"}, {"dynamic_sampling": True}),
        ({"kind": "grpo", "correction": {}}, STALE),
        ({"kind": "grpo", "old_logprobs": "sampler"}, STALE),
        ({"kind": "topr"}, STALE),  # its ratio is to what drew the attempt
        ({"kind": "decoupled_ppo"}, STALE),
        ({"kind": "distill_on_policy", "teacher": "x"}, STALE),  # a divergence needs no ratio
    ],
)
def test_what_is_weighed_or_fresh_is_not_warned_of(
    algorithm: dict[str, Any], rollouts: dict[str, Any]
):
    assert warnings(algorithm, rollouts) == []
