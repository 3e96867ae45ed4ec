"""A Hugging Face Hub on loopback: the part of its API that an upload and a load of a model use.

It keeps repositories in memory. A token `hf_NAME` belongs to user NAME, who may write to
repositories `NAME/...` only. Files from LFS_BYTES on go through the LFS API, smaller ones come with
the commit.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_BYTES = 10_000
COMMIT = "c" * 40


@dataclass
class Hub:
    """The state of the hub. `repositories` maps a name to its files."""

    address: str = ""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    datasets: set[str] = field(default_factory=set)
    private: set[str] = field(default_factory=set)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)  # part of METHOD PATH -> status


@contextmanager
def run_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self, status: int, body: Any = None, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X_Error_Code": code} if code else {}
        self._answer(status, {"error": message}, X_Error_Message=message, **headers)

    def _handle(self) -> None:
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for part, status in self.hub.failures.items():
            if part in self.hub.requests[-1]:
                self._refuse(status, "out of order")
                return
        user = self.headers.get("Authorization", "").removeprefix("Bearer hf_")
        if path == "/api/whoami-v2":
            if user:
                self._answer(200, {"name": user, "type": "user"})
            else:
                self._refuse(401, "Invalid credentials")
        elif path == "/api/repos/create":
            self._create(json.loads(body), user)
        elif "/preupload/" in path:
            self._choose_modes(json.loads(body))
        elif path.endswith("/info/lfs/objects/batch"):
            self._plan_upload(json.loads(body))
        elif path.startswith("/objects/"):
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
            self._answer(200, {})
        elif "/commit/" in path:
            self._commit(path, body, user)
        else:
            self._read(path)

    do_GET = do_HEAD = do_POST = do_PUT = _handle

    def _create(self, request: dict[str, Any], user: str) -> None:
        owner = request.get("organization") or user
        name = f"{owner}/{request['name']}"
        if owner != user:
            self._refuse(403, f'You don\'t have the rights to create a model under "{owner}"')
        elif name in self.hub.repositories:
            self._answer(409, {"error": "exists", "url": f"{self.hub.address}/{name}"})
        else:
            self.hub.repositories[name] = {}
            if request.get("visibility") == "private" or request.get("private"):
                self.hub.private.add(name)
            self._answer(200, {"url": f"{self.hub.address}/{name}", "name": name})

    def _choose_modes(self, request: dict[str, Any]) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["size"] >= LFS_BYTES else "regular",
                "shouldIgnore": False,
                "oid": None,
            }
            for file in request["files"]
        ]
        self._answer(200, {"files": files})

    def _plan_upload(self, request: dict[str, Any]) -> None:
        objects = [
            {
                **entry,
                "actions": {"upload": {"href": f"{self.hub.address}/objects/{entry['oid']}"}},
            }
            for entry in request["objects"]
        ]
        self._answer(200, {"transfer": "basic", "objects": objects})

    def _commit(self, path: str, body: bytes, user: str) -> None:
        name = path.removeprefix("/api/models/").partition("/commit/")[0]
        if not name.startswith(f"{user}/"):
            self._refuse(403, "You don't have the rights to write here")
            return
        files = self.hub.repositories[name]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        url = f"{self.hub.address}/{name}/commit/{COMMIT}"
        self._answer(200, {"commitUrl": url, "commitOid": COMMIT})

    def _read(self, path: str) -> None:
        if path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
            return
        kind, _, rest = path.removeprefix("/api/").partition("/")
        if kind == "datasets":
            self._answer(200 if rest in self.hub.datasets else 404, {"id": rest})
            return
        name = "/".join((rest if kind == "models" else path.strip("/")).split("/")[:2])
        files = self.hub.repositories.get(name)
        if files is None:
            self._refuse(404, "Repository not found", "RepoNotFound")
        elif kind == "models" and "/tree/" in rest:
            tree = [
                {"type": "file", "path": file, "size": len(content), "oid": "0" * 40}
                for file, content in files.items()
            ]
            self._answer(200, tree)
        elif kind == "models":
            siblings = [{"rfilename": file} for file in files]
            self._answer(200, {"id": name, "sha": COMMIT, "siblings": siblings})
        else:
            self._resolve(files, path.partition("/resolve/")[2].partition("/")[2])

    def _resolve(self, files: dict[str, bytes], file: str) -> None:
        if file not in files:
            self._refuse(404, "Entry not found", "EntryNotFound")
            return
        digest = hashlib.sha256(files[file]).hexdigest()
        self._answer(200, files[file], ETag=f'"{digest}"', X_Repo_Commit=COMMIT)
