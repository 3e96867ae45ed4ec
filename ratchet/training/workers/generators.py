"""Start generators in worker processes, and sync weights to workers that are restarted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from ratchet.config.base import Section
from ratchet.config.resolve import build, resolve
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import WeightSyncError
from ratchet.executors import env_vars
from ratchet.executors.freeze import prepare_process, use_kernels
from ratchet.executors.placement import ResourceRequest
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.generators.workers.receivers import PoolReceivers
from ratchet.generators.workers.worker import GeneratorRank
from ratchet.kernels import bfloat16, cpu
from ratchet.models.accelerator import use_accelerator
from ratchet.models.model_source import ModelSource
from ratchet.observe.metrics import MetricsManager
from ratchet.protocols import Generator, WeightSync
from ratchet.utils.object_store import expand_home
from ratchet.utils.user_parts import add_missing_members
from ratchet.weight_sync.factory import SyncEndpoints, make_weight_sync
from ratchet.worker_protocols import Executor, Workers

GENERATOR = "generator"  # the role of the workers that generate

# Import paths of the functions that make a worker, by the value of `generator.worker_runs`.
WORKER_FACTORIES = {
    "completions": "ratchet.training.workers.generators:make_rank",
    "groups": "ratchet.training.workers.rollouts:make_rank",
}


class WorkerPlacement(Protocol):
    """The placement of a worker (`ratchet.executors.worker.WorkerPlace`)."""

    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> str: ...


def make_rank(placement: WorkerPlacement, **arguments: Any) -> GeneratorRank:
    """Return the component of a worker process. `arguments` go to `make_generator`."""
    # Only the worker needs this import; a driver with its own generator does not.
    from ratchet.weight_sync.endpoints import WeightReceiver

    return GeneratorRank(make_generator(placement, **arguments), WeightReceiver)


def make_generator(
    placement: WorkerPlacement,
    *,
    section: Mapping[str, Any],
    origin: ModelSource,
    tokenizer: Tokenizer,
    compiled: bool = False,
    rounds_products: bool = False,
) -> Generator:
    """Create the generator of this worker process.

    Args:
        placement: The placement of this worker.
        section: The values of the generator's section.
        origin: The source of the generator's first weights.
        tokenizer: The policy's tokenizer.
        compiled: True if the driver, and so this worker, computes with compiled kernels.
        rounds_products: True if both compute products of layers in bfloat16.
    """
    prepare_process(placement.threads)
    use_kernels(compiled, rounds_products=rounds_products, device=placement.device)
    config = resolve("worker_generator", section)
    if placement.device != "cpu":
        use_accelerator(placement.device)
    device = "cpu" if config.copies_weights else placement.device
    model = origin.policy(device=device).requires_grad_(False)
    with env_vars.set_env_defaults(config.environment):
        return add_missing_members(build(config, model, tokenizer), Generator)


def get_worker_factory(section: GeneratorWorkersConfig) -> str:
    """Return the import path of the function that makes a worker (`generator.worker_runs`)."""
    return WORKER_FACTORIES[section.worker_runs]


def get_generator_resources(
    section: Section, *, on_cpu: bool, colocated_role: str | None = None
) -> list[ResourceRequest]:
    """Return the resources of generator workers, or none if the generator is in this process.

    Args:
        section: The generator's section.
        on_cpu: True if the workers need no accelerators.
        colocated_role: The role that workers share accelerators with.
    """
    if not isinstance(section, GeneratorWorkersConfig):
        return []
    return [
        ResourceRequest(
            GENERATOR,
            section.workers,
            colocated_with=colocated_role,
            gpus=0 if on_cpu else section.accelerators,
            interpreter=section.interpreter and str(expand_home(section.interpreter).absolute()),
        )
    ]


def start_generators(
    pool: GeneratorPool,
    section: GeneratorWorkersConfig,
    executor: Executor,
    origin: ModelSource,
    tokenizer: Tokenizer,
    *,
    role: str = GENERATOR,
) -> None:
    """Start the workers on the resources that the executor has planned for `role`.

    If a worker can't start, the error of its generator is raised.
    """
    arguments = {
        "section": section.worker.model_dump(mode="json"),
        "origin": origin,
        "tokenizer": tokenizer,
        "compiled": cpu.is_enabled(),
        "rounds_products": bfloat16.is_enabled(),
    }

    def start_worker(rank: int) -> Workers:
        group = executor.group(role, rank)
        try:
            group.build_now(get_worker_factory(section), arguments)
        except BaseException:
            group.close()
            raise
        return group

    pool.start(start_worker)


def make_recovering_weight_sync(
    section: Section, endpoints: SyncEndpoints, metrics: MetricsManager
) -> WeightSync:
    """Create the weight sync between learner and generator, local or remote.

    Generator workers that are restarted get the current weights. Restarts are counted in `metrics`.
    """
    pool = endpoints.generator
    if not isinstance(pool, GeneratorPool):
        return make_weight_sync(section, endpoints)
    receivers = pool.receivers
    endpoints = replace(endpoints, receivers=receivers, receivers_count=receivers.size)

    async def push_to_some(receivers: PoolReceivers, version: int) -> None:
        weight_sync = make_weight_sync(
            section, replace(endpoints, receivers=receivers, receivers_count=receivers.size)
        )
        try:
            await weight_sync.push(version)
        finally:
            await weight_sync.close()

    pool.push_to_some = push_to_some
    pool.on_restart = lambda: metrics.add("generator", {"restarts": 1.0}, merge="sum")
    return RecoveringWeightSync(make_weight_sync(section, endpoints), pool)


class RecoveringWeightSync(WeightSync):
    """A weight sync that survives lost workers.

    A push that loses a worker starts again with its replacement, or without it if no machine has
    room, or raises the worker's error.
    """

    def __init__(self, weight_sync: WeightSync, pool: GeneratorPool) -> None:
        self.weight_sync = weight_sync
        self.pool = pool

    async def push(self, version: int) -> None:
        """Push the learner's weights to the workers. Repeat this if a lost worker was replaced.

        Raises:
            WeightSyncError: The push failed and no worker was replaced.
            WorkerDied: A worker was lost and is not replaced.
        """
        async with self.pool.push_lock:
            await self.pool.rebuild(retries_absent=True)
            while True:
                try:
                    await self._push_to_present(version)
                    return
                except WeightSyncError:
                    if not await self.pool.rebuild():
                        raise

    async def _push_to_present(self, version: int) -> None:
        present = self.pool.present_receivers
        if present.size == self.pool.size or self.pool.push_to_some is None:
            await self.weight_sync.push(version)
        else:
            await self.pool.push_to_some(present, version)

    async def audit(self) -> Sequence[str] | None:
        """Return the names of weights that differ; None if that can't be told of all workers."""
        is_complete = self.pool.present_receivers.size == self.pool.size
        return await self.weight_sync.audit() if is_complete else None

    async def close(self) -> None:
        await self.weight_sync.close()
