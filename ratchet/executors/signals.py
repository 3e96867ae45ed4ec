"""Keep a run's signal handlers installed until the run ends, whatever libraries do to them.

Libraries replace handlers when they start or later: `ray.init` replaces the SIGTERM handler,
SwanLab the SIGINT handler, uvicorn both. A run without its handler would end in the middle of a
step, without a save.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

log = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

DELIBERATE_SIGNALS = (signal.SIGINT, signal.SIGTERM)
STOP_SIGNALS = (*DELIBERATE_SIGNALS, signal.SIGHUP)
SAME_SIGNAL_S = 1.0  # `timeout` signals its command twice at once

# Set a moment after this process's supervisor has ended; nothing forwards signals from then on.
_supervisor_has_ended = threading.Event()


class SecondSignal(KeyboardInterrupt):
    """An exception for a second SIGINT or SIGTERM; it ends the process at once.

    Attributes:
        number: The number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _HandlerKeeper:
    """A set of signal handlers, and a replacement of `signal.signal` that keeps them installed.

    Attributes:
        install: The original `signal.signal`.
    """

    def __init__(self, handlers: Mapping[signal.Signals, Handler]) -> None:
        self.handlers = dict(handlers)
        self.install = signal.signal
        self._owner = os.getpid()

    def install_all(self) -> None:
        """Install all handlers and unblock their signals."""
        # A blocked signal would stay pending, and would not wake the main thread.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.handlers)
        for number, handler in self.handlers.items():
            self.install(number, handler)

    def replace_signal(self, number: int, handler: Handler) -> Handler:
        """Stand in for `signal.signal`: don't install `handler` for a kept signal.

        A forked child may install it.
        """
        if os.getpid() == self._owner and number in self.handlers:
            return self.handlers[signal.Signals(number)]
        return self.install(number, handler)


_keeper: _HandlerKeeper | None = None


@contextmanager
def keep_handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install handlers that no library can replace inside the block; enter it in the main thread.

    Inside the block `signal.signal` ignores other handlers for these signals. Changes that bypass
    it are undone by `reinstall_handlers`.
    """
    global _keeper
    outer = _keeper
    previous = {number: signal.getsignal(number) for number in handlers}
    keeper = _HandlerKeeper(handlers)
    signal.signal = keeper.replace_signal
    _keeper = keeper
    try:
        keeper.install_all()
        yield
    finally:
        signal.signal = keeper.install
        _keeper = outer
        for number, handler in previous.items():
            # None means that the handler was not installed from Python; it can't be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def reinstall_handlers() -> None:
    """Reinstall the kept handlers and unblock their signals; it takes 11 microseconds.

    This undoes what native code changed by `sigaction` or a signal mask. Without kept handlers, or
    outside the main thread, it does nothing.
    """
    if _keeper is not None and threading.current_thread() is threading.main_thread():
        _keeper.install_all()


@contextmanager
def handle_stop_signals(
    request_stop: Callable[[signal.Signals], object], *, forwarded: bool = False
) -> Iterator[None]:
    """Call `request_stop` with the first SIGINT, SIGTERM or SIGHUP in the block.

    A second SIGINT or SIGTERM raises SecondSignal. SIGHUP is not counted for that, because a closed
    terminal sends several, and service managers send one after SIGTERM. If SIGHUP was ignored
    before (`nohup`), it stays ignored.

    Args:
        request_stop: The function to call.
        forwarded: True to never raise SecondSignal, because the parent process forwards signals
            that this process may also get directly, as torchrun and `--supervise` do under Slurm.
            The parent kills processes that don't end. It counts no more once
            `stop_with_supervisor` has found that the parent has ended.
    """
    has_requested = False
    had_deliberate = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal has_requested, had_deliberate
        if number in DELIBERATE_SIGNALS:
            if had_deliberate and (not forwarded or _supervisor_has_ended.is_set()):
                raise SecondSignal(number)
            had_deliberate = True
        if not has_requested:
            has_requested = True
            request_stop(signal.Signals(number))

    handlers: dict[signal.Signals, Handler] = dict.fromkeys(STOP_SIGNALS, handle)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handlers[signal.SIGHUP] = signal.SIG_IGN
    with keep_handlers(handlers):
        yield


def stop_with_supervisor(descriptor: int) -> None:
    """Send SIGTERM to this process when its supervisor has ended, however that came about.

    Args:
        descriptor: The reading end of a pipe whose only writing end the supervisor holds. Programs
            that this process starts will not inherit it.
    """
    os.set_inheritable(descriptor, False)

    def wait() -> None:
        os.read(descriptor, 1)  # The supervisor never writes, so this returns at the pipe's end.
        log.warning("the process of `ratchet train --supervise` has ended: the run ends too")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(SAME_SIGNAL_S)  # A service manager may send one too when its command has ended.
        _supervisor_has_ended.set()

    threading.Thread(target=wait, name="supervisor-watch", daemon=True).start()


@contextmanager
def shield_programs() -> Iterator[None]:
    """Let programs that a library starts in the block survive Ctrl-C and a closed terminal.

    They inherit a mask that blocks SIGINT and SIGHUP. This process handles signals that arrive
    inside the block when the block ends.
    """
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
