"""What vLLM's workers learn from us: to check a push of weights, and to load it by vLLM's own
reloading.

vLLM mixes the class into its worker (`worker_extension_cls`) and calls the methods in every process
that holds weights.
"""

from __future__ import annotations

import glob
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.generators.vllm.lora import damage
from ratchet.generators.vllm.weights import Inbox

LOOK_EVERY_S = 2.0

if TYPE_CHECKING:

    class Worker:
        model_runner: Any
        vllm_config: Any

        def reload_weights(self, **how: Any) -> None: ...
else:
    Worker = object


def _end_after(driver: int, engine: int) -> None:
    while _runs(driver):
        time.sleep(LOOK_EVERY_S)
    if os.getppid() == engine:
        os.kill(engine, signal.SIGKILL)
    os._exit(1)


def _unlink_shared_memory() -> None:
    """Remove the names under which vLLM's workers on a CPU share memory: vLLM never does, and all
    workers have opened it."""
    # imported by every worker that shares memory
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    for reference in parallel_state._groups.values() if parallel_state else ():
        communicator = getattr(reference(), "device_communicator", None)
        # absent on accelerators
        name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}_*") if name else ():
            path.unlink(missing_ok=True)  # another worker may have removed it


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


class VLLMBackend(Worker):
    """Answers are plain values: an exception in one of several workers would leave the others'
    answers unread. Of several copies of the model (data parallel) vLLM passes on the first one's
    answers alone, so there a failure is an exception."""

    checked_push: Inbox | None = None
    pushed_version: int = 0

    def check_push(self, manifest: Mapping[str, Any]) -> str:
        """Maps the file and compares every checksum, while the old weights serve. Says what is
        wrong; "" for nothing."""
        self.checked_push = None
        try:
            inbox = Inbox.open(manifest)
        except (OSError, ValueError) as error:
            return self._failed(f"{manifest['path']} can't be read: {error}")
        if damaged := inbox.damaged():
            some = ", ".join(damaged[:5])
            return self._failed(
                f"{len(damaged)} weights don't have the checksum that they were sent with: {some}"
            )
        self.checked_push = inbox
        return ""

    def check_adapter(self, path: str, checksum: str) -> str:
        """Says what is wrong with the file of an adapter; "" for nothing."""
        reason = damage(path, checksum)
        return self._failed(reason) if reason else ""

    def apply_push(self, version: int) -> str:
        """Loads what `check_push` found in order. Call it between two steps. Says what went wrong;
        "" for nothing."""
        inbox, self.checked_push = self.checked_push, None
        if inbox is None:
            return self._failed("no push was found in order here")
        try:
            self.reload_weights(weights_iterator=inbox.weights())
            self._repack_experts()
        # whatever a model's loader raises; the caller stops the generator
        except Exception as error:
            return self._failed(f"{type(error).__name__}: {error}")
        self.pushed_version = version
        return ""

    def get_pushed_version(self) -> int:
        return self.pushed_version

    def end_with(self, host: str, driver: int) -> None:
        """From now on this worker and vLLM's engine end with the process that started them. vLLM's
        engine notices when it is told, not when the one that would tell it was killed, and would
        keep the accelerator."""
        _unlink_shared_memory()
        if socket.gethostname() == host and os.getpid() != driver:
            threading.Thread(target=_end_after, args=(driver, os.getppid()), daemon=True).start()

    def _failed(self, reason: str) -> str:
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError(reason)
        return reason

    def _repack_experts(self) -> None:
        """On a CPU vLLM 0.32 computes experts on a repacked copy of their weights, which its
        reloading leaves as it was."""
        model = self.model_runner.get_model()
        if next(model.parameters()).device.type != "cpu":
            return
        for module in model.modules():
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(module)
