"""Undo what user code changes in the process and what would change a run's computations.

Seeds of the global random generators are no such setting: a run draws from generators of its own.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

log = logging.getLogger(__name__)


class _Setting(NamedTuple):
    """A setting of the process, or of a thread."""

    name: str  # the function that changes it
    read: Callable[[], Any]
    write: Callable[[Any], object]


class _KeptSettings:
    """The settings as they were when a run's stage began, in the thread that trains."""

    def __init__(self) -> None:
        self.owner = os.getpid(), threading.get_ident()
        self._values = [(setting, setting.read()) for setting in _list_settings()]
        self._warned: set[str] = set()

    def restore(self, code: str) -> None:
        """Restore the settings that have changed, with one warning for each.

        Args:
            code: The name of the code that may have changed them.
        """
        for setting, value in self._values:
            new_value = setting.read()
            if new_value == value:
                continue
            try:
                setting.write(value)
            except OSError:  # the working directory is gone, and so are the files in it
                continue
            if setting.name not in self._warned:
                self._warned.add(setting.name)
                log.warning(
                    "%s changed what %s sets, from %s to %s. It is set back now and each time, "
                    "because it would change the run. Remove the call",
                    code,
                    setting.name,
                    value,
                    new_value,
                )


_kept: _KeptSettings | None = None


@contextlib.contextmanager
def keep_settings() -> Generator[None]:
    """Restore the settings of now at the context's end, and within it by `restore_settings`."""
    global _kept
    outer, _kept = _kept, _KeptSettings()
    try:
        yield
    finally:
        restore_settings()
        _kept = outer


def restore_settings(code: str = "a reward, an environment or a library") -> None:
    """Restore the settings that user code has changed; it takes 3 microseconds.

    Outside of `keep_settings` and of its thread it does nothing: threads have settings of their
    own.
    """
    if _kept is not None and _kept.owner == (os.getpid(), threading.get_ident()):
        _kept.restore(code)


def _list_settings() -> list[_Setting]:
    settings = [_Setting("os.chdir", _get_working_directory, os.chdir)]
    if "torch" not in sys.modules:
        return settings
    import torch

    return [
        *settings,
        _Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
        _Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
        _Setting("torch.set_default_device", _get_default_device, _set_default_device),
        _Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
        _Setting(
            "torch.use_deterministic_algorithms",
            torch.get_deterministic_debug_mode,
            torch.set_deterministic_debug_mode,
        ),
        _Setting(
            "torch.set_float32_matmul_precision",
            torch.get_float32_matmul_precision,
            torch.set_float32_matmul_precision,
        ),
        *(
            _Setting(
                "torch.set_autocast_enabled",
                lambda kind=kind: torch.is_autocast_enabled(kind),
                lambda value, kind=kind: torch.set_autocast_enabled(kind, value),
            )
            for kind in ("cpu", "cuda")
        ),
    ]


def _get_default_device() -> Any:
    import torch

    return torch.empty(0).device  # torch.get_default_device takes ten times as long


def _set_default_device(device: Any) -> None:
    import torch

    # A default device slows every call of torch, also if it is the CPU.
    torch.set_default_device(None if device.type == "cpu" else device)


def _get_working_directory() -> str:
    """Return the working directory; "" if it was deleted."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
