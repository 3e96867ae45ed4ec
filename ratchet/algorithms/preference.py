"""Build the preference algorithms from their configuration."""

from __future__ import annotations

from functools import partial

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, Pass, Role
from ratchet.algorithms.config.preference import KTOConfig, PreferenceConfig
from ratchet.algorithms.config_binding import bind
from ratchet.algorithms.loss_aggregation import chosen_mean, prompt_mean, sequence_mean
from ratchet.algorithms.losses.common import nll
from ratchet.algorithms.losses.preference import kto, kto_reference_point

# Properties (see `ratchet.algorithms.properties`) that losses on pairs and on labels do not have.
PAIR_EXEMPTIONS = {
    "isolated": "a pair is one datum: the loss compares its two rows",
    "on_policy": "no policy gradient: answers are given, not sampled",
    "equal_rewards": "no advantages: the order of a pair is the signal",
}
LABELLED_EXEMPTIONS = {
    "on_policy": "no policy gradient: answers are given, not sampled",
    "equal_rewards": "no advantages: each row's label is its signal",
    "lone_attempt": "no advantages: each labelled row is a datum of its own",
}


def build_pairs(config: PreferenceConfig) -> Algorithm:
    """Return the preference algorithm (DPO, IPO, SimPO, ...) that a config section describes."""
    coef = config.preference_coef
    terms = [AlgorithmTerm("preference", bind(config), prompt_mean, level="group", coef=coef)]
    if config.sft_coef > 0:
        terms.append(AlgorithmTerm("nll", nll, chosen_mean, coef=config.sft_coef))
    return Algorithm(
        name=config.display_name,
        source=config.source,
        losses={"policy": tuple(terms)},
        passes=(Pass("reference", "logprobs", "ref_logprobs"),) if config.needs_reference else (),
        roles={"reference": Role()} if config.needs_reference else {},
        minibatches=config.minibatches,
        epochs=config.epochs,
        exempt=PAIR_EXEMPTIONS,
    )


def build_kto(config: KTOConfig) -> Algorithm:
    """Return the KTO algorithm that a config section describes."""
    loss = partial(
        kto, beta=config.beta, desirable=config.desirable, undesirable=config.undesirable
    )
    return Algorithm(
        name=config.display_name,
        source=config.source,
        losses={"policy": (AlgorithmTerm("kto", loss, sequence_mean, level="sequence"),)},
        passes=(
            Pass("policy", "logprobs", "old_logprobs"),
            Pass("reference", "logprobs", "ref_logprobs"),
        ),
        roles={"reference": Role()},
        # This hook computes no advantage, but KTO's reference point z0, once per batch.
        advantage=kto_reference_point,
        minibatches=config.minibatches,
        epochs=config.epochs,
        uses_mismatched_pairs=config.uses_mismatched_pairs,
        exempt=LABELLED_EXEMPTIONS,
    )
