"""Several generators in processes of their own as one: requests go to whoever has least to do, and
equal prompts together.

Seeds belong to requests, so a completion does not depend on who draws it. A worker that is lost
ends the run, or another one takes its place: what the first had not answered is drawn again, with
the same seeds, and the second serves once it has the weights of the others.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import LinkError, RatchetError, WorkerError, WorkerRaised
from ratchet.generators.engine.stop_strings import TextDecoder
from ratchet.generators.workers.config import WorkersConfig
from ratchet.generators.workers.worker_queue import Station, Wanted
from ratchet.protocols import Shard, Workers
from ratchet.types import Completion, Placed, Sampling

log = logging.getLogger(__name__)

# of an exchange in which nothing ends: as long may a new request wait until it is begun
WAIT_S = 0.05
TOGETHER = 64  # attempts at one prompt that go to one worker; of more, others take their share


class Router:
    """Implements `Generator`, `Placeable` and `ShowsWeights` on workers whose components are
    `GeneratorRank`s.

    pushing: held by whoever moves weights. catch_up: pushes the current version to those receivers
    alone; None: nobody can. restarted: called after each restart.
    """

    def __init__(
        self, config: WorkersConfig, model: object = None, tokenizer: TextDecoder | None = None
    ) -> None:
        """model, tokenizer: the policy's. Workers are given their own when they start."""
        self.tokenizer = tokenizer
        self.precision: str | None = getattr(config.of, "quantise", None)
        self.most_restarts = config.max_restarts if config.recovery == "restart" else 0
        self.restarts = self.version = 0
        self.stations = [Station(rank) for rank in range(config.workers)]
        self.pushing = asyncio.Lock()
        self.catch_up: Callable[[Receivers], Awaitable[None]] | None = None
        self.restarted: Callable[[], object] = lambda: None
        self.broken: Exception | None = None  # what ended all of it
        self.records_routes = False
        self.hosts: set[str] = set()  # a replacement is where the one before was
        self._start: Callable[[int], Workers] | None = None
        self._numbers = itertools.count()
        self._unplaced: dict[int, Wanted] = {}  # while no worker can serve
        self._mending: asyncio.Task[None] | None = None
        self._pushed = self._paused = self._closed = False

    # --- workers

    def start(self, start: Callable[[int], Workers]) -> None:
        """start: gives a worker by its rank, with its component; may be asked again for one that
        was lost."""
        self._start = start
        with ThreadPoolExecutor(len(self.stations)) as threads:
            for station, group in zip(
                self.stations, threads.map(start, range(len(self.stations))), strict=True
            ):
                station.group, station.current = group, True
        self.records_routes = all(group.call_now("records_routes")[0] for group in self._groups)
        self.hosts = {str(group.call_now("host")[0]) for group in self._groups}

    @property
    def receivers(self) -> Receivers:
        """The ends of a link to all workers."""
        return Receivers(self, self.stations)

    @property
    def _groups(self) -> list[Workers]:
        return [station.group for station in self.stations if station.group is not None]

    async def rebuild(self) -> bool:
        """Starts another process for each worker that was lost, with the weights of the beginning:
        it serves after a push. Returns whether any was lost; raises what ended all of it."""
        lost = [station for station in self.stations if station.group is None]
        await asyncio.gather(*(self._replace(station) for station in lost))
        if self.broken is not None:
            raise self.broken
        return bool(lost)

    async def _replace(self, station: Station) -> None:
        assert self._start is not None, "what never started can't be lost"
        remains, station.remains = station.remains, None
        if remains is not None:
            await asyncio.to_thread(remains.close)
        while self.broken is None:
            try:
                group = await asyncio.to_thread(self._start, station.rank)
                if self._paused:
                    await group.call("pause")
            except WorkerError as error:
                self._count(error)
                continue
            station.group = group
            return

    def _count(self, error: Exception, redrawn: int = 0) -> None:
        """Another loss: it is made up for, or the end."""
        if self.restarts >= self.most_restarts:
            self._end(error)
            return
        self.restarts += 1
        log.warning(
            "generator restart %d of at most %d, %d requests are drawn again: %s",
            self.restarts,
            self.most_restarts,
            redrawn,
            error,
        )
        self.restarted()

    def _end(self, error: Exception) -> None:
        if self.broken is None:
            self.broken = error
        for wanted in self._outstanding():
            wanted.deliver(self.broken)
        self._unplaced.clear()

    def _outstanding(self) -> list[Wanted]:
        own = [
            wanted
            for station in self.stations
            for wanted in (*station.sent.values(), *station.waiting.values())
        ]
        return [*own, *self._unplaced.values()]

    def lost(self, station: Station, group: Workers, error: Exception) -> None:
        """Whoever learns of it first says so."""
        if station.group is not group or self._closed:
            return
        left = station.lose()
        for wanted in left:
            if wanted.aborted:
                wanted.end()
        left = [wanted for wanted in left if not wanted.future.done()]
        self._unplaced.update((wanted.number, wanted) for wanted in left)
        self._count(error, len(left))
        self._place_all()

    def _mend_soon(self) -> None:
        if self._mending is None or self._mending.done():
            self._mending = asyncio.get_running_loop().create_task(self._mend())

    async def _mend(self) -> None:
        """While somebody waits for completions, the learner stands still with the current version;
        later ones come by its own pushes."""
        try:
            async with self.pushing:
                while await self.rebuild() or self._stale:
                    if not self._stale or not self._outstanding():
                        return
                    await self._bring_up(self._stale)
        except Exception as error:
            self._end(error)

    @property
    def _stale(self) -> list[Station]:
        return [
            station
            for station in self.stations
            if station.group is not None and not station.current
        ]

    async def _bring_up(self, stale: Sequence[Station]) -> None:
        if not self._pushed:  # all have what they started with
            self.serve(stale)
            return
        if self.catch_up is None:
            raise LinkError(
                f"nobody can push version {self.version} to a worker that has taken the place of "
                "another"
            )
        try:
            await self.catch_up(Receivers(self, stale))
        except LinkError:
            # then it was not a worker's fault
            if all(station.group is not None for station in stale):
                raise

    def serve(self, stations: Sequence[Station], version: int | None = None) -> None:
        """These have the weights. version: which were pushed."""
        if version is not None:
            self.version, self._pushed = version, True
        for station in stations:
            station.current = True
        self._place_all()

    # --- requests

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[Placed] = (),
    ) -> Completion:
        """Raises as the workers' generators do, and WorkerDied and others where a worker is lost
        and not replaced."""
        assert self._start is not None, (
            "generator.kind=workers starts with the run's other processes: see Router.start"
        )
        future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        wanted = Wanted(
            next(self._numbers), np.array(tokens, dtype=np.int64), sampling, future, tuple(media)
        )
        self._place(wanted)
        try:
            return await future
        except asyncio.CancelledError:
            if self._unplaced.pop(wanted.number, None) is None:
                any(station.cancel(wanted) for station in self.stations)
            raise

    def _place(self, wanted: Wanted) -> None:
        if self.broken is not None:
            wanted.deliver(self.broken)
            return
        serving = [station for station in self.stations if station.current]
        if len(serving) < len(self.stations):
            self._mend_soon()
        if not serving:
            self._unplaced[wanted.number] = wanted
            return
        alike = (station for station in serving if 0 < station.prompts[wanted.key] < TOGETHER)
        station = next(alike, None) or min(serving, key=lambda station: station.load)
        station.add(wanted)
        self._feed(station)

    def _place_all(self) -> None:
        unplaced, self._unplaced = self._unplaced, {}
        for wanted in unplaced.values():
            self._place(wanted)

    def _feed(self, station: Station) -> None:
        loop = asyncio.get_running_loop()
        if station.pump is None or station.pump.done() or station.pump.get_loop() is not loop:
            station.pump = loop.create_task(self._pump(station))

    async def _pump(self, station: Station) -> None:
        """Exchanges with a worker, one after the other, as long as there is something to
        exchange."""
        group = station.group
        assert group is not None, "only who serves is asked"
        # callers of the same moment enter together: equal prompts are then computed once
        await asyncio.sleep(0)
        while station.busy and station.group is group:
            asked, cancelled, abort = station.outgoing()
            try:
                (answered,) = await group.call("exchange", asked, cancelled, WAIT_S, abort)
            except Exception as error:  # whatever it is, what was asked has no answer
                self.lost(station, group, error)
                return
            for number, answer in (*answered.each(), *answered.errors.items()):
                if isinstance(answer, Exception) and not _of_request(answer):
                    self.lost(station, group, answer)
                    return
                if (wanted := station.answered(number)) is not None:
                    wanted.deliver(answer)
            # whoever goes on with what came is in time for the next exchange
            await asyncio.sleep(0)

    # --- control

    def abort(self) -> None:
        for station in self.stations:
            station.abort()
        for wanted in self._unplaced.values():
            wanted.end()
        self._unplaced.clear()

    async def pause(self) -> None:
        self._paused = True
        await self._tell("pause")

    async def resume(self) -> None:
        self._paused = False
        await self._tell("resume")

    async def onload(self) -> None:
        await self._tell("onload")

    async def offload(self) -> None:
        await self._tell("offload")

    async def _tell(self, method: str) -> None:
        """All workers. One that is lost meanwhile is replaced, or ends the run, when it is
        needed."""
        said = await asyncio.gather(
            *(self.ask(station, method) for station in self.stations if station.group is not None),
            return_exceptions=True,
        )
        for error in said:
            if isinstance(error, BaseException) and (
                self.broken is not None or not isinstance(error, WorkerError)
            ):
                raise error

    async def ask(
        self, station: Station, method: str, *arguments: Any, timeout_s: float | None = None
    ) -> Any:
        """Raises WorkerError where the worker is lost, and what its component raises. timeout_s:
        None: the workers' own."""
        if (group := station.group) is None:
            raise self.broken or WorkerError(f"generator rank {station.rank} was lost")
        try:
            (answer,) = await (group if timeout_s is None else group.within(timeout_s)).call(
                method, *arguments
            )
        except WorkerRaised:
            raise
        except WorkerError as error:
            self.lost(station, group, error)
            raise
        return answer

    async def ask_each(
        self,
        method: str,
        arguments_by_worker: Sequence[Sequence[Any]],
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Each with arguments of its own. Raises what the first raised, while others may go on: see
        `give_up`."""
        pairs = zip(self.stations, arguments_by_worker, strict=True)
        return await asyncio.gather(
            *(self.ask(own, method, *given, timeout_s=timeout_s) for own, given in pairs)
        )

    def give_up(self, error: Exception) -> None:
        """All workers are lost: whoever asks them is told so at once, and waits for nothing they
        are at."""
        for station in self.stations:
            if station.group is not None:
                self.lost(station, station.group, error)

    @property
    def size(self) -> int:
        return len(self.stations)

    # --- weights that come through this process

    async def prepare(self, manifest: Mapping[str, Any]) -> None:
        await self._ask_all("prepare", manifest)

    async def receive(self, shards: Iterator[Shard]) -> None:
        await self._ask_all("receive", list(shards))

    async def commit(self, version: int) -> None:
        await self._ask_all("commit", version)
        self.serve(self.stations, version)

    async def rollback(self) -> None:
        await self._ask_all("rollback")

    async def _ask_all(self, method: str, *arguments: Any) -> None:
        await asyncio.gather(*(self.ask(station, method, *arguments) for station in self.stations))

    def weights(self) -> Iterator[Shard]:
        """Those of the first worker; nothing where its generator doesn't show them."""
        for group in self._groups[:1]:
            yield from group.call_now("weights")[0]

    async def close(self) -> None:
        """Ends the workers. Whoever still waits for a completion is cancelled."""
        self._closed = True
        for task in (self._mending, *(station.pump for station in self.stations)):
            if task is not None:
                task.cancel()
        for wanted in self._outstanding():
            wanted.future.cancel()
        await asyncio.gather(*(asyncio.to_thread(group.close) for group in self._groups))


class Receivers:
    """Implements `Ranks`: the receiving ends that a link has at some of the workers."""

    def __init__(self, router: Router, stations: Sequence[Station]) -> None:
        self.router, self.stations = router, list(stations)

    @property
    def size(self) -> int:
        return len(self.stations)

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        asked = (
            self.router.ask(own, "link", place, method, *arguments)
            for place, own in enumerate(self.stations)
        )
        answers = await asyncio.gather(*asked)
        if method == "commit":
            self.router.serve(self.stations, arguments[0])
        return answers


def _of_request(error: Exception) -> bool:
    """Whether it belongs to the request alone: its generator goes on."""
    return isinstance(error, RatchetError) and not isinstance(error, WorkerError)
