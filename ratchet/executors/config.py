"""Configuration of the executors. This module imports neither torch nor Ray."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from ratchet.config.sections import ClusterSection

Port = Annotated[int, Field(ge=1024, le=65535)]
Strategy = Literal["pack", "spread", "per_node"]


def _check_ascending(ports: tuple[int, int] | None) -> tuple[int, int] | None:
    if ports is not None and ports[0] > ports[1]:
        raise ValueError(f"the first port, {ports[0]}, is above the last, {ports[1]}: swap them")
    return ports


def _check_distinct(devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if devices is not None and (not devices or len(set(devices)) < len(devices)):
        raise ValueError("must list at least one device, and each only once; null: all devices")
    return devices


class ClusterConfig(ClusterSection):
    """The fields that every kind of cluster has."""

    timeout_s: float = Field(1800.0, gt=0)
    """Default deadline of a worker's call, in seconds."""
    silence_s: float = Field(25.0, ge=5)
    """Seconds without a heartbeat after which a worker is killed."""
    colocated: bool | Literal["resident"] = False
    """Learner and generator use the same accelerators. true: they take turns, and the one that
    waits keeps its memory on the host; resident: both stay there and work at the same time, so
    their memory must fit together (generator.worker.kv_cache_gib)."""
    ports: Annotated[tuple[Port, Port] | None, AfterValidator(_check_ascending)] = None
    """First and last port on which workers may listen; null: any free port."""

    @property
    def takes_turns(self) -> bool:
        return self.colocated is True

    @property
    def is_resident(self) -> bool:
        return self.colocated == "resident"


class LocalClusterConfig(ClusterConfig):
    """A cluster of processes on this machine; components without a process run in the driver."""

    builds: ClassVar[str] = "ratchet.executors.local:LocalExecutor"

    devices: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, AfterValidator(_check_distinct)
    ] = None
    """Accelerators to use, by index; null: all that this process sees."""


class RayClusterConfig(ClusterConfig):
    """A Ray cluster: a running one, or a new one on this machine that is shut down with the run."""

    builds: ClassVar[str] = "ratchet.executors.ray:RayExecutor"

    address: str | None = None
    """Address of a running cluster: host:port, or auto; null: a new cluster on this machine."""
    nodes: int = Field(1, ge=1)
    """Number of nodes that the run uses. It does not start on a smaller cluster."""
    gpus_per_node: int | None = Field(None, ge=0)
    """Accelerators that the run uses on each node; null: all."""
    cpus_per_node: float | None = Field(None, gt=0)
    """Cores that the run uses on each node; null: all cores of the node, or `threads` in a new
    cluster on this machine."""
    strategy: Strategy = "pack"
    """How ranks are placed on nodes: on few nodes (pack), on many (spread), or one on each
    (per_node)."""
    object_store_mib: int = Field(2048, ge=80)
    """Shared memory of a new cluster, in MiB, for data that its processes exchange."""


class TorchrunClusterConfig(ClusterConfig):
    """The processes that torchrun started: rank 0 is the driver, and all ranks are workers."""

    builds: ClassVar[str] = "ratchet.executors.torchrun:TorchrunExecutor"
