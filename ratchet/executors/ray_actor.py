"""What runs in Ray's processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray

from ratchet.executors.orphan_killer import guard_me
from ratchet.executors.protocol import Parcel
from ratchet.executors.worker import Worker
from ratchet.executors.worker_main import log_to, tail_of

Box = tuple[bytes, list[Any]]  # a Parcel as Ray carries it without a copy: its buffers as arrays


def boxed(parcel: Parcel) -> Box:
    return parcel.head, [
        np.frombuffer(buffer, np.uint8) if buffer.nbytes else np.empty(0, np.uint8)
        for buffer in parcel.buffers
    ]


def opened(box: Box) -> Parcel:
    """In memory of its own, as elsewhere: what lies in Ray's shared memory can't be written."""
    head, arrays = box
    return Parcel(head, tuple(memoryview(bytearray(array)) for array in arrays))


class WorkerActor:
    """A worker; its calls run in one thread, and another shows that it lives."""

    def __init__(self) -> None:
        log_to(Path(os.readlink("/proc/self/fd/1")))  # one file for all that it writes
        guard_me()
        self._worker = Worker()

    def answer(self, box: Box) -> tuple[int, Box]:
        kind, parcel = self._worker.answer(opened(box))
        return int(kind), boxed(parcel)

    def close(self) -> None:
        self._worker.close()

    @ray.method(concurrency_group="life")
    def greet(self) -> dict[str, Any]:
        return self._worker.greet() | {"log": os.readlink("/proc/self/fd/1")}

    @ray.method(concurrency_group="life")
    def beat(self) -> None:
        pass


OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": 0,
    "concurrency_groups": {"life": 1},
    # Ray's gcs_server keeps a record of each of the latest 100,000 calls, for a dashboard that does
    # not run.
    "enable_task_events": False,
}
ACTOR: Any = ray.remote(**OPTIONS)(WorkerActor)


@ray.remote(num_cpus=0)
def devices_here() -> Sequence[int]:
    """The accelerators that Ray gave this task."""
    return sorted(int(index) for index in ray.get_runtime_context().get_accelerator_ids()["GPU"])


@ray.remote(num_cpus=0, max_retries=0)
def ended_process(pid: int) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)


@ray.remote(num_cpus=0, max_retries=0)
def last_lines(log: str) -> str:
    return tail_of(Path(log))
