"""Packed values: what driver and workers send to each other in frames.

Values are packed so that large arrays are never copied on the way. A parcel's body is the pickle,
and its buffers are the memory of the arrays in the value (pickle protocol 5, out-of-band). Only
processes of one run, which trust each other, may exchange packed values: a pickle can run any code.
"""

from __future__ import annotations

import io
import pickle
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ratchet.errors import DISTRIBUTION, DataError
from ratchet.processes.frames import Parcel

PROTOCOL = 2  # version: increase it with every change of the messages


def get_versions() -> dict[str, Any]:
    """Return the versions that must be equal in driver and worker."""
    try:
        ratchet_version = version(DISTRIBUTION)
    except PackageNotFoundError:  # run from a checkout
        ratchet_version = "unknown"
    return {
        "protocol": PROTOCOL,
        "ratchet": ratchet_version,
        "python": ".".join(map(str, sys.version_info[:2])),
    }


def pack(value: Any) -> Parcel:
    """Pack a value. Tensors are detached, and arrive on the CPU, each in separate memory.

    Raises DataError for a value that can't be pickled.
    """
    buffers: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=buffers.append).dump(value)
    # The value's own methods may raise any type. pickle raises one of these.
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise DataError(
            f"a value can't be sent between processes: {type(error).__name__}: {error}. Tasks, "
            "messages, steps and rewards may not contain lambdas, locks, open files, or objects of "
            "classes that are defined inside a function"
        ) from error
    return Parcel(stream.getvalue(), tuple(buffer.raw() for buffer in buffers))


def unpack(parcel: Parcel) -> Any:
    """Unpack a value.

    Its arrays and tensors share the memory of the parcel's buffers, and are writable if those are.
    """
    return pickle.loads(parcel.body, buffers=parcel.buffers)


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")  # a process that has not imported it has no tensors
        if (
            torch is None
            or type(value) is not torch.Tensor
            or value.layout is not torch.strided
            or value.is_quantized
        ):
            return NotImplemented
        # Torch's own reduction would copy the whole storage, of which this may be a slice.
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        name = str(value.dtype).removeprefix("torch.")
        return _rebuild_tensor, (
            pickle.PickleBuffer(flat.numpy()),
            name,
            tuple(value.shape),
            value.requires_grad,
        )


def _rebuild_tensor(buffer: Any, dtype: str, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    torch_dtype = getattr(torch, dtype)
    if memoryview(buffer).nbytes == 0:
        return torch.empty(shape, dtype=torch_dtype, requires_grad=requires_grad)
    return (
        torch.frombuffer(buffer, dtype=torch.uint8)
        .view(torch_dtype)
        .reshape(shape)
        .requires_grad_(requires_grad)
    )
