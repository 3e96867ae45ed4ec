"""The server that all others run on: connections that hold nothing up, and clients that may do what
they want."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from ratchet.web.connection import Connections, ServerLimits
from ratchet.web.guard import LOOPBACK, Guard, explain_refusal
from ratchet.web.server import Server, ServerThread

GET = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n"
LONG = ServerLimits(head_s=60, body_s=60, write_s=60, grace_s=1)


class App:
    """Answers "hello" at once; /held after `release`, /large with `size` bytes, /broken never."""

    def __init__(self) -> None:
        self.release, self.entered, self.size = asyncio.Event(), asyncio.Event(), 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/broken":
            raise RuntimeError("a secret")
        if path == "/held":
            self.entered.set()
            await self.release.wait()
        body = b"x" * self.size if path == "/large" else b"hello"
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-length", b"%d" % len(body))],
            }
        )
        await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: Any, limits: ServerLimits = LONG) -> AsyncIterator[Server]:
    server = Server(app, socket.create_server(("127.0.0.1", 0)), limits=limits)
    task = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        server.stop()
        await asyncio.wait_for(task, 30)


async def connect(
    server: Server, data: bytes = b""
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(data)
    return reader, writer


async def ask(server: Server, data: bytes = GET) -> bytes:
    """Return the answer's head and body, as the connection is closed after it."""
    reader, writer = await connect(
        server, data.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n", 1)
    )
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


@pytest.mark.medium
@pytest.mark.fault("S15")
@pytest.mark.parametrize("data", [b"", b"GET / HTTP/1.1\r\nhost:"], ids=["silent", "half a head"])
def test_an_honest_client_gets_in_beside_silent_ones(data: bytes) -> None:
    async def scene() -> tuple[bytes, int]:
        async with serving(App(), replace(LONG, connections=8)) as server:
            silent = [await connect(server, data) for _ in range(30)]
            answer = await ask(server)
            closed = [reader for reader, _ in silent if reader.at_eof() or await ended(reader)]
            for _, writer in silent:
                writer.close()
            return answer, len(closed)

    answer, closed = asyncio.run(scene())
    assert answer.endswith(b"hello")
    assert closed >= 30 - 8


async def ended(reader: asyncio.StreamReader) -> bool:
    """Return True if the server closed the connection; False while it holds it."""
    try:
        return await asyncio.wait_for(reader.read(1), 0.05) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.fault("S15")
