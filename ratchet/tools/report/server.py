"""`ratchet ui DIR`: the page of the runs in a directory, which follows those that are under way. For this machine alone."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from ratchet.errors import PortBusy, RatchetError, RunDirectoryError
from ratchet.tools.report.media import names_of
from ratchet.tools.report.page import live_page
from ratchet.tools.report.runs import RunReader, find_runs
from ratchet.tools.report.wire import pack

log = logging.getLogger(__name__)

HOST = "127.0.0.1"
MOST_FOUND = 2000  # rollouts of a search
MOST_OPENED = 64  # rollouts of a request

JSON, BINARY, HTML = "application/json", "application/octet-stream", "text/html; charset=utf-8"
Query = Mapping[str, str]


class Runs:
    """The runs below a directory, by name; those that appear later are found too."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._known: dict[str, RunReader] = {}
        self.lock = threading.Lock()  # requests come at the same time, and share what readers hold
        self.refresh()

    def refresh(self) -> dict[str, RunReader]:
        found = {run.name: run for run in find_runs(self.root)}
        self._known = {name: self._known.get(name, run) for name, run in found.items()}
        return self._known

    def __getitem__(self, name: str) -> RunReader:
        if name not in self._known:
            raise RunDirectoryError(f"there is no run '{name}' in {self.root} (any more)")
        return self._known[name]

    # --- what is asked for

    def listed(self, query: Query) -> tuple[str, bytes]:
        return JSON, _json({name: run.version() for name, run in self.refresh().items()})

    def run(self, query: Query) -> tuple[str, bytes]:
        run = self[query["run"]]
        return BINARY, pack(run.facts(), run.metrics(int(query.get("after", -1))))

    def rollouts(self, query: Query) -> tuple[str, bytes]:
        return BINARY, self[query["run"]].rollouts.columns(query["known"].split(",") if query.get("known") else ())

    def details(self, query: Query) -> tuple[str, bytes]:
        places = [int(place) for place in query["places"].split(",")][:MOST_OPENED]
        return JSON, _json(self[query["run"]].rollouts.details(int(query["step"]), places))

    def media(self, query: Query) -> tuple[str, bytes]:
        rollouts, step = self[query["run"]].rollouts, int(query["step"])
        kinds = names_of(rollouts.details(step, [int(place) for place in query["places"].split(",")][:MOST_OPENED]))
        return JSON, _json(rollouts.media(step, kinds))

    def search(self, query: Query) -> tuple[str, bytes]:
        found, since = self[query["run"]].rollouts.search(query["text"], most=MOST_FOUND)
        return JSON, _json({"found": found, "since": since})


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


def serve(root: Path, port: int) -> ThreadingHTTPServer:
    """A server that is bound and not yet running; port 0: any that is free. Raises RunDirectoryError, OSError."""
    runs = Runs(root)
    answers: dict[str, Callable[[Query], tuple[str, bytes]]] = {
        "/": lambda query: (HTML, live_page().encode()),
        "/api/runs": runs.listed,
        "/api/run": runs.run,
        "/api/rollouts": runs.rollouts,
        "/api/details": runs.details,
        "/api/media": runs.media,
        "/api/search": runs.search,
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            if not self._from_here():
                # A page of somebody else's, whose name was made to lead here, could otherwise read the runs.
                self._send(403, "text/plain", b"this server answers to localhost alone")
                return
            answer = answers.get(url.path)
            if answer is None:
                self._send(404, "text/plain", b"no such page")
                return
            query = {name: values[0] for name, values in parse_qs(url.query).items()}
            try:
                with runs.lock:
                    kind, body = answer(query)
            except (RatchetError, KeyError, ValueError) as error:
                self._send(400, "text/plain; charset=utf-8", f"{type(error).__name__}: {error}".encode())
                return
            self._send(200, kind, body)

        def _from_here(self) -> bool:
            name = self.headers.get("Host", "").rpartition(":")[0]
            return name in ("localhost", HOST)

        def _send(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            log.debug(format, *args)

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    return server


def serve_forever(root: Path, port: int, *, say: Callable[[str], object]) -> None:
    """Until Ctrl-C. Raises RunDirectoryError where `root` is no directory, PortBusy."""
    try:
        server = serve(root, port)
    except OSError as error:
        raise PortBusy(f"port {port} of {HOST} can't be had: {error.strerror}; choose another --port, or 0 for any") from error
    say(f"http://{HOST}:{server.server_address[1]}/  shows the runs in {root}; Ctrl-C ends it")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
