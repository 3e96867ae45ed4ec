"""An extension of vLLM's workers that checks a weight push and loads the weights into vLLM.

Both are done by vLLM's weight transfer, with the engine of `transfer_engine.py`. vLLM adds the
class to its worker's bases (`worker_extension_cls`) and calls the methods in every process that
holds weights.
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
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ratchet.generators.vllm.lora import explain_adapter_damage, explain_unknown_experts
from ratchet.generators.vllm.sampler import report_unfiltered
from ratchet.processes.process_group import list_mapped_segments, remove_paths

DRIVER_POLL_S = 2.0

if TYPE_CHECKING:

    class _VLLMWorker:
        model_runner: Any
        vllm_config: Any
        weight_transfer_engine: Any
        _weight_update_active: bool

        def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None: ...
        def start_weight_update(self) -> None: ...
        def update_weights(self, update_info: dict[str, Any]) -> None: ...
        def finish_weight_update(self) -> None: ...
else:
    _VLLMWorker = object


def _end_after_driver(driver: int, engine: int) -> None:
    while _is_running(driver):
        time.sleep(DRIVER_POLL_S)
    # The engine created some of these files, and it is killed below, so it can't remove them.
    remove_paths(list_mapped_segments())
    if os.getppid() == engine:
        os.kill(engine, signal.SIGKILL)
    os._exit(1)


def _unlink_shared_memory() -> None:
    """Remove the files in /dev/shm through which vLLM's workers on a CPU share memory.

    vLLM never removes them. When this is called, all workers have opened the files, so no worker
    needs their names any more.
    """
    # A worker that has not imported `parallel_state` shares no memory through it.
    parallel_state = sys.modules.get("vllm.distributed.parallel_state")
    for reference in parallel_state._groups.values() if parallel_state else ():
        group = reference()
        communicator = None if group is None else group.device_communicator
        # Communicators of accelerators have no `dist_module`. A `dist_module` has a `group_name`
        # only if it uses shared memory.
        name = getattr(getattr(communicator, "dist_module", None), "group_name", None)
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}_*") if name else ():
            path.unlink(missing_ok=True)  # another worker may have removed it


def _is_running(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


def expand_to_tokens(
    values_N: torch.Tensor,
    ends_N: torch.Tensor,
    num_tokens: int,
    replace_from: int = 0,
    replace_to: int = 0,
) -> torch.Tensor:
    """Return the value of each request once for each of its drafted tokens, [num_tokens].

    On a CPU this function replaces vLLM's `expand_batch_to_tokens`, which in vLLM 0.32 returns
    memory that was never written. Drafted tokens would be sampled and reported at an arbitrary
    temperature.

    N = requests.

    Args:
        values_N: of any dtype; `replace_from` becomes `replace_to`.
        ends_N: cumulative number of drafted tokens.
        num_tokens: number of drafted tokens; equal to the last of `ends_N`.
    """
    values_N = torch.where(values_N == replace_from, replace_to, values_N)
    counts_N = torch.diff(ends_N, prepend=ends_N.new_zeros(1))
    return values_N.repeat_interleave(counts_N, output_size=num_tokens)


def count_at_least(values_NV: torch.Tensor, least_N1: torch.Tensor) -> torch.Tensor:
    """Return how many values of each row are not less than the row's `least_N1`, int64 [N].

    On a CPU this function replaces vLLM's `batched_count_greater_than`, which vLLM compiles even if
    `enforce_eager` is set: the first token would wait many seconds, and need a C++ compiler, for
    the ranks of tokens.
    """
    return (values_NV >= least_N1).sum(-1)


class VLLMWorkerExtension(_VLLMWorker):
    """The methods that Ratchet adds to vLLM's worker.

    They return failures as text, because an exception in one of several workers would leave the
    results of the others unread. With data parallelism they raise, because vLLM returns only the
    first replica's results.
    """

    pushed_version: int = 0

    def map_buffer(self, offer: Mapping[str, Any]) -> str:
        """Map the buffer that a `DeviceCarrier` offers. Return the reason if it can't, else ""."""
        try:
            self.init_weight_transfer_engine({"offer": offer})
        except Exception as error:  # of any type: the caller chooses another carrier
            return self._report_failure(f"{error}")
        return ""

    def check_push(self, manifest: Mapping[str, Any]) -> str:
        """Map the memory of a push and compare every checksum, while the old weights serve.

        Return the reason if the push is refused, else "".
        """
        try:
            self._drop_push()
            self.start_weight_update()
            self.update_weights({"manifest": manifest})
        except Exception as error:  # of any type: the caller raises it
            return self._report_failure(f"{error}")
        return ""

    def _drop_push(self) -> None:
        """End the update of a push that was checked but not loaded, as another worker refused it.

        vLLM's only way to end an update is to finish it. The engine then has nothing to load.
        """
        self.weight_transfer_engine.checked_push = None
        if self._weight_update_active:
            self.finish_weight_update()

    def check_adapter(self, path: str, checksum: str) -> str:
        """Check an adapter's file. Return the reason if it is refused, else ""."""
        reason = explain_adapter_damage(path, checksum)
        if not reason:
            modules = self.model_runner.get_model().named_modules()
            reason = explain_unknown_experts(path, [name for name, _ in modules])
        return self._report_failure(reason) if reason else ""

    def apply_push(self, version: int) -> str:
        """Load the push that `check_push` accepted.

        Call it between two steps of vLLM's engine, while generation is paused. Return the error's
        text if loading failed, else "".
        """
        if self.weight_transfer_engine.checked_push is None:
            return self._report_failure("this worker has accepted no push")
        try:
            self.finish_weight_update()
            self.model_runner.reset_encoder_cache()
            self.model_runner.reset_mm_cache()
            self._repack_experts()
        except Exception as error:  # of any type: the caller stops the generator
            return self._report_failure(f"{type(error).__name__}: {error}")
        self.pushed_version = version
        return ""

    def tie_to_driver(self, host: str, driver: int) -> list[str]:
        """End this worker and vLLM's engine when the driver's process ends.

        Without this call, an engine whose driver was killed would keep running and hold the
        accelerator, since it ends only on the driver's request.

        Shared-memory files that vLLM never removes are removed now. Return the paths of those still
        mapped. vLLM removes them only at an orderly exit, so after a kill the caller must remove
        them.
        """
        _unlink_shared_memory()
        if socket.gethostname() == host and os.getpid() != driver:
            threading.Thread(
                target=_end_after_driver, args=(driver, os.getppid()), daemon=True
            ).start()
        return list_mapped_segments()

    def prepare_sampler(self) -> bool:
        """Repair vLLM's sampler, and make it report logprobs before filters.

        Call it before any request. Return False for the sampler of vLLM's V2 model runner,
        which can't report them.
        """
        sampling: Any = import_module("vllm.v1.sample.sampler")
        if self.model_runner.device.type == "cpu":
            rejection: Any = import_module("vllm.v1.sample.rejection_sampler")
            rejection.expand_batch_to_tokens = expand_to_tokens
            sampling.batched_count_greater_than = count_at_least
        sampler = self.model_runner.sampler
        if not isinstance(sampler, sampling.Sampler):
            return False
        report_unfiltered(sampler)
        return True

    def _report_failure(self, reason: str) -> str:
        if self.vllm_config.parallel_config.data_parallel_size > 1:
            raise RuntimeError(reason)
        return reason

    def _repack_experts(self) -> None:
        """Repack the experts' weights on a CPU after a reload.

        vLLM 0.32 computes experts from a repacked copy, which `reload_weights` does not update.
        """
        model = self.model_runner.get_model()
        if next(model.parameters()).device.type != "cpu":
            return
        for module in model.modules():
            # Only vLLM's own layers have `quant_method`, and only that of experts has `moe_kernel`.
            kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(module, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(module)
