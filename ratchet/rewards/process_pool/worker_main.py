"""The worker process of a reward pool: calls one function with the arguments in each input line.

If a call exceeds its processor time, the kernel kills the worker (SIGPROF), inside C code too and
even if the process that waits for the result is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import traceback
from importlib import import_module


def main(path: str, cpu_s: float, memory_mib: int) -> None:
    """Serve calls, whose arguments and results are JSON lines, until standard input ends.

    Args:
        path: The function, as "module:function".
        cpu_s: Limit on the processor time of a call.
        memory_mib: Limit on the memory of the process.
    """
    reply_stream = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # libraries' prints go to stderr, not between the results
    module, _, name = path.partition(":")
    function = getattr(import_module(module), name)
    # The process writes no files from here on.
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    _send(reply_stream, {"ready": True})
    for line in sys.stdin:
        arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            reply = {"value": function(*arguments)}
        except Exception:  # the caller decides what a bug, or exhausted memory, costs
            reply = {"error": traceback.format_exc()[-4000:]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(reply_stream, reply)


def _send(reply_stream, reply: object) -> None:
    reply_stream.write(json.dumps(reply) + "\n")
    reply_stream.flush()
