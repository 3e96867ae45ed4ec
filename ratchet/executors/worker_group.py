"""A worker group: the ranks of one role, called together.

Every wait has a name, a deadline, and an owner: the component that waits. A rank's exception is
raised again in the caller, with the rank's name. A rank that dies, is silent, or misses a deadline
ends the group, because the other ranks would wait for it forever in a collective. Independent
workers are groups of one.
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

from ratchet.errors import CallTimeout, WorkerDied, WorkerError, WorkerRaised, link_symptom
from ratchet.executors.protocol import pack, unpack
from ratchet.executors.worker import WorkerPlace
from ratchet.executors.worker_handle import Answer, WorkerHandle
from ratchet.observe import stall_report
from ratchet.processes.frames import FrameKind, Parcel

log = logging.getLogger(__name__)

TICK_S = 0.1  # time between checks of deadlines and heartbeats
GRACE_S = 5.0  # maximum time for the other ranks to answer after a rank has raised
CLOSE_S = 10.0  # maximum time for components to close
TIMEOUT_S = 1800.0


class WorkerGroup:
    """The components of all ranks of one role.

    A method runs on all ranks at the same time. Each rank runs its calls one after another, in the
    same order on all ranks.

    Arguments and results are pickled; arrays and tensors are sent without a copy, and tensors
    arrive on the CPU. Arguments must not be changed before a call has ended. A cancelled `await`
    ends the wait, not the call.
    """

    def __init__(
        self,
        places: Sequence[WorkerPlace],
        members: Sequence[WorkerHandle],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Create a group of running workers.

        Args:
            places: one for each rank. `rendezvous` ends with the allowed ports, "first-last" or ""
                for any. `build` reserves one and replaces the range by it.
            members: one handle for each rank.
            timeout_s: deadline of a call.
        """
        self.places = list(places)
        self.members = list(members)
        self.role = places[0].role
        self.size = len(places)
        self.timeout_s = timeout_s
        self.owner = "driver"
        self._state = _State(self.members)
        for member in self.members:
            member.gone.add_done_callback(self._state.on_gone)
        threading.Thread(
            target=_watch, args=(weakref.ref(self._state),), name=f"{self.role}-watch", daemon=True
        ).start()

    @property
    def final_error(self) -> WorkerError | None:
        """Return the error that ended the group, if any; every later call raises it."""
        return self._state.final_error

    def within(self, timeout_s: float, *, owner: str = "driver") -> Self:
        """Return a view of this group whose calls have another deadline and owner."""
        view = copy.copy(self)
        view.timeout_s, view.owner = timeout_s, owner
        return view

    async def build(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Create the component of each rank.

        factory: "module:callable", which is called with the rank's `WorkerPlace` and the arguments.
        Raises PortBusy, and what the factory raises.
        """
        await asyncio.wrap_future(self._reserve())
        await asyncio.wrap_future(self._build(factory, arguments or {}))

    def build_now(self, factory: str, arguments: Mapping[str, Any] | None = None) -> None:
        """Create the component of each rank like `build`, but block the calling thread."""
        self._reserve().result()
        self._build(factory, arguments or {}).result()

    async def call(self, method: str, /, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a method of every rank's component and return the results by rank.

        Raises the exception that arrived first, with a note that names its rank (as WorkerRaised if
        it can't be sent), WorkerDied, or CallTimeout.
        """
        return await asyncio.wrap_future(self.submit(method, *arguments, **keywords))

    def call_now(self, method: str, /, *arguments: Any, **keywords: Any) -> list[Any]:
        """Call a method like `call`, but block the calling thread.

        This also blocks any event loop that runs in the thread.
        """
        return self.submit(method, *arguments, **keywords).result()

    async def each(self, method: str, arguments_by_rank: Sequence[Sequence[Any]]) -> list[Any]:
        """Call a method like `call`, with separate positional arguments for each rank.

        If several ranks share a tuple object, it is packed once.
        """
        return await asyncio.wrap_future(self.submit_each(method, arguments_by_rank))

    def submit(self, method: str, /, *arguments: Any, **keywords: Any) -> Future[list[Any]]:
        """Start a call and return the future of its results."""
        return self._submit(method, self._pack_shared(("call", (method, arguments, keywords))))

    def submit_each(
        self, method: str, arguments_by_rank: Sequence[Sequence[Any]]
    ) -> Future[list[Any]]:
        """Start a call like `each` and return the future of its results."""
        if len(arguments_by_rank) != self.size:
            raise ValueError(
                f"{self.role} has {self.size} ranks: {len(arguments_by_rank)} tuples of arguments "
                "don't fit"
            )
        counts = Counter(map(id, arguments_by_rank))
        request_by_id: dict[int, Any] = {}
        for arguments in arguments_by_rank:
            key = id(arguments)
            if key not in request_by_id:
                request = pack(("call", (method, tuple(arguments), {})))
                request_by_id[key] = (
                    self.members[0].prepare_shared(request) if counts[key] > 1 else request
                )
        return self._submit(
            method, [request_by_id[id(arguments)] for arguments in arguments_by_rank]
        )

    def close(self) -> None:
        """Close the components and end the processes; those that take too long are killed.

        Blocks until they are gone.
        """
        self._state.close()

    def _pack_shared(self, request: Any) -> list[Any]:
        return [self.members[0].prepare_shared(pack(request))] * self.size

    def _reserve(self) -> Future[list[Any]]:
        """Reserve a rendezvous on the host of rank 0."""
        first, _, last = self.places[0].rendezvous.rpartition(":")[2].partition("-")
        ports = (int(first), int(last)) if last else None
        request = pack(("reserve", (self.places[0].host, ports)))
        return self._submit("reserve", [request], self.members[:1], on_success=self._set_rendezvous)

    def _set_rendezvous(self, answers: list[Any]) -> None:
        self.places[:] = [replace(place, rendezvous=answers[0]) for place in self.places]

    def _build(self, factory: str, arguments: Mapping[str, Any]) -> Future[list[Any]]:
        return self._submit(
            "build", [pack(("build", (place, factory, arguments))) for place in self.places]
        )

    def _submit(
        self,
        name: str,
        requests: Sequence[Any],
        members: Sequence[WorkerHandle] | None = None,
        on_success: Callable[[list[Any]], None] | None = None,
    ) -> Future[list[Any]]:
        call = _PendingCall(members or self.members, name, self.owner, self.timeout_s, on_success)
        self._state.begin(call, requests)
        return call.future


class _State:
    """The state that all views of a group share."""

    def __init__(self, members: Sequence[WorkerHandle]) -> None:
        self.members = members
        self.final_error: WorkerError | None = None
        self.is_closed = False
        self._pending_calls: list[_PendingCall] = []
        self._order = threading.Lock()  # keeps the order of calls the same on all ranks

    def begin(self, call: _PendingCall, requests: Sequence[Any]) -> None:
        with self._order:
            if self.final_error is not None:
                call.fail(self.final_error)
                return
            stall_report.begin_wait(call.wait)
            self._pending_calls.append(call)
            futures = [
                m.submit(request, call.wait.name)
                for m, request in zip(call.members, requests, strict=True)
            ]
        call.future.add_done_callback(lambda future: self._finish(call))
        for index, future in enumerate(futures):
            future.add_done_callback(lambda future, index=index: call.store_answer(index, future))

    def on_gone(self, gone: Future[WorkerError | None]) -> None:
        error = gone.result()
        if error is not None:
            self.end(error)

    def end(
        self,
        error: WorkerError,
        failed_call: _PendingCall | None = None,
        cause: Exception | None = None,
    ) -> None:
        """End the group.

        All pending calls fail with `error`, except `failed_call`, which fails with `cause` if that
        is given.
        """
        if self.final_error is not None or self.is_closed:
            return
        self.final_error = error
        # Without a pending call, the error would show only at the next call.
        if not self._pending_calls:
            log.error("%s", error)
        # Fail the calls before the workers are killed: the kill would hide the cause.
        for call in list(self._pending_calls):
            call.fail(cause if call is failed_call and cause is not None else error)
        for member in self.members:
            if not member.gone.done():
                member.give_up(member.make_death_error("was ended with its group"))

    def check(self) -> None:
        for member in self.members:
            member.check(TICK_S)
        for call in list(self._pending_calls):
            if (error := call.check_deadline()) is not None:
                self.end(error, call, call.raised)

    def close(self) -> None:
        if self.is_closed:
            return
        self.is_closed = True
        for member in self.members:
            member.close()
        wait([member.gone for member in self.members], CLOSE_S)
        for member in self.members:
            if not member.gone.done():
                log.warning("%s did not close within %g s, and was killed", member.name, CLOSE_S)
                member.give_up(WorkerError(f"{member.name} was closed"))

    def _finish(self, call: _PendingCall) -> None:
        stall_report.end_wait(call.wait)
        self._pending_calls.remove(call)


def _watch(state: weakref.ref[_State]) -> None:
    stop = threading.Event()
    while not stop.wait(TICK_S):
        live_state = state()
        if live_state is None or live_state.is_closed:
            return
        live_state.check()
        del live_state


class _PendingCall:
    """A pending call: it collects the answers of several ranks."""

    def __init__(
        self,
        members: Sequence[WorkerHandle],
        name: str,
        owner: str,
        timeout_s: float,
        on_success: Callable[[list[Any]], None] | None,
    ) -> None:
        self.members = members
        self._on_success = on_success
        self.future: Future[list[Any]] = Future()
        self.wait = stall_report.Wait(owner, name, self._pending_names, timeout_s)
        self._results: dict[int, Any] = {}
        # (error, seconds after the call) in order of arrival.
        self._errors: list[tuple[Exception, float]] = []
        self._pending = dict.fromkeys(range(len(members)))
        self._lock = threading.Lock()

    def store_answer(self, index: int, answer: Future[Answer]) -> None:
        """Store a rank's answer; end the call with the last one. It may run in any thread."""
        result = None
        error = answer.exception()
        if error is None:
            result, error = _unpack_answer(self.members[index], *answer.result())
        assert error is None or isinstance(error, Exception)
        with self._lock:
            self._pending.pop(index)
            if error is None:
                self._results[index] = result
            else:
                self._errors.append((error, self.wait.seconds))
            is_complete = not self._pending
        if isinstance(error, WorkerDied):
            self.fail(error)
        elif is_complete and self._errors:
            self.fail(self._errors[0][0])
        elif is_complete:
            self._succeed()

    @property
    def raised(self) -> Exception | None:
        """Return the first exception that a rank has raised in this call, if any."""
        return self._errors[0][0] if self._errors else None

    def check_deadline(self) -> WorkerError | None:
        """Return the error of ranks that have not answered in time; None if there are none.

        After a rank has raised, others may wait for it in a collective, so they get GRACE_S only.
        """
        name = self.wait.name
        with self._lock:
            names = self._pending_names()
            first_error = self._errors[0] if self._errors else None
        if not names or self.future.done():
            return None
        if first_error is not None and self.wait.seconds > first_error[1] + GRACE_S:
            problem = (
                f"{names} did not answer '{name}' within {GRACE_S:g} s after another rank had "
                "raised"
            )
            first_error[0].add_note(f"{problem}, so the group was ended")
            return CallTimeout(f"{problem} {type(first_error[0]).__name__}: {first_error[0]}")
        if self.wait.seconds <= self.wait.timeout_s:
            return None
        message = (
            f"{names} did not answer '{name}' within {self.wait.timeout_s:g} s (for "
            f"{self.wait.owner})"
        )
        return CallTimeout(f"{message}\n{stall_report.format_report()}\n{link_symptom('it-hangs')}")

    def fail(self, error: BaseException) -> None:
        with contextlib.suppress(InvalidStateError):  # the call has ended or was cancelled
            self.future.set_exception(error)

    def _succeed(self) -> None:
        results = [self._results[index] for index in range(len(self.members))]
        if self._on_success is not None:
            self._on_success(results)
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(results)

    def _pending_names(self) -> str:
        return ", ".join(str(self.members[index].name) for index in list(self._pending))


def _unpack_answer(
    member: WorkerHandle, kind: FrameKind, parcel: Parcel
) -> tuple[Any, Exception | None]:
    """Return (returned value, raised error) of an answer."""
    try:
        value = unpack(parcel)
    except Exception as error:  # for example, the value's module is missing here
        return None, WorkerRaised(
            f"the result of {member.name} can't be unpickled here: {type(error).__name__}: {error}"
        )
    if kind is FrameKind.RESULT:
        return value, None
    packed, summary, text = value
    location = f"raised in {member.name}:\n{text}"
    try:
        error = unpack(packed) if packed is not None else None
    except Exception:  # for example, its class can't be created from its arguments
        error = None
    # SystemExit becomes WorkerRaised too, because it must not end the driver.
    if not isinstance(error, Exception):
        return None, WorkerRaised(f"{summary}\n{location}")
    error.add_note(location)
    return None, error
