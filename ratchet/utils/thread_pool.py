"""Threads that work on parts of a batch at the same time, each on operations of its own.

Small operations gain little from many threads that share each of them: they wait for one another
after every one. Where a batch has parts, whoever computes a part never waits. PyTorch lets go of
the interpreter inside of its operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from typing import TypeVar

P = TypeVar("P")
T = TypeVar("T")


class Crew:
    """size: jobs that run at once, one of them in the thread that asks."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._others = ThreadPoolExecutor(size - 1, thread_name_prefix="crew") if size > 1 else None

    def run(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Their results, in order. Raises what the first of those raised that failed, after all
        have ended.

        Meanwhile each has its share of the threads that PyTorch gives an operation. Modes of
        PyTorch that belong to a thread (no_grad, inference_mode, autocast) are for a job to enter.
        """
        if self._others is None or len(jobs) < 2:
            return [job() for job in jobs]
        import torch

        threads = torch.get_num_threads()
        share = max(1, threads // self.size)
        futures = [self._others.submit(_limited, share, job) for job in jobs[1:]]
        try:
            first = _limited(share, jobs[0])
        finally:
            wait(futures)
            torch.set_num_threads(threads)
        return [first, *(future.result() for future in futures)]

    def each(self, work: Callable[[P], T], pieces: Sequence[P], sizes: Sequence[int]) -> list[T]:
        """What comes of each piece, in order; nobody gets much more than another. Raises as `run`
        does."""
        hands = [taken for taken in dealt(sizes, self.size) if taken]
        done = self.run([partial(_done, work, [pieces[i] for i in taken]) for taken in hands])
        found = dict(zip(chain(*hands), chain(*done), strict=True))
        return [found[i] for i in range(len(pieces))]


def _done(work: Callable[[P], T], pieces: Sequence[P]) -> list[T]:
    return [work(piece) for piece in pieces]


def _limited(threads: int, job: Callable[[], T]) -> T:
    import torch

    torch.set_num_threads(threads)  # of this thread
    return job()


def dealt(sizes: Sequence[int], hands: int) -> list[list[int]]:
    """Which of the pieces each of so many hands takes, in ascending order: the largest first, to
    whoever has least."""
    loads = [0] * hands
    taken: list[list[int]] = [[] for _ in range(hands)]
    for piece in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        least = loads.index(min(loads))
        loads[least] += sizes[piece]
        taken[least].append(piece)
    return [sorted(pieces) for pieces in taken]
