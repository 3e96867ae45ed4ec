"""Define the actor and the tasks that run in Ray's processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from ratchet.executors.worker import ComponentHost
from ratchet.processes.frames import Parcel
from ratchet.processes.orphan_killer import end_with_parent
from ratchet.processes.output_log import read_tail, redirect_output

# A Parcel with its buffers as arrays, which Ray sends without a copy.
Box = tuple[bytes | bytearray, list[Any]]


def box_parcel(parcel: Parcel) -> Box:
    """Return a parcel in the form that Ray sends."""
    return parcel.body, [
        np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.empty(0, np.uint8)
        for buffer in parcel.buffers
    ]


def unbox_parcel(box: Box) -> Parcel:
    """Return a box's parcel, copied because Ray's shared memory is read-only."""
    body, arrays = box
    return Parcel(body, tuple(memoryview(bytearray(array)) for array in arrays))


class WorkerActor:
    """A worker in a Ray actor: calls run in one thread, and another answers heartbeats."""

    def __init__(self) -> None:
        # Ray has one file for stdout and one for stderr. Write both, and the log, to the first, so
        # that they are in order.
        redirect_output(Path(os.readlink("/proc/self/fd/1")))
        end_with_parent()
        self._worker = ComponentHost()

    def answer(self, box: Box) -> tuple[int, Box]:
        """Run a packed request and return the kind and value of its result."""
        kind, parcel = self._worker.answer(unbox_parcel(box))
        return int(kind), box_parcel(parcel)

    def close(self) -> None:
        self._worker.close()

    @ray.method(concurrency_group="life")
    def greet(self) -> dict[str, Any]:
        return self._worker.greet() | {"log": os.readlink("/proc/self/fd/1")}

    @ray.method(concurrency_group="life")
    def beat(self) -> None:
        pass


ACTOR_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": 0,
    "concurrency_groups": {"life": 1},
    # Ray's gcs_server would keep a record of each of the latest 100,000 calls, for a dashboard that
    # does not run.
    "enable_task_events": False,
}
ACTOR: Any = ray.remote(**ACTOR_OPTIONS)(WorkerActor)


@ray.remote(num_cpus=0)
def find_assigned_devices() -> Sequence[int]:
    """Return the indices of the accelerators that Ray assigned to this task."""
    return sorted(int(index) for index in ray.get_runtime_context().get_accelerator_ids()["GPU"])


@ray.remote(num_cpus=0, max_retries=0)
def kill_process(pid: int) -> None:
    """Kill a process of this node with all its children."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


@ray.remote(num_cpus=0, max_retries=0)
def read_log_tail(log: str) -> str:
    """Return the last lines of a log file of this node."""
    return read_tail(Path(log))
