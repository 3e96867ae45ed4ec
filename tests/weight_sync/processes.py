"""Components in processes of their own, called as a link calls them."""

import asyncio
import contextlib
import importlib
import inspect
import pickle
import tempfile
from datetime import timedelta
from pathlib import Path

from learners.ranks import CONTEXT

from ratchet.errors import WorkerDied


class RankDied(WorkerDied):
    def __init__(self, rank):
        super().__init__(f"rank {rank} died", role="policy", rank=rank, host="localhost")


class Processes:
    """Implements `Ranks`. factory: "module:callable", called with (rank, world, *arguments). gloo:
    with a default group."""

    def __init__(self, world, factory, *arguments, gloo=False):
        self._directory = tempfile.TemporaryDirectory()
        store = str(Path(self._directory.name) / "store") if gloo else None
        self.pipes, self.processes = [], []
        for rank in range(world):
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve, args=(rank, world, store, factory, arguments, there), daemon=True
            )
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    async def call(self, method, /, *arguments):
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead one is found below
                pipe.send_bytes(pickle.dumps((method, arguments)))
        results = await asyncio.gather(
            *(asyncio.to_thread(_answer, rank, pipe) for rank, pipe in enumerate(self.pipes)),
            return_exceptions=True,
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    def ask(self, method, *arguments):
        return asyncio.run(self.call(method, *arguments))

    def close(self):
        for process in self.processes:
            process.kill()
            process.join()
        self._directory.cleanup()


def _answer(rank, pipe):
    if not pipe.poll(60):
        raise RankDied(rank)
    try:
        kind, value = pickle.loads(pipe.recv_bytes())
    except (EOFError, OSError):
        raise RankDied(rank) from None
    if kind == "error":
        raise value
    return value


def _serve(rank, world, store, factory, arguments, pipe):
    import torch

    torch.set_num_threads(1)
    if store is not None:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            rank=rank,
            world_size=world,
            init_method=f"file://{store}",
            timeout=timedelta(seconds=60),
        )
    module, _, name = factory.partition(":")
    component = getattr(importlib.import_module(module), name)(rank, world, *arguments)
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pickle.loads(pipe.recv_bytes())
            try:
                value = getattr(component, method)(*arguments)
                answer = ("done", asyncio.run(value) if inspect.iscoroutine(value) else value)
            except Exception as error:
                answer = ("error", error)
            pipe.send_bytes(pickle.dumps(answer))
