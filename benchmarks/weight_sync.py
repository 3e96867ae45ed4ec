"""Moves a model of about 100 MiB (float32) from 2 ranks of a learner, of which each has half of the
rows, to a generator in a third process, by each link, and compares every bit. Beside it a plain
copy of the same bytes in memory, in the same rounds.

python benchmarks/weight_sync.py [--rounds 7] [--links shared_memory,collective,files,delta] [--threads 2]

The receiver has as many threads as there are cores, unless `--threads` says otherwise: ranks and
receiver work in turn.

Prints a table and one JSON line. Seconds are medians over the pushes after the first. Peak extra
memory is what a push adds to the private memory of a process at most, and the shared memory and
files that the link uses.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import json
import multiprocessing
import os
import pickle
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

CONTEXT = multiprocessing.get_context("forkserver")
HIDDEN, LAYERS = 1024, 12  # 12 x 2 matrices of 4 MiB, and small ones
WIDE = 1024
MIB = 2**20


def shapes() -> dict[str, tuple[int, ...]]:
    named = {
        f"model.layers.{i}.{kind}.weight": (WIDE, HIDDEN)
        for i in range(LAYERS)
        for kind in ("up", "down")
    }
    return {**named, **{f"model.layers.{i}.norm.weight": (HIDDEN,) for i in range(LAYERS)}}


def private_bytes() -> int:
    """Memory of this process that is no other's and no file's."""
    return sum(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line[:7] == "RssAnon"
    )


class Watched:
    """Samples the private memory while it is watched."""

    def watch(self) -> None:
        self._before = self._most = private_bytes()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._look, daemon=True)
        self._watcher.start()

    def _look(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, private_bytes())

    def watched(self) -> int:
        self._over.set()
        self._watcher.join()
        return max(self._most, private_bytes()) - self._before


class Rank(Watched):
    """Half of the rows of every weight."""

    def __init__(self, rank: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.rank = rank
        rng = torch.Generator().manual_seed(rank)
        self.own = {
            name: torch.randn(shape[0] // 2, *shape[1:], generator=rng)
            for name, shape in shapes().items()
        }

    def weights(self) -> Iterator[Any]:
        from ratchet.protocols import Shard

        for (name, own), shape in zip(self.own.items(), shapes().values(), strict=True):
            yield Shard(name, shape, (self.rank * len(own), *(0,) * (own.dim() - 1)), own)

    def apply_to_weights(self, operation: Callable[[Iterator[Any], int], Any]) -> Any:
        return operation(self.weights(), self.rank)

    def step(self, share: float) -> None:
        """Changes so large a share of the numbers."""
        for own in self.own.values():
            own.view(-1)[:: max(1, round(1 / share))] += 1.0


class Receiver(Watched):
    """A generator's weights, staged and committed as the embedded engine's are."""

    def __init__(self, rank: int, threads: int) -> None:
        import torch

        from ratchet.generators.weight_update import WeightStaging
        from ratchet.protocols import Shard
        from ratchet.weight_sync.endpoints import WeightReceiver

        torch.set_num_threads(threads)
        own = {
            name: torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            for name, shape in shapes().items()
        }

        class Weights:
            staging, version = (
                WeightStaging(lambda: ((name, one.data) for name, one in own.items()), own.values),
                0,
            )

            @property
            def adopted(self) -> bool:
                return self.staging.adopted

            async def prepare(self, manifest: Any) -> None:
                self.staging.prepare(manifest)

            async def receive(self, shards: Any) -> None:
                self.staging.receive(shards)

            async def commit(self, version: int) -> None:
                self.staging.apply()
                self.version = version

            async def rollback(self) -> None:
                self.staging.clear()

            def weights(self) -> Iterator[Any]:
                for name, view in self.staging.views.items():
                    yield Shard(name, tuple(view.shape), (0,) * view.dim(), view)

        self.intake = WeightReceiver(Weights())  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.intake, name)


def plain_copy(rounds: int) -> list[float]:
    """Seconds to copy the same bytes within this process, by one thread, between memory that is
    there already."""
    import torch

    torch.set_num_threads(1)
    source = [torch.randn(shape) for shape in shapes().values()]
    target = [torch.zeros_like(tensor) for tensor in source]
    seconds = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for to, what in zip(target, source, strict=True):
            to.copy_(what)
        seconds.append(time.perf_counter() - begun)
    return seconds[1:]


class Processes:
    """Implements `Ranks`."""

    def __init__(self, make: Callable[[int, int], Any], count: int, threads: int) -> None:
        self.pipes, self.processes = [], []
        for rank in range(count):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=serve, args=(make, rank, threads, there), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        message = pickle.dumps((method, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        results = [pickle.loads(await _said(pipe)) for pipe in self.pipes]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


async def _said(pipe: Any) -> bytes:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pipe.fileno(), ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(pipe.fileno())
    return pipe.recv_bytes()


def serve(make: Callable[[int, int], Any], rank: int, threads: int, pipe: Any) -> None:
    component = make(rank, threads)
    loop = asyncio.new_event_loop()
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pickle.loads(pipe.recv_bytes())
            try:
                result = getattr(component, method)(*arguments)
                result = loop.run_until_complete(result) if inspect.iscoroutine(result) else result
            except Exception as error:
                result = error
            pipe.send_bytes(pickle.dumps(result))


def make_links(senders: Any, receivers: Any, directory: Path) -> dict[str, Callable[[], Any]]:
    from ratchet.weight_sync.collective import CollectiveWeightSync
    from ratchet.weight_sync.files import FilesWeightSync
    from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

    return {
        "shared_memory": lambda: SharedMemoryWeightSync(senders, receivers, run="bench"),
        "collective": lambda: CollectiveWeightSync(senders, receivers),
        "files": lambda: FilesWeightSync(senders, receivers, directory=directory),
        "delta": lambda: SharedMemoryWeightSync(senders, receivers, run="bench", changes_only=True),
    }


async def measure_time(link: Any, senders: Any, rounds: int) -> dict[str, float]:
    seconds, copies = [], []
    for version in range(1, rounds + 2):
        begun = time.perf_counter()
        await link.push(version)
        seconds.append(time.perf_counter() - begun)
        copies += plain_copy(1)
        assert await link.audit() == [], "a bit differs"
        await senders.call("step", 0.01)
    found = {
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:]),
        "best_s": min(seconds[1:]),
        "copy_s": statistics.median(copies[1:]),
        "copy_best_s": min(copies[1:]),
        "sent_mib": link.sent_bytes / MIB,
    }
    return {
        **found,
        "ratio": found["median_s"] / found["copy_s"],
        "best_ratio": found["best_s"] / found["copy_best_s"],
    }


async def measure_memory(link: Any, senders: Any, receivers: Any) -> dict[str, float]:
    """From the first push on, in fresh processes: what was once allocated and is free again does
    not count a second time."""
    await senders.call("watch")
    await receivers.call("watch")
    for version in (1, 2):
        await link.push(version)
        await senders.call("step", 0.01)
    return {
        "sender_peak_mib": max(await senders.call("watched")) / MIB,
        "receiver_peak_mib": max(await receivers.call("watched")) / MIB,
        "shared_mib": getattr(link, "shared_bytes", 0) / MIB,
    }


async def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    found = {}
    for work in ("time", "memory"):
        senders, receivers = Processes(Rank, 2, 1), Processes(Receiver, 1, arguments.threads)
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            link = make_links(senders, receivers, Path(directory))[name]()
            if work == "time":
                found |= await measure_time(link, senders, arguments.rounds)
            else:
                found |= await measure_memory(link, senders, receivers)
            await link.close()
        senders.close()
        receivers.close()
    return found


async def main(arguments: argparse.Namespace) -> None:
    import math

    rows = {name: await measure(name, arguments) for name in arguments.links.split(",")}
    mib = sum(math.prod(shape) for shape in shapes().values()) * 4 / MIB
    heading = (
        "WeightSync",
        "First",
        "Median",
        "Plain copy",
        "Ratio (best to best)",
        "Sent MiB",
        "Extra MiB: rank / receiver / shared",
    )
    lines = [heading, ["---"] * len(heading)]
    for name, row in rows.items():
        extra = (
            f"{row['sender_peak_mib']:.0f} / {row['receiver_peak_mib']:.0f} / "
            f"{row['shared_mib']:.0f}"
        )
        times = (f"{1e3 * row[key]:.0f} ms" for key in ("first_s", "median_s", "copy_s"))
        lines.append(
            (
                name,
                *times,
                f"{row['ratio']:.1f} ({row['best_ratio']:.1f})",
                f"{row['sent_mib']:.1f}",
                extra,
            )
        )
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    print(
        json.dumps(
            {"case": "Weight sync", "model_mib": mib, "rounds": arguments.rounds, "rows": rows}
        )
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="pushes after the first")
    parser.add_argument(
        "--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the receiver"
    )
    parser.add_argument("--links", default="shared_memory,collective,files,delta")
    parser.add_argument(
        "--directory", help="where the files link writes; a temporary directory by default"
    )
    CONTEXT.set_forkserver_preload(
        [
            "torch",
            "ratchet.weight_sync.endpoints",
            "ratchet.weight_sync.transport",
            "ratchet.weight_sync.collective",
        ]
    )
    sys.exit(asyncio.run(main(parser.parse_args())))
