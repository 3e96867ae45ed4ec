"""The environment variables that programs started by a run get."""

from __future__ import annotations

import os


def inherited(**more: str) -> dict[str, str]:
    """Those of this process, and some more."""
    return {**os.environ, **more}
