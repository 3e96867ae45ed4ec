"""A Docker engine for tests, on a unix socket: answers as the real one does, and really runs what
it is given.

A container is a process in namespaces of its own (by util-linux), with a directory as its /tmp, or as
its root if its root can be changed.
Nothing is confined further: only for programs of the tests. `faults` maps "METHOD path-expression"
to what happens to the next such requests, in order.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingMixIn, UnixStreamServer
from urllib.parse import parse_qs, urlparse

# the environment that links to it may lie in a /tmp that containers don't see
PYTHON = os.path.realpath(sys.executable)
OURS = ["--user", "--map-root-user"] if os.getuid() else []
UPGRADED = (
    b"HTTP/1.1 101 UPGRADED\r\nContent-Type: "
    b"application/vnd.docker.raw-stream\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
)


# What a changeable root shares with the machine; all else is the container's own.
SHARED = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/proc", "/dev")
ROOT_SCRIPT = """for path in $0; do [ -L $path ] && cp -P $path "$1$path" && continue
mkdir -p "$1$path" && mount --rbind $path "$1$path"; done
root=$1; shift  # it is ready in its new root, which commands enter by its process
exec chroot "$root" sh -c 'echo ready >&2; exec "$@" 2>/dev/null' sh "$@"
"""


class Container:
    def __init__(self, body):
        self.body, self.folder, self.process, self.first = (
            body,
            tempfile.mkdtemp(prefix="fake-docker-"),
            None,
            0,
        )
        os.chmod(self.folder, 0o777)
        self.has_root = body.get("HostConfig", {}).get("ReadonlyRootfs") is False
        if self.has_root:
            for name in ("tmp", "app"):
                Path(self.folder, name).mkdir()

    def start(self):
        command = ["unshare", *OURS, "--mount", "--pid", "--fork", "--kill-child", "sh", "-c"]
        inside = ['mount --bind "$0" /tmp && echo ready >&2 && exec "$@" 2>/dev/null', self.folder]
        if self.has_root:
            inside = [ROOT_SCRIPT, " ".join(filter(os.path.exists, SHARED)), self.folder]
        words = [*(self.body.get("Entrypoint") or []), *(self.body.get("Cmd") or [])]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [*command, *inside, *words], stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe
        )
        assert self.process.stderr.readline() == b"ready\n"
        outer = self.process.pid
        self.first = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0])

    def enter(self, body):
        users = ["--user", "--preserve-credentials"] if OURS else []
        command = [
            "nsenter",
            "--target",
            str(self.first),
            *users,
            "--mount",
            "--pid",
            *(["--root"] if self.has_root else []),
            "sh",
            "-c",
            'cd "$0"; exec "$@"',
        ]
        pipe = subprocess.PIPE
        words = [*command, body.get("WorkingDir") or "/", *body["Cmd"]]
        return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)

    def end(self):
        if self.process:
            self.process.kill()
            self.process.wait()
            self.process.stdin.close()
            self.process.stderr.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, inner):
        if self.has_root:
            return Path(self.folder, inner.lstrip("/"))
        assert inner == "/tmp" or inner.startswith("/tmp/"), inner
        return Path(self.folder, inner.removeprefix("/tmp").lstrip("/"))


class FakeDocker(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, images=("python:3.11-slim",), info=None, version="1.47"):
        self.folder = tempfile.mkdtemp(prefix="fake-engine-")
        self.images, self.version = set(images), version
        self.info = {
            "OSType": "linux",
            "SecurityOptions": ["name=seccomp,profile=builtin"],
            "Runtimes": {"runc": {}},
        } | (info or {})
        self.containers: dict[str, Container] = {}
        self.execs: dict[str, dict] = {}
        self.created: list[dict] = []  # bodies, for assertions
        self.asked: list[str] = []
        self.built: list[list[str]] = []  # the files of each build
        self.faults: dict[str, list[str]] = {}
        self.released = threading.Event()  # what hangs ends with it
        self.names = iter(range(10**6))
        super().__init__(f"{self.folder}/engine.sock", Handler)
        self.address = f"unix://{self.folder}/engine.sock"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def fault(self, method, path):
        for pattern, kinds in self.faults.items():
            if kinds and re.fullmatch(pattern, f"{method} {path}"):
                return kinds.pop(0)
        return ""

    def drop(self, name):
        if container := self.containers.pop(name, None):
            container.end()

    def close(self):
        self.released.set()
        self.shutdown()
        self.server_close()
        for name in list(self.containers):
            self.drop(name)
        shutil.rmtree(self.folder, ignore_errors=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeDocker

    def log_message(self, *_):
        pass

    def answer(self, status, body=None, kind="application/json"):
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        )
        self.send_response(status)
        self.send_header("Content-Type", kind)
        if status == 200 and kind != "application/json":  # archives come in chunks
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(data), 1000):
                piece = data[start : start + 1000]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fail(self, status, why):
        self.answer(status, {"message": why})

    def handle_any(self):
        url = urlparse(self.path)
        self.query = {name: values[0] for name, values in parse_qs(url.query).items()}
        path = re.sub(r"^/v1\.\d+", "", url.path)
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(f"{self.command} {path}")
        self.cut = ""
        match self.server.fault(self.command, path).split(":", 1):
            case ["status", number]:
                return self.fail(int(number), "as told")
            case ["hang"]:
                self.server.released.wait()
                self.close_connection = True
                return None
            case ["says", body]:  # JSON of another shape
                return self.answer(200, body.encode())
            case ["drip"]:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not self.server.released.wait(0.05):
                    self.wfile.write(b" ")
                return None
            case ["drop"]:
                self.close_connection = True
                return None
            case [kind]:
                self.cut = kind
        for pattern, method, handler in ROUTES:
            if self.command == method and (found := re.fullmatch(pattern, path)):
                return handler(self, data, *found.groups())
        return self.fail(404, "page not found")

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def known(self, name):
        container = self.server.containers.get(name)
        if container is None:
            self.fail(404, f"No such container: {name}")
        return container

    def create(self, data):
        body = json.loads(data)
        if body["Image"] not in self.server.images:
            return self.fail(404, f"No such image: {body['Image']}")
        name = f"c{next(self.server.names):063d}"
        self.server.created.append(body)
        self.server.containers[name] = Container(body)
        return self.answer(201, {"Id": name, "Warnings": []})

    def attach(self, _, name):
        container = self.known(name)
        if container is None:
            return
        self.wfile.write(UPGRADED)
        while self.connection.recv(4096):
            pass
        if container.process:  # StdinOnce: the one client is gone
            container.process.stdin.close()
            container.process.wait()
            self.server.drop(name)
        self.close_connection = True

    def start(self, _, name):
        if container := self.known(name):
            container.start()
            self.answer(204)

    def inspect(self, _, name):
        if self.known(name):
            self.answer(
                200, {"Id": name, "State": {"Running": True, "OOMKilled": self.cut == "oom"}}
            )

    def list(self, _):
        wanted = json.loads(self.query["filters"])["label"]
        listed = [
            {"Id": name, "Labels": container.body.get("Labels", {})}
            for name, container in self.server.containers.items()
            if all(label in container.body.get("Labels", {}) for label in wanted)
        ]
        self.answer(200, listed)

    def remove(self, _, name):
        if self.known(name):
            assert self.query == {"force": "true", "v": "true"}
            self.server.drop(name)
            self.answer(204)

    def put(self, data, name):
        if container := self.known(name):
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(container.path(self.query["path"]), filter="tar")
            self.answer(200)

    def get(self, _, name):
        container = self.known(name)
        if container is None:
            return
        inner = self.query["path"]
        path = container.path(inner.removesuffix("/."))
        if not path.exists():
            self.fail(404, f"Could not find the file {inner} in container {name}")
            return
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(path, arcname="." if inner.endswith("/.") else path.name)
        self.answer(200, packed.getvalue(), "application/x-tar")

    def exec_create(self, data, name):
        if self.known(name):
            number = f"e{next(self.server.names):063d}"
            self.server.execs[number] = {
                "container": name,
                "body": json.loads(data),
                "process": None,
            }
            self.answer(201, {"Id": number})

    def exec_start(self, data, number):
        told = self.server.execs[number]
        container = self.known(told["container"])
        if container is None:
            return
        process = told["process"] = container.enter(told["body"])
        if json.loads(data)["Detach"]:
            self.answer(200)
            for pipe in (process.stdout, process.stderr):
                pipe.close()
            return
        self.wfile.write(UPGRADED)
        self.connection.settimeout(30)
        lock = threading.Lock()
        copies = [
            threading.Thread(target=self.copy, args=(kind, pipe, lock))
            for kind, pipe in ((1, process.stdout), (2, process.stderr))
        ]
        for copy in copies:
            copy.start()
        for copy in copies:
            copy.join()
        process.wait()
        self.close_connection = True

    def copy(self, kind, pipe, lock):
        with contextlib.suppress(OSError), pipe:
            while data := os.read(pipe.fileno(), 4096):
                frame = struct.pack(">BxxxI", kind, len(data)) + data
                with lock:
                    if self.cut == "cut":  # in the middle of a frame
                        self.wfile.write(frame[:-1])
                        self.connection.shutdown(socket.SHUT_RDWR)
                    # between frames: the rest is lost, and nobody says so
                    elif self.cut == "quiet":
                        self.wfile.write(frame[:8][:4] + struct.pack(">I", 1) + data[:1])
                        self.connection.shutdown(socket.SHUT_RDWR)
                    elif self.cut == "garbage":
                        self.wfile.write(b"HTTP/1.1 502 Bad Gateway\r\n\r\n")
                        self.connection.shutdown(socket.SHUT_RDWR)
                    else:
                        self.wfile.write(frame)

    def exec_inspect(self, _, number):
        code = self.server.execs[number]["process"].poll()
        running = code is None or self.cut == "running"
        self.answer(
            200,
            {
                "Running": running,
                "ExitCode": None if running else code if code >= 0 else 128 - code,
            },
        )

    def image(self, _, name):
        if name in self.server.images:
            return self.answer(200, {"Id": name})
        return self.fail(404, f"No such image: {name}")

    def build(self, data):
        if self.cut == "builderror":
            return self.answer(200, {"error": "no such step"})
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            self.server.built.append(archive.getnames())
        self.server.images.add(self.query["t"])
        return self.answer(200, {"stream": "built"})

    def pull(self, _):
        image = f"{self.query['fromImage']}:{self.query['tag']}"
        lines = [{"status": "Pulling"}]
        if image.startswith("no/"):
            lines.append({"errorDetail": {"message": "denied"}, "error": "pull access denied"})
        else:
            self.server.images.add(image)
        self.answer(200, "\r\n".join(map(json.dumps, lines)).encode(), "text/plain")


ROUTES = (
    (
        r"/version",
        "GET",
        lambda self, _: self.answer(
            200, {"ApiVersion": self.server.version, "MinAPIVersion": "1.24"}
        ),
    ),
    (r"/info", "GET", lambda self, _: self.answer(200, self.server.info)),
    (r"/images/create", "POST", Handler.pull),
    (r"/containers/create", "POST", Handler.create),
    (r"/containers/json", "GET", Handler.list),
    (r"/containers/(\w+)/attach", "POST", Handler.attach),
    (r"/containers/(\w+)/start", "POST", Handler.start),
    (r"/containers/(\w+)/json", "GET", Handler.inspect),
    (r"/containers/(\w+)/archive", "PUT", Handler.put),
    (r"/images/(.+)/json", "GET", Handler.image),
    (r"/build", "POST", Handler.build),
    (r"/containers/(\w+)/archive", "GET", Handler.get),
    (r"/containers/(\w+)/exec", "POST", Handler.exec_create),
    (r"/containers/(\w+)", "DELETE", Handler.remove),
    (r"/exec/(\w+)/start", "POST", Handler.exec_start),
    (r"/exec/(\w+)/json", "GET", Handler.exec_inspect),
)
