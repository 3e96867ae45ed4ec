"""The rank of a group, in the process that it lives in: makes a component there, and runs its
methods, one at a time, in order.

How calls come here is the executor's: by a socket (`ratchet.executors.worker_main`) or by Ray.
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

from ratchet.config.resolve import imported
from ratchet.errors import PortBusy
from ratchet.executors.protocol import Kind, Parcel, pack, unpack, versions
from ratchet.utils.object_store import keep_as


@dataclass(frozen=True)
class Place:
    """Where a component lives, and with whom. Every component of a `WorkerGroup` is made with its
    own as the first argument.

    local_rank: among the ranks of its group on this host. host: of this rank, as others reach it.
    rendezvous: "host:port" for `torch.distributed.init_process_group("tcp://...")` of the group's
    ranks, free on the host of rank 0. threads: for one operation. device: "cpu", or "cuda:N" among
    those that the process sees.
    """

    role: str
    rank: int
    world_size: int
    local_rank: int
    host: str
    rendezvous: str
    threads: int
    device: str

    @property
    def who(self) -> str:
        return f"{self.role} rank {self.rank} of {self.world_size}"


class Worker:
    """Holds one component. Everything here happens in one thread."""

    def __init__(self) -> None:
        keep_as(os.environ)
        self._component: Any = None
        self._runner = asyncio.Runner()
        self._reserved: socket.socket | None = None

    def answer(self, request: Parcel) -> tuple[Kind, Parcel]:
        """Runs a request, packed (operation, arguments): RESULT with what it returned, or RAISED
        with (the packed error or None where it can't be sent, "Type: message", its traceback)."""
        try:
            operation, arguments = unpack(request)
            return Kind.RESULT, pack(getattr(self, operation)(*arguments))
        except (Exception, SystemExit) as error:  # anybody's code; the driver raises it
            return Kind.RAISED, _packed_error(error)

    def greet(self) -> dict[str, Any]:
        return versions() | {"pid": os.getpid(), "host": socket.gethostname()}

    def reserve(self, host: str, ports: tuple[int, int] | None) -> str:
        """A "host:port" that no other program here gets: bound, and not listened on, until the
        component does so.

        Raises PortBusy where none of `ports` (first, last) is free.
        """
        self._reserved = bound("", ports)
        return f"{host}:{self._reserved.getsockname()[1]}"

    def build(self, place: Place, factory: str, arguments: Mapping[str, Any]) -> None:
        """Makes the component: `factory` ("module:callable") of the place and the arguments. One
        made before is closed."""
        self.close()
        os.environ["OMP_NUM_THREADS"] = str(place.threads)  # of programs that it starts
        if "torch" in sys.modules:
            import torch

            torch.set_num_threads(place.threads)
        self._component = self._awaited(imported(factory)(place, **arguments))

    def call(self, method: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        if self._component is None:
            raise RuntimeError(f"'{method}' was called before build")
        return self._awaited(getattr(self._component, method)(*arguments, **named))

    def close(self) -> None:
        component, self._component = self._component, None
        if component is not None and hasattr(component, "close"):
            self._awaited(component.close())

    def _awaited(self, result: Any) -> Any:
        if not inspect.isawaitable(result):
            return result

        async def wait() -> Any:
            return await result

        return self._runner.run(wait())


def bound(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """A socket at the first free one of `ports` (first, last; None: any). Raises PortBusy."""
    first, last = ports or (0, 0)
    for port in range(first, last + 1):
        found = socket.socket()
        # so that it can be bound again to be listened on
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind((host, port))
        except OSError:
            found.close()
            continue
        return found
    raise PortBusy(
        f"none of the ports {first} to {last} is free on {socket.gethostname()}: end what listens "
        "there, or set cluster.ports"
    )


def _packed_error(error: BaseException) -> Parcel:
    text = "".join(traceback.format_exception(error))
    said = traceback.format_exception_only(error)[0].strip()
    try:
        packed: Parcel | None = pack(error)
    except Exception:  # whatever its own __reduce__ does
        packed = None
    return pack((packed, said, text))
