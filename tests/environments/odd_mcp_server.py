"""A server that speaks just enough MCP, without its package, to err as its argument says.

Like a hung server, it stays when its input ends, and ignores SIGTERM.
"""

import atexit
import json
import signal
import sys
import time
from pathlib import Path

ERROR = {"code": -32603, "message": "the file is closed"}


def describe(name):
    return {"name": name, "inputSchema": {"type": "object", "properties": {}}}


def leave_mark(fault):
    if Path(fault).is_absolute():
        Path(fault).touch()


def answer(request, fault):
    method, parameters = request["method"], request.get("params") or {}
    if method == "initialize":
        return {
            "protocolVersion": parameters["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "odd", "version": "1"},
        }
    if method == "tools/call" and fault == "shapes":
        name = parameters["name"]
        return {"content": [], "structuredContent": {"sum": 3}} if name == "a" else {"sum": 3}
    if method == "tools/call" and fault != "pages":
        sys.exit(1)
    if method == "tools/list" and Path(fault).is_file():  # the second start
        return {"tools": [describe("c")]}
    if method == "tools/list" and fault == "twins":
        return {"tools": [describe("a"), describe("a")]}
    if method == "tools/list":
        if "cursor" in parameters:
            return {"tools": [describe("b")]}
        return {"tools": [describe("a")], "nextCursor": "1"}
    return None


def main(fault):
    atexit.register(leave_mark, fault)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    for line in sys.stdin if fault != "silence" else ():
        request = json.loads(line)
        if "id" in request:
            result = answer(request, fault)
            outcome = {"error": ERROR} if result is None else {"result": result}
            message = {"jsonrpc": "2.0", "id": request["id"], **outcome}
            sys.stdout.write(json.dumps(message) + "\n")
            sys.stdout.flush()
    time.sleep(60)


main(sys.argv[1])
