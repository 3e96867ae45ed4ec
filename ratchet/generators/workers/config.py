"""Configure generators in worker processes.

This module imports neither torch nor the generators' code.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from ratchet.config.resolve import Slot, resolve
from ratchet.config.schema import AnyGenerator
from ratchet.config.sections import GeneratorSection, ModelSizes


class GeneratorWorkersConfig(GeneratorSection):
    """A pool of generators in worker processes that balances requests over them."""

    builds: ClassVar[str] = "ratchet.generators.workers.pool:GeneratorPool"

    worker: Annotated[AnyGenerator, Slot("worker_generator")] = Field(
        default_factory=lambda: resolve("worker_generator", {"kind": "engine"})
    )
    """The generator that each worker holds."""
    workers: int = Field(2, ge=1, le=1024)
    """Number of processes, each with the whole model."""
    worker_runs: Literal["completions", "groups"] = "completions"
    """Work of each worker. completions: requests of the driver; groups: whole groups of attempts,
    with their environments and rewards (rollout workers), which is faster if attempts are short and
    many."""
    recovery: Literal["none", "restart"] = "none"
    """Reaction to a worker that dies or is silent for too long. none: the run ends; restart: a new
    worker replaces it and draws its unanswered requests again."""
    max_restarts: int = Field(3, ge=1)
    """Maximum number of restarts in a run, of all workers together; the next loss ends the run."""

    interpreter: str | None = None
    """Python of another environment that runs the workers (.venv-vllm/bin/python), if their
    packages clash with those of the learner; Ratchet is installed there too. null: the run's
    own."""

    def check_keys(self) -> None:
        if self.worker_runs == "groups" and self.recovery == "restart":
            raise ValueError(
                "worker_runs=groups can't repeat the groups of a lost worker: set recovery=none, "
                "or worker_runs=completions"
            )
        if self.recovery == "none" and "max_restarts" in self.changed:
            raise ValueError(
                "max_restarts is only for recovery=restart: set recovery=restart, or remove "
                "max_restarts"
            )

    @property
    def sampler(self) -> GeneratorSection:
        return self.worker

    @property
    def n_workers(self) -> int:
        return self.workers

    @property
    def plays_groups(self) -> bool:
        return self.worker_runs == "groups"

    @property
    def can_offload(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.can_offload

    @property
    def reports_kept_mass(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.reports_kept_mass

    @property
    def records_masks(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.records_masks

    @property
    def min_temperature(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.worker.min_temperature

    @property
    def accelerators(self) -> int:
        """Return the number of accelerators of each worker, if the machine has any."""
        return self.worker.accelerators

    def explain_misfit(self, sizes: ModelSizes, *, on_cpu: bool) -> str | None:
        return self.worker.explain_misfit(sizes, on_cpu=on_cpu)
