"""Configuration of the links. Free of torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from ratchet.config.base import Section

Sent = Literal["float32", "bfloat16", "float16"] | None
SENT = "Floating-point weights are sent in it, converted by the learner; null: as the learner has them."
TIMEOUT = "Seconds for one push; then the generator goes on with the weights that it has, and the run stops."


class AutoLinkConfig(Section):
    """The same tensors where learner and generator share them, else shared memory on one host, else collectives."""

    builds: ClassVar[str] = "ratchet.links.make:auto"

    kind: Literal["auto"] = "auto"
    dtype: Sent = Field(default=None, description=SENT)
    timeout_s: float = Field(default=600.0, gt=0, description=TIMEOUT)


class SharedLinkConfig(Section):
    """Learner and generator have the same tensors, in one process: a push only names the version."""

    builds: ClassVar[str] = "ratchet.links.make:shared"

    kind: Literal["shared"] = "shared"


class SharedMemoryLinkConfig(Section):
    """Memory that the processes of one host share: each rank writes its blocks once, receivers read them where they lie."""

    builds: ClassVar[str] = "ratchet.links.make:shared_memory"

    kind: Literal["shared_memory"] = "shared_memory"
    dtype: Sent = Field(default=None, description=SENT)
    timeout_s: float = Field(default=600.0, gt=0, description=TIMEOUT)


class CudaIpcLinkConfig(Section):
    """The same on an accelerator that learner and generator both use."""

    builds: ClassVar[str] = "ratchet.links.make:cuda_ipc"

    kind: Literal["cuda_ipc"] = "cuda_ipc"
    dtype: Sent = Field(default=None, description=SENT)
    timeout_s: float = Field(default=600.0, gt=0, description=TIMEOUT)


class CollectiveLinkConfig(Section):
    """Broadcasts from each rank to all receivers, over the network."""

    builds: ClassVar[str] = "ratchet.links.make:collective"

    kind: Literal["collective"] = "collective"
    backend: Literal["gloo", "nccl"] = Field(default="gloo", description="nccl: where all weights are on accelerators.")
    host: str = Field(default="127.0.0.1", description="The driver's address, as learner and receivers reach it.")
    bucket_mib: int = Field(default=16, ge=1, description="Weights that a rank broadcasts at a time, in MiB.")
    dtype: Sent = Field(default=None, description=SENT)
    timeout_s: float = Field(default=600.0, gt=0, description=TIMEOUT)


class FilesLinkConfig(Section):
    """Files in a directory that learner and receivers share."""

    builds: ClassVar[str] = "ratchet.links.make:files"

    kind: Literal["files"] = "files"
    directory: str | None = Field(default=None, description="Of this run alone; null: links/ in the run's directory.")
    dtype: Sent = Field(default=None, description=SENT)
    timeout_s: float = Field(default=600.0, gt=0, description=TIMEOUT)


class DeltaLinkConfig(Section):
    """Only what changed since the version before, by files or by shared memory."""

    builds: ClassVar[str] = "ratchet.links.make:delta"

    kind: Literal["delta"] = "delta"
    through: Literal["files", "shared_memory"] = Field(default="files", description="What carries the changes.")
    directory: str | None = Field(default=None, description="Of the files; null: links/ in the run's directory.")
    dtype: Sent = Field(default="bfloat16", description=SENT)
    timeout_s: float = Field(default=600.0, gt=0, description=TIMEOUT)
