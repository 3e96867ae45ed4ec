"""Settings that can't work are refused when the recipe is read, with the smallest fix."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, Pass
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.policy import clipped_surrogate
from ratchet.config.checks.stages import conflicts
from ratchet.config.resolve import build, resolve
from ratchet.config.schema import RunConfig
from ratchet.errors import ConfigError

GAE = {"advantage": {"kind": "gae"}}
SECTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("grpo", {"group_size": 1}, "set group_size=2 or more"),
    ("rloo", {"group_size": 1}, "set group_size=2 or more"),
    ("gigpo", {"group_size": 1}, "set group_size=2 or more"),
    ("policy_gradient", {"group_size": 1, "advantage": {"kind": "mixture", "parts": [{"kind": "opo"}]}}, "group_size=2"),
    ("rloo", {"group_size": 2, "advantage": {"scale": "std"}}, "set group_size=3 or more, or "
                                                               "advantage.scale=none"),
    ("rloo", {"group_size": 2, "shaping": [{"kind": "normalise", "over": "group"}]}, "set group_size=3 or more"),
    ("grpo", GAE, "set critic: {}"),
    ("grpo", {"critic": {}}, "set advantage.kind=gae"),
    ("grpo", {"advantage": {"kind": "on_policy_distillation"}}, "set teacher to the directory of a "
                                                                "model"),
    ("grpo", {"teacher": "x"}, "teacher is not read"),
    ("grpo", {"teacher_tokens": "aligned"}, "teacher_tokens is not read without teacher"),
    ("dr_grpo", {}, "set it to the stage's sampling.max_new_tokens"),
    ("grpo", {"fixed_length": 9}, "set weighting=fixed_length, or remove fixed_length"),
    ("gspo", {"correction": {"weight": "token"}}, "set correction.weight=geometric or sequence"),
    ("kimi", {"correction": {"weight": "turn"}}, "set correction.weight=geometric or sequence"),
    ("grpo", {"correction": {"weight": "none"}}, "set weight or mask, or remove correction"),
    ("grpo", {"correction": {"mask_low": 0.1}}, "mask_low is not read with mask=none"),
    ("grpo", {"correction": {"weight_low": 3.0}}, "weight_low=3 is not below weight_high=2"),
    ("grpo", {"correction": {}, "old_logprobs": "sampler"}, "set old_logprobs=learner, or remove "
                                                            "correction"),
    ("grpo", {"kl": {"target": 0.1}}, "set coef, or remove target"),
    ("grpo", {"kl": {"coef": 0.1, "rate": 0.5}}, "rate is not read without target"),
    ("grpo", {"kl": {"coef": 0.1, "objective": "forward", "estimator": "k2"}}, "set estimator=k3"),
    ("grpo", {"kl": {"coef": 0.1, "place": "reward", "estimator": "k3"}}, "set estimator=k1, or "
                                                                          "place=loss"),
    ("grpo", {"kl": {"coef": 0.1, "place": "reward", "objective": "forward"}}, "set objective=reverse, or place=loss"),
    ("grpo", {"kl": {"coef": 0.1, "importance_weight": False}}, "set importance_weight=true or estimator=k2"),
    ("rloo", {"kl": {"coef": 0.1, "place": "reward", "importance_weight": False}}, "set place=loss, or remove importance_weight"),
    ("gspo", {"correction": {"weight": "none", "mask": "token"}}, "set correction.mask=geometric "
                                                                  "or sequence"),
    ("grpo", {"correction": {"mask_denominator": "kept"}}, "mask_denominator is not read with "
                                                           "mask=none"),
    ("grpo", {"positive_nll_above": 0.5}, "set positive_nll_coef, or remove positive_nll_above"),
    ("grpo", {"shaping": [{"kind": "clip"}]}, "set low or high, or remove clip"),
    ("grpo", {"shaping": [{"kind": "clip", "low": 1.0, "high": 0.0}]}, "low=1 is not below high=0"),
    ("grpo", {"shaping": [{"kind": "overlong_penalty", "max_length": 4, "buffer": 5}]}, "buffer=5 "
                                                                                        "is more "
                                                                                        "than max_length=4"),
    ("reinforce_pp", {"advantage": {"baseline": "group"}}, "set group_size=2 or more"),
    ("ppo", {"shaping": [{"kind": "normalise", "over": "group"}]}, "set group_size=2 or more"),
    ("policy_gradient", {"group_size": 1, "advantage": {"kind": "turn_returns", "baseline": "group"}}, "set group_size=2"),
    ("ppo", {"equal_rewards": "drop"}, "with advantage gae groups of equal rewards have a signal "
                                       "too: set equal_rewards=keep"),
    ("reinforce_pp", {"equal_rewards": "drop"}, "set equal_rewards=keep"),
    ("grpo", {"advantage_clip": -1}, "set a number above 0, or a range around 0"),
    ("grpo", {"advantage_clip": (0.1, 2)}, "from 0.1 to 2: set a number above 0"),
    ("grpo", {"mean_reward_range": (0.9, 0.1)}, "0.9 is not below 0.1: lower 0.9"),
    ("on_policy_distillation", {"teacher": "x", "mean_reward_range": (0, 1)}, "needs no reward"),
    ("remax", {"equal_rewards": "drop", "group_size": 4}, "set equal_rewards=keep"),
    ("on_policy_distillation", {"teacher": "x", "equal_rewards": "drop"}, "set equal_rewards=keep"),
    ("rloo", {"equal_rewards": "drop", "kl": {"coef": 0.1, "place": "reward"}}, "every group has "
                                                                                "a signal: set "
                                                                                "kl.place=loss"),
    ("grpo", {"kl": {"coef": 0.1, "place": "reward"}}, "set advantage.scale=none, or "
                                                       "kl.place=loss"),
    ("gdpo", {"kl": {"coef": 0.1, "place": "reward"}}, "kl.place=reward has no effect, because "
                                                       "advantage gdpo does not read the reward"),
    ("gdpo", {"shaping": [{"kind": "scale", "factor": 2}]}, "shaping has no effect"),
    ("on_policy_distillation", {"teacher": "x", "shaping": [{"kind": "scale", "factor": 2}]}, "shaping has no effect"),
    ("vapo", {"advantage": {"lam": 0.5}}, "lam is not read with length_alpha and value_lam"),
    ("ppo", {"advantage": {"kind": "mixture", "parts": [{"kind": "gae"}, {"kind": "gae"}]}}, "gae twice"),
    ("distill_off_policy", {"teacher": "x", "sft_coef": 0.2, "temperature": 2}, "set temperature=1, or sft_coef=0"),
    ("distill_off_policy", {"teacher": "x", "mix": 0.3}, "mix is not read with objective=forward"),
    ("distill_off_policy", {"teacher": [{"path": "x"}, {"path": "y"}]}, "set top_k=null"),
    ("distill_off_policy", {"teacher": [{"path": "x"}] * 2, "top_k": None}, "two teachers are x"),
    ("distill_off_policy", {"teacher": "x", "span_temperature": 2}, "span_temperature is not read"),
    ("distill_on_policy", {"teacher": "x", "teacher_tokens": "aligned", "top_k": 3}, "remove top_k"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options", "message"), SECTIONS)
def test_a_section_that_contradicts_itself_is_refused(
    kind: str, options: dict[str, Any], message: str
):
    with pytest.raises(ValidationError, match=message):
        resolve("algorithm", {"kind": kind, **options})


@pytest.mark.parametrize(
    "kind", ["grpo", "rloo", "ppo", "gspo", "dapo", "decoupled_ppo", "vapo", "kto", "orpo"]
)
def test_a_saved_section_loads_again(kind: str):
    """Every key is written out then: what a default says must not count as set by somebody."""
    section = resolve("algorithm", {"kind": kind})
    assert resolve("algorithm", section.model_dump()) == section


def recipe(algorithm: dict[str, Any], **stage: Any) -> RunConfig:
    made = {
        "name": "a",
        "algorithm": algorithm,
        "environment": {"kind": "sorting"},
        "sampling": {"max_new_tokens": 9},
        **stage,
    }
    model = {"preset": "tiny"}
    return RunConfig.model_validate(
        {"model": model, "tokenizer": {"kind": "bytes"}, "stages": [made]}
    )


STAGES: list[tuple[RunConfig, str]] = [
    (
        recipe({"kind": "dpo"}, environment={"kind": "countdown"}),
        "learns from pairs, which environment countdown doesn't have",
    ),
    (recipe({"kind": "process_reward"}, environment={"kind": "countdown"}), "learns from steps"),
    (recipe({"kind": "kto"}, batch_size=1), "set batch_size=2 or more"),
    (
        recipe({"kind": "vapo"}, steps=50),
        "warmup_steps=50 leaves the policy none of the stage's 50 steps",
    ),
    (
        recipe({"kind": "grpo"}, sampling={"top_p": 0.9}),
        "or algorithm.correction if the algorithm has that key",
    ),
    (recipe({"kind": "grpo"}, sampling={"temperature": 0.0}), "set sampling.temperature above 0"),
    (
        recipe(
            {
                "kind": "grpo",
                "shaping": [{"kind": "overlong_penalty", "max_length": 99, "buffer": 9}],
            }
        ),
        "overlong_penalty begins after 90 tokens",
    ),
]


@pytest.mark.parametrize(("config", "message"), STAGES)
def test_a_stage_that_contradicts_itself_is_refused(config: RunConfig, message: str):
    assert any(message in conflict.message for conflict in conflicts(config))


@pytest.mark.parametrize(
    "config",
    [
        recipe({"kind": "dpo"}),
        recipe({"kind": "vapo"}, steps=51),
        recipe({"kind": "decoupled_ppo", "correction": {"weight": "none", "mask": "token"}}),
        recipe({"kind": "grpo", "correction": {}}, sampling={"top_p": 0.9}),
        recipe(
            {
                "kind": "grpo",
                "shaping": [{"kind": "overlong_penalty", "max_length": 9, "buffer": 3}],
            }
        ),
    ],
)
def test_what_can_work_is_not_refused(config: RunConfig):
    assert list(conflicts(config)) == []


def test_a_kl_penalty_brings_its_reference():
    algorithm = build(resolve("algorithm", {"kind": "grpo", "kl": {"coef": 0.1}}))
    assert "reference" in algorithm.roles
    assert "ref_logprobs" in algorithm.columns


def term() -> AlgorithmTerm:
    return AlgorithmTerm(
        "x", clipped_surrogate, token_mean, needs=frozenset({"logprobs", "old_logprobs"})
    )


def test_several_updates_without_old_logprobs_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"Add Pass\('policy', 'logprobs', 'old_logprobs'\), or set minibatches and epochs to "
        r"1",
    ):
        Algorithm("x", {"policy": (term(),)}, source="rollouts", epochs=2)


def test_a_role_that_nothing_makes_is_refused():
    with pytest.raises(
        ConfigError, match="uses the role 'reference', which `roles` does not define"
    ):
        Algorithm(
            "x",
            {"policy": (term(),)},
            "rollouts",
            passes=(Pass("reference", "logprobs", "ref_logprobs"),),
        )


def test_two_terms_of_one_name_are_refused():
    with pytest.raises(ConfigError, match="two terms share the name 'x'"):
        Algorithm("x", {"policy": (term(), term())}, source="rollouts")
