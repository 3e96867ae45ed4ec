"""Configure the models of a run that judge attempts. This module does not import torch."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from ratchet.config.resolve import Slot, resolve
from ratchet.config.schema import AnyGenerator, Device
from ratchet.config.sections import JudgeSection


class LanguageModelJudgeConfig(JudgeSection):
    """A language model that answers the questions of the rewards `judge` and `pairwise_judge`."""

    builds: ClassVar[str] = "ratchet.training.workers.judges:start_language_model"

    backend: Literal["auto", "ratchet", "transformers"] = "auto"
    """Implementation of the model: ratchet (the built-in decoder), transformers, or auto: the
    built-in decoder for the families that it supports."""
    chat_template_kwargs: dict[str, Any] = Field({})
    """Variables of the chat template, such as {enable_thinking: false}."""
    generator: Annotated[AnyGenerator, Slot("generator")] = Field(
        default_factory=lambda: resolve("generator", {})
    )
    """Engine that writes the judge's replies, in the run's process. With kind=workers it has its
    own processes, which the cluster places."""
    device: Device | None = None
    """Device of a judge in the run's process: cpu, cuda or cuda:N; null: the run's. The cluster
    places workers."""

    def check_keys(self) -> None:
        if self.generator.plays_groups:
            raise ValueError(
                "generator.worker_runs=groups plays attempts, and a judge only answers questions: "
                "set worker_runs=completions"
            )
        if self.generator.sampler.quantisation is not None:
            raise ValueError(
                "generator.quantise takes effect when a weight sync delivers weights, and a judge "
                "gets none: remove quantise"
            )
        if self.device is not None and self.n_processes:
            raise ValueError(
                f"device={self.device} is for a judge in the run's process, and the cluster places "
                "generator.kind=workers: remove device"
            )

    @property
    def n_processes(self) -> int:
        return self.generator.n_workers

    @property
    def accelerators(self) -> int:
        return self.generator.accelerators


class RewardModelJudgeConfig(JudgeSection):
    """A model with a scalar head that scores conversations in processes of its own."""

    builds: ClassVar[str] = "ratchet.training.workers.judges:start_reward_model"

    workers: int = Field(1, ge=1, le=1024)
    """Number of processes, each with the whole model."""

    @property
    def n_processes(self) -> int:
        return self.workers
