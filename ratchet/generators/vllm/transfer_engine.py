"""A weight transfer engine for vLLM that compares checksums before it loads a push.

vLLM imports this module in each of its workers, to extend the worker (`worker_extension_cls`). The
import registers the engine under the name of `BACKEND` (`weight_transfer_config`).

vLLM's own engines (ipc, nccl) load weights while they arrive. This one receives and compares a
whole push in `update_weights`, while the old weights serve, and loads it in `finish_weight_update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from ratchet.generators.vllm.device_memory import map_offered
from ratchet.generators.vllm.weights import PushReader
from ratchet.generators.vllm.worker_extension import VLLMWorkerExtension

BACKEND = "ratchet"

__all__ = ["BACKEND", "CheckedTransferEngine", "VLLMWorkerExtension"]

_base: Any = import_module("vllm.distributed.weight_transfer.base")
_factory: Any = import_module("vllm.distributed.weight_transfer.factory")


@dataclass
class BufferOffer:
    """vLLM's init info: the offer of a `DeviceCarrier`."""

    offer: Mapping[str, Any]


@dataclass
class PushInfo:
    """vLLM's update info: the manifest of a `PushWriter`."""

    manifest: Mapping[str, Any]


class CheckedTransferEngine(_base.WeightTransferEngine):
    """The receiver of pushes in a worker of vLLM."""

    init_info_cls = BufferOffer
    update_info_cls = PushInfo
    supports_draft_weight_update = False

    checked_push: PushReader | None = None
    mapped_n: Tensor | None = None  # the buffer of pushes without a file, uint8

    def init_transfer_engine(self, init_info: BufferOffer) -> None:
        """Map the sender's buffer, in place of an earlier one.

        Raises ModelError if it can't be mapped, or a sample of it differs.
        """
        self.mapped_n = None
        self.mapped_n = map_offered(init_info.offer)

    def start_weight_update(self) -> None:
        self.checked_push = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class also waits for the device, which vLLM 0.32 can't do on a CPU. Comparing
        # has waited already.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: PushInfo) -> None:
        """Map a push and compare every checksum. Raises ModelError for a push that differs."""
        self.checked_push = PushReader.open_checked(update_info.manifest, self.mapped_n)

    def finish_weight_update(self) -> None:
        """Load the checked push; if there is none, change nothing."""
        push, self.checked_push = self.checked_push, None
        if push is None:
            return
        reload: Any = import_module("vllm.model_executor.model_loader.reload")
        reload.initialize_layerwise_reload(self.model)
        try:
            self.model.load_weights(push.weights())
        finally:
            # After a failure too: the next push can't be loaded into layers that are half replaced.
            reload.finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type != "cpu":
            # The sender overwrites its buffer in the next push.
            torch.accelerator.synchronize(self.device)

    def shutdown(self) -> None:
        self.checked_push = None
        self.mapped_n = None


_factory.WeightTransferEngineFactory.register_engine(BACKEND, CheckedTransferEngine)
