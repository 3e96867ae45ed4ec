"""A program apart: as soon as a worker, or the process that started it, is gone, it kills the
worker's process group and removes what that has in shared memory.

Ray ends its workers when their node or driver dies; what a worker has started itself it ends only
where the worker still gets to do so. Run as a script, so that it starts in milliseconds: it imports
nothing of ratchet but a module that lies beside it.
"""

import contextlib
import importlib
import os
import select
import signal
import subprocess
import sys


def guard_me() -> None:
    """Makes this process, which then leads a group, and whatever it starts in that, end with its
    parent."""
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(os.getppid())], check=True
    )


def main(group: int, parent: int) -> None:
    ends = select.poll()
    for pid in (group, parent):
        try:
            ends.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:  # already
            break
    else:
        if os.fork() > 0:  # nobody's child: its worker would end it first
            return
        os.setsid()
        ends.poll()
    sys.path.append(os.path.dirname(__file__))
    leftovers = importlib.import_module("shm_cleanup")
    left = leftovers.shared_by(group)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
    leftovers.remove(left)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
