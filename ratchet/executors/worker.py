"""The process of one rank of a worker group: it creates a component and runs its methods.

Methods run one at a time, in order. The executor delivers the calls, over a socket
(`ratchet.executors.worker_main`) or by Ray.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.config.resolve import import_object
from ratchet.errors import PortBusy
from ratchet.executors.event_loop import AbandonableThreads
from ratchet.executors.protocol import get_versions, pack, unpack
from ratchet.processes.frames import FrameKind, Parcel
from ratchet.utils.object_store import configure_cache


@dataclass(frozen=True)
class WorkerPlace:
    """The rank and resources of a component. Its factory gets them as the first argument."""

    role: str
    rank: int
    world_size: int
    local_rank: int  # among the ranks of its group on this host
    host: str  # address at which other ranks reach this rank's host
    # "host:port" at which the group's ranks meet, for
    # `torch.distributed.init_process_group("tcp://...")`; the port is free on rank 0's host.
    rendezvous: str
    threads: int  # CPU threads of one operation
    device: str  # "cpu", or "cuda:N" among the accelerators that the process sees


class ComponentHost:
    """A holder of one component, whose methods all run in one thread."""

    def __init__(self) -> None:
        configure_cache(os.environ)
        self._component: Any = None
        self._runner = asyncio.Runner()
        self._runner.get_loop().set_default_executor(AbandonableThreads())
        self._reserved_socket: socket.socket | None = None

    def answer(self, request: Parcel) -> tuple[FrameKind, Parcel]:
        """Run a packed request (operation, arguments) and return its packed result.

        The kind of the result is RESULT, with the returned value, or RAISED, with (packed error,
        "Type: message", traceback). The packed error is None if the error can't be packed.
        """
        try:
            operation, arguments = unpack(request)
            return FrameKind.RESULT, pack(getattr(self, operation)(*arguments))
        # The component may raise anything; the driver raises it again.
        except (Exception, SystemExit) as error:
            return FrameKind.RAISED, _pack_error(error)

    def greet(self) -> dict[str, Any]:
        """Return the versions, process id and host of this worker."""
        return get_versions() | {"pid": os.getpid(), "host": socket.gethostname()}

    def reserve(self, host: str, ports: tuple[int, int] | None) -> str:
        """Reserve a port on this host and return "host:port".

        The port is bound but not listened on: no other program gets it, and the component can still
        bind it. Raises PortBusy if none of `ports` (first, last) is free.
        """
        self._reserved_socket = bind_socket("", ports)
        return f"{host}:{self._reserved_socket.getsockname()[1]}"

    def build(self, place: WorkerPlace, factory: str, arguments: Mapping[str, Any]) -> None:
        """Create the component, after closing the previous one.

        factory: "module:callable", called with the place and the arguments.
        """
        self.close()
        os.environ["OMP_NUM_THREADS"] = str(place.threads)  # for programs that the component starts
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(place.threads)
        self._component = self._await_result(import_object(factory)(place, **arguments))

    def call(self, method: str, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        """Run a method of the component."""
        if self._component is None:
            raise RuntimeError(f"'{method}' was called before build")
        return self._await_result(getattr(self._component, method)(*arguments, **keywords))

    def close(self) -> None:
        """Close the component, if it has a `close`."""
        component = self._component
        self._component = None
        if component is not None and hasattr(component, "close"):
            self._await_result(component.close())

    def _await_result(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return self._runner.run(wait())


def bind_socket(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a socket bound to the first free port of `ports`. Raises PortBusy if none is free.

    ports: (first, last); None: any port.
    """
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        listener = socket.socket()
        # With this option the component can bind the reserved port again, and listen on it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError:
            listener.close()
            continue
        return listener
    raise PortBusy(
        f"none of the ports {first} to {last} is free on {socket.gethostname()}: end the programs "
        "that listen there, or set cluster.ports to another range"
    )


def _pack_error(error: BaseException) -> Parcel:
    traceback_text = "".join(traceback.format_exception(error))
    summary = traceback.format_exception_only(error)[0].strip()
    try:
        packed: Parcel | None = pack(error)
    except Exception:  # a custom __reduce__ may raise any type
        packed = None
    return pack((packed, summary, traceback_text))
