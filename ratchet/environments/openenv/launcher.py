"""Serve an OpenEnv package. It runs as a script, in an interpreter that has the package `openenv`.

Arguments: the app ("server.app:app") and the number of sessions. It prints its port, and ends when
its standard input does. It imports nothing of Ratchet, which that interpreter may lack.
"""

import importlib
import inspect
import os
import socket
import sys
import threading

import uvicorn


def allow_sessions(count):
    """Let apps created from now on hold `count` sessions at once, if their class allows it."""
    # No import statement, because type checks of Ratchet run without the package.
    http_server = importlib.import_module("openenv.core.env_server.http_server")
    original = http_server.HTTPEnvServer.__init__

    def init(self, *arguments, **options):
        call = inspect.signature(original).bind(self, *arguments, **options)
        # The environment may be a function, which makes no such promise.
        if getattr(call.arguments["env"], "SUPPORTS_CONCURRENT_SESSIONS", False):
            call.arguments["max_concurrent_envs"] = count
            call.arguments.pop("concurrency_config", None)
        original(*call.args, **call.kwargs)

    http_server.HTTPEnvServer.__init__ = init


def main():
    app_path, count = sys.argv[1], int(sys.argv[2])
    sys.path.insert(0, os.getcwd())
    allow_sessions(count)
    module, _, name = app_path.partition(":")
    app = getattr(importlib.import_module(module), name)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)  # connections wait from now on, before the application runs
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))

    def end_with_parent():
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    server.run(sockets=[listener])


if __name__ == "__main__":
    main()
