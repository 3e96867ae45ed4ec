"""Probe this machine at start and freeze the results into the resolved configuration."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from ratchet.config.base import Section
from ratchet.config.resolve import resolve
from ratchet.config.schema import RunConfig
from ratchet.data.chat.chat_templates import may_print_date, today
from ratchet.data.config import AutoTokenizerConfig, TokenizerConfig
from ratchet.errors import ConfigError
from ratchet.executors.config import ClusterConfig, LocalClusterConfig
from ratchet.executors.torchrun import TorchrunRank
from ratchet.kernels.build import load_library
from ratchet.utils.thread_pool import ThreadPool

log = logging.getLogger(__name__)

MAX_WORKERS = 4  # each has its own gradients, which take as much memory as the weights
CLEARLY = 1.2  # minimum speedup; less may be noise of a busy machine
ROUNDS = 5


def count_usable_cores() -> int:
    """Return the number of cores that this process may use.

    A container or `taskset` can allow fewer than the machine has.
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure_worker_count(threads: int) -> int:
    """Return the number of workers that compute a batch of a small model fastest.

    That is the largest divisor of `threads` up to MAX_WORKERS, each worker with its share of the
    threads; or 1 if sharing every operation among all threads is clearly faster. The measurement
    takes some milliseconds.
    """
    workers = max(n for n in range(1, MAX_WORKERS + 1) if threads % n == 0)
    if workers == 1:
        return 1
    import torch

    pool = ThreadPool(workers)
    before = torch.get_num_threads()
    x = torch.ones(512, 128)
    up = torch.full((128, 512), 1e-2)
    down = torch.full((512, 128), 1e-2)

    def part() -> None:
        with torch.inference_mode():
            y = x
            for _ in range(4):
                y = (
                    y
                    + torch.nn.functional.silu(torch.nn.functional.layer_norm(y, (128,)) @ up)
                    @ down
                )

    try:
        torch.set_num_threads(threads)
        shared = _seconds(lambda: [part() for _ in range(workers)])
        apart = _seconds(lambda: pool.run([part] * workers))
    finally:
        torch.set_num_threads(before)
    return 1 if shared * CLEARLY < apart else workers


def _seconds(work: Callable[[], object]) -> float:
    """Return the shortest time of ROUNDS runs of `work`, after a warm-up."""
    taken: list[float] = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


# Parameters of mallopt(3), and their values:
# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX
MALLOC = {-3: 2**30, -1: 2**31 - 1, -2: 64 * 2**20, -8: 1}
# Bytes of the heap for which huge pages are requested: less than M_MMAP_THRESHOLD, or malloc would
# not take them from the heap.
HEAP = 2**30 - 2**20


def prepare_process(threads: int | Literal["auto"]) -> None:
    """Set the number of threads, memory reuse and garbage collection of a training process.

    Memory reuse matters even if an accelerator or other processes do the arithmetic: in a driver's
    step of 11 million tokens, clearing fresh pages took more than half the time.
    """
    import torch

    torch.set_num_threads(count_usable_cores() if threads == "auto" else threads)
    keep_freed_memory()
    # A step creates some hundred objects per attempt, hardly any in a reference cycle. By default
    # Python collects after every 700, and at times walks all objects of the imports, which takes a
    # tenth of a small model's step. A thousand attempts hold some 100,000 objects at a time; with a
    # threshold below that, every step would walk all of them.
    if not gc.get_freeze_count():
        gc.freeze()
    gc.set_threshold(200_000, 10, 10)


def use_kernels(compiled: bool) -> None:
    """Set whether this process computes models with compiled kernels.

    Raises ConfigError if they can't be compiled or loaded.
    """
    from ratchet.kernels import cpu

    try:
        cpu.set_enabled(compiled)
    except OSError as error:
        raise ConfigError(
            f"kernels: compiled, but {error}; install gcc, or set kernels: torch"
        ) from error


def has_compiled_kernels() -> bool:
    """Return True if compiled kernels can be built and loaded; the first call takes 2 s."""
    try:
        load_library()
    except OSError as error:
        log.info("no compiled kernels, PyTorch's operations do their work: %s", error)
        return False
    return True


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process, in one heap for all threads.

    By default it returns a large tensor's memory to the kernel when it is freed, and the kernel
    clears each page of the next one. Without glibc nothing changes.
    """
    libc = ctypes.CDLL(None)
    # Other C libraries have no mallopt.
    if sys.platform != "linux" or not hasattr(libc, "mallopt"):
        return
    for parameter, value in MALLOC.items():
        libc.mallopt(parameter, value)
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Request pages of 2 MiB for the heap. They need fewer entries of the processor's TLB, and an
    # update of a small model takes 6 % less time. No page is touched here, and a kernel without
    # huge pages rejects the request.
    block = libc.malloc(HEAP)
    if block:
        libc.madvise(
            -(-block // mmap.PAGESIZE) * mmap.PAGESIZE, HEAP - mmap.PAGESIZE, mmap.MADV_HUGEPAGE
        )
        libc.free(block)


def get_peak_memory() -> int:
    """Return the peak main memory of this process in bytes."""
    # Linux's getrusage also counts the parent's memory at the time of the fork.
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    if peaks := [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]:
        return peaks[0] * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def freeze(config: RunConfig) -> RunConfig:
    """Return the configuration with every "auto" that depends on the machine resolved.

    A resumed run thus sees the same values. If torchrun started several processes, they become the
    cluster.
    """
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = count_usable_cores() if config.threads == "auto" else config.threads
    is_auto = any(getattr(stage.learner, "workers", 1) == "auto" for stage in config.stages)
    workers = measure_worker_count(threads) if is_auto and device == "cpu" else 1

    def frozen(learner: Section) -> Section:
        return (
            learner.model_copy(update={"workers": workers})
            if getattr(learner, "workers", 1) == "auto"
            else learner
        )

    stages = tuple(
        stage.model_copy(update={"learner": frozen(stage.learner)}) for stage in config.stages
    )
    kernels = config.kernels
    # One value for the run, because learners and generators must compute alike.
    if kernels == "auto":
        kernels = (
            "compiled"
            if device == "cpu" and config.compiles and has_compiled_kernels()
            else "torch"
        )
    cluster = config.cluster
    if TorchrunRank.here() is not None and isinstance(cluster, LocalClusterConfig):
        shared = {key: getattr(cluster, key) for key in ClusterConfig.model_fields}
        cluster = resolve("cluster", {"kind": "torchrun", **shared})
    facts = {
        "device": device,
        "threads": threads,
        "kernels": kernels,
        "stages": stages,
        "cluster": cluster,
    }
    return config.model_copy(update={**facts, "tokenizer": _dated(config.tokenizer)})


def left_to_machine(config: RunConfig) -> str | None:
    """Return a key that `freeze` would fill in; None for the saved configuration of any run."""
    return next((key for key in ("device", "threads") if getattr(config, key) == "auto"), None)


def _dated(tokenizer: Section) -> Section:
    """Return the section with today's date, if its template may print one and it sets none."""
    if not isinstance(tokenizer, TokenizerConfig) or tokenizer.date is not None:
        return tokenizer
    if not may_print_date(
        tokenizer.template, has_template=isinstance(tokenizer, AutoTokenizerConfig)
    ):
        return tokenizer
    return tokenizer.model_copy(update={"date": today()})
