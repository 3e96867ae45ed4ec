"""The kit passes whatever is right, and tells what is wrong with the rest."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ratchet.algorithms.advantages.common import broadcast_to_tokens, mean_by
from ratchet.algorithms.advantages.group_baselines import group_relative
from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.loss_aggregation import sequence_mean, token_mean, token_sum
from ratchet.algorithms.losses.policy import reinforce
from ratchet.algorithms.properties import PROPERTIES
from ratchet.batch import Batch
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.protocols import Outputs
from ratchet.testing.algorithms import INVARIANCES, check_algorithm, examine
from ratchet.testing.check_command import build_builtin, properties_page

PAGE = Path(__file__).resolve().parents[2] / "docs" / "algorithms" / "properties.md"

VARIANTS = {
    "token correction": ("grpo", {"correction": {"weight": "token", "mask": "geometric"}}),
    "turn correction": ("grpo", {"correction": {"weight": "turn", "mask": "token"}}),
    "sequence correction": (
        "gspo",
        {"correction": {"weight": "sequence", "mask": "turn", "mask_denominator": "kept"}},
    ),
    "geometric correction": ("gmpo", {"correction": {"weight": "geometric", "mask": "sequence"}}),
    "mask alone": (
        "sapo",
        {"correction": {"weight": "none", "mask": "token"}, "weighting": "prompt_mean"},
    ),
    "forward kl in the loss": (
        "grpo",
        {"kl": {"coef": 0.1, "objective": "forward"}, "entropy_coef": 0.01},
    ),
    "corrected k1 in the loss": (
        "grpo",
        {"kl": {"coef": 0.1, "estimator": "k1"}, "correction": {}},
    ),
    "adaptive k2 in the loss": (
        "rloo",
        {"kl": {"coef": 0.1, "estimator": "k2", "target": 0.1}, "weighting": "token_sum"},
    ),
    "kl in the reward": ("rloo", {"kl": {"coef": 0.1, "place": "reward"}}),
    "kl in the reward-to-go against the group": (
        "reinforce_pp",
        {
            "kl": {"coef": 0.1, "place": "reward"},
            "advantage": {"baseline": "group"},
            "group_size": 3,
        },
    ),
    "kl in the reward-to-go": (
        "reinforce_pp",
        {"kl": {"coef": 0.1, "place": "reward"}, "weighting": "sequence_mean"},
    ),
    "group baseline, whitened": (
        "reinforce_pp",
        {"advantage": {"baseline": "group"}, "group_size": 3},
    ),
    "kl in the critic's reward": (
        "ppo",
        {"kl": {"coef": 0.1, "place": "reward"}, "critic": {"value_clip": None}},
    ),
    "kl in the turns' reward": (
        "gigpo",
        {
            "kl": {"coef": 0.1, "place": "reward"},
            "advantage": {"scale": "none", "step_weight": 0.0},
            "whiten": True,
        },
    ),
    "scaled leave-one-out": ("rloo", {"advantage": {"scale": "std"}, "advantage_clip": 1.0}),
    "returns of turns": (
        "policy_gradient",
        {"advantage": {"kind": "turn_returns"}, "loss": {"kind": "gspo_token"}},
    ),
    "returns of turns against the group": (
        "policy_gradient",
        {
            "advantage": {"kind": "turn_returns", "gamma": 0.9, "baseline": "group"},
            "loss": {"kind": "reinforce"},
        },
    ),
    "mixture": (
        "policy_gradient",
        {
            "advantage": {
                "kind": "mixture",
                "parts": [
                    {"kind": "group_relative"},
                    {"kind": "on_policy_distillation", "weight": 0.1},
                ],
            },
            "teacher": {"": "path", "other": "path"},
        },
    ),
    "teacher of other tokens": ("on_policy_distillation", {"teacher_tokens": "aligned"}),
    "two teachers of other tokens": (
        "on_policy_distillation",
        {"teacher": {"": "path", "other": "path"}, "teacher_tokens": "aligned"},
    ),
    "mini-batches": (
        "grpo",
        {"minibatches": 2, "epochs": 2, "loss": {"kind": "ppo", "dual_clip": 3.0}},
    ),
    "mini-batches with a critic": ("ppo", {"minibatches": 3}),
    "sampler's logprobs": ("dapo", {"old_logprobs": "sampler", "truncated": "drop", "epochs": 2}),
    "dapo shaped by length": (
        "dapo",
        {"shaping": [{"kind": "overlong_penalty", "max_length": 4096, "buffer": 512}]},
    ),
    "shaped by length": (
        "grpo",
        {"shaping": [{"kind": "overlong_penalty", "max_length": 4096, "buffer": 512}]},
    ),
    "shaped by its end": (
        "opo",
        {"shaping": [{"kind": "stop_properly", "coef": 0.2}, {"kind": "clip", "high": 2.0}]},
    ),
    "normalised by the batch": (
        "grpo",
        {"shaping": [{"kind": "normalise", "over": "batch"}, {"kind": "scale", "factor": 3.0}]},
    ),
    "normalised by the run": (
        "remax",
        {"shaping": [{"kind": "normalise", "over": "running"}], "group_size": 2},
    ),
    "weighed parts": (
        "grpo",
        {"shaping": [{"kind": "component_weights", "weights": {"right": 1.0, "short": 0.3}}]},
    ),
    "parts normalised apart": ("gdpo", {"advantage": {"weights": {"right": 1.0, "short": 0.3}}}),
    "likelihood of good answers": ("grpo", {"positive_nll_coef": 0.1, "positive_nll_above": 0.5}),
    "losses of routers": (
        "grpo",
        {"router": {"balance_coef": 0.1, "z_coef": 0.1}, "minibatches": 2},
    ),
    "last turn": ("sft", {"train": "last", "weighting": "sequence_mean"}),
    "mean ratios and likelihood": (
        "dpo",
        {"normalize": "mean", "sft_coef": 0.2, "label_smoothing": 0.1, "minibatches": 2},
    ),
    "likeliest tokens": ("distill_off_policy", {"top_k": 3, "objective": "js", "temperature": 2.0}),
    "teacher and likelihood": ("distill_off_policy", {"sft_coef": 0.2, "minibatches": 2}),
    "several teachers of other tokens": (
        "distill_off_policy",
        {
            "teacher": [{"path": "a", "weight": 0.3}, {"path": "b"}],
            "teacher_tokens": "aligned",
        },
    ),
    "teachers by tag": (
        "distill_on_policy",
        {"teacher": {"a": "path", "b": "path"}, "group_size": 2, "top_k": 4},
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS["algorithm"])
def test_every_built_in_algorithm_passes_with_its_defaults(kind: str):
    check_algorithm(build_builtin(kind))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_options_keep_what_is_promised(name: str):
    kind, keys = VARIANTS[name]
    small = (
        {"group_size": 3} if "group_size" in section_class("algorithm", kind).model_fields else {}
    )
    check_algorithm(build_builtin(kind, **{**small, **keys}))


def test_the_page_of_properties_says_what_the_algorithms_say():
    """Where it doesn't, write `ratchet.testing.check_command.properties_page()` there."""
    assert PAGE.read_text(encoding="utf-8") == properties_page()


