"""Recognise whether the files of a model directory changed, without reading its weights whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from ratchet.errors import ModelError

BLOCK_BYTES = 4096
N_BLOCKS = 64  # of each file
# The small files of a model directory on which its tokens and outputs depend.
SMALL_FILES = (
    *("config.json", "adapter_config.json", "tokenizer*", "*.model", "*.jinja"),
    *("vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json"),
)


def fingerprint_weight_files(directory: Path) -> str:
    """Return a hash (hex) of the safetensors files of a directory.

    It covers each file's name, size and 64 evenly spaced blocks of 4 KiB, the first of which holds
    the beginning of the header. Training changes nearly every weight, and so these blocks too; a
    whole hash of a large model would take minutes.

    Raises ModelError if a file can't be read.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("*.safetensors")):
        try:
            size = path.stat().st_size
            digest.update(f"{path.name} {size}\n".encode())
            with path.open("rb") as file:
                for index in range(N_BLOCKS):
                    file.seek(max(size - BLOCK_BYTES, 0) * index // (N_BLOCKS - 1))
                    digest.update(file.read(BLOCK_BYTES))
        except OSError as error:
            raise ModelError(f"{path}: can't be read: {error.strerror}") from error
    return digest.hexdigest()


def list_small_files(directory: Path) -> list[Path]:
    """Return a model directory's configuration, tokenizer and chat template, sorted by path."""
    paths = {path for pattern in SMALL_FILES for path in directory.glob(pattern)}
    return sorted(path for path in paths if path.is_file())
