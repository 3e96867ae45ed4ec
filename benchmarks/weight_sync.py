"""Measure the time and memory of weight syncs, and check that every bit arrives.

A model of about 100 MiB (float32) is pushed from 2 ranks of a learner, each with half of the rows of
every weight, to a generator in a third process. Each round also times a plain copy of the same bytes
in memory.

    python benchmarks/weight_sync.py [--rounds 7] [--links shared_memory,collective,files,delta]
    [--threads 2]

A link is a kind of weight sync. Prints a table and one JSON line. Seconds are medians over the
pushes after the first. Extra memory is the peak of what a push adds to the private memory of a rank
and of the receiver, and the shared memory of the link.
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
# The model has 12 x 2 matrices of 4 MiB, and small vectors.
HIDDEN, WIDE, LAYERS = 1024, 1024, 12
MIB = 2**20


def list_shapes() -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, by name."""
    matrices = {
        f"model.layers.{i}.{kind}.weight": (WIDE, HIDDEN)
        for i in range(LAYERS)
        for kind in ("up", "down")
    }
    return {**matrices, **{f"model.layers.{i}.norm.weight": (HIDDEN,) for i in range(LAYERS)}}


def measure_private_bytes() -> int:
    """Return the anonymous resident memory of this process, which no other process shares."""
    return sum(
        int(line.split()[1]) * 1024
        for line in Path("/proc/self/status").read_text().splitlines()
        if line[:7] == "RssAnon"
    )


class MemoryWatcher:
    """A mixin that samples the private memory of its process in a thread."""

    def start_watching(self) -> None:
        self._start_bytes = self._peak_bytes = measure_private_bytes()
        self._has_ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._has_ended.wait(0.002):
            self._peak_bytes = max(self._peak_bytes, measure_private_bytes())

    def stop_watching(self) -> int:
        """Return the peak increase of the private memory since `start_watching`, in bytes."""
        self._has_ended.set()
        self._watcher.join()
        return max(self._peak_bytes, measure_private_bytes()) - self._start_bytes


class Rank(MemoryWatcher):
    """A rank of the learner, with half of the rows of every weight."""

    def __init__(self, rank: int, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        self.rank = rank
        rng = torch.Generator().manual_seed(rank)
        self.blocks = {
            name: torch.randn(shape[0] // 2, *shape[1:], generator=rng)
            for name, shape in list_shapes().items()
        }

    def weights(self) -> Iterator[Any]:
        from ratchet.protocols import Shard

        for (name, block), shape in zip(self.blocks.items(), list_shapes().values(), strict=True):
            yield Shard(name, shape, (self.rank * len(block), *(0,) * (block.dim() - 1)), block)

    def apply_to_weights(self, operation: Callable[[Iterator[Any], int], Any]) -> Any:
        return operation(self.weights(), self.rank)

    def step(self, share: float) -> None:
        """Change this share of the numbers."""
        for block in self.blocks.values():
            block.view(-1)[:: max(1, round(1 / share))] += 1.0


class Receiver(MemoryWatcher):
    """A receiver whose generator stages and commits weights like the embedded engine."""

    def __init__(self, rank: int, threads: int) -> None:
        import torch

        from ratchet.generators.weight_update import WeightStaging
        from ratchet.protocols import Shard
        from ratchet.weight_sync.endpoints import WeightReceiver

        torch.set_num_threads(threads)
        parameters = {
            name: torch.nn.Parameter(torch.zeros(shape), requires_grad=False)
            for name, shape in list_shapes().items()
        }

        class StagedGenerator:
            version = 0
            staging = WeightStaging(
                lambda: ((name, parameter.data) for name, parameter in parameters.items()),
                parameters.values,
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

        self.receiver = WeightReceiver(StagedGenerator())  # pyright: ignore[reportArgumentType]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.receiver, name)


def time_plain_copies(rounds: int) -> list[float]:
    """Return the seconds of each copy of the model's bytes within this process.

    One thread copies, into memory that is already allocated.
    """
    import torch

    torch.set_num_threads(1)
    source = [torch.randn(shape) for shape in list_shapes().values()]
    target = [torch.zeros_like(tensor) for tensor in source]
    seconds = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        for target_tensor, source_tensor in zip(target, source, strict=True):
            target_tensor.copy_(source_tensor)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


class Processes:
    """An implementation of `Ranks`: one process for each component."""

    def __init__(self, make: Callable[[int, int], Any], count: int, threads: int) -> None:
        self.pipes, self.processes = [], []
        for rank in range(count):
            parent_end, child_end = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=serve, args=(make, rank, threads, child_end), daemon=True
            )
            process.start()
            child_end.close()
            self.processes.append(process)
            self.pipes.append(parent_end)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    async def call(self, method: str, /, *arguments: Any) -> list[Any]:
        message = pickle.dumps((method, arguments))
        for pipe in self.pipes:
            pipe.send_bytes(message)
        results = [pickle.loads(await _receive_bytes(pipe)) for pipe in self.pipes]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


async def _receive_bytes(pipe: Any) -> bytes:
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
        start = time.perf_counter()
        await link.push(version)
        seconds.append(time.perf_counter() - start)
        copies += time_plain_copies(1)
        assert await link.audit() == [], "a weight differs"
        await senders.call("step", 0.01)
    times = {
        "first_s": seconds[0],
        "median_s": statistics.median(seconds[1:]),
        "best_s": min(seconds[1:]),
        "copy_s": statistics.median(copies[1:]),
        "copy_best_s": min(copies[1:]),
        "sent_mib": link.sent_bytes / MIB,
    }
    return {
        **times,
        "ratio": times["median_s"] / times["copy_s"],
        "best_ratio": times["best_s"] / times["copy_best_s"],
    }


async def measure_memory(link: Any, senders: Any, receivers: Any) -> dict[str, float]:
    """Return the peak extra memory of two pushes.

    The processes must be fresh, because memory that is freed and used again would not be counted.
    """
    await senders.call("start_watching")
    await receivers.call("start_watching")
    for version in (1, 2):
        await link.push(version)
        await senders.call("step", 0.01)
    return {
        "sender_peak_mib": max(await senders.call("stop_watching")) / MIB,
        "receiver_peak_mib": max(await receivers.call("stop_watching")) / MIB,
        "shared_mib": getattr(link, "shared_bytes", 0) / MIB,
    }


async def measure(name: str, arguments: argparse.Namespace) -> dict[str, float]:
    results = {}
    for work in ("time", "memory"):
        senders, receivers = Processes(Rank, 2, 1), Processes(Receiver, 1, arguments.threads)
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            link = make_links(senders, receivers, Path(directory))[name]()
            if work == "time":
                results |= await measure_time(link, senders, arguments.rounds)
            else:
                results |= await measure_memory(link, senders, receivers)
            await link.close()
        senders.close()
        receivers.close()
    return results


async def main(arguments: argparse.Namespace) -> None:
    import math

    rows = {name: await measure(name, arguments) for name in arguments.links.split(",")}
    mib = sum(math.prod(shape) for shape in list_shapes().values()) * 4 / MIB
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
        "--threads",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="threads of the receiver; default: one per core, because ranks and receiver take turns",
    )
    parser.add_argument("--links", default="shared_memory,collective,files,delta")
    parser.add_argument(
        "--directory", help="parent of the files link's directory; default: that of temporary files"
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
