"""What a process imports and sets so that its forks start vLLM at once.

The server of `command_line.call_in_fork` imports this. Of an engine's start a fork saves what vLLM
does once per process: over ten seconds of imports, in the driver and in each process of an engine.
"""

from __future__ import annotations

import gc
import os
import time
from functools import partial
from importlib import import_module
from typing import Any

import command_line

# As Ratchet sets it for a start: vLLM reads it when it is imported.
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

POLL_S = 0.0003  # between two looks of a process at what another gives it
MODULES = (
    "vllm.engine.arg_utils",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.engine.coordinator",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.sample.rejection_sampler",
    "vllm.lora.worker_manager",
    "vllm.model_executor.model_loader.default_loader",
    "vllm.model_executor.models.qwen3",
    "vllm.renderers.hf",
    "ratchet.generators.vllm.transfer_engine",
    "ratchet.models.transformers.policy",
    "ratchet.testing.conformance",
    "ratchet.training.stage_from_config",
)
for name in MODULES:
    import_module(name)


def fork_engines() -> None:
    """Make vLLM fork its processes, though on a CPU it would start fresh interpreters.

    A play whose subject is the start itself doesn't call this.
    """
    platform = import_module("vllm.platforms").current_platform
    check = platform.check_and_update_config

    def check_and_fork(config: Any) -> None:
        check(config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    platform.check_and_update_config = check_and_fork


def run_command(words: list[str]) -> None:
    """Run `ratchet` in this process; vLLM's processes are its forks."""
    fork_engines()
    command_line.run_command(words)


def _prepare() -> None:
    platform = import_module("vllm.platforms").current_platform
    if platform.is_cpu():
        # Each call looks through all modules for what it replaces.
        platform.register_triton_kernel_overrides()
        platform.register_triton_kernel_overrides = lambda: None
    # A process that waits for another spins for a second first, on cores that others need.
    queues: Any = import_module("vllm.distributed.device_communicators.shm_broadcast")
    queues.sched_yield = partial(time.sleep, POLL_S)
    # vLLM collects garbage six times as it starts and ends. The server freezes what it has imported,
    # so that a collection doesn't look through all of it, and vLLM would undo that.
    gc.unfreeze = lambda: None


_prepare()
