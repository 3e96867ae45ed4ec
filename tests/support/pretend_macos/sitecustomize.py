"""Take away from a Python program on Linux what macOS does not have.

Python runs this file at its start where the directory is on PYTHONPATH. `sys.platform` is "darwin";
functions that only Linux has are gone; /proc, /sys and /dev/shm can't be opened. Packages that
choose their compiled part by the platform are imported before, so torch, psutil and the standard
library still are Linux's: the test is of Ratchet's own code.
"""

import builtins
import os
import resource
import select
import signal
import sys
import sysconfig
import tempfile
import uuid
import webbrowser
from multiprocessing import resource_tracker

import psutil
import torch

MISSING = {
    os: (
        "memfd_create",
        "sched_getaffinity",
        "sched_setaffinity",
        "pidfd_open",
        "eventfd",
        "copy_file_range",
        "splice",
        "posix_fadvise",
        "getrandom",
    ),
    select: ("epoll",),
    resource: ("prlimit",),
    signal: ("pidfd_send_signal", "sigtimedwait", "sigwaitinfo"),
}
LINUX_DIRECTORIES = ("/proc", "/sys", "/dev/shm")
IMPORTED = (psutil, resource_tracker, tempfile, torch, uuid, webbrowser)


def hide_directories(function):
    """Return a function that opens or lists no directory that only Linux has, but for psutil."""

    def checked(path, *arguments, **options):
        is_path = isinstance(path, str | os.PathLike)
        if is_path and os.fspath(path).startswith(LINUX_DIRECTORIES) and not is_psutil():
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return function(path, *arguments, **options)

    return checked


def is_psutil():
    frame = sys._getframe(2)
    for _ in range(3):
        if frame is not None and "psutil" in frame.f_code.co_filename:
            return True
        frame = frame and frame.f_back
    return False


sysconfig.get_config_vars()  # reads a module whose name has the platform
sys.platform = "darwin"
for module, names in MISSING.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
builtins.open = hide_directories(builtins.open)
for name in ("stat", "listdir", "readlink", "scandir", "open"):
    setattr(os, name, hide_directories(getattr(os, name)))