@pytest.mark.parametrize(
    "data",
    [b"", b"GET / HTT", GET, b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n"],
    ids=["silent", "half", "idle", "body"],
)
def test_a_connection_that_sends_nothing_is_closed(data: bytes) -> None:
    async def scene() -> bytes:
        async with serving(App(), ServerLimits(head_s=0.05, body_s=0.05)) as server:
            reader, writer = await connect(server, data)
            try:
                return await asyncio.wait_for(reader.read(), 30)
            finally:
                writer.close()

    assert asyncio.run(scene())[-5:] in (b"", b"hello")


@pytest.mark.fault("S15")
def test_requests_that_are_answered_keep_their_place() -> None:
    async def scene() -> list[bytes]:
        app = App()
        async with serving(app, replace(LONG, connections=2)) as server:
            held = [
                asyncio.create_task(ask(server, GET.replace(b"/ ", b"/held "))) for _ in range(2)
            ]
            while len(server._connections.open - server._connections.waiting.keys()) < 2:
                await asyncio.sleep(0)
            late = asyncio.create_task(ask(server))  # waits in the kernel's queue
            await asyncio.sleep(0)
            assert not server._connections.can_accept.is_set()
            app.release.set()
            return await asyncio.gather(*held, late)

    assert [answer[-5:] for answer in asyncio.run(scene())] == [b"hello"] * 3


def test_the_body_of_an_answer_does_not_wait_for_the_client() -> None:
    async def scene() -> int:
        app = App()
        async with serving(app) as server:
            held = asyncio.create_task(ask(server, GET.replace(b"/ ", b"/held ")))
            await asyncio.wait_for(app.entered.wait(), 30)
            (connection,) = server._connections.open
            accepted = connection.transport.get_extra_info("socket")
            without_delay = accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            app.release.set()
            await held
            return without_delay

    assert asyncio.run(scene())


@pytest.mark.medium
@pytest.mark.fault("S15")
def test_a_client_that_does_not_read_is_dropped() -> None:
    async def scene() -> None:
        app = App()
        app.size = 2**26
        async with serving(app, replace(LONG, write_s=0.1)) as server:
            _, writer = await connect(server, GET.replace(b"/ ", b"/large "))
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            while not server.n_accepted:
                await asyncio.sleep(0)
            async with asyncio.timeout(30):
                while server._connections.open:
                    await asyncio.sleep(0.01)
            writer.close()

    asyncio.run(scene())


def test_a_large_answer_arrives_whole() -> None:
    async def scene() -> bytes:
        app = App()
        app.size = 2**20 + 7
        async with serving(Guard(app)) as server:
            return await ask(server, GET.replace(b"/ ", b"/large "))

    assert asyncio.run(scene()).partition(b"\r\n\r\n")[2] == b"x" * (2**20 + 7)


NOISE = [
    b"\0\xff" * 100,
    b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n",
    b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 2**16 + b"\r\n\r\n",
    GET + b"\0 garbage",
    GET * 5,
    b"GET / HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n",
]


@pytest.mark.fault("S15")
def test_what_is_no_http_is_refused_without_a_word_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> list[bytes]:
        async with serving(Guard(App())) as server:
            answers = []
            for data in NOISE:
                reader, writer = await connect(server, data)
                writer.write_eof()
                answers.append(await asyncio.wait_for(reader.read(), 30))
                writer.close()
            assert (await ask(server)).endswith(b"hello")
            return answers

    with caplog.at_level(logging.INFO):
        answers = asyncio.run(scene())
    assert {answer[:12] for answer in answers} <= {b"HTTP/1.1 400", b"HTTP/1.1 200", b""}
    assert [record for record in caplog.records if record.name != "asyncio"] == []


def test_a_fault_is_an_answer_with_a_number_and_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scene() -> bytes:
        async with serving(Guard(App())) as server:
            return await ask(server, GET.replace(b"/ ", b"/broken "))

    answer = asyncio.run(scene())
    assert answer.startswith(b"HTTP/1.1 500")
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.args is not None
    assert record.args[0].encode() in answer  # type: ignore[index]
    assert b"a secret" not in answer


@pytest.mark.fault("S16")
@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({"host": "localhost:80"}, True),
        ({"host": "127.0.0.1"}, True),
        ({"host": "[::1]:8000"}, True),
        ({"host": "LOCALHOST"}, True),
        ({"host": "evil.example"}, False),
        ({"host": "localhost.evil.example"}, False),
        ({"host": "evil.example@localhost:1"}, False),
        ({"host": "evil.example\\@localhost"}, False),
        ({"host": "localhost:evil.example"}, False),
        ({"host": "localhost."}, False),
        ({"host": ""}, False),
        ({"host": "[::1"}, False),
        ({}, False),
        ({"host": "localhost", "origin": "http://localhost:3000"}, True),
        ({"host": "localhost", "origin": "http://evil.example"}, False),
        ({"host": "localhost", "origin": "null"}, False),
        ({"host": "localhost", "origin": "http://localhost.evil.example"}, False),
        ({"host": "localhost", "origin": "http://[::1"}, False),
        ({"host": "localhost", "origin": "http://evil.example\\@localhost"}, False),
        ({"host": "localhost", "origin": "chrome-extension://localhost"}, False),
    ],
)
def test_names_that_are_answered(headers: dict[str, str], allowed: bool) -> None:
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    assert (explain_refusal(encoded, LOOPBACK) == "") == allowed


@pytest.mark.fault("S16")
@pytest.mark.parametrize("name", [b"host", b"origin"])
def test_every_name_of_several_is_checked(name: bytes) -> None:
    local = {b"host": b"localhost", b"origin": b"http://localhost"}[name]
    other = local.replace(b"localhost", b"evil.example")
    assert explain_refusal([(b"host", b"localhost"), (name, other), (name, local)], LOOPBACK)


FRAMES = {
    "two lengths": b"1.1\r\nhost: a\r\ncontent-length: 5\r\ntransfer-encoding: chunked",
    "in the other order": b"1.1\r\nhost: a\r\nTransfer-Encoding: Chunked\r\nContent-Length: 0",
    "chunked in 1.0": b"1.0\r\nconnection: keep-alive\r\ntransfer-encoding: chunked",
}


