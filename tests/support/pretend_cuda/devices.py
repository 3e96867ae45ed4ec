"""`torch.cuda` of the pretended accelerator, in place of PyTorch's."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.attention.varlen as varlen
import torch.nn.functional as F
from support.pretend_cuda import DEVICE_BYTES, load_backend
from support.pretend_cuda.collectives import install_collectives
from support.pretend_cuda.counting import count_as_one_kernel, record

DEVICE_NAME = "NVIDIA H200"
CAPABILITY = (9, 0)


def install() -> None:
    """Replace what PyTorch's CPU build lacks."""
    for name, function in _make_functions().items():
        setattr(torch.cuda, name, function)
    torch.cuda.device = DeviceContext
    torch.cuda.Stream = torch.cuda.Event = Stream
    torch.cuda.CUDAGraph = Graph
    torch._C._cuda_getCurrentRawStream = lambda index: 0
    torch.Tensor.pin_memory = lambda self, device=None: self
    torch.Tensor.is_pinned = lambda self, device=None: self.is_cpu
    torch.Tensor.__deepcopy__ = _make_deepcopy(torch.Tensor.__deepcopy__)
    torch.nn.Parameter.__deepcopy__ = _make_deepcopy(torch.nn.Parameter.__deepcopy__)
    F.scaled_dot_product_attention = count_as_one_kernel(
        F.scaled_dot_product_attention, name_attention
    )
    varlen.varlen_attn = count_as_one_kernel(attend_varlen, lambda *_, **options: "flash attention")
    F.rms_norm = count_as_one_kernel(F.rms_norm, lambda *arguments, **options: "rms_norm")
    if torch.distributed.is_available():
        install_collectives()


def name_attention(
    q: Any, k: Any, v: Any, attn_mask: Any = None, *rest: Any, enable_gqa: bool = False, **more: Any
) -> str:
    """Return the kernel that PyTorch chooses on a Hopper GPU.

    Without cuDNN's, which builds a plan for every new shape, these are left: flash attention takes
    half precision without masks; the memory-efficient kernel takes masks, but no grouped queries;
    the math kernel holds the scores of all pairs.
    """
    is_half = q.dtype.itemsize == 2 or torch.is_autocast_enabled("cuda")
    is_grouped = enable_gqa and q.shape[-3] != k.shape[-3]
    if is_half and attn_mask is None:
        return "flash attention"
    return "math attention" if is_grouped else "memory-efficient attention"


