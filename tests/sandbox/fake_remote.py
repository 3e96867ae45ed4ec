"""A sandbox service for tests, on loopback: SandboxFusion's POST /run_code, whose programs really
run, unconfined.

`faults`: what happens to the next requests, in order. `shared`: one directory for all programs, as
a service without isolation.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

FIELDS = {
    "compile_timeout",
    "run_timeout",
    "memory_limit_MB",
    "code",
    "stdin",
    "language",
    "files",
    "fetch_files",
    "args",
}


class FakeRemote(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults: list[str] = []
        self.asked: list[dict] = []
        self.headers: list[str | None] = []
        self.shared: str | None = None
        self.released = threading.Event()
        self.address = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.released.set()
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: FakeRemote

    def log_message(self, *_):
        pass

    def answer(self, status, body):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self):
        data = self.rfile.read(int(self.headers["Content-Length"]))
        request = json.loads(data)
        self.server.asked.append(request)
        self.server.headers.append(self.headers["Authorization"])
        fault = self.server.faults.pop(0) if self.server.faults else ""
        if fault == "hang":
            self.server.released.wait()
        elif fault == "drop":
            self.close_connection = True
        elif fault == "short":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n{")
        elif fault == "garbage":
            self.answer(200, b"<html>")
        elif fault == "deep":
            self.answer(200, b"[" * 100_000)
        elif fault == "text":
            self.answer(200, {"status": "Success", "run_result": "Finished"})
        elif fault == "drip":
            self.wfile.write(b"HTTP/1.0 200 OK\r\nContent-Length: 1000\r\n\r\n")
            for _ in range(100):
                self.wfile.write(b" ")
                self.server.released.wait(0.02)
        elif fault.isdecimal():
            self.answer(int(fault), {"detail": "as told"})
        elif fault == "sandbox":
            self.answer(
                200, {"status": "SandboxError", "message": "no space left", "run_result": None}
            )
        elif fault == "pod":
            ran = {"status": "Error", "stderr": "pod"}
            self.answer(200, {"status": "Failed", "message": "", "run_result": ran})
        elif self.path != "/run_code":
            self.answer(404, {"detail": "Not Found"})
        elif not {"code", "language"} <= set(request) or set(request) - FIELDS:
            self.answer(422, {"detail": "validation"})
        else:
            self.answer(200, self.run(request))

    def run(self, request):
        interpreter = {"python": [sys.executable, "-B"], "bash": ["sh"]}[request["language"]]
        with tempfile.TemporaryDirectory() as folder:
            scratch = self.server.shared or folder
            code = request["code"].replace("'/tmp/", f"'{scratch}/")  # its own /tmp, or everybody's
            Path(folder, "program").write_bytes(code.encode("utf-8", "surrogatepass"))
            began = time.monotonic()
            work = Path(folder, "work")
            work.mkdir()
            try:
                done = subprocess.run(
                    [*interpreter, str(Path(folder, "program"))],
                    input=(request.get("stdin") or "").encode(),
                    capture_output=True,
                    cwd=work,
                    timeout=request["run_timeout"],
                    check=False,
                )
            except subprocess.TimeoutExpired as late:
                ran = {"status": "TimeLimitExceeded", "return_code": None}
                return self.whole(ran, began, late.stdout or b"", late.stderr or b"")
        return self.whole(
            {"status": "Finished", "return_code": done.returncode}, began, done.stdout, done.stderr
        )

    def whole(self, ran, began, stdout, stderr):
        def text(data):
            try:
                return data[: 1 << 20].decode()
            except UnicodeDecodeError as error:
                return f"[DecodeError] {error}"

        ran |= {
            "execution_time": time.monotonic() - began,
            "stdout": text(stdout),
            "stderr": text(stderr),
        }
        status = "Success" if ran["return_code"] == 0 else "Failed"
        return {
            "status": status,
            "message": "",
            "compile_result": None,
            "run_result": ran,
            "executor_pod_name": None,
            "files": {},
        }
