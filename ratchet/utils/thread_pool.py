"""A pool of threads that compute the parts of a batch at the same time.

Splitting each small operation over many threads gains little, because the threads wait for one
another after every operation. Threads that compute separate parts never wait, and run at the same
time because PyTorch releases the interpreter lock inside its operations.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import ParamSpec, TypeVar

Piece = TypeVar("Piece")
Result = TypeVar("Result")
Parameters = ParamSpec("Parameters")


class ThreadPool:
    """A pool that runs `size` jobs at once, one of them in the calling thread."""

    def __init__(self, size: int) -> None:
        self.size = size
        # The calling thread runs one job itself.
        self._executor = (
            ThreadPoolExecutor(size - 1, thread_name_prefix="crew") if size > 1 else None
        )

    def run(self, jobs: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run the jobs and return their results in order.

        Each job gets 1/`size` of PyTorch's threads for one operation, also if there are fewer than
        `size` jobs; only a single job gets all threads. Each job must enter PyTorch's per-thread
        modes itself (no_grad, inference_mode, autocast).

        If jobs fail, raise the first failed job's exception after all jobs have ended.
        """
        if self._executor is None or len(jobs) < 2:
            return [job() for job in jobs]
        import torch

        threads = torch.get_num_threads()
        threads_per_job = max(1, threads // self.size)
        futures = [self._executor.submit(_run_limited, threads_per_job, job) for job in jobs[1:]]
        try:
            first_result = _run_limited(threads_per_job, jobs[0])
        finally:
            wait(futures)
            torch.set_num_threads(threads)
        return [first_result, *(future.result() for future in futures)]

    def each(
        self, work: Callable[[Piece], Result], pieces: Sequence[Piece], sizes: Sequence[int]
    ) -> list[Result]:
        """Return the result of `work` for each piece, in order. Exceptions are handled as in `run`.

        Args:
            sizes: Sizes of the pieces; each thread gets pieces of about the same total size.
        """
        index_lists = [indices for indices in balance_by_size(sizes, self.size) if indices]
        jobs = [partial(_map, work, [pieces[i] for i in indices]) for indices in index_lists]
        results = dict(zip(chain(*index_lists), chain(*self.run(jobs)), strict=True))
        return [results[i] for i in range(len(pieces))]


def _map(work: Callable[[Piece], Result], pieces: Sequence[Piece]) -> list[Result]:
    return [work(piece) for piece in pieces]


def _run_limited(threads: int, job: Callable[[], Result]) -> Result:
    import torch

    torch.set_num_threads(threads)  # applies to the thread that runs this job
    return job()


def balance_by_size(sizes: Sequence[int], workers: int) -> list[list[int]]:
    """Assign pieces to workers so that their loads are about equal.

    The assignment is greedy: the largest piece goes first, to the worker with the smallest load.
    Return the indices of each worker's pieces, in ascending order.
    """
    loads = [0] * workers
    indices_by_worker: list[list[int]] = [[] for _ in range(workers)]
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        lightest = loads.index(min(loads))
        loads[lightest] += sizes[index]
        indices_by_worker[lightest].append(index)
    return [sorted(indices) for indices in indices_by_worker]


def keep_current_device(work: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Return `work` for another thread, with this thread's current CUDA device.

    Each thread has a current device of its own, at first 0: there `device="cuda"` would mean the
    first accelerator, not the one that this thread computes on.
    """
    import torch

    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def run(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        with torch.cuda.device(device):
            return work(*arguments, **keywords)

    return run


async def finish_in_thread(function: Callable[[], Result]) -> Result:
    """Run a function in a thread. A cancelled caller waits for its end before it is cancelled."""
    running = asyncio.ensure_future(asyncio.to_thread(function))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise
