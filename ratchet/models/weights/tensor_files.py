"""Write tensors as a safetensors file that other users may read."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file with the mode of new files, as the umask sets it.

    safetensors creates its files with mode 0600, so that no other user could read a finished model.

    Args:
        tensors: Contiguous tensors on the CPU that share no memory, by name.
        path: The file.
        metadata: Text fields of the file's header.

    Raises:
        OSError: The file can't be written, for example because the disk is full.
    """
    try:
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
    except SafetensorError as error:  # a full disk, without the file's name
        raise OSError(f"{path} can't be written: {error}") from error
    probe = path.with_name(f".{path.name}.mode")
    try:
        with probe.open("w") as file:
            path.chmod(stat.S_IMODE(os.fstat(file.fileno()).st_mode))
    finally:
        probe.unlink(missing_ok=True)
