"""Run one command of a session inside the sandbox, with the session's files.

The program unpacks the files, runs the command, and reports its result and the changed files. The
sandbox gets this source with a call of `main` appended, so it imports only the standard library.
stdin is a JSON request, stdout a JSON report. The `files` of both map a path to its mode and data
(base64); the data of a directory is null.
"""

import base64
import contextlib
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time

CHUNK_BYTES = 1 << 16
GRACE_S = 0.5  # wait for the end of an output that a background process holds open


def unpack(files):
    for name, (mode, data) in files.items():
        os.makedirs((os.path.dirname(name) if data is not None else name) or ".", exist_ok=True)
        if data is None:
            continue
        with open(name, "wb") as file:
            file.write(base64.b64decode(data))
        os.chmod(name, mode)


def pack(max_bytes):
    """Return the files below the current directory; None if they exceed `max_bytes`."""
    files = {}
    total = 0
    for folder, _, names in os.walk("."):
        total += len(folder)
        files[os.path.relpath(folder)] = [0o755, None]
        for name in names:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            if not stat.S_ISREG(status.st_mode):
                continue
            total += status.st_size + len(path)
            if total > max_bytes:
                return None
            try:
                with open(path, "rb") as file:
                    data = file.read(max_bytes + 1)
            except PermissionError:
                continue
            files[os.path.relpath(path)] = [
                stat.S_IMODE(status.st_mode),
                base64.b64encode(data).decode(),
            ]
    return files


def read_output(pipe, text, max_bytes, over_limit):
    while data := os.read(pipe, CHUNK_BYTES):
        text += data
        if len(text) > max_bytes:
            over_limit.set()
            return


def run(request):
    texts = [bytearray(), bytearray()]
    over_limit = threading.Event()
    start = time.monotonic()
    words = [
        os.path.abspath(word) if word == request["state"] else word for word in request["words"]
    ]
    process = subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    readers = [
        threading.Thread(
            target=read_output,
            args=(pipe.fileno(), text, request["max_output_bytes"], over_limit),
            daemon=True,
        )
        for pipe, text in zip((process.stdout, process.stderr), texts, strict=True)
    ]
    for reader in readers:
        reader.start()
    reason = "exit"
    while process.poll() is None:
        if over_limit.wait(0.005):
            reason = "output"
            break
        if time.monotonic() - start > request["timeout_s"]:
            reason = "wall"
            break
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # also kills its background processes
    code = process.wait()
    for reader in readers:
        reader.join(GRACE_S)
    if over_limit.is_set():
        reason = "output"
    elif code < 0 and reason == "exit":
        reason = "signal"
    return (
        code,
        reason,
        [bytes(text[: request["max_output_bytes"]]) for text in texts],
        time.monotonic() - start,
    )


def main():
    # Handlers that do nothing protect this process from the command's `kill -TERM -1`. Unlike
    # SIG_IGN, they are not inherited by the command, in which `kill` must work.
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    request = json.load(sys.stdin)
    unpack(request["files"])
    home = os.getcwd()
    code, reason, texts, seconds = run(request)
    os.chdir(home)
    files = pack(request["max_files_bytes"])
    if files is None:
        reason = "output"
        texts[1] += (
            b"\nthe working directory is too large to be kept: changes by this command are undone\n"
        )
    stdout, stderr = (base64.b64encode(text).decode() for text in texts)
    report = {
        "code": code,
        "reason": reason,
        "stdout": stdout,
        "stderr": stderr,
        "seconds": seconds,
        "files": files,
    }
    sys.stdout.write(json.dumps(report))
