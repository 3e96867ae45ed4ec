"""Choose how each push reaches vLLM's workers: through a file, or through an accelerator's memory.

Both ways differ only in the memory (`WeightCarrier`). Checks, versions and the transaction of a
push are the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from shutil import disk_usage
from typing import Any, Literal

import torch
from torch import Tensor

from ratchet.errors import ModelError
from ratchet.generators.config import VLLMConfig
from ratchet.generators.vllm import device_memory
from ratchet.generators.vllm.device_memory import DeviceCarrier
from ratchet.generators.vllm.engines import VLLMCore
from ratchet.generators.vllm.weights import FileCarrier, WeightCarrier, align_offset
from ratchet.models.policy import DecoderPolicy, PolicyModel
from ratchet.utils.temp_dirs import TemporaryFolder

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
FIX = "Set generator.weight_transfer=file."


async def call_workers(core: VLLMCore, method: str, *arguments: Any) -> None:
    """Call a method of `VLLMWorkerExtension` in every worker.

    Raises ModelError if a worker returns a reason why it refuses, or can't be called.
    """
    try:
        reasons = [reason for reason in await core.call(method, *arguments) if reason]
    except Exception as error:  # vLLM's exception types differ by engine
        raise ModelError(f"the push was refused by a worker: {error}") from error
    if reasons:
        raise ModelError(f"the push was refused by {len(reasons)} of vLLM's workers: {reasons[0]}")


def choose_transfer(
    config: VLLMConfig, model: PolicyModel, *, on_cpu: bool
) -> Literal["auto", "file", "ipc"]:
    """Return the kind of transfer that fits the run; "auto" tries ipc and falls back to a file.

    `auto` is only for a built-in model that a learner in this process has on an accelerator,
    without adapters and quantisation. All else is sent through files until it has been tried.
    """
    if config.weight_transfer != "auto":
        return config.weight_transfer
    _, weight = next(iter(model.canonical_weights()))
    fits = (
        not on_cpu
        and config.engine == "async"
        and not config.lora_rank
        and config.quantise is None
        and isinstance(model, DecoderPolicy)
        and device_memory.can_export(weight)
    )
    return "auto" if fits else "file"


def count_push_bytes(weights: Mapping[str, Tensor], dtype: torch.dtype) -> int:
    """Return the bytes of a push of all weights, if floating-point ones are sent as `dtype`."""
    return sum(
        align_offset(
            weight.numel() * (dtype if weight.is_floating_point() else weight.dtype).itemsize
        )
        for weight in weights.values()
    )


def make_push_folder(config: VLLMConfig, size: int) -> TemporaryFolder:
    """Create the directory for pushes of `size` bytes, in shared memory if two pushes fit there."""
    parent = config.handover_dir
    if parent is None and SHARED_MEMORY.is_dir() and disk_usage(SHARED_MEMORY).free > 2 * size:
        parent = str(SHARED_MEMORY)
    # The name holds the process group, so that code that kills the group can remove the directory.
    return TemporaryFolder(f"vllm-{os.getpgid(0)}", parent)


class CarrierChoice:
    """The choice of a carrier for each push, by where its weights lie.

    Args:
        kind: "file", "ipc", or "auto": ipc if vLLM's workers can map the learner's accelerator.
        file: The carrier of pushes through files.
        n_bytes: Size of a push in bytes.
    """

    def __init__(
        self, kind: Literal["auto", "file", "ipc"], file: FileCarrier, n_bytes: int
    ) -> None:
        self.kind: Literal["auto", "file", "ipc"] = kind
        self.file = file
        self.n_bytes = n_bytes
        self._device: DeviceCarrier | None = None

    async def choose(self, core: VLLMCore, tensor: Tensor) -> WeightCarrier:
        """Return the carrier of a push whose first weight is `tensor`.

        Raises ModelError if `kind` is "ipc" and the weights can't be sent so.
        """
        if self.kind == "file":
            return self.file
        if not device_memory.can_export(tensor):
            if self.kind == "auto":
                return self.file
            raise ModelError(
                "generator.weight_transfer=ipc needs weights on an accelerator, and those of this "
                f"push are in main memory. {FIX}"
            )
        if self._device is None:
            try:
                self._device = await self._open_device(core, tensor.device)
            except (ModelError, RuntimeError) as error:  # torch's errors of CUDA
                problem = f"vLLM's workers can't read the learner's accelerator ({error})"
                if self.kind == "ipc":
                    raise ModelError(f"{problem}. {FIX}") from error
                log.warning("%s, so weights are pushed to them through files.", problem)
                self.kind = "file"
                return self.file
        return self._device

    async def _open_device(self, core: VLLMCore, device: torch.device) -> DeviceCarrier:
        """Allocate the buffer of pushes, and have every worker map it and compare a sample."""
        bytes_n = device_memory.allocate_memory(self.n_bytes, device)
        carrier = DeviceCarrier(bytes_n, self.file.dtype)
        await call_workers(core, "map_buffer", carrier.offer())
        return carrier

    def close(self) -> None:
        """Free the buffer."""
        self._device = None
