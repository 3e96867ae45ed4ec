"""The algorithms that train reward models, built from their configuration."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.algorithms.config.base import AlgorithmConfig
from ratchet.algorithms.loss_aggregation import labelled_turn_mean, prompt_mean, sequence_mean
from ratchet.algorithms.losses.reward_model import bradley_terry, process_reward, score_regression
from ratchet.algorithms.preference import PAIR_EXEMPTIONS

SCORED_EXEMPTIONS = {
    "on_policy": "no policy gradient: answers are given, not sampled",
    "equal_rewards": "no advantages: each row's score is its target",
    "lone_attempt": "no advantages: each row is a datum of its own",
}


def build_bradley_terry(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that trains a reward model on pairs."""
    term = AlgorithmTerm(
        "bradley_terry", bradley_terry, prompt_mean, level="group", needs=frozenset({"scores"})
    )
    return _build_algorithm(config, term, exempt=PAIR_EXEMPTIONS)


def build_regression(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that trains a reward model on scores."""
    term = AlgorithmTerm(
        "regression", score_regression, sequence_mean, level="sequence", needs=frozenset({"scores"})
    )
    return _build_algorithm(config, term, exempt=SCORED_EXEMPTIONS)


def build_process(config: AlgorithmConfig) -> Algorithm:
    """Return the algorithm that trains a process reward model."""
    term = AlgorithmTerm(
        "process", process_reward, labelled_turn_mean, needs=frozenset({"token_scores"})
    )
    return _build_algorithm(config, term, exempt=SCORED_EXEMPTIONS)


def _build_algorithm(
    config: AlgorithmConfig, term: AlgorithmTerm, *, exempt: Mapping[str, str]
) -> Algorithm:
    return Algorithm(
        name=config.display_name,
        source=config.source,
        losses={"policy": (term,)},
        minibatches=config.minibatches,
        epochs=config.epochs,
        exempt=exempt,
    )