# --- broken on purpose


def algorithm(
    term=reinforce, *, weighting=token_mean, level="token", advantage=group_relative, **more
) -> Algorithm:
    """One term on attempts in groups of three."""
    terms = (
        AlgorithmTerm(
            "mine", term, weighting, level=level, needs=frozenset({"logprobs", "old_logprobs"})
        ),
    )
    return Algorithm(
        "mine", {"policy": terms}, "rollouts", advantage=advantage, group_size=3, **more
    )


def verdicts(algo: Algorithm) -> dict[str, str]:
    return {finding.name: finding.verdict for finding in examine(algo)}


def fails(algo: Algorithm, message: str, *names: str) -> None:
    """At least these checks fail, and the error says so."""
    found = verdicts(algo)
    assert {name for name in names if found[name] != "fails"} == set(), found
    with pytest.raises(AssertionError, match=f"algorithm 'mine': .*{message}"):
        check_algorithm(algo)


@pytest.mark.medium
def test_an_algorithm_of_ones_own_passes():
    assert set(verdicts(algorithm()).values()) == {"holds"}
    assert list(verdicts(algorithm())) == [*INVARIANCES, "learns", *PROPERTIES]


def mean_here(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Divides by what happens to be in the same micro-batch."""
    x_T, _ = reinforce(out, batch)
    return x_T / batch.trainable_T.sum(), {}


def test_a_mean_over_a_micro_batch_is_found():
    fails(
        algorithm(mean_here, weighting=token_sum),
        "cut into micro-batches, the loss is",
        "micro_batches",
        "packing",
        "shards",
    )


def baseline_here(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Takes the mean reward of those rows of the group that are there."""
    rewards_S = batch.rewards_S.nan_to_num(0.0)
    centred_S = rewards_S - mean_by((batch.group_S, batch.n_groups), rewards_S)[batch.group_S]
    return -centred_S[batch.sequence_T] * out.need("logprobs"), {}


@pytest.mark.medium
def test_statistics_of_the_group_inside_a_term_are_found():
    fails(
        algorithm(baseline_here),
        "one unit at a time, the",
        "micro_batches",
        "packing",
        "shards",
        "on_policy",
    )


def over_the_edge(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Smooths over neighbours on the flat axis, whosever they are."""
    x_T, _ = reinforce(out, batch)
    return x_T + 0.01 * x_T.roll(9), {}


def test_a_leak_from_the_neighbour_is_found():
    fails(
        algorithm(over_the_edge),
        "gives a row another value when other rows' tokens change",
        "isolated",
        "order",
        "packing",
    )


def metric_of_the_batch(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    x_T, _ = reinforce(out, batch)
    return x_T, {"count": torch.full_like(x_T, batch.n_sequences).detach()}


@pytest.mark.medium
def test_a_metric_that_depends_on_the_cut_is_found():
    fails(algorithm(metric_of_the_batch), "metric mine/count is", "micro_batches", "packing")


def first_token(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Crashes on nothing."""
    x_T, _ = reinforce(out, batch)
    return x_T - 0 * x_T.max().detach(), {}


@pytest.mark.medium
def test_a_term_that_needs_rows_is_found():
    fails(algorithm(first_token), "a rank without rows can't compute the loss", "shards")


def upside_down(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    x_T, metrics = reinforce(out, batch)
    return -x_T, metrics


@pytest.mark.medium
def test_a_wrong_sign_is_found_and_nothing_else():
    algo = algorithm(upside_down)
    fails(algo, "on policy, the gradient of term 'mine' by logprobs is not -weight", "on_policy")
    assert [name for name, verdict in verdicts(algo).items() if verdict == "fails"] == ["on_policy"]


def stale_ratio(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Measures against the sampler, one token late."""
    x_T, _ = reinforce(out, batch)
    return x_T, {"ratio": (out.need("logprobs") - out.need("logprobs").roll(1)).exp().detach()}


@pytest.mark.medium
def test_a_wrong_ratio_is_found():
    fails(algorithm(stale_ratio), "has ratios other than 1", "on_policy")


def no_gradient(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return -batch.need("advantages") * out.need("logprobs").detach(), {}


@pytest.mark.medium
def test_a_term_that_teaches_nothing_is_found():
    fails(algorithm(no_gradient), "no batch gives role policy a gradient", "learns")


def infinite(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return out.need("logprobs").log(), {}


def test_a_loss_that_is_not_finite_is_found():
    fails(algorithm(infinite), "the loss of term 'mine' is nan", "micro_batches")


def undeclared(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    return -out.need("entropy"), {}


def test_a_term_is_given_what_it_declares():
    fails(algorithm(undeclared), "reads 'entropy' without declaring it", "micro_batches")


def first_come(batch: Batch, state: AlgoState) -> Batch:
    """The baseline is the reward of the batch's first row."""
    rewards_S = torch.where(batch.scored_S, batch.rewards_S, batch.rewards_S[0])
    return broadcast_to_tokens(batch, rewards_S - rewards_S[0])


@pytest.mark.medium
def test_an_estimator_that_goes_by_order_is_found():
    fails(
        algorithm(advantage=first_come),
        "with groups and rows in another order",
        "order",
        "equal_rewards",
        "lone_attempt",
    )


def nearly_nothing(batch: Batch, state: AlgoState) -> Batch:
    """Blows the rounding of a mean up into a signal."""
    means_G = batch.group_sum(batch.rewards_S) / torch.bincount(batch.group_S)
    centred_S = batch.rewards_S - means_G[batch.group_S]
    return broadcast_to_tokens(
        batch, centred_S / (batch.group_sum(centred_S.square())[batch.group_S].sqrt() + 1e-16)
    )


@pytest.mark.medium
def test_an_estimator_that_normalises_rounding_is_found():
    fails(
        algorithm(advantage=nearly_nothing),
        "rewards are equal in every group, but advantages reach",
        "equal_rewards",
    )


# --- claims and exemptions


def compared(out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Its own group in one number."""
    gain_S = out.sequence_sum(-batch.need("advantages") * out.need("logprobs"))
    return batch.group_sum(gain_S).square(), {}


@pytest.mark.medium
def test_a_false_claim_is_found():
    """Whole groups stay together, so that all invariances hold; rows are not isolated, and nobody
    said so."""
    algo = algorithm(compared, level="group")
    fails(algo, "isolated: term 'mine' gives a row", "isolated")
    assert {verdicts(algo)[name] for name in INVARIANCES} == {"holds"}
    honest = {"isolated": "a group is one datum", "on_policy": "a square"}
    assert verdicts(replace(algo, exempt=honest))["isolated"] == "exempt"
    check_algorithm(replace(algo, exempt=honest))


@pytest.mark.medium
@pytest.mark.parametrize("name", PROPERTIES)
def test_a_false_exemption_is_found(name: str):
    fails(
        algorithm(exempt={name: "too hard"}),
        rf"{name}: is exempt \(too hard\), but it holds on every synthetic batch",
        name,
    )


@pytest.mark.medium
def test_an_exemption_for_want_of_advantages_is_held_to_that():
    fails(
        algorithm(exempt={"equal_rewards": "no advantages: none"}),
        "does make a column 'advantages'",
        "equal_rewards",
    )


def test_a_claim_about_advantages_needs_some():
    algo = replace(build_builtin("sft"), name="mine", exempt={})
    fails(algo, "there are no advantages: exempt it", "on_policy", "equal_rewards", "lone_attempt")


def test_an_unknown_property_is_refused():
    with pytest.raises(AssertionError, match=r"exempt from 'isolatd': did you mean 'isolated'\?"):
        check_algorithm(algorithm(exempt={"isolatd": "a slip"}))


def constant(batch: Batch, state: AlgoState, *, value: float) -> Batch:
    return broadcast_to_tokens(
        batch, torch.where(batch.train_S & batch.scored_S, value, 0.0).double()
    )


@pytest.mark.medium
def test_true_exemptions_pass():
    never_zero = {"equal_rewards": "always the same", "lone_attempt": "always the same"}
    algo = algorithm(
        weighting=sequence_mean, advantage=partial(constant, value=0.5), exempt=never_zero
    )
    check_algorithm(algo)
    assert verdicts(algo)["equal_rewards"] == "exempt"
