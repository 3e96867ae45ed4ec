"""A server on loopback that answers as a test says: `serve(answer)`, in threads of this process."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HANG = object()  # keeps the connection open until the test is over


@dataclass
class Answer:
    body: Any = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Fake:
    """`seen`: (path, headers in lower case, body) of each request, in the order of their
    arrival."""

    url: str = ""
    seen: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    most_at_once: int = 0


@contextmanager
def serve(answer: Callable[[Any, int], Any]) -> Iterator[Fake]:
    """answer(body, number of the request from 0) gives JSON to send, text to send as it is, an
    `PartialCompletion`, or HANG."""
    fake, lock, over = Fake(), threading.Lock(), threading.Event()
    running = 0

    class Handler(BaseHTTPRequestHandler):
        wbufsize = 1 << 16  # one packet an answer: a second one may wait 40 ms for an ACK

        def do_POST(self) -> None:
            nonlocal running
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            body = json.loads(sent) if sent else None
            with lock:
                number = len(fake.seen)
                fake.seen.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()}, body)
                )
                running += 1
                fake.most_at_once = max(fake.most_at_once, running)
            try:
                given = answer(body, number)
            finally:
                with lock:
                    running -= 1
            if given is HANG:
                over.wait()
                return
            made = given if isinstance(given, Answer) else Answer(given)
            content = made.body
            if not isinstance(content, bytes):
                content = (content if isinstance(content, str) else json.dumps(content)).encode()
            self.send_response(made.status)
            for name, value in {"content-length": str(len(content)), **made.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    fake.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield fake
    finally:
        over.set()
        server.shutdown()
        thread.join()
        server.server_close()


def chat(text: str | None, finish_reason: str = "stop") -> dict[str, Any]:
    """Return a reply as an OpenAI-compatible endpoint sends it."""
    return {
        "id": "x",
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "finish_reason": finish_reason,
            }
        ],
    }
