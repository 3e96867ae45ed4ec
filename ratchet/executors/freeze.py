"""What this machine offers, probed once at start and frozen into the resolved configuration."""

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
from ratchet.executors.torchrun import Launched
from ratchet.kernels.build import library
from ratchet.utils.thread_pool import Crew

log = logging.getLogger(__name__)

MOST_WORKERS = 4  # each has gradients of its own, which take as much memory as the weights
CLEARLY = 1.2  # times faster: a busy machine disturbs either side
ROUNDS = 5


def usable_cores() -> int:
    """Cores that this process may run on (a container or `taskset` can allow fewer than the machine
    has)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def workers_for(threads: int) -> int:
    """In how many parts so many threads best compute a batch of a small model: as many as there are
    threads, up to a few, each part with its share of the threads; 1 where sharing every operation
    is clearly faster. Takes some milliseconds."""
    workers = max(n for n in range(1, MOST_WORKERS + 1) if threads % n == 0)
    if workers == 1:
        return 1
    import torch

    crew, before = Crew(workers), torch.get_num_threads()
    x, up, down = torch.ones(512, 128), torch.full((128, 512), 1e-2), torch.full((512, 128), 1e-2)

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
        apart = _seconds(lambda: crew.run([part] * workers))
    finally:
        torch.set_num_threads(before)
    return 1 if shared * CLEARLY < apart else workers


def _seconds(work: Callable[[], object]) -> float:
    """The quickest of a few, after one that warms up."""
    taken: list[float] = []
    for _ in range(1 + ROUNDS):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


# Parameters of mallopt(3), and what they are set to.
# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX
MALLOC = {-3: 2**30, -1: 2**31 - 1, -2: 64 * 2**20, -8: 1}
# bytes of it that are asked to be in huge pages: less than M_MMAP_THRESHOLD, or they would lie
# elsewhere
HEAP = 2**30 - 2**20


def prepare_process(threads: int | Literal["auto"]) -> None:
    """What training asks of its process: so many threads for an operation, memory that it keeps, a
    collector that rests.

    Memory counts where an accelerator, or other processes, do the arithmetic too: of a driver's
    step for 11 million tokens, clearing pages anew took more than half.
    """
    import torch

    torch.set_num_threads(usable_cores() if threads == "auto" else threads)
    keep_freed_memory()
    # A step makes some hundred objects an attempt, hardly any in a cycle. By default Python looks
    # for cycles every 700, and every so often through all that the imports made: a tenth of the
    # time of a small model's steps. A thousand attempts have some 100,000 at a time: with less,
    # every step would look through all of its own.
    if not gc.get_freeze_count():
        gc.freeze()
    gc.set_threshold(200_000, 10, 10)


def use_kernels(compiled: bool) -> None:
    """From now on this process computes models with compiled kernels, or without. Raises
    ConfigError where it can't."""
    from ratchet.kernels import cpu

    try:
        cpu.use(compiled)
    except OSError as error:
        raise ConfigError(
            f"kernels: compiled, but {error}; install gcc, or set kernels: torch"
        ) from error


def compiles() -> bool:
    """Whether this machine has compiled kernels; the first time it takes two seconds."""
    try:
        library()
    except OSError as error:
        log.info("no compiled kernels, PyTorch's operations do their work: %s", error)
        return False
    return True


def keep_freed_memory() -> None:
    """glibc gives large tensors back at every free, and the kernel clears each page of the next one
    anew: from now on what is freed stays with the process, in one heap for all threads. Elsewhere
    nothing changes."""
    libc = ctypes.CDLL(None)
    # other libraries than glibc have none
    if sys.platform != "linux" or not hasattr(libc, "mallopt"):
        return
    for parameter, value in MALLOC.items():
        libc.mallopt(parameter, value)
    libc.malloc.argtypes, libc.malloc.restype = [ctypes.c_size_t], ctypes.c_void_p
    libc.free.argtypes, libc.madvise.argtypes = (
        [ctypes.c_void_p],
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    )
    # Its pages are to be of 2 MiB: the processor then knows where they are, and an update of a
    # small model takes 6 % less time. Nothing is touched here, and a kernel without huge pages
    # refuses.
    block = libc.malloc(HEAP)
    if block:
        libc.madvise(
            -(-block // mmap.PAGESIZE) * mmap.PAGESIZE, HEAP - mmap.PAGESIZE, mmap.MADV_HUGEPAGE
        )
        libc.free(block)


def peak_memory() -> int:
    """Bytes of main memory that this process had at its largest."""
    # Linux's getrusage also counts what the parent had when it started this process
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    if of_this := [int(line.split()[1]) for line in lines if line.startswith("VmHWM:")]:
        return of_this[0] * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (
        1 if sys.platform == "darwin" else 1024
    )


def freeze(config: RunConfig) -> RunConfig:
    """What the recipe leaves to the machine ("auto") becomes a fact of the run, so that a resumed
    run sees the same. Where torchrun started several processes, these are the cluster."""
    import torch

    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    threads = usable_cores() if config.threads == "auto" else config.threads
    asked = any(getattr(stage.learner, "workers", 1) == "auto" for stage in config.stages)
    workers = workers_for(threads) if asked and device == "cpu" else 1

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
    if kernels == "auto":  # all processes that learn and generate are to compute alike
        kernels = "compiled" if device == "cpu" and config.compiles and compiles() else "torch"
    cluster = config.cluster
    if Launched.here() is not None and isinstance(cluster, LocalClusterConfig):
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
    """Return a key that `freeze` would fill in. Runs of all versions have it written down."""
    return next((key for key in ("device", "threads") if getattr(config, key) == "auto"), None)


def _dated(tokenizer: Section) -> Section:
    """Return the section with the day of today, if templates may print one and it names none."""
    if not isinstance(tokenizer, TokenizerConfig) or tokenizer.date is not None:
        return tokenizer
    if not may_print_date(
        tokenizer.template, has_template=isinstance(tokenizer, AutoTokenizerConfig)
    ):
        return tokenizer
    return tokenizer.model_copy(update={"date": today()})
