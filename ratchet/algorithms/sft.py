"""Supervised fine-tuning (SFT): maximum likelihood of the assistant's tokens and ends of turns."""

from __future__ import annotations

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.algorithms.config.sft import SFTConfig
from ratchet.algorithms.loss_aggregation import WEIGHTINGS
from ratchet.algorithms.losses.common import nll

SFT_EXEMPTIONS = {
    "on_policy": "no policy gradient: answers are given, not sampled",
    "equal_rewards": "no advantages: the answers are not judged",
    "lone_attempt": "no advantages: each row is a datum of its own",
}


def build_sft(config: SFTConfig) -> Algorithm:
    """Return the supervised fine-tuning algorithm of a section."""
    return Algorithm(
        name=config.display_name,
        source=config.source,
        turns=config.train,
        losses={"policy": (AlgorithmTerm("nll", nll, WEIGHTINGS[config.weighting]),)},
        minibatches=config.minibatches,
        epochs=config.epochs,
        exempt=SFT_EXEMPTIONS,
    )
