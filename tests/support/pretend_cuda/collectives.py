"""Collectives of the pretended accelerator: gloo, on copies in main memory, in place of NCCL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

BACKEND_NAME = "pretend_nccl"
COLLECTIVES = ("gather", "reduce", "scatter", "alltoall", "all_to_all", "broadcast", "barrier")
POINT_TO_POINT = ("send", "recv", "recv_anysource")


def install_collectives() -> None:
    """Let `init_process_group` create groups that accept tensors on the device."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    for name in dir(dist.ProcessGroup):
        if not name.startswith("__") and (
            name in POINT_TO_POINT or any(part in name for part in COLLECTIVES)
        ):
            setattr(HostCopyGroup, name, _make_method(name))
    dist.Backend.register_backend(BACKEND_NAME, HostCopyGroup, devices=["cpu", "cuda"])
    # The backend has no kernel that shrinks a storage to nothing.
    _fsdp_param.free_storage = lambda tensor: None
    init_process_group = dist.init_process_group

    def init(backend: str | None = None, *arguments: Any, **options: Any) -> Any:
        if backend != "gloo":
            backend = f"cpu:{BACKEND_NAME},cuda:{BACKEND_NAME}"
        return init_process_group(backend, *arguments, **options)

    dist.init_process_group = init


class HostCopyGroup(dist.ProcessGroup):
    """A process group that copies tensors to main memory, calls gloo, and copies results back."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroup(store, rank, size)
        self.gloo._register_backend(
            torch.device("cpu"),
            dist.ProcessGroup.BackendType.GLOO,
            dist.ProcessGroupGloo(store, rank, size, timeout),
        )

    def getBackendName(self) -> str:
        return BACKEND_NAME

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]


class HostCopyWork(torch._C._distributed_c10d.Work):
    """A collective in progress. Waiting for it copies its results to the device."""

    def __init__(self, work: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self.work = work
        self.copies = copies  # (device tensor, its copy)

    def wait(self, *arguments: Any) -> bool:
        self.work.wait()
        for tensor, copy in self.copies:
            tensor.copy_(copy)
        self.copies = []
        return True


def _make_method(name: str) -> Callable[..., Any]:
    # The options of a barrier may name the device, so they are not passed on.
    def call(self: HostCopyGroup, *arguments: Any, opts: Any = None) -> HostCopyWork:
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []

        def copy_to_host(value: Any) -> Any:
            if isinstance(value, list | tuple):
                return [copy_to_host(item) for item in value]
            if not isinstance(value, torch.Tensor) or not value.is_cuda:
                return value
            copies.append((value, value.cpu()))
            return copies[-1][1]

        work = HostCopyWork(getattr(self.gloo, name)(*copy_to_host(arguments)), copies)
        if name not in POINT_TO_POINT:
            work.wait()
        return work

    return call
