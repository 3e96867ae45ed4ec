"""The worker process of a reward pool: calls one function with the arguments of each call.

If a call exceeds its processor time, the kernel kills the worker (SIGPROF), inside C code too and
even if the process that waits for the result is gone.
"""

from __future__ import annotations

import contextlib
import resource
import signal
import traceback
from typing import NoReturn

from ratchet.processes.child import import_function
from ratchet.processes.frames import Connection, FrameKind, dump_json


def serve(connection: Connection, path: str, cpu_s: float, memory_mib: int) -> NoReturn:
    """Serve calls until the connection ends.

    Args:
        path: The function, as "module:function".
        cpu_s: Limit on the processor time of a call.
        memory_mib: Limit on the memory of the process.
    """
    function = import_function(path)
    # From now on the process writes no files.
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (0, 0))
    with contextlib.suppress(ValueError, OSError):  # macOS has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (memory_mib * 2**20, memory_mib * 2**20))
    connection.send(FrameKind.HELLO)
    while True:
        call = connection.receive()
        arguments = call.parcel.load_json()
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            kind, answer = FrameKind.RESULT, dump_json(function(*arguments))
        # The caller decides how a bug, an exit or exhausted memory affects the reward.
        except (Exception, SystemExit):
            kind = FrameKind.RAISED
            answer = dump_json(traceback.format_exc()[-4000:])
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(kind, call.number, answer)
