"""Serve `ratchet ui DIR`: a page of the runs in a directory, updated while they train.

Only this machine can reach it.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from ratchet.commands.report.answers import list_evaluations, read_answers
from ratchet.commands.report.files import read_files
from ratchet.commands.report.media import collect_names
from ratchet.commands.report.page import make_live_page
from ratchet.commands.report.runs import RunReader, find_runs
from ratchet.commands.report.wire_format import pack
from ratchet.errors import PortBusy, RatchetError, RunDirectoryError
from ratchet.web.connection import ServerLimits
from ratchet.web.guard import LOOPBACK, Guard
from ratchet.web.server import Server

HOST = "127.0.0.1"
MAX_MATCHES = 2000  # rollouts that a search returns
MAX_NEW_RECIPES = 64  # that one list of runs reads; each takes some 20 ms
MAX_DETAILS = 64  # rollouts whose details one request can get
LIMITS = ServerLimits(connections=64, grace_s=1.0)
HEADERS = {
    b"cache-control": b"no-store",
    b"x-content-type-options": b"nosniff",
    b"cross-origin-resource-policy": b"same-origin",
}

JSON = "application/json"
BINARY = "application/octet-stream"
HTML = "text/html; charset=utf-8"
TEXT = "text/plain; charset=utf-8"
Query = Mapping[str, str]


class RunReaders:
    """Readers of the runs below a directory, by name. `refresh` searches for new runs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._readers: dict[str, RunReader] = {}
        self.refresh()

    def refresh(self) -> dict[str, RunReader]:
        readers = {run.name: run for run in find_runs(self.root)}
        for name, run in self._readers.items():
            # A run that was deleted and begun anew is read from its start.
            if name in readers and run.recipe_stamp == readers[name].recipe_stamp:
                readers[name] = run
        self._readers = readers
        return self._readers

    def __getitem__(self, name: str) -> RunReader:
        if name not in self._readers:
            raise RunDirectoryError(f"there is no run '{name}' in {self.root} (any more)")
        return self._readers[name]

    # --- answers to requests

    def list_runs(self, query: Query) -> tuple[str, bytes]:
        """Return the state and progress of each run.

        One answer reads only some new recipes, so that the first one for hundreds of runs comes
        soon; the stages of the others follow in the next answers.
        """
        versions, n_new = {}, 0
        for name, run in self.refresh().items():
            n_new += run.progress.has_new_recipe()
            versions[name] = run.read_version(read_recipe=n_new <= MAX_NEW_RECIPES)
        return JSON, _to_json(versions)

    def run(self, query: Query) -> tuple[str, bytes]:
        """Return the run's facts, and its metrics of the steps after the query's `after`.

        The key `has_more` is true if there are more steps than one answer holds.
        """
        run = self[query["run"]]
        columns, has_more = run.metrics.read_part(int(query.get("after", -1)))
        return BINARY, pack({**run.read_facts(), "has_more": has_more}, columns)

    def rollouts(self, query: Query) -> tuple[str, bytes]:
        """Return the columns of the recorded rollouts.

        The query's `known` has the hashes of the record files whose rows the page already has.
        """
        return BINARY, self[query["run"]].rollouts.pack_columns(
            query["known"].split(",") if query.get("known") else ()
        )

    def details(self, query: Query) -> tuple[str, bytes]:
        return JSON, _to_json(
            self[query["run"]].rollouts.read_details(int(query["step"]), _read_row_indices(query))
        )

    def media(self, query: Query) -> tuple[str, bytes]:
        rollouts, step = self[query["run"]].rollouts, int(query["step"])
        kind_by_name = collect_names(rollouts.read_details(step, _read_row_indices(query)))
        return JSON, _to_json(rollouts.make_media_urls(step, kind_by_name))

    def evaluations(self, query: Query) -> tuple[str, bytes]:
        return JSON, _to_json(list_evaluations(self[query["run"]].directory))

    def answers(self, query: Query) -> tuple[str, bytes]:
        return JSON, _to_json(read_answers(self[query["run"]].directory, query["name"]))

    def files(self, query: Query) -> tuple[str, bytes]:
        return JSON, _to_json(read_files(self[query["run"]].directory))

    def search(self, query: Query) -> tuple[str, bytes]:
        matches, earliest_step = self[query["run"]].rollouts.search(
            query["text"], limit=MAX_MATCHES
        )
        return JSON, _to_json({"found": matches, "since": earliest_step})


