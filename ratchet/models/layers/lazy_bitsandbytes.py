"""bitsandbytes, whose kernels quantise and restore numbers: imported where it is first used, as
that takes a second."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from typing import Any


@cache
def bits() -> Any:
    """Its functions. On a CPU it says that a kernel which nothing here uses can't be had."""
    log = logging.getLogger("bitsandbytes")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        return import_module("bitsandbytes.functional")
    finally:
        log.setLevel(level)
