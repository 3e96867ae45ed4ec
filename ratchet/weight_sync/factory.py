"""Create the weight sync between learner and generator, local or remote.

Each transport is imported by the function that creates it. So a run imports only the transport that
it uses, and none if learner and generator share weights.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.config.base import Section
from ratchet.config.resolve import build
from ratchet.errors import ConfigError
from ratchet.protocols import Generator, Learner, WeightSync
from ratchet.utils.user_parts import add_missing_members
from ratchet.weight_sync.config import (
    AutoWeightSyncConfig,
    CollectiveWeightSyncConfig,
    DeltaWeightSyncConfig,
    FilesWeightSyncConfig,
    PushSection,
    SharedMemoryWeightSyncConfig,
    SharedWeightSyncConfig,
)
from ratchet.weight_sync.in_process import SharedWeightSync
from ratchet.worker_protocols import Ranks

if TYPE_CHECKING:
    from ratchet.models.lora.decoder import Adapter
    from ratchet.weight_sync.collective import CollectiveWeightSync
    from ratchet.weight_sync.files import FilesWeightSync
    from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync


@dataclass(frozen=True)
class SyncEndpoints:
    """The two ends of a weight sync, learner and generator, and facts about their run."""

    # A learner in this process, or ranks that each have the methods of a `WeightSender`.
    learner: Learner | Ranks
    # The generator that the driver calls.
    generator: Generator
    # Ranks with a `WeightReceiver` each; None: the driver passes the weights to `generator`.
    receivers: Ranks | None = None
    receivers_count: int = 1
    # Name of the run.
    run: str = "run"
    # Directory of the run.
    directory: Path = Path("runs/run")
    # True if both ends are on the driver's host.
    one_host: bool = True
    # True if the weights of a learner in this process stay on an accelerator during pushes.
    on_accelerator: bool = False
    # The adapter that the learner trains instead of the model's weights; None: the weights train.
    adapter: Adapter | None = None

    @property
    def sender_ranks(self) -> Ranks:
        """Return the ranks that send weights. A learner in this process is a single rank."""
        if isinstance(self.learner, Ranks):
            return self.learner
        from ratchet.weight_sync.endpoints import LocalRank, WeightSender

        return LocalRank(WeightSender(self.learner))

    @property
    def receiver_ranks(self) -> Ranks:
        """Return the ranks that receive weights; without `receivers`, only the generator."""
        if self.receivers is not None:
            return self.receivers
        from ratchet.weight_sync.endpoints import LocalRank, WeightReceiver

        return LocalRank(WeightReceiver(self.generator))

    @property
    def shares_weights(self) -> bool:
        """True if learner and generator use the same tensors."""
        return self.is_one_process and self.generator.shares_weights

    @property
    def is_one_process(self) -> bool:
        """True if learner and generator are called in this process."""
        return not isinstance(self.learner, Ranks) and self.receivers is None


def make_weight_sync(section: Section, endpoints: SyncEndpoints) -> WeightSync:
    """Create the weight sync that a recipe's weight_sync section describes."""
    return add_missing_members(build(section, endpoints), WeightSync)


def auto(config: AutoWeightSyncConfig, endpoints: SyncEndpoints) -> WeightSync:
    """Create the weight sync that fits the two ends.

    It is `shared` if they use the same tensors, a handover if weights on an accelerator can stay in
    this process, shared memory on one host (files where the system has no `memfd_create`), else
    collective.
    """
    if endpoints.shares_weights:
        return SharedWeightSync(endpoints.generator)
    options: dict[str, Any] = {"dtype": config.dtype, "timeout_s": config.timeout_s}
    if endpoints.is_one_process and endpoints.on_accelerator:
        from ratchet.weight_sync.handover import HandoverWeightSync

        return HandoverWeightSync(
            endpoints.sender_ranks,
            endpoints.receiver_ranks,
            **_get_transport_options(config, endpoints),
        )
    if not endpoints.one_host:
        return collective(CollectiveWeightSyncConfig(**options), endpoints)
    if not hasattr(os, "memfd_create"):
        return files(FilesWeightSyncConfig(**options), endpoints)
    return shared_memory(SharedMemoryWeightSyncConfig(**options), endpoints)


