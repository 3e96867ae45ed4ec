"""A separate program that kills a worker's process group once the worker or its parent is gone.

It also removes the group's files in shared memory. Ray ends its workers when their node or driver
dies, but not the processes that a killed worker has started. The program runs as a script, and
imports only one module of Ratchet, from the same folder, so that it starts in milliseconds.
"""

import importlib
import os
import select
import subprocess
import sys


def end_with_parent() -> None:
    """Make this process and its children end with its parent.

    The process becomes the leader of a process group, if it is not one yet.
    """
    if os.getpgrp() != os.getpid():
        os.setpgrp()
    subprocess.run(
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(os.getppid())], check=True
    )


def main(group: int, parent: int) -> None:
    """Wait until the leader of `group` or `parent` has ended, then kill the group."""
    poller = select.poll()
    for pid in (group, parent):
        try:
            poller.register(os.pidfd_open(pid), select.POLLIN)
        except ProcessLookupError:  # it has ended already
            break
    else:
        # Continue in a forked child in a session of its own, so that it survives the worker.
        if os.fork() > 0:
            return
        os.setsid()
        poller.poll()
    sys.path.append(os.path.dirname(__file__))
    importlib.import_module("process_group").kill_group(group)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
