"""Import bitsandbytes, for its quantization kernels, on first use: the import takes a second."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any


@cache
def load_bitsandbytes() -> Any:
    """Return `bitsandbytes.functional`.

    Its warning about a missing CPU kernel, which is not used here, is suppressed.
    """
    logger = logging.getLogger("bitsandbytes")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes.functional")
    finally:
        logger.setLevel(level)
