"""Save nested state bit for bit, as JSON and safetensors files.

`<name>.json` has the structure and numbers, `<name>.safetensors` the tensors and arrays.

Python values that JSON can represent are written unchanged (JSON keeps every bit of a float). Every
other value becomes a JSON object whose key "$" holds a tag for its type: non-finite floats, tuples,
tensors, numpy arrays and scalars, and dicts with a key "$" or with keys that are not strings (such
as the integers in the state of a torch optimizer). Reading the files never executes code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ratchet.errors import CheckpointError
from ratchet.models.weights.tensor_files import save_tensors
from ratchet.utils import failpoints, safe_read

TAG = "$"
# The dtypes that every version of safetensors supports. Tensors of other dtypes are stored as
# bytes.
NATIVE_DTYPES = {
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
}


WriteFiles = Callable[[Path], None]  # writes files below the given root

# The writes that the current thread has deferred; None outside of `defer_writes`. Under torchrun
# the driver and a rank share a process, so one thread's block must not change another's saves.
_deferred_writes: ContextVar[list[WriteFiles] | None] = ContextVar("deferred_writes", default=None)


@contextmanager
def defer_writes() -> Iterator[list[WriteFiles]]:
    """Make saves only copy their state to main memory inside the block, and write no file yet.

    Each save adds a function to the yielded list. The caller calls it later with a root directory,
    for example in another thread while the original tensors change, and it then writes the files.
    The directories passed to `save_state` and `save_blocks` are relative to that root.
    """
    assert _deferred_writes.get() is None, "defer_writes can't be nested"
    writes: list[WriteFiles] = []
    token = _deferred_writes.set(writes)
    try:
        yield writes
    finally:
        _deferred_writes.reset(token)


def are_writes_deferred() -> bool:
    """True inside of a `defer_writes` block of this thread."""
    return _deferred_writes.get() is not None


def write_or_defer(write: WriteFiles) -> None:
    """Write files below the current directory at once, or later inside of `defer_writes`."""
    writes = _deferred_writes.get()
    if writes is None:
        write(Path())
    else:
        writes.append(write)


def save_state(directory: Path, state: Any, name: str = "state") -> None:
    """Write a state to the files `<name>.json` and `<name>.safetensors`.

    Raises CheckpointError if the files can't be written, or if a value has an unsupported type. The
    message then says where in the state the value is.

    Args:
        state: Nested dicts, lists and tuples of None, numbers, strings, tensors, and numpy arrays
            and scalars.
    """
    tensors: dict[str, Tensor] = {}
    structure = _encode(state, tensors, path="state")
    write_or_defer(lambda root: _write(root / directory, name, structure, tensors))


def _write(directory: Path, name: str, structure: Any, tensors: Mapping[str, Tensor]) -> None:
    """Write the two files of a state."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"{name}.json").write_text(
            json.dumps(structure, allow_nan=False), encoding="utf-8"
        )
        failpoints.point("checkpoint.between_files")
        save_tensors(_unshare_memory(tensors), directory / f"{name}.safetensors")
    except OSError as error:
        raise CheckpointError(f"'{name}' can't be written to {directory}: {error}") from error


def load_state(directory: Path, name: str = "state") -> Any:
    """Return the state that `save_state` wrote, with tensors on the CPU.

    Raises CheckpointError if files are absent or damaged.
    """
    try:
        structure = safe_read.read_json(directory / f"{name}.json")
        safe_read.require_file(directory / f"{name}.safetensors")
        # Loaded tensors are views of the file. They are copied, because the file may be deleted
        # while they are in use.
        tensors = {
            key: tensor.clone()
            for key, tensor in load_file(directory / f"{name}.safetensors").items()
        }
        return _decode(structure, tensors)
    except (
        OSError,
        SafetensorError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        RuntimeError,
    ) as error:
        raise CheckpointError(f"'{name}' in {directory} can't be read: {error!r}") from error


