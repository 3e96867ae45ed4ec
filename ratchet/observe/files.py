"""Writing files so that a crash leaves the old content or the new, never a part of it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def sync(path: Path) -> None:
    """Flushes a file, or a directory's entries, to the disk itself. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_text(path: Path, text: str) -> None:
    """Replaces the file's content as a whole. Raises OSError, and then leaves the old content and no other file."""
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        draft.write_text(text, encoding="utf-8")
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)
