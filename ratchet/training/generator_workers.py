"""Generators in processes of their own: how they start, what each holds, and how weights reach
those that come later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from ratchet.config.base import Section
from ratchet.config.resolve import construct, resolve
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import LinkError
from ratchet.executors import env_vars
from ratchet.executors.freeze import prepare_process, use_kernels
from ratchet.executors.placement import Need
from ratchet.generators.workers.config import WorkersConfig
from ratchet.generators.workers.pool import Receivers, Router
from ratchet.generators.workers.worker import GeneratorRank
from ratchet.kernels import cpu
from ratchet.models.model_source import Origin
from ratchet.observe.metrics import MetricsManager
from ratchet.protocols import Audits, Executor, Generator, Link, Workers
from ratchet.weight_sync.factory import Between, make_link

GENERATOR = "generator"  # the name of the workers that generate


class Seat(Protocol):
    """Where a worker lives (`ratchet.executors.worker.Place`)."""

    @property
    def threads(self) -> int: ...
    @property
    def device(self) -> str: ...


def make_rank(seat: Seat, **given: Any) -> GeneratorRank:
    """What a worker's process holds. given: to `make_generator`."""
    # the driver needs it where it has the generator itself
    from ratchet.weight_sync.endpoints import Intake

    return GeneratorRank(make_generator(seat, **given), Intake)


def make_generator(
    seat: Seat,
    *,
    section: Mapping[str, Any],
    origin: Origin,
    tokenizer: Tokenizer,
    compiled: bool = False,
) -> Generator:
    """The generator of this process. section: the values of its own. Its first weights are those of
    the origin. compiled: whether it computes with compiled kernels, as the driver does."""
    prepare_process(seat.threads)
    use_kernels(compiled)
    config = resolve("generating", section)
    if seat.device != "cpu":
        torch.cuda.set_device(seat.device)
    device = "cpu" if getattr(config, "copies_weights", False) else seat.device
    model = origin.policy(device=device).requires_grad_(False)
    with env_vars.settings(getattr(config, "environment", {})):
        return construct(config, model, tokenizer)


def generator_needs(section: Section, *, on_cpu: bool, beside: str | None = None) -> list[Need]:
    """What the cluster is asked for; nothing where the generator lives in this process. beside:
    whose accelerators they use."""
    if not isinstance(section, WorkersConfig):
        return []
    return [
        Need(GENERATOR, section.workers, beside=beside, gpus=0 if on_cpu else section.accelerators)
    ]


def start_generators(
    router: Router, section: WorkersConfig, executor: Executor, origin: Origin, tokenizer: Tokenizer
) -> None:
    """On what the executor has planned. Raises what the generator raises where it can't start."""
    arguments = {
        "section": section.of.model_dump(mode="json"),
        "origin": origin,
        "tokenizer": tokenizer,
        "compiled": cpu.used(),
    }

    def start(rank: int) -> Workers:
        group = executor.group(GENERATOR, rank)
        try:
            group.build_now(section.rank_factory, arguments)
        except BaseException:
            group.close()
            raise
        return group

    router.start(start)


def link_of(section: Section, between: Between, metrics: MetricsManager) -> Link:
    """From the learner to the generator, in whatever processes they live. metrics: where restarts
    are counted."""
    router = between.generator
    if not isinstance(router, Router):
        return make_link(section, between)
    to = router.receivers
    between = replace(between, receivers=to, receivers_count=to.size)

    async def catch_up(receivers: Receivers) -> None:
        link = make_link(
            section, replace(between, receivers=receivers, receivers_count=receivers.size)
        )
        try:
            await link.push(router.version)
        finally:
            await link.close()

    router.catch_up = catch_up
    router.on_restart = lambda: metrics.add("generator", {"restarts": 1.0}, merge="sum")
    return SteadyLink(make_link(section, between), router)


class SteadyLink:
    """Implements `Link` and `Audits`: a link to workers, some of which may be lost meanwhile. A
    push then begins again, with those that take their places, or the run ends with what became of
    them."""

    def __init__(self, link: Link, router: Router) -> None:
        self.link, self.router = link, router

    async def push(self, version: int) -> None:
        """Raises LinkError, and WorkerDied where a worker was lost and is not replaced."""
        async with self.router.push_lock:
            await self.router.rebuild()
            while True:
                try:
                    await self.link.push(version)
                    return
                except LinkError:
                    if not await self.router.rebuild():
                        raise

    async def audit(self) -> Sequence[str] | None:
        return await self.link.audit() if isinstance(self.link, Audits) else None

    async def close(self) -> None:
        await self.link.close()
