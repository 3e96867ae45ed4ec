"""Configuration of where a run's processes live. Free of torch and of Ray."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field

from ratchet.config.base import Section

Port = Annotated[int, Field(ge=1024, le=65535)]
Strategy = Literal["pack", "spread", "per_node"]


def _ascending(ports: tuple[int, int] | None) -> tuple[int, int] | None:
    if ports is not None and ports[0] > ports[1]:
        raise ValueError(f"the first port, {ports[0]}, is above the last, {ports[1]}: swap them")
    return ports


def _distinct(devices: tuple[int, ...] | None) -> tuple[int, ...] | None:
    if devices is not None and (not devices or len(set(devices)) < len(devices)):
        raise ValueError("must name devices, each of them once; null: all")
    return devices


class ClusterConfig(Section):
    """What every kind has."""

    timeout_s: float = Field(
        1800.0,
        gt=0,
        description="Seconds that a call of a worker may take, where nothing else is said.",
    )
    silence_s: float = Field(
        25.0, ge=5, description="Seconds without a sign of life, after which a worker is killed."
    )
    colocated: bool = Field(
        False,
        description="Learner and generator use the same accelerators by turns, the other's memory "
        "on the host.",
    )
    ports: Annotated[tuple[Port, Port] | None, AfterValidator(_ascending)] = Field(
        None, description="First and last port on which workers may listen; null: any that is free."
    )


class LocalClusterConfig(ClusterConfig):
    """Processes of this machine. What needs none stays in the driver's."""

    builds: ClassVar[str] = "ratchet.executors.local:LocalExecutor"

    devices: Annotated[
        tuple[Annotated[int, Field(ge=0)], ...] | None, AfterValidator(_distinct)
    ] = Field(None, description="Accelerators to use, by index; null: all that this process sees.")


class RayClusterConfig(ClusterConfig):
    """Actors of Ray: on a cluster that runs already, or on one of this machine alone that lives as
    long as the run."""

    builds: ClassVar[str] = "ratchet.executors.ray:RayExecutor"

    address: str | None = Field(
        None,
        description="Of a running cluster: host:port, or auto; null: a new one on this machine.",
    )
    nodes: int = Field(
        1, ge=1, description="Nodes that the run uses: it refuses to start on fewer."
    )
    gpus_per_node: int | None = Field(
        None, ge=0, description="Accelerators that the run uses on each; null: all."
    )
    cpus_per_node: float | None = Field(
        None, gt=0, description="Cores that the run uses on each; null: all, here `threads`."
    )
    strategy: Strategy = Field(
        "pack",
        description="How ranks go to nodes: few nodes (pack), many (spread), one on each "
        "(per_node).",
    )
    object_store_mib: int = Field(
        2048, ge=80, description="Shared memory of a new cluster, for what its processes exchange."
    )


class TorchrunClusterConfig(ClusterConfig):
    """The processes that torchrun started: that of rank 0 drives, and all of them work."""

    builds: ClassVar[str] = "ratchet.executors.torchrun:TorchrunExecutor"
