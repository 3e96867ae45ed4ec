"""What driver and workers send each other: values, packed so that large arrays are never copied on
the way, and frames.

A frame is HEAD (kind, number of the call, count of pieces), the lengths of the pieces, and the
pieces: the pickle first, then the memory of each array that it refers to (pickle protocol 5,
out-of-band). Only processes of one run, which trust each other, speak this.
"""

from __future__ import annotations

import io
import pickle
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PROTOCOL = 1  # raise it with every change of what is sent
HEAD = struct.Struct("!BQI")
LENGTH = struct.Struct("!Q")
SMALL = 2**16  # pieces below this are joined before they are sent


class Kind(IntEnum):
    # from a worker, JSON: what it is. The only frame that is read before the versions are known to
    # agree
    HELLO = 0
    CALL = 1
    RESULT = 2
    RAISED = 3
    BEAT = 4
    CLOSE = 5


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed value. The buffers are the memory of its arrays: they must not change until it was
    sent."""

    head: bytes
    buffers: tuple[memoryview, ...] = ()


def versions() -> dict[str, Any]:
    """What driver and worker must have in common."""
    try:
        own = version("ratchet")
    except PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {
        "protocol": PROTOCOL,
        "ratchet": own,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


# --- values


def pack(value: Any) -> Parcel:
    """Tensors are detached, and arrive on the CPU, each in memory of its own. Raises what pickle
    does for what can't go."""
    buffers: list[pickle.PickleBuffer] = []
    out = io.BytesIO()
    _Pickler(out, protocol=5, buffer_callback=buffers.append).dump(value)
    return Parcel(out.getvalue(), tuple(buffer.raw() for buffer in buffers))


def unpack(parcel: Parcel) -> Any:
    """Arrays and tensors use the parcel's buffers, and can be written where those can."""
    return pickle.loads(parcel.head, buffers=parcel.buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # who has not imported it has no tensors
        if (
            torch is None
            or type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            return NotImplemented
        # Torch's own way would write the whole storage, of which this may be a slice, into one more
        # copy.
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        name = str(value.dtype).removeprefix("torch.")
        return _tensor, (
            pickle.PickleBuffer(flat.numpy()),
            name,
            tuple(value.shape),
            value.requires_grad,
        )


def _tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    kind = getattr(torch, dtype)
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=kind, requires_grad=requires_grad)
    return (
        torch.frombuffer(buffer, dtype=torch.uint8)
        .view(kind)
        .reshape(shape)
        .requires_grad_(requires_grad)
    )


# --- frames


def send(
    connection: socket.socket, kind: Kind, number: int = 0, parcel: Parcel | None = None
) -> None:
    """Raises OSError where the other side is gone."""
    pieces: Sequence[bytes | memoryview] = () if parcel is None else (parcel.head, *parcel.buffers)
    lengths = [LENGTH.pack(memoryview(piece).nbytes) for piece in pieces]
    joined = bytearray(HEAD.pack(kind, number, len(pieces)) + b"".join(lengths))
    for piece in pieces:
        if memoryview(piece).nbytes < SMALL:
            joined += piece
            continue
        connection.sendall(joined)
        connection.sendall(piece)
        joined = bytearray()
    connection.sendall(joined)


def receive(
    connection: socket.socket, heard: Callable[[], None] = lambda: None
) -> tuple[Kind, int, Parcel]:
    """heard: called whenever something has arrived. Raises EOFError where the other side is
    gone."""
    kind, number, count = HEAD.unpack(_exactly(connection, HEAD.size, heard))
    lengths = _exactly(connection, count * LENGTH.size, heard)
    pieces = [_exactly(connection, length, heard) for (length,) in LENGTH.iter_unpack(lengths)]
    return (
        Kind(kind),
        number,
        Parcel(
            bytes(pieces[0]) if pieces else b"", tuple(memoryview(piece) for piece in pieces[1:])
        ),
    )


def _exactly(connection: socket.socket, count: int, heard: Callable[[], None]) -> bytearray:
    memory = bytearray(count)
    rest = memoryview(memory)
    while rest:
        try:
            got = connection.recv_into(rest)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not got:
            raise EOFError("the connection was closed")
        heard()
        rest = rest[got:]
    return memory