def attend_varlen(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> Any:
    """Compute `torch.nn.attention.varlen.varlen_attn`, and refuse what its kernel refuses."""
    if not query.dtype == key.dtype == value.dtype or query.dtype.itemsize != 2:
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    if cu_seq_q.dtype is not torch.int32 or cu_seq_k.dtype is not torch.int32:
        raise RuntimeError("cu_seqlens_q must have dtype int32")
    if not query.device == cu_seq_q.device == cu_seq_k.device:
        raise RuntimeError("Expected all tensors to be on the same device")
    if query.shape[1] != key.shape[1] and not enable_gqa:
        raise ValueError("Expect query and key/value to have the same number of heads")
    lengths = cu_seq_q.diff().tolist()
    assert window_size == (-1, 0), "only causal attention is pretended"
    assert sum(lengths) == len(query) == len(key)
    assert max(lengths) == max_q == max_k
    return VarlenAttention.apply(query, key, value, lengths)


class VarlenAttention(torch.autograd.Function):
    """Causal attention within each of several sequences: one kernel in each direction."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, lengths: list[int]) -> Any:
        ctx.save_for_backward(query, key, value)
        ctx.lengths = lengths
        return _attend_each(query, key, value, lengths)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        def differentiate(grad: Any) -> Any:
            inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
            with torch.enable_grad():
                out = _attend_each(*inputs, ctx.lengths)
            return torch.autograd.grad(out, inputs, grad)

        name = "flash attention backward"
        return *count_as_one_kernel(differentiate, lambda grad: name)(*grads), None


def _attend_each(query: Any, key: Any, value: Any, lengths: list[int]) -> Any:
    outputs = []
    for part in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        rows = (x.transpose(0, 1)[None] for x in part)
        is_grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(*rows, is_causal=True, enable_gqa=is_grouped)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def count_visible_devices() -> int:
    """Return the number of devices that CUDA_VISIBLE_DEVICES leaves."""
    count = load_backend().pretend_device_count()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else min(count, len(visible.split(",")) if visible else 0)


def get_index(device: Any) -> int:
    """Return the index of a device that PyTorch's functions accept; None: the current device."""
    if isinstance(device, int):
        index = device
    else:
        index = None if device is None else torch.device(device).index
    return load_backend().pretend_current_device() if index is None else index


class Stream:
    """A stream or an event of a device on which everything has ended when its call returns."""

    def __init__(self, device: Any = None, *arguments: Any, **options: Any) -> None:
        self.device = torch.device("cuda", get_index(None))
        self.cuda_stream = 0

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        record("sync", "synchronize")

    def record(self, *arguments: Any) -> None: ...

    def wait(self, *arguments: Any) -> None: ...

    def wait_event(self, *arguments: Any) -> None: ...

    def wait_stream(self, *arguments: Any) -> None: ...

    def record_event(self, *arguments: Any) -> Stream:
        return self


class Graph:
    """A CUDA graph: operations that are run again on the memory that they had when captured.

    As on CUDA, they don't run while they are captured, and what waits for the device is refused.
    """

    _numbers = itertools.count()

    def __init__(self) -> None:
        self.number = next(self._numbers)

    def capture_begin(self, **options: Any) -> None:
        load_backend().pretend_begin_capture(self.number)

    def capture_end(self) -> None:
        load_backend().pretend_end_capture()

    def replay(self) -> None:
        load_backend().pretend_replay(self.number)

    def __del__(self) -> None:
        load_backend().pretend_drop_graph(self.number)


class DeviceContext:
    """`torch.cuda.device`: the current device of this thread inside a block."""

    def __init__(self, device: Any) -> None:
        self.index = get_index(device)

    def __enter__(self) -> None:
        self.previous_index = get_index(None)
        load_backend().pretend_set_device(self.index)

    def __exit__(self, *error: object) -> None:
        load_backend().pretend_set_device(self.previous_index)


def _make_functions() -> dict[str, Callable[..., Any]]:
    backend = load_backend()
    properties = SimpleNamespace(
        name=DEVICE_NAME, total_memory=DEVICE_BYTES, multi_processor_count=132, major=9, minor=0
    )
    rng_state = torch.zeros(16, dtype=torch.uint8)
    constants = {
        "is_initialized": True,
        "is_bf16_supported": True,
        "_lazy_init": None,
        "empty_cache": None,
        "ipc_collect": None,
        "get_device_name": DEVICE_NAME,
        "get_device_capability": CAPABILITY,
        "get_device_properties": properties,
        "get_rng_state": rng_state,
        "set_rng_state": None,
        "set_rng_state_all": None,
        "is_current_stream_capturing": False,
    }
    functions: dict[str, Callable[..., Any]] = {
        name: lambda *arguments, value=value, **options: value for name, value in constants.items()
    }

    def get_memory(device: Any = None) -> int:
        return backend.pretend_memory_bytes(get_index(device))

    return functions | {
        "is_available": lambda: count_visible_devices() > 0,
        "device_count": count_visible_devices,
        "get_rng_state_all": lambda: [rng_state] * count_visible_devices(),
        "current_stream": Stream,
        "default_stream": Stream,
        "current_device": lambda: get_index(None),
        "set_device": lambda device: backend.pretend_set_device(get_index(device)),
        "synchronize": lambda device=None: record("sync", "synchronize"),
        "mem_get_info": lambda device=None: (DEVICE_BYTES - get_memory(device), DEVICE_BYTES),
        "memory_allocated": get_memory,
        "memory_reserved": get_memory,
        "max_memory_allocated": lambda device=None: backend.pretend_peak_memory_bytes(
            get_index(device)
        ),
        "reset_peak_memory_stats": lambda device=None: backend.pretend_reset_peak_memory(
            get_index(device)
        ),
        "graph_pool_handle": lambda: (0, 0),
        "stream": lambda stream: nullcontext(),
    }


def _make_deepcopy(deepcopy_on_host: Callable[..., Any]) -> Callable[..., Any]:
    """Return `__deepcopy__` for tensors whose storages have no allocator."""

    def deepcopy(self: Any, memo: dict[int, Any]) -> Any:
        if not self.is_cuda:
            return deepcopy_on_host(self, memo)
        if id(self) not in memo:
            copy = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copy = torch.nn.Parameter(copy, self.requires_grad)
            memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return memo[id(self)]

    return deepcopy
