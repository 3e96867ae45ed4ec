"""The sections that train reward models: a scalar head on the layers of the policy's model."""

from __future__ import annotations

from typing import ClassVar

from ratchet.algorithms.config.base import AlgorithmConfig
from ratchet.config.sections import Source


class BradleyTerryConfig(AlgorithmConfig):
    """A reward model trained on pairs with the Bradley-Terry loss (arXiv:2203.02155).

    The better answer of a pair should get the higher score.
    """

    builds: ClassVar[str] = "ratchet.algorithms.reward_model:build_bradley_terry"
    source: ClassVar[Source] = "pairs"


class ScoreRegressionConfig(AlgorithmConfig):
    """A reward model trained by least squares on scores of single answers (arXiv:2406.08673)."""

    builds: ClassVar[str] = "ratchet.algorithms.reward_model:build_regression"
    source: ClassVar[Source] = "labelled"


class ProcessRewardConfig(AlgorithmConfig):
    """A process reward model, trained on a label for each step of an answer (arXiv:2305.20050)."""

    builds: ClassVar[str] = "ratchet.algorithms.reward_model:build_process"
    source: ClassVar[Source] = "steps"
