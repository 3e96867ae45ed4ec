"""Choose the number of CPU threads of a run, by this machine's limits and by measuring."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median

from ratchet.config.model_shape.presets import PRESETS
from ratchet.config.schema import ModelConfig
from ratchet.utils.thread_pool import ThreadPool

log = logging.getLogger(__name__)

MAX_WORKERS = 4  # each has its own gradients, which take as much memory as the weights
# Minimum speedup of one worker that uses all threads over several workers with a share each. Below
# it, several workers are chosen, since the difference may be noise.
MIN_SHARING_SPEEDUP = 1.2
MIN_THREAD_SPEEDUP = 1.05  # minimum speedup for which a run takes more than one thread
TIMED_ROUNDS = 5
TIMED_ROWS = 512  # rows of the timed matrix products: the tokens of a small micro-batch
USUAL_WIDTH = 128  # hidden size where the model's is not known
MAX_TIMED_WIDTH = 512  # wider matrix products are faster with more threads on any machine
CGROUP = Path("/sys/fs/cgroup")


def count_usable_cores() -> int:
    """Return the number of cores that this process may use.

    `taskset` and a container's CPU limit (cgroup v2 `cpu.max`, or v1 quota) can allow fewer than
    the machine has. A limit of 1.5 cores counts as 2.
    """
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota = _read_cpu_quota()
    return allowed if quota is None else max(1, min(allowed, math.ceil(quota)))


def _read_cpu_quota(root: Path = CGROUP) -> float | None:
    """Return the cores that the container's CPU quota allows; None if there is none."""
    for quota_file, period_file in (
        ("cpu.max", None),
        ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us"),
    ):
        try:
            words = (root / quota_file).read_text().split()
            if period_file is not None:
                words += (root / period_file).read_text().split()
            quota, period = float(words[0]), float(words[1])
        except (OSError, ValueError, IndexError):  # no such limit: "max", -1, or no file
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def find_thread_limit(environ: Mapping[str, str] = os.environ) -> tuple[int, str]:
    """Return the largest number that `threads: auto` may choose, and the reason in words."""
    cores = count_usable_cores()
    requested_threads = environ.get("OMP_NUM_THREADS", "").partition(",")[0]
    if (
        requested_threads.isascii()
        and requested_threads.isdigit()
        and 0 < int(requested_threads) <= cores
    ):
        return int(requested_threads), f"OMP_NUM_THREADS={requested_threads}"
    return cores, f"{cores} usable core{'s' * (cores > 1)}"


def describe_threads() -> str:
    """Return what `threads: auto` means on this machine, without measuring."""
    limit, reason = find_thread_limit()
    timing_note = (
        ""
        if limit == 1
        else f"; a run of a small model first compares the speed of 1 thread and of {limit}"
    )
    return f"auto: at most {limit} ({reason}){timing_note}"


def choose_threads(model: ModelConfig) -> tuple[int, str]:
    """Return the number of threads for a run on the CPU, and the reason in words.

    It is the limit of `find_thread_limit`, or 1 if layers of the model's width are about as fast
    with one thread. The measurement takes some tens of milliseconds, and reflects the load of other
    programs on the machine.
    """
    limit, reason = find_thread_limit()
    width = read_width(model) or USUAL_WIDTH
    if limit == 1 or width > MAX_TIMED_WIDTH:
        return limit, reason
    import torch

    timed_work = make_timed_work(width)
    durations_by_threads: dict[int, list[float]] = {1: [], limit: []}
    previous_threads = torch.get_num_threads()
    try:
        for _ in range(1 + TIMED_ROUNDS):  # in turn, so that other programs slow both alike
            for threads, durations in durations_by_threads.items():
                torch.set_num_threads(threads)
                durations.append(measure_once(timed_work))
    finally:
        torch.set_num_threads(previous_threads)
    one_thread_s, all_threads_s = (
        median(durations[1:]) for durations in durations_by_threads.values()
    )
    slowdown = one_thread_s / all_threads_s
    ratio, slower, faster = slowdown, "1 thread", f"{limit}"
    if slowdown < 1:
        ratio, slower, faster = 1 / slowdown, f"{limit} threads", "1"
    comparison = f"with {slower} four layers take {ratio:,.2f} times as long as with {faster}"
    threads = limit if slowdown > MIN_THREAD_SPEEDUP else 1
    return threads, f"{reason}; {comparison}"


def read_width(model: ModelConfig) -> int | None:
    """Return the hidden size of a preset or of a local model directory; None if it is unknown."""
    width = {**PRESETS.get(model.preset or "", {}), **model.overrides}.get("hidden_size")
    if width is None and model.path is not None:
        try:
            config = json.loads((Path(model.path) / "config.json").read_text())
            width = config.get("hidden_size")
        except (OSError, ValueError, AttributeError):
            return None
    return width if isinstance(width, int) and width > 0 else None


def measure_worker_count(threads: int) -> int:
    """Return the number of workers that compute a batch of a small model fastest.

    It is the largest divisor of `threads` up to MAX_WORKERS, so that each worker has an equal share
    of the threads. It is 1 if sharing every operation among all threads is clearly faster. The
    measurement takes some milliseconds.
    """
    workers = max(n for n in range(1, MAX_WORKERS + 1) if threads % n == 0)
    if workers == 1:
        return 1
    import torch

    pool = ThreadPool(workers)
    previous_threads = torch.get_num_threads()
    timed_work = make_timed_work(USUAL_WIDTH)
    try:
        torch.set_num_threads(threads)
        shared_s = measure_shortest(lambda: [timed_work() for _ in range(workers)])
        separate_s = measure_shortest(lambda: pool.run([timed_work] * workers))
    finally:
        torch.set_num_threads(previous_threads)
    return 1 if shared_s * MIN_SHARING_SPEEDUP < separate_s else workers


def make_timed_work(width: int) -> Callable[[], None]:
    """Return a function that computes the matrix products of four small feed-forward layers."""
    import torch

    x = torch.ones(TIMED_ROWS, width)
    up = torch.full((width, 4 * width), 1e-2)
    down = torch.full((4 * width, width), 1e-2)

    def compute() -> None:
        with torch.inference_mode():
            y = x
            for _ in range(4):
                normed = torch.nn.functional.layer_norm(y, (width,))
                y = y + torch.nn.functional.silu(normed @ up) @ down

    return compute


def measure_once(work: Callable[[], object]) -> float:
    """Return the seconds that one call takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure_shortest(work: Callable[[], object]) -> float:
    """Return the shortest time of TIMED_ROUNDS runs of `work`, after a warm-up."""
    return min([measure_once(work) for _ in range(1 + TIMED_ROUNDS)][1:])
