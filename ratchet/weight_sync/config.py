"""The recipe sections of weight syncs. This module imports no torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.sections import WeightSyncSection

SentDtype = Literal["float32", "bfloat16", "float16"] | None
SENT_DTYPE_DESCRIPTION = (
    "The learner converts floating-point weights to this dtype before it sends them; null: it does "
    "not convert them."
)


class PushSection(WeightSyncSection):
    """The base class of weight syncs that move weights."""

    dtype: SentDtype = Field(default=None, description=SENT_DTYPE_DESCRIPTION)
    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds for one push. After that the generator keeps its weights, and the run stops."""


class AutoWeightSyncConfig(PushSection):
    """The automatic choice of a weight sync.

    Shared tensors if learner and generator share them, else shared memory on one host (files on
    macOS), else collectives.
    """

    builds: ClassVar[str] = "ratchet.weight_sync.factory:auto"

    kind: Literal["auto"] = "auto"


class SharedWeightSyncConfig(WeightSyncSection):
    """A weight sync for tensors shared in one process: a push only announces the version."""

    builds: ClassVar[str] = "ratchet.weight_sync.factory:shared"

    kind: Literal["shared"] = "shared"


class SharedMemoryWeightSyncConfig(PushSection):
    """A weight sync through shared memory of the processes on one host.

    Each rank writes its blocks once, and receivers read them in place.
    """

    builds: ClassVar[str] = "ratchet.weight_sync.factory:shared_memory"

    kind: Literal["shared_memory"] = "shared_memory"


class CollectiveWeightSyncConfig(PushSection):
    """A weight sync by broadcasts from each rank to all receivers, over the network."""

    builds: ClassVar[str] = "ratchet.weight_sync.factory:collective"

    kind: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"] = "gloo"
    """nccl needs all weights on accelerators."""
    host: str | None = None
    """The address at which other processes reach the driver; null: 127.0.0.1 on one host, else the
    driver's host name."""
    bucket_mib: int = Field(default=16, ge=1)
    """Weights that a rank broadcasts at a time, in MiB."""

    @property
    def reads_accelerator(self) -> bool:
        return self.backend == "nccl"


class FilesWeightSyncConfig(PushSection):
    """A weight sync through files in a directory that learner and receivers share."""

    builds: ClassVar[str] = "ratchet.weight_sync.factory:files"

    kind: Literal["files"] = "files"
    directory: str | None = None
    """Directory in which the run makes a folder for the weights; null: weight_sync/ in the run's
    directory."""


class DeltaWeightSyncConfig(PushSection):
    """A weight sync that sends only the changes since the last version.

    The changes are sent through files, shared memory or collectives.
    """

    builds: ClassVar[str] = "ratchet.weight_sync.factory:delta"

    kind: Literal["delta"] = "delta"
    through: Literal["files", "shared_memory", "collective"] = "files"
    """How the changes are sent."""
    directory: str | None = None
    """Directory of the files; null: weight_sync/ in the run's directory."""
    host: str | None = None
    """With collective: the address at which other processes reach the driver; null: 127.0.0.1 on
    one host, else the driver's host name."""
    dtype: SentDtype = Field(default="bfloat16", description=SENT_DTYPE_DESCRIPTION)

    def check_keys(self) -> None:
        super().check_keys()
        if self.host is not None and self.through != "collective":
            raise ValueError(
                f"host has no effect with through={self.through}: set through=collective, or "
                "remove host"
            )
