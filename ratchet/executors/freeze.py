"""Probe this machine at start and freeze the results into the resolved configuration."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
import sys
from pathlib import Path
from typing import Literal

from ratchet.config.base import Section
from ratchet.config.resolve import resolve
from ratchet.config.schema import RunConfig
from ratchet.data.chat.chat_templates import may_print_date, today
from ratchet.data.tokenizer_config import AutoTokenizerConfig, TokenizerConfig
from ratchet.errors import ConfigError
from ratchet.executors.config import ClusterConfig, LocalClusterConfig
from ratchet.executors.threads import choose_threads, find_thread_limit, measure_worker_count
from ratchet.executors.torchrun import TorchrunRank
from ratchet.kernels.build import load_library

# Parameters of mallopt(3), and their values:
# M_MMAP_THRESHOLD, M_TRIM_THRESHOLD, M_TOP_PAD, M_ARENA_MAX
MALLOC_OPTIONS = {-3: 2**30, -1: 2**31 - 1, -2: 64 * 2**20, -8: 1}
# Bytes of the heap for which huge pages are requested: less than M_MMAP_THRESHOLD, or malloc would
# not take them from the heap.
HEAP_BYTES = 2**30 - 2**20


def prepare_process(threads: int | Literal["auto"]) -> None:
    """Set the number of threads, memory reuse and garbage collection of a training process.

    Memory reuse matters even if an accelerator or other processes do the arithmetic: in a driver's
    step of 11 million tokens, clearing fresh pages took more than half the time.
    """
    import torch

    torch.set_num_threads(find_thread_limit()[0] if threads == "auto" else threads)
    keep_freed_memory()
    limit_garbage_collection()


def limit_garbage_collection() -> None:
    """Make Python collect garbage less often, and never traverse the objects that exist by now.

    An attempt creates some hundred objects, hardly any in a reference cycle. By default Python
    collects garbage after every 700 new objects, and sometimes traverses all objects. That takes a
    tenth of a small model's step, and a fifth of an evaluation of 10,000 tasks by a model of two
    layers. A step of a thousand attempts holds some 100,000 objects; a threshold below that would
    traverse them in each step.
    """
    if not gc.get_freeze_count():
        gc.freeze()
    gc.set_threshold(200_000, 10, 10)


def use_kernels(compiled: bool, *, rounds_products: bool = False, device: str = "cpu") -> None:
    """Enable or disable the compiled kernels and products in bfloat16 in this process.

    Args:
        compiled: True to use the compiled kernels.
        rounds_products: True to compute products of layers in bfloat16.
        device: The device that computes.

    Raises ConfigError if the kernels can't be compiled or loaded, or if `device` is a CPU that does
    not multiply in bfloat16.
    """
    from ratchet.kernels import bfloat16, cpu

    try:
        bfloat16.set_enabled(rounds_products, on_cpu=device == "cpu")
    except OSError as error:
        raise ConfigError(f"precision=bfloat16, but {error}. Set precision=auto") from error
    try:
        cpu.set_enabled(compiled)
    except OSError as error:
        raise ConfigError(
            f"kernels: compiled, but {error}; install gcc, or set kernels: torch"
        ) from error


def has_compiled_kernels(reasons: list[str] | None = None) -> bool:
    """Return True if compiled kernels can be built and loaded; the first call takes 2 s.

    Args:
        reasons: Receives a sentence that says why there are none, and what that costs.
    """
    try:
        load_library()
    except OSError as error:
        if reasons is not None:
            reasons.append(
                f"kernels=auto became torch ({error}): a step of a small model takes about 1.5 "
                "times as long. Install gcc"
            )
        return False
    return True


def keep_freed_memory() -> None:
    """Make glibc keep freed memory in the process, in one heap for all threads.

    By default glibc returns the memory of a freed large tensor to the kernel, and the kernel clears
    every page of the next large tensor. Without glibc this function does nothing.
    """
    libc = ctypes.CDLL(None)
    # Other C libraries have no mallopt.
    if sys.platform != "linux" or not hasattr(libc, "mallopt"):
        return
    for parameter, value in MALLOC_OPTIONS.items():
        libc.mallopt(parameter, value)
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Request pages of 2 MiB for the heap. They need fewer entries of the processor's TLB, and an
    # update of a small model takes 6 % less time. No page is touched here, and a kernel without
    # huge pages rejects the request.
    block = libc.malloc(HEAP_BYTES)
    if block:
        libc.madvise(
            -(-block // mmap.PAGESIZE) * mmap.PAGESIZE,
            HEAP_BYTES - mmap.PAGESIZE,
            mmap.MADV_HUGEPAGE,
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


def resolve_device(device: str) -> str:
    """Return the device; for "auto", CUDA's if torch finds one, else the CPU."""
    import torch

    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def freeze(config: RunConfig, reasons: list[str] | None = None) -> RunConfig:
    """Return the configuration with every "auto" that depends on the machine resolved.

    A resumed run thus sees the same values. If torchrun started several processes, they become the
    cluster. `reasons` receives a sentence for each value that was measured, or that the lack of a
    compiler decided.
    """
    device = resolve_device(config.device)
    threads = config.threads
    if threads == "auto":
        threads, reason = choose_threads(config.model) if device == "cpu" else find_thread_limit()
        if reasons is not None:
            reasons.append(f"threads=auto became {threads} ({reason})")
    is_auto = any(stage.learner.measures_workers for stage in config.stages)
    workers = measure_worker_count(threads) if is_auto and device == "cpu" else 1
    stages = tuple(
        stage.model_copy(update={"learner": stage.learner.with_workers(workers)})
        for stage in config.stages
    )
    kernels = config.kernels
    # One value for the run, because learners and generators must compute alike.
    if kernels == "auto":
        kernels = (
            "compiled"
            if device == "cpu" and config.can_use_compiled_kernels and has_compiled_kernels(reasons)
            else "torch"
        )
    precision = config.precision
    if precision == "auto":
        precision = "bfloat16" if device.startswith("cuda") else "float32"
    elif precision == "float32" and device.startswith("cuda"):
        raise ConfigError(
            f"precision=float32 is for CPUs: device=auto became {device}, which multiplies in "
            "bfloat16. Set precision=auto, or device=cpu"
        )
    cluster = config.cluster
    if TorchrunRank.from_environment() is not None and isinstance(cluster, LocalClusterConfig):
        common_fields = {key: getattr(cluster, key) for key in ClusterConfig.model_fields}
        cluster = resolve("cluster", {"kind": "torchrun", **common_fields})
    resolved_fields = {
        "device": device,
        "threads": threads,
        "kernels": kernels,
        "precision": precision,
        "stages": stages,
        "cluster": cluster,
    }
    return config.model_copy(update={**resolved_fields, "tokenizer": _set_date(config.tokenizer)})


def find_unfrozen_key(config: RunConfig) -> str | None:
    """Return a key that `freeze` would fill in; None if the configuration is already frozen."""
    return next((key for key in ("device", "threads") if getattr(config, key) == "auto"), None)


def _set_date(tokenizer: Section) -> Section:
    """Set the section's date to today, if it has none and its template may print one."""
    if not isinstance(tokenizer, TokenizerConfig) or tokenizer.date is not None:
        return tokenizer
    if not may_print_date(
        tokenizer.template, has_template=isinstance(tokenizer, AutoTokenizerConfig)
    ):
        return tokenizer
    return tokenizer.model_copy(update={"date": today()})
