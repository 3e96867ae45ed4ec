"""Run one rank of a distributed learner, with its shard of the model and a learner per role."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.batch import Batch
from ratchet.checkpoint.async_writer import BackgroundTask
from ratchet.checkpoint.serialization import WriteFiles, defer_writes
from ratchet.config.resolve import build, import_object, resolve
from ratchet.learners.distributed.base import RankLearner
from ratchet.learners.distributed.model_providers import ModelProvider
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.models.accelerator import use_accelerator
from ratchet.models.memory import memory_bytes
from ratchet.models.model_source import ModelSource
from ratchet.protocols import ExportedPart, Shard

# Timeout of a collective; the worker group's own timeouts are shorter.
TIMEOUT = timedelta(minutes=30)


class RankProcess(Protocol):
    """The process that a rank runs in (`ratchet.executors.worker.WorkerPlace`)."""

    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def rendezvous(self) -> str: ...
    @property
    def device(self) -> str: ...


class LearnerRank:
    """One rank of a distributed learner, which the driver (`RemoteLearner`) calls."""

    def __init__(
        self,
        process: RankProcess,
        *,
        learner: Mapping[str, Any],
        origin: ModelSource,
        double: bool = False,
    ) -> None:
        """Join the process group and load this rank's shard of the model.

        Args:
            learner: Values of a `DistributedConfig`.
            origin: The source of the policy's model.
            double: True to compute in float64.
        """
        config: Any = resolve("learner", learner)
        self.device = device = torch.device(process.device)
        dtype = torch.float64 if double else torch.float32
        if device.type == "cuda":
            use_accelerator(device)
        dist.init_process_group(
            # Gradients may be in host memory, which needs gloo.
            "gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            init_method=f"tcp://{process.rendezvous}",
            rank=process.rank,
            world_size=process.world_size,
            timeout=TIMEOUT,
        )
        self.provider: ModelProvider = import_object(config.provider)(config, device, dtype)
        self.policy = self.provider.load(origin)
        self.learners: dict[str, RankLearner] = {}
        self.algorithm: Algorithm | None = None
        # The copied state of each role, which waits to be written, and the thread that writes one.
        self.copied_states: dict[str, list[WriteFiles]] = {}
        self.background = BackgroundTask()

    def host(self) -> str:
        """Return the name of this machine."""
        return socket.gethostname()

    # --- Start of a stage.

    def begin(self, roles: Mapping[str, RoleSpec], algorithm: Mapping[str, Any]) -> None:
        """Create the learners of a stage.

        Args:
            algorithm: Values of the recipe's algorithm section, from which every rank builds the
                losses.
        """
        self.algorithm = build(resolve("algorithm", algorithm))
        # Free the learners of the previous stage before new ones are created.
        self.learners.clear()
        for name, spec in roles.items():
            self.learners[name] = self._create_learner(name, spec)

    def _create_learner(self, name: str, spec: RoleSpec) -> RankLearner:
        """Return the learner of a role, with the policy's model, a copy of it, or another model."""
        provider = self.provider
        if name == "policy":
            model = self.policy
        else:
            model = (
                provider.copy(self.policy) if spec.origin is None else provider.load(spec.origin)
            )
        if spec.adapter is None:
            model.requires_grad_(spec.optimizer is not None)
        return provider.learner(model, spec)

    def _find_terms(self, role: str, names: Sequence[str]) -> list[AlgorithmTerm]:
        """Return the loss terms of a role by their names."""
        assert self.algorithm is not None, "no stage has begun"
        terms = {term.name: term for term in self.algorithm.losses[role]}
        return [terms[name] for name in names]

    # --- Calls from the driver.

    def score(
        self, role: str, micros: Sequence[Batch], output_names: Sequence[str], top_k: int
    ) -> list[dict[str, Tensor]]:
        return self.learners[role].score(micros, output_names, top_k=top_k)

    def score_base(
        self, role: str, micros: Sequence[Batch], output_names: Sequence[str], top_k: int
    ) -> list[dict[str, Tensor]]:
        with self.learners[role].forward.model.without_adapter():
            return self.score(role, micros, output_names, top_k)

    def update(self, role: str, micros: Sequence[Batch], terms: Sequence[str]) -> dict[str, float]:
        return dict(self.learners[role].update(micros, self._find_terms(role, terms)))

    def weights(self, role: str) -> list[Shard]:
        """Return copies of this rank's blocks on the CPU."""
        return [
            replace(shard, tensor=shard.tensor.detach().to("cpu", copy=True))
            for shard in self.learners[role].weights()
        ]

    def apply_to_weights(self, operation: Callable[[Iterator[Shard], int], Any]) -> Any:
        """Return the result of an operation of a `WeightTransport` on (policy's blocks, rank)."""
        return operation(self.learners["policy"].weights(), dist.get_rank())

    def count_device_bytes(self) -> int:
        """Return the total memory of this rank's accelerator; 0 on a CPU."""
        return 0 if self.device.type == "cpu" else memory_bytes(self.device) or 0

    def count_later_bytes(self, role: str) -> int:
        """Return the bytes that updates will allocate on this rank's device; 0 on a CPU."""
        return self.learners[role].count_later_bytes()

    def onload(self, role: str) -> None:
        self.learners[role].onload()

    def offload(self, role: str) -> None:
        self.learners[role].offload()

    def save(self, role: str, directory: str) -> None:
        self.learners[role].save(Path(directory))

    def copy_state(self, role: str, directory: str) -> None:
        """Copy what `save` would write to host memory.

        directory: where the files will be, relative to the root that `begin_write` gets.
        """
        with defer_writes() as writes:
            self.save(role, directory)
        self.copied_states[role] = writes

    def begin_write(self, role: str, root: str) -> None:
        """Write the copied state of a role in another thread, while calls go on."""
        writes = self.copied_states.pop(role)

        def write() -> None:
            for write_files in writes:
                write_files(Path(root))

        self.background.begin(write)

    def is_writing(self) -> bool:
        """Return True while the thread of `begin_write` runs."""
        return self.background.is_running

    def finish_write(self) -> None:
        """Wait for the thread of `begin_write`. Raises CheckpointError if it could not write."""
        self.background.wait()

    def load(self, role: str, directory: str) -> None:
        self.learners[role].load(Path(directory))

    def export(self, role: str, directory: str, averaged: bool, part: ExportedPart) -> None:
        self.learners[role].export(Path(directory), averaged=averaged, part=part)

    def close(self) -> None:
        if dist.is_initialized():
            self.provider.close()
            dist.destroy_process_group()
