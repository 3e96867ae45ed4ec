"""What the tests run in workers. Free of torch, but where a function says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time

import numpy as np

from ratchet.executors.worker import WorkerPlace


class Tiny:
    def __init__(self, place: WorkerPlace, start: int = 0) -> None:
        self.place, self.total = place, start
        self.closed_in = None

    def where(self):
        return self.place

    def pid(self):
        return os.getpid()

    def add(self, n: int) -> int:
        self.total += n
        return self.total

    async def add_later(self, n: int) -> int:
        await asyncio.sleep(0)
        return self.add(n)

    def double(self, array):
        array *= 2
        return array

    def prefix(self):
        return sys.prefix

    def environ(self, name):
        return os.environ.get(name)

    def fail(self, rank: int):
        if self.place.rank == rank:
            raise KeyError("no such thing")
        return "fine"

    def fail_and_hang(self, rank: int):
        self.fail(rank)
        time.sleep(600)

    def fail_oddly(self):
        raise Unpicklable(open(os.devnull))  # noqa: SIM115

    def leave(self):
        sys.exit(3)

    def unsendable(self):
        return lambda: 0

    def say(self, text: str):
        sys.stdout.write(f"{text}\n")

    def hang(self, rank: int | None = None):
        if rank in (None, self.place.rank):
            time.sleep(600)

    def stop(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def die(self, rank: int):
        if self.place.rank == rank:
            self.say("last words")
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)

    def start_program(self):
        return subprocess.Popen(["sleep", "600"]).pid

    def close(self):
        self.say("closed")


class Unpicklable(Exception):
    def __init__(self, file) -> None:
        super().__init__("odd")
        self.file = file


class Collective:
    """Joins a gloo group. Imports torch."""

    def __init__(self, place: WorkerPlace) -> None:
        import torch.distributed as dist

        self.place = place
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{place.rendezvous}",
            rank=place.rank,
            world_size=place.world_size,
        )

    def sum(self, count: int = 1, die: tuple[int, int] | None = None):
        """The sum of all ranks' numbers, so often. die: (rank, before which of them)."""
        import torch
        import torch.distributed as dist

        for i in range(count):
            if die == (self.place.rank, i):
                os.kill(os.getpid(), signal.SIGKILL)
            tensor = torch.full((1000,), float(self.place.rank + 1))
            dist.all_reduce(tensor)
        return tensor

    def hang(self, rank: int):
        if self.place.rank != rank:
            self.sum()
        time.sleep(600)

    def close(self):
        """Ends the group, as the learners do: a process that exits with it sometimes aborts."""
        import torch.distributed as dist

        dist.destroy_process_group()


def plain(place: WorkerPlace, value: int = 0):
    """A factory that is a function."""
    return Tiny(place, value + place.rank)


def broken(place: WorkerPlace):
    raise ValueError("this component can't be made")


def arrays():
    return {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "big": np.ones(300_000),
        "empty": np.zeros((0, 3)),
    }
