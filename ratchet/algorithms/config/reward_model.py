"""The sections of reward models: a scalar head on the policy's body."""

from __future__ import annotations

from typing import ClassVar

from ratchet.algorithms.config.base import AlgorithmConfig, Source


class BradleyTerryConfig(AlgorithmConfig):
    """A Bradley-Terry model of pairs: the better answer scores higher (arXiv:2203.02155)."""

    builds: ClassVar[str] = "ratchet.algorithms.reward_model:build_bradley_terry"
    source: ClassVar[Source] = "pairs"


class ScoreRegressionConfig(AlgorithmConfig):
    """A reward model of single answers, trained by least squares (arXiv:2406.08673)."""

    builds: ClassVar[str] = "ratchet.algorithms.reward_model:build_regression"
    source: ClassVar[Source] = "labelled"


class ProcessRewardConfig(AlgorithmConfig):
    """A reward model of steps, trained on a label for each step (arXiv:2305.20050)."""

    builds: ClassVar[str] = "ratchet.algorithms.reward_model:build_process"
    source: ClassVar[Source] = "steps"