# --- encoding to JSON


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """Return the JSON form of a value, and add its tensors to `tensors`.

    Args:
        path: Where the value is in the state, for error messages.
    """
    # Exact types are compared, because an enum would be read back as a plain number or string.
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    if isinstance(value, Tensor):
        return _encode_tensor(value, tensors)
    if isinstance(value, dict):
        return _encode_dict(value, tensors, path)
    if type(value) in (list, tuple):
        items = [_encode(item, tensors, f"{path}[{index}]") for index, item in enumerate(value)]
        return items if type(value) is list else {TAG: "tuple", "items": items}
    # Arrays of objects (O) and of records (V) have no plain bytes.
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind not in "OV":
        return _encode_array(value, tensors)
    raise CheckpointError(
        f"{path} is a {type(value).__qualname__}, which can't be saved: use numbers, text, lists "
        "or tensors"
    )


def _encode_dict(value: Mapping[Any, Any], tensors: dict[str, Tensor], path: str) -> Any:
    values = [_encode(item, tensors, f"{path}[{key!r}]") for key, item in value.items()]
    if all(type(key) is str for key in value) and TAG not in value:
        return dict(zip(value, values, strict=True))
    keys = [_encode(key, tensors, f"a key of {path}") for key in value]
    return {TAG: "dict", "items": [list(pair) for pair in zip(keys, values, strict=True)]}


def _encode_tensor(value: Tensor, tensors: dict[str, Tensor]) -> dict[str, Any]:
    name = f"t{len(tensors)}"
    # Conjugate and negative views are lazy: their memory holds the values of the original tensor.
    cpu_tensor = (
        value.detach()
        .resolve_conj()
        .resolve_neg()
        .to("cpu", copy=are_writes_deferred())
        .contiguous()
    )
    if cpu_tensor.dtype in NATIVE_DTYPES:
        tensors[name] = cpu_tensor
        return {TAG: "tensor", "name": name}
    tensors[name] = cpu_tensor.reshape(-1).view(torch.uint8)
    return {
        TAG: "bytes",
        "name": name,
        "dtype": str(cpu_tensor.dtype).removeprefix("torch."),
        "shape": list(cpu_tensor.shape),
    }


def _encode_array(
    value: np.ndarray[Any, Any] | np.generic, tensors: dict[str, Tensor]
) -> dict[str, Any]:
    name = f"t{len(tensors)}"
    tensors[name] = (
        torch.from_numpy(np.frombuffer(bytearray(value.tobytes()), dtype=np.uint8))
        if value.size
        else torch.zeros(0)
    )
    tag = "array" if isinstance(value, np.ndarray) else "scalar"
    return {TAG: tag, "name": name, "dtype": value.dtype.str, "shape": list(value.shape)}


def _unshare_memory(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors, with clones of those that share memory (views, tied weights).

    safetensors refuses to save tensors that share memory.
    """
    storages: set[int] = set()
    unshared = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        shares_memory = storage.nbytes() != tensor.nbytes or storage.data_ptr() in storages
        storages.add(storage.data_ptr())
        unshared[name] = tensor.clone() if shares_memory else tensor
    return unshared


# --- decoding from JSON


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that `_encode` turned into this JSON form."""
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG in value:
        return _DECODERS[value[TAG]](value, tensors)
    return {key: _decode(item, tensors) for key, item in value.items()}


def _decode_bytes(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"torch.{value['dtype']} is not a dtype")
    return tensors[value["name"]].view(dtype).reshape(value["shape"])


def _decode_array(value: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> np.ndarray[Any, Any]:
    data = tensors[value["name"]].numpy().tobytes()
    return np.frombuffer(bytearray(data), dtype=np.dtype(value["dtype"])).reshape(value["shape"])


_DECODERS = {
    "float": lambda value, tensors: float(value["value"]),
    "tuple": lambda value, tensors: tuple(_decode(value["items"], tensors)),
    "dict": lambda value, tensors: {
        _decode(key, tensors): _decode(item, tensors) for key, item in value["items"]
    },
    "tensor": lambda value, tensors: tensors[value["name"]],
    "bytes": _decode_bytes,
    "array": _decode_array,
    "scalar": lambda value, tensors: _decode_array(value, tensors)[()],
}
