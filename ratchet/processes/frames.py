"""The frames that processes send to each other through a socket.

A frame is HEAD (kind, number of the call, length of the body, count of buffers), the lengths of the
buffers, the body, and the buffers, which are sent without a copy.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Generator, Iterator
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import asyncio

HEAD = struct.Struct("!BQQI")
LENGTH = struct.Struct("!Q")
SMALL_BYTES = 2**16  # pieces below this size are joined into one send, and one receive


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 0  # from a child: it is ready
    CALL = 1
    RESULT = 2
    RAISED = 3  # the call raised an exception; number 0: the child could not start
    BEAT = 4  # from a child: it is alive
    CLOSE = 5
    CANCEL = 6
    PAUSE = 7  # from a child: pause or continue the deadline of the call


class Parcel(NamedTuple):
    """The content of a frame. The buffers must not change until it is sent."""

    body: bytes | bytearray
    buffers: tuple[memoryview, ...] = ()

    def load_json(self) -> Any:
        """Return the value that `dump_json` was called with."""
        return json.loads(self.body)


class Frame(NamedTuple):
    """A frame as it was received."""

    kind: FrameKind
    number: int
    parcel: Parcel


NOTHING = memoryview(b"")
EMPTY = Parcel(b"")


class PeerGone(EOFError):
    """The process at the other end of a connection has ended or closed it."""


def dump_json(value: Any) -> Parcel:
    """Return a value as a parcel of JSON. Raises TypeError or ValueError for other types."""
    return Parcel(json.dumps(value).encode("ascii"))


def encode_frame(
    kind: FrameKind, number: int = 0, parcel: Parcel = EMPTY
) -> Iterator[bytes | bytearray | memoryview]:
    """Yield the parts of a frame, to be sent in this order."""
    body, buffers = parcel
    joined = HEAD.pack(kind, number, len(body), len(buffers))
    if buffers:
        joined += b"".join(LENGTH.pack(buffer.nbytes) for buffer in buffers)
    for piece in (body, *buffers):
        if memoryview(piece).nbytes < SMALL_BYTES:
            joined += piece
            continue
        yield joined
        yield piece
        joined = b""
    if joined:
        yield joined


def parse_frame() -> Generator[int, bytes | bytearray, Frame]:
    """Parse a frame. The generator yields how many bytes it needs next, and is sent these bytes."""
    kind, number, body_bytes, n_buffers = HEAD.unpack((yield HEAD.size))
    lengths = LENGTH.iter_unpack((yield n_buffers * LENGTH.size)) if n_buffers else ()
    body = (yield body_bytes) if body_bytes else b""
    buffers = []
    for (length,) in lengths:
        buffer = (yield length) if length else b""
        # The receiver may change its arrays.
        buffers.append(memoryview(buffer if isinstance(buffer, bytearray) else bytearray(buffer)))
    return Frame(FrameKind(kind), number, Parcel(body, tuple(buffers)))


class Connection:
    """A socket with frames. Any thread may send, and one thread at a time may receive.

    Attributes:
        on_data: Called whenever data has arrived.
    """

    def __init__(self, peer: socket.socket) -> None:
        self.socket = peer
        self.on_data: Callable[[], object] = lambda: None
        self._send_lock = threading.Lock()
        self._unread = NOTHING

    def send(self, kind: FrameKind, number: int = 0, parcel: Parcel = EMPTY) -> None:
        """Send a frame. Raises OSError if the other side is gone."""
        with self._send_lock:
            for part in encode_frame(kind, number, parcel):
                self.socket.sendall(part)

    def send_descriptor(
        self, descriptor: int, kind: FrameKind, number: int, parcel: Parcel
    ) -> None:
        """Send a frame below 64 KiB with a file descriptor, through a SOCK_SEQPACKET socket."""
        with self._send_lock:
            socket.send_fds(self.socket, list(encode_frame(kind, number, parcel)), [descriptor])

    def receive_descriptor(self) -> tuple[Frame, list[int]]:
        """Receive a frame like `receive`, and the descriptors sent with it (at most one)."""
        try:
            message, descriptors, _, _ = socket.recv_fds(self.socket, SMALL_BYTES, 1)
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not message:
            raise PeerGone("the connection was closed")
        self._unread = memoryview(message)
        return self.receive(), descriptors

    def receive(self) -> Frame:
        """Receive a frame.

        Raises PeerGone if the other side is gone, and TimeoutError if the socket has a timeout and
        nothing arrives in that time; the connection can't be used after that.
        """
        parser = parse_frame()
        try:
            count = next(parser)
            while True:
                count = parser.send(self._read(count))
        except StopIteration as end:
            return end.value

    def shut_down(self) -> None:
        """End the connection for both sides; a `receive` that waits in another thread ends too."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def _read(self, count: int) -> bytes | bytearray:
        """Return the next `count` bytes. Bytes that were received beyond them are kept."""
        unread = self._unread
        if not unread and count < SMALL_BYTES:
            unread = memoryview(self._take(self.socket.recv, SMALL_BYTES))
        if len(unread) >= count:
            self._unread = unread[count:]
            return bytes(unread[:count])
        received = bytearray(count)
        received[: len(unread)] = unread
        self._unread = NOTHING
        remaining = memoryview(received)[len(unread) :]
        while remaining:
            remaining = remaining[self._take(self.socket.recv_into, remaining) :]
        return received

    def _take(self, read: Callable[[Any], Any], argument: Any) -> Any:
        """Return the result of a read from the socket; raise PeerGone if it is empty."""
        try:
            result = read(argument)
        except TimeoutError:
            raise
        except OSError as error:
            raise PeerGone(str(error)) from error
        if not result:
            raise PeerGone("the connection was closed")
        self.on_data()
        return result


async def receive_async(reader: asyncio.StreamReader) -> Frame:
    """Receive a frame in an event loop.

    Raises asyncio.IncompleteReadError or OSError if the other side is gone.
    """
    parser = parse_frame()
    try:
        count = next(parser)
        while True:
            count = parser.send(await reader.readexactly(count))
    except StopIteration as end:
        return end.value
