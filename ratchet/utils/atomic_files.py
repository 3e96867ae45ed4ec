"""Write files atomically: readers see a whole file or none. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratchet.errors import ConfigError
from ratchet.utils import failpoints


def require_empty_directory(path: Path) -> None:
    """Raise ConfigError unless `path` is an empty directory, or does not exist yet."""
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file: choose an empty directory")
    if path.exists() and any(path.iterdir()):
        raise ConfigError(f"{path} has files already: choose an empty directory")


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, in the directory of `path`.

    The block writes the draft, which replaces `path` if the block ends without an error.
    """
    draft = path.with_name(f".{path.name}.partial")
    try:
        yield draft
        with draft.open("rb+") as file:
            os.fsync(file.fileno())
        failpoints.point("file.drafted")
        draft.replace(path)
        failpoints.point("file.replaced")
    finally:
        draft.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as indented JSON with sorted keys, atomically."""
    with atomic_path(path) as draft:
        draft.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
