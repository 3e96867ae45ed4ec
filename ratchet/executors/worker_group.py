"""The ranks of one role, called together.

Every wait has an owner, a name and a deadline. What a rank raises is raised here as itself, with
the rank's name. A rank that dies, or is silent, or late, ends the group: its ranks work together,
and whoever waits for a dead one in a collective would wait for ever. Workers that do not need one
another are groups of one.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, wait
from dataclasses import replace
from typing import Any, Self

from ratchet.errors import CallTimeout, WorkerDied, WorkerError, WorkerRaised
from ratchet.executors.protocol import Kind, Parcel, pack, unpack
from ratchet.executors.worker import Place
from ratchet.executors.worker_handle import Answer, Member
from ratchet.observe import stall_report

log = logging.getLogger(__name__)

TICK_S = 0.1  # between looks at deadlines and silences
GRACE_S = 5.0  # for the other ranks to answer, after one has raised
CLOSE_S = 10.0  # for components to close
TIMEOUT_S = 1800.0


class WorkerGroup:
    """Methods of the components run on all ranks at the same time, and one after another on each,
    in the same order on all.

    Arguments and results are pickled; arrays and tensors travel uncopied, and tensors arrive on the
    CPU. Arguments must not be changed before a call has ended. A cancelled `await` ends the wait,
    not the call.
    """

    def __init__(
        self, places: Sequence[Place], members: Sequence[Member], *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """places: `rendezvous` is filled in by `build`, from the "first-last" ports there ("":
        any)."""
        self.places, self.members = list(places), list(members)
        self.role, self.size = places[0].role, len(places)
        self.timeout_s, self.owner = timeout_s, "driver"
        self._state = _State(self.members)
        for member in self.members:
            member.gone.add_done_callback(self._state.lost)
        threading.Thread(
            target=_watch, args=(weakref.ref(self._state),), name=f"{self.role}-watch", daemon=True
        ).start()

    @property
    def broken(self) -> WorkerError | None:
        """What ended the group, if something did: every later call raises it."""
        return self._state.broken

    def within(self, timeout_s: float, *, owner: str = "driver") -> Self:
        """The same group, its waits with another deadline and owner."""
        view = copy.copy(self)
        view.timeout_s, view.owner = timeout_s, owner
        return view

    async def build(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Makes the component of each rank: `factory` ("module:callable") of its Place and the
        arguments. Raises PortBusy, and what the factory raises."""
        await asyncio.wrap_future(self._reserve())
        await asyncio.wrap_future(self._build(factory, arguments or {}))

    def build_now(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        self._reserve().result()
        self._build(factory, arguments or {}).result()

    async def call(self, method: str, /, *arguments: Any, **named: Any) -> list[Any]:
        """The same call of every rank's component. Returns the results by rank.

        Raises what a rank raised (the first of several), with a note that names it; WorkerDied;
        CallTimeout; WorkerRaised.
        """
        return await asyncio.wrap_future(self.submit(method, *arguments, **named))

    def call_now(self, method: str, /, *arguments: Any, **named: Any) -> list[Any]:
        """`call` for whoever can't await. It may be inside of a running event loop, which it then
        holds up."""
        return self.submit(method, *arguments, **named).result()

    async def each(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """`call` with positional arguments of its own for each rank. What several are given is
        packed once."""
        return await asyncio.wrap_future(self.submit_each(method, arguments_by_rank))

    def each_now(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        return self.submit_each(method, arguments_by_rank).result()

    def submit(self, method: str, /, *arguments: Any, **named: Any) -> Future[list[Any]]:
        """Begins a call."""
        return self._ask(method, self._alike(("call", (method, arguments, named))))

    def submit_each(
        self, method: str, arguments_by_rank: Sequence[Sequence[Any]]
    ) -> Future[list[Any]]:
        if len(arguments_by_rank) != self.size:
            raise ValueError(
                f"{self.role} has {self.size} ranks: {len(arguments_by_rank)} tuples of arguments "
                "don't fit"
            )
        times = Counter(map(id, arguments_by_rank))
        packed: dict[int, Any] = {}
        for own in arguments_by_rank:
            if id(own) not in packed:
                request = pack(("call", (method, tuple(own), {})))
                packed[id(own)] = self.members[0].share(request) if times[id(own)] > 1 else request
        return self._ask(method, [packed[id(own)] for own in arguments_by_rank])

    def close(self) -> None:
        """Closes the components, and ends the processes: those that take too long by force. Blocks
        until they are gone."""
        self._state.close()

    def _alike(self, request: Any) -> list[Any]:
        return [self.members[0].share(pack(request))] * self.size

    def _reserve(self) -> Future[list[Any]]:
        """A rendezvous on the host of rank 0."""
        first, _, last = self.places[0].rendezvous.rpartition(":")[2].partition("-")
        ports = (int(first), int(last)) if last else None
        request = pack(("reserve", (self.places[0].host, ports)))
        return self._ask("reserve", [request], self.members[:1], then=self._meet_at)

    def _meet_at(self, answers: list[Any]) -> None:
        self.places[:] = [replace(place, rendezvous=answers[0]) for place in self.places]

    def _build(self, factory: str, arguments: Mapping[str, Any]) -> Future[list[Any]]:
        return self._ask(
            "build", [pack(("build", (place, factory, arguments))) for place in self.places]
        )

    def _ask(
        self,
        name: str,
        requests: Sequence[Any],
        members: Sequence[Member] | None = None,
        then: Callable[[list[Any]], None] | None = None,
    ) -> Future[list[Any]]:
        gather = _Gather(members or self.members, name, self.owner, self.timeout_s, then)
        self._state.begin(gather, requests)
        return gather.future


class _State:
    """What all views of a group share."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.broken: WorkerError | None = None
        self.closed = False
        self._gathers: list[_Gather] = []
        self._order = threading.Lock()  # of calls, which must be the same on all ranks

    def begin(self, gather: _Gather, requests: Sequence[Any]) -> None:
        with self._order:
            if self.broken is not None:
                gather.fail(self.broken)
                return
            stall_report.begin(gather.wait)
            self._gathers.append(gather)
            futures = [
                m.submit(request, gather.wait.name)
                for m, request in zip(gather.members, requests, strict=True)
            ]
        gather.future.add_done_callback(lambda future: self._over(gather))
        for index, future in enumerate(futures):
            future.add_done_callback(lambda future, index=index: gather.take(index, future))

    def lost(self, gone: Future[WorkerError | None]) -> None:
        error = gone.result()
        if error is not None:
            self.end(error)

    def end(
        self, error: WorkerError, waiting: _Gather | None = None, told: Exception | None = None
    ) -> None:
        """The group can't go on. waiting: is told something else than the others."""
        if self.broken is not None or self.closed:
            return
        self.broken = error
        # whoever calls next is told; until then this is all that anybody hears of it
        if not self._gathers:
            log.error("%s", error)
        # before their members are killed, which is no cause of anything
        for gather in list(self._gathers):
            gather.fail(told if gather is waiting and told is not None else error)
        for member in self.members:
            if not member.gone.done():
                member.give_up(member.died("was ended with its group"))

    def check(self) -> None:
        for member in self.members:
            member.check(TICK_S)
        for gather in list(self._gathers):
            if (late := gather.late()) is not None:
                self.end(late, gather, gather.raised)

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        for member in self.members:
            member.close()
        wait([member.gone for member in self.members], CLOSE_S)
        for member in self.members:
            if not member.gone.done():
                log.warning("%s did not close within %g s, and was killed", member.name, CLOSE_S)
                member.give_up(WorkerError(f"{member.name} was closed"))

    def _over(self, gather: _Gather) -> None:
        stall_report.end(gather.wait)
        self._gathers.remove(gather)


def _watch(state: weakref.ref[_State]) -> None:
    tick = threading.Event()
    while not tick.wait(TICK_S):
        alive = state()
        if alive is None or alive.closed:
            return
        alive.check()
        del alive


class _Gather:
    """The answers of several ranks to one call."""

    def __init__(
        self,
        members: Sequence[Member],
        name: str,
        owner: str,
        timeout_s: float,
        then: Callable[[list[Any]], None] | None,
    ) -> None:
        self.members, self._then = members, then
        self.future: Future[list[Any]] = Future()
        self.wait = stall_report.Wait(owner, name, self._whom, timeout_s)
        self._results: dict[int, Any] = {}
        # in the order in which they came, and when
        self._errors: list[tuple[Exception, float]] = []
        self._pending = dict.fromkeys(range(len(members)))
        self._lock = threading.Lock()

    def take(self, index: int, answer: Future[Answer]) -> None:
        """From any thread."""
        result, error = None, answer.exception()
        if error is None:
            result, error = _opened(self.members[index], *answer.result())
        assert error is None or isinstance(error, Exception)
        with self._lock:
            self._pending.pop(index)
            if error is None:
                self._results[index] = result
            else:
                self._errors.append((error, self.wait.seconds))
            complete = not self._pending
        if isinstance(error, WorkerDied):
            self.fail(error)
        elif complete and self._errors:
            self.fail(self._errors[0][0])
        elif complete:
            self._succeed()

    @property
    def raised(self) -> Exception | None:
        """By the first rank that did, of an unfinished call."""
        return self._errors[0][0] if self._errors else None

    def late(self) -> WorkerError | None:
        """The error of those who have not answered in time. Where a rank has raised, others may
        wait for it in vain."""
        with self._lock:
            whom, name = self._whom(), self.wait.name
            first = self._errors[0] if self._errors else None
        if not whom or self.future.done():
            return None
        if first is not None and self.wait.seconds > first[1] + GRACE_S:
            why = (
                f"{whom} did not answer '{name}' within {GRACE_S:g} s after another rank had raised"
            )
            first[0].add_note(f"{why}, so the group was ended")
            return CallTimeout(f"{why} {type(first[0]).__name__}: {first[0]}")
        if self.wait.seconds <= self.wait.timeout_s:
            return None
        late = (
            f"{whom} did not answer '{name}' within {self.wait.timeout_s:g} s (for "
            f"{self.wait.owner})"
        )
        return CallTimeout(f"{late}\n{stall_report.report()}")

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # it is over, or nobody waits for it any more
            self.future.set_exception(error)

    def _succeed(self) -> None:
        results = [self._results[index] for index in range(len(self.members))]
        if self._then is not None:
            self._then(results)
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(results)

    def _whom(self) -> str:
        return ", ".join(str(self.members[index].name) for index in list(self._pending))


def _opened(member: Member, kind: Kind, parcel: Parcel) -> tuple[Any, Exception | None]:
    """(what it returned, what it raised)"""
    try:
        value = unpack(parcel)
    except Exception as error:  # its module is missing here, say
        return None, WorkerRaised(
            f"what {member.name} returned can't be read here: {type(error).__name__}: {error}"
        )
    if kind is Kind.RESULT:
        return value, None
    packed, said, text = value
    where = f"raised in {member.name}:\n{text}"
    try:
        error = unpack(packed) if packed is not None else None
    except Exception:  # its class can't be made from its arguments, say
        error = None
    if not isinstance(error, Exception):  # SystemExit too: it was meant for that process
        return None, WorkerRaised(f"{said}\n{where}")
    error.add_note(where)
    return None, error