def shared(config: SharedWeightSyncConfig, endpoints: SyncEndpoints) -> SharedWeightSync:
    """Create the weight sync of a generator that reads the learner's own tensors.

    Raises ConfigError if the generator has its own weights, which this sync would never update.
    """
    if not endpoints.shares_weights:
        raise ConfigError(
            "weight_sync.kind=shared is for a generator that reads the learner's own tensors. Set "
            "weight_sync.kind=auto."
        )
    return SharedWeightSync(endpoints.generator)


def shared_memory(
    config: SharedMemoryWeightSyncConfig, endpoints: SyncEndpoints
) -> SharedMemoryWeightSync:
    """Create the weight sync that uses shared memory."""
    from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

    return SharedMemoryWeightSync(
        endpoints.sender_ranks,
        endpoints.receiver_ranks,
        run=endpoints.run,
        **_get_transport_options(config, endpoints),
    )


def collective(
    config: CollectiveWeightSyncConfig, endpoints: SyncEndpoints
) -> CollectiveWeightSync:
    """Create the weight sync that uses collective operations."""
    from ratchet.weight_sync.collective import CollectiveWeightSync

    return CollectiveWeightSync(
        endpoints.sender_ranks,
        endpoints.receiver_ranks,
        receivers_count=endpoints.receivers_count,
        host=_get_host(config.host, endpoints),
        backend=config.backend,
        bucket_mib=config.bucket_mib,
        **_get_transport_options(config, endpoints),
    )


def files(config: FilesWeightSyncConfig, endpoints: SyncEndpoints) -> FilesWeightSync:
    """Create the weight sync that uses files."""
    from ratchet.weight_sync.files import FilesWeightSync

    return FilesWeightSync(
        endpoints.sender_ranks,
        endpoints.receiver_ranks,
        directory=_get_directory(config.directory, endpoints),
        **_get_transport_options(config, endpoints),
    )


def delta(
    config: DeltaWeightSyncConfig, endpoints: SyncEndpoints
) -> CollectiveWeightSync | FilesWeightSync | SharedMemoryWeightSync:
    """Create the weight sync that sends receivers only the changes since the last version."""
    both_ends = (endpoints.sender_ranks, endpoints.receiver_ranks)
    if config.through == "collective":
        from ratchet.weight_sync.collective import CollectiveWeightSync

        return CollectiveWeightSync(
            *both_ends,
            receivers_count=endpoints.receivers_count,
            host=_get_host(config.host, endpoints),
            changes_only=True,
            **_get_transport_options(config, endpoints),
        )
    if config.through == "shared_memory":
        from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

        return SharedMemoryWeightSync(
            *both_ends,
            run=endpoints.run,
            changes_only=True,
            **_get_transport_options(config, endpoints),
        )
    from ratchet.weight_sync.files import FilesWeightSync

    directory = _get_directory(config.directory, endpoints)
    return FilesWeightSync(
        *both_ends,
        directory=directory,
        changes_only=True,
        **_get_transport_options(config, endpoints),
    )


def _get_transport_options(config: PushSection, endpoints: SyncEndpoints) -> dict[str, Any]:
    """Return the arguments that all transports take."""
    return {"dtype": config.dtype, "timeout_s": config.timeout_s, "adapter": endpoints.adapter}


def _get_host(host: str | None, endpoints: SyncEndpoints) -> str:
    """Return the address of the driver; None: one that the run's processes reach."""
    return host or ("127.0.0.1" if endpoints.one_host else socket.gethostname())


def _get_directory(directory: str | None, endpoints: SyncEndpoints) -> Path:
    """Return the directory for weight files; None: one inside the run's directory."""
    return Path(directory) if directory is not None else endpoints.directory / "weight_sync"