@pytest.mark.fault("S15")
@pytest.mark.parametrize("before", [b"", GET], ids=["first", "second"])
@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES)
def test_a_body_of_two_lengths_is_refused_and_closed(frame: bytes, before: bytes) -> None:
    """What follows may be a request here, and the rest of a body for a proxy in front."""

    async def scene() -> bytes:
        async with serving(Guard(App())) as server:
            reader, writer = await connect(
                server, before + b"POST / HTTP/" + frame + b"\r\n\r\n0\r\n\r\n" + GET
            )
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            return answer

    answer = asyncio.run(scene())
    assert answer.count(b"HTTP/1.1 200") == bool(before)
    assert (
        answer.count(b"HTTP/1.1 ")
        == answer.count(b"HTTP/1.1 200") + answer.count(b"HTTP/1.1 400")
        == 1 + bool(before)
    )


class Reading(App):
    """Reads the body; then it answers as `App` does."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass
        await super().__call__(scope, receive, send)


def post(size: int, *, path: str = "/", authorization: str = "Bearer a") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: {authorization}\r\ncontent-length: "
        f"{size}\r\n\r\n"
    )
    return head.encode() + b"x" * size


@pytest.mark.fault("S5")
def test_bodies_count_until_their_requests_are_answered() -> None:
    async def scene() -> list[bytes]:
        app = Reading()
        limits = replace(LONG, body_bytes=10, bodies_bytes_per_key=14, total_body_bytes=25)
        guard = Guard(app, limits=limits)
        async with serving(guard, limits) as server:
            held = [
                asyncio.create_task(
                    ask(server, post(8, path="/held", authorization=f"Bearer {key}"))
                )
                for key in "ab"
            ]
            while guard.bodies.bytes_by_key.total() < 16:
                await asyncio.sleep(0)
            asked = [
                await ask(server, post(size, authorization=authorization))
                for size, authorization in [
                    (8, "bearer  a"),
                    (11, "Bearer c"),
                    (10, "Bearer c"),
                    (9, "Bearer c"),
                ]
            ]
            assert [b"retry-after: 5" in answer for answer in asked] == [True, False, True, False]
            app.release.set()
            await asyncio.gather(*held)
            assert not guard.bodies.bytes_by_key
            return [*asked, await ask(server, post(8))]

    statuses = [answer.split()[1] for answer in asyncio.run(scene())]
    assert statuses == [b"429", b"413", b"503", b"200", b"200"]


def test_the_oldest_goes_first() -> None:
    class Stub:
        dropped = False

        def drop(self, why: str) -> None:
            self.dropped = True

    stubs: Any = [Stub() for _ in range(4)]
    connections = Connections(3)
    for stub in stubs[:3]:
        connections.mark_waiting(stub)
    connections.mark_answering(stubs[0])
    connections.mark_waiting(stubs[1])  # it was answered, and waits again
    connections.make_room()
    assert [stub.dropped for stub in stubs] == [False, False, True, False]
    connections.mark_answering(stubs[1])
    connections.mark_answering(stubs[3])
    assert connections.can_accept.is_set()


FEW = """
import asyncio, resource, socket, sys
from ratchet.web.server import Server
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

async def app(scope, receive, send):
    body = f"{server.n_accepted} {server.n_refused}".encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})

async def main():
    global server
    server = Server(app, socket.create_server(("127.0.0.1", 0)))
    print(server.address[1], flush=True)
    await server.run()

asyncio.run(main())
"""


@pytest.mark.medium
@pytest.mark.fault("S15")
def test_few_descriptors_and_many_connections() -> None:
    """Of 120 silent connections to a process with 64 descriptors none is in the way, and accepting
    hardly ever fails."""
    with subprocess.Popen(
        [sys.executable, "-c", FEW], stdout=subprocess.PIPE, text=True, env=os.environ
    ) as child:
        assert child.stdout is not None
        try:
            port = int(child.stdout.readline())
            silent = [socket.create_connection(("127.0.0.1", port), timeout=30) for _ in range(120)]
            with socket.create_connection(("127.0.0.1", port), timeout=30) as asking:
                asking.sendall(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
                answer = asking.makefile("rb").read()
            accepted, refused = map(int, answer.rpartition(b"\r\n\r\n")[2].split())
            for connection in silent:
                connection.close()
        finally:
            child.kill()
    assert accepted == 121
    assert refused <= 20


def test_a_server_in_a_thread_ends() -> None:
    thread = ServerThread(Guard(App()), socket.create_server(("127.0.0.1", 0)))
    with socket.create_connection(thread.address, timeout=30) as asking:
        asking.sendall(GET.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
        assert asking.makefile("rb").read().endswith(b"hello")
    thread.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(thread.address, timeout=5)
