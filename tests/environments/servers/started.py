"""A server of another package, in an interpreter of its own."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def started(*command: object) -> Iterator[str]:
    """The address of a server that this command starts, with a free port as its last argument."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    words = [*map(str, command), str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 120
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert server.poll() is None, f"{words} ended with code {server.returncode}"
                assert time.monotonic() < deadline, f"{words} does not listen"
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()
