"""The embedded executor: everything lives in this process; no Ray, no torch.distributed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class LocalExecutor:
    def spawn(self, factory: Callable[..., T], /, **arguments: object) -> T:
        return factory(**arguments)