def _read_row_indices(query: Query) -> list[int]:
    """Return the query's `row_indices`, which count the rollouts of a step from 0."""
    return [int(index) for index in query["row_indices"].split(",")][:MAX_DETAILS]


def _to_json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False).encode()


class Pages:
    """The ASGI application of `ratchet ui`.

    Requests are answered in one thread, one at a time, because readers share state.
    """

    def __init__(self, runs: RunReaders) -> None:
        self._routes: dict[str, Callable[[Query], tuple[str, bytes]]] = {
            "/": lambda query: (HTML, make_live_page().encode()),
            "/api/runs": runs.list_runs,
            "/api/run": runs.run,
            "/api/rollouts": runs.rollouts,
            "/api/details": runs.details,
            "/api/media": runs.media,
            "/api/search": runs.search,
            "/api/files": runs.files,
            "/api/evaluations": runs.evaluations,
            "/api/answers": runs.answers,
        }
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ui")

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope["method"] not in ("GET", "HEAD"):
            status = 405
            content_type = TEXT
            body = b"this server only answers GET requests"
        else:
            query = {
                name: values[0]
                for name, values in parse_qs(scope["query_string"].decode("latin-1")).items()
            }
            request = asyncio.get_running_loop().run_in_executor(
                self._thread, self._answer, scope["path"], query
            )
            status, content_type, body = await request
        headers = {
            b"content-type": content_type.encode(),
            b"content-length": str(len(body)).encode(),
            **HEADERS,
        }
        await send(
            {"type": "http.response.start", "status": status, "headers": list(headers.items())}
        )
        await send({"type": "http.response.body", "body": body})

    def _answer(self, path: str, query: Query) -> tuple[int, str, bytes]:
        answer = self._routes.get(path)
        if answer is None:
            return 404, TEXT, b"no such page"
        try:
            return 200, *answer(query)
        except RatchetError as error:
            problem = str(error)
        except KeyError as error:
            problem = f"the request lacks {error.args[0]}"
        except ValueError as error:
            problem = f"a value of the request can't be read: {error}"
        except OSError as error:  # a file was removed meanwhile
            problem = f"{error.filename or 'a file of the run'} can't be read: {error.strerror}"
        return 400, TEXT, problem.encode(errors="replace")


def make_app(root: Path) -> Guard:
    """Return the application for the runs in a directory. Raises RunDirectoryError."""
    # Without a list of hosts, a website whose host name resolves to this machine (DNS rebinding)
    # could read the runs.
    return Guard(Pages(RunReaders(root)), hosts=LOOPBACK)


def bind(port: int) -> socket.socket:
    """Return a socket that only this machine can reach. Port 0 takes any free port.

    Raises PortBusy.
    """
    try:
        return socket.create_server((HOST, port))
    except OSError as error:
        raise PortBusy(
            f"port {port} of {HOST} can't be used: {error.strerror}; choose another --port, or 0 "
            "for any free one"
        ) from error


def serve_forever(root: Path, port: int, *, say: Callable[[str], object]) -> None:
    """Serve until Ctrl-C. Raises RunDirectoryError if `root` is not a directory, or PortBusy."""
    app, listener = make_app(root), bind(port)
    say(f"http://{HOST}:{listener.getsockname()[1]}/  shows the runs in {root}; Ctrl-C ends it")
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(app, listener))


async def _serve(app: Guard, listener: socket.socket) -> None:
    await Server(app, listener, limits=LIMITS).run()
