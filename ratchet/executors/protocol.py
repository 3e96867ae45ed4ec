"""The protocol between driver and workers: packed values, and the frames that carry them.

Values are packed so that large arrays are never copied on the way. A frame is HEAD (kind, number of
the call, count of pieces), the lengths of the pieces, and the pieces: the pickle first, then the
memory of each array that it refers to (pickle protocol 5, out-of-band). Use the protocol only
between processes of one run, which trust each other: a pickle can run any code.
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

PROTOCOL = 1  # version: increase it with every change of the messages
HEAD = struct.Struct("!BQI")  # kind, call number, count of pieces
LENGTH = struct.Struct("!Q")
SMALL_PIECE_BYTES = 2**16  # pieces below this size are joined into one send


class FrameKind(IntEnum):
    """The kind of a frame."""

    # From a worker: its versions, as JSON. It is the only frame that is read before the versions
    # have been compared.
    HELLO = 0
    CALL = 1
    RESULT = 2
    RAISED = 3
    BEAT = 4
    CLOSE = 5


@dataclass(frozen=True, slots=True)
class Parcel:
    """A packed value.

    Its buffers are the memory of the arrays, which must not change until the parcel is sent.
    """

    pickled: bytes  # the value's pickle; in a HELLO frame, JSON
    buffers: tuple[memoryview, ...] = ()


def get_versions() -> dict[str, Any]:
    """Return the versions that must be equal in driver and worker."""
    try:
        ratchet_version = version("ratchet")
    except PackageNotFoundError:  # run from a checkout
        ratchet_version = "unknown"
    return {
        "protocol": PROTOCOL,
        "ratchet": ratchet_version,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


# --- values


def pack(value: Any) -> Parcel:
    """Pack a value. Tensors are detached, and arrive on the CPU, each in separate memory.

    Raises pickle's error for a value that can't be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    return Parcel(stream.getvalue(), tuple(buffer.raw() for buffer in buffers))


def unpack(parcel: Parcel) -> Any:
    """Unpack a value.

    Its arrays and tensors share the memory of the parcel's buffers, and are writable if those are.
    """
    return pickle.loads(parcel.pickled, buffers=parcel.buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # a process that has not imported it has no tensors
        if (
            torch is None
            or type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            return NotImplemented
        # Torch's own reduction would copy the whole storage, of which this may be a slice.
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        name = str(value.dtype).removeprefix("torch.")
        return _rebuild_tensor, (
            pickle.PickleBuffer(flat.numpy()),
            name,
            tuple(value.shape),
            value.requires_grad,
        )


def _rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    torch_dtype = getattr(torch, dtype)
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=torch_dtype, requires_grad=requires_grad)
    return (
        torch.frombuffer(buffer, dtype=torch.uint8)
        .view(torch_dtype)
        .reshape(shape)
        .requires_grad_(requires_grad)
    )


# --- frames


def send(
    connection: socket.socket, kind: FrameKind, number: int = 0, parcel: Parcel | None = None
) -> None:
    """Send a frame. Raises OSError if the other side is gone."""
    pieces: Sequence[bytes | memoryview] = (
        () if parcel is None else (parcel.pickled, *parcel.buffers)
    )
    lengths = [LENGTH.pack(memoryview(piece).nbytes) for piece in pieces]
    joined = bytearray(HEAD.pack(kind, number, len(pieces)) + b"".join(lengths))
    for piece in pieces:
        if memoryview(piece).nbytes < SMALL_PIECE_BYTES:
            joined += piece
            continue
        connection.sendall(joined)
        connection.sendall(piece)
        joined = bytearray()
    connection.sendall(joined)


def receive(
    connection: socket.socket, on_data: Callable[[], None] = lambda: None
) -> tuple[FrameKind, int, Parcel]:
    """Receive a frame, and return its kind, call number and value.

    on_data: called whenever data has arrived.

    Raises EOFError if the other side is gone.
    """
    kind, number, count = HEAD.unpack(_receive_exactly(connection, HEAD.size, on_data))
    lengths = _receive_exactly(connection, count * LENGTH.size, on_data)
    pieces = [
        _receive_exactly(connection, length, on_data) for (length,) in LENGTH.iter_unpack(lengths)
    ]
    return (
        FrameKind(kind),
        number,
        Parcel(
            bytes(pieces[0]) if pieces else b"", tuple(memoryview(piece) for piece in pieces[1:])
        ),
    )


def _receive_exactly(
    connection: socket.socket, count: int, on_data: Callable[[], None]
) -> bytearray:
    received = bytearray(count)
    remaining = memoryview(received)
    while remaining:
        try:
            size = connection.recv_into(remaining)
        except OSError as error:
            raise EOFError(str(error)) from error
        if not size:
            raise EOFError("the connection was closed")
        on_data()
        remaining = remaining[size:]
    return received
