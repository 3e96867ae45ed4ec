"""Write files atomically: readers see a whole file or none. Imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ratchet.utils import failpoints


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, in the directory of `path`.

    The written file replaces `path` if the block ends without an error.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        yield temporary
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        failpoints.point("file.drafted")
        temporary.replace(path)
        failpoints.point("file.replaced")
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` as indented JSON with sorted keys, atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
