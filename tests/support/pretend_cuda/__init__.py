"""A pretended CUDA accelerator, so that `device=cuda` can be rehearsed on a machine without one.

`make_environment()` returns the environment of a process in which PyTorch finds two NVIDIA H200.
Their memory is main memory and their kernels are the CPU's, so results can be compared bit by bit.

Like CUDA: where tensors are (`is_cuda`, the current device of each thread), the errors for operands
on several devices, `numpy()`, generators, autocast, backward passes in threads of their own, and
device memory in use. `counting.py` counts kernels, copies and synchronisations by the line of code
that caused them; attention and `rms_norm` count as one kernel each in the forward pass.

Unlike CUDA: nothing is asynchronous, so a missing synchronisation goes unseen. Kernels keep the
CPU's precision, shapes and speed. NCCL, CUDA IPC and the profiler of the device are missing; gloo
stands in for NCCL (`collectives.py`).

Needs a C++ compiler and PyTorch's build for CPUs; `build.py` compiles the backend.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from support.pretend_cuda.build import build_backend

TESTS = Path(__file__).resolve().parents[2]
STARTUP = Path(__file__).resolve().parent / "startup"
DEVICE_BYTES = 140 * 2**30  # of an H200


def make_environment(**changes: str) -> dict[str, str]:
    """Return this process's environment, changed for a Python process that has the accelerator.

    The processes that it starts have it too.
    """
    path = os.pathsep.join([str(STARTUP), str(TESTS), os.environ.get("PYTHONPATH", "")])
    # At the end PyTorch stops the threads of backward passes, and sometimes aborts: they need the
    # interpreter then. Without time for it, it leaves them.
    exit_time = {"TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT": "0"}
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep), **exit_time, **changes}


@cache
def load_backend() -> ctypes.CDLL:
    """Load the backend. PyTorch must not have been imported: it looks for CUDA while imported."""
    backend = ctypes.CDLL(str(build_backend()))
    for name in ("device_count", "memory_bytes", "peak_memory_bytes", "current_device"):
        getattr(backend, f"pretend_{name}").restype = ctypes.c_int64
    return backend
