"""The process of `ratchet.rewards.process_pool.pool`: one function, called with the arguments of
each line that arrives.

Its own clock ends it: a call that takes more processor time than it may is killed by the kernel
(SIGPROF), inside C code too and even if the process that waits for it is gone.
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
    """Serves until its standard input ends. `path` is "module:function"; arguments and results
    travel as JSON lines."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # whatever a library prints is no answer
    module, _, name = path.partition(":")
    function = getattr(import_module(module), name)
    # from here on it has nothing to write
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    _send(answers, {"ready": True})
    for line in sys.stdin:
        arguments = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            answer = {"value": function(*arguments)}
        except Exception:  # the caller decides what a bug, or memory that ran out, costs
            answer = {"error": traceback.format_exc()[-4000:]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _send(answers, answer)


def _send(answers, answer: object) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()
