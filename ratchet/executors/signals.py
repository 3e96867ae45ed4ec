"""The one owner of a run's signals: its handlers stand until the run ends, whatever libraries do to
handlers.

Libraries replace handlers when they start, or later: `ray.init` that of SIGTERM, SwanLab that of
SIGINT, uvicorn both. A run that has lost its handler ends in the middle of a step, without a save.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers | None

DELIBERATE = (signal.SIGINT, signal.SIGTERM)
STOPPING = (*DELIBERATE, signal.SIGHUP)


class SecondSignal(KeyboardInterrupt):
    """A second SIGINT or SIGTERM, which ends the process at once.

    number: the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


class _Keeper:
    """Installs handlers, and refuses others of this process.

    install: `signal.signal` as it was before.
    """

    def __init__(self, handlers: Mapping[signal.Signals, Handler]) -> None:
        self.handlers, self.install, self._owner = dict(handlers), signal.signal, os.getpid()

    def hold(self) -> None:
        # A blocked signal would wait for a thread that lets it in, and would not wake the main one.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, self.handlers)
        for number, handler in self.handlers.items():
            self.install(number, handler)

    def refuse(self, number: int, handler: Handler) -> Handler:
        """Stand in for `signal.signal`: a forked child is another process, and does as it likes."""
        if os.getpid() == self._owner and number in self.handlers:
            return self.handlers[signal.Signals(number)]
        return self.install(number, handler)


_keeper: _Keeper | None = None


@contextmanager
def kept(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    """Install handlers that no library replaces before the block ends; enter it in the main thread.

    `signal.signal` ignores other handlers for these signals meanwhile, and `hold` puts right what
    bypasses it.
    """
    global _keeper
    outer, previous = _keeper, {number: signal.getsignal(number) for number in handlers}
    keeper = _Keeper(handlers)
    signal.signal, _keeper = keeper.refuse, keeper
    try:
        keeper.hold()
        yield
    finally:
        signal.signal, _keeper = keeper.install, outer
        for number, handler in previous.items():
            # None: a handler that was not installed from Python can't be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def hold() -> None:
    """Install the kept handlers anew and let their signals in, in 11 microseconds.

    This undoes what native code did to them by `sigaction` or by a mask. Without kept handlers, or
    in another thread than the main one, it does nothing.
    """
    if _keeper is not None and threading.current_thread() is threading.main_thread():
        _keeper.hold()


@contextmanager
def stops_on_signals(
    ask: Callable[[signal.Signals], object], *, forwarded: bool = False
) -> Iterator[None]:
    """Call `ask` with the first SIGINT, SIGTERM or SIGHUP that arrives in the block; raise
    SecondSignal for a second.

    SIGHUP never counts as the second: a closed terminal sends several, and service managers send
    one after SIGTERM. Nor does the first SIGINT or SIGTERM after it. Where SIGHUP was ignored
    before (`nohup`), it stays ignored.

    forwarded: no signal counts as the second, because the parent sends on what this process may
    have got itself, as torchrun does under Slurm. It also kills what does not end.
    """
    asked, deliberate = False, False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked, deliberate
        if number in DELIBERATE and not forwarded:
            if deliberate:
                raise SecondSignal(number)
            deliberate = True
        if not asked:
            asked = True
            ask(signal.Signals(number))

    handlers: dict[signal.Signals, Handler] = dict.fromkeys(STOPPING, handle)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        handlers[signal.SIGHUP] = signal.SIG_IGN
    with kept(handlers):
        yield


@contextmanager
def spares_programs() -> Iterator[None]:
    """Let programs that a library starts in the block outlive Ctrl-C and a closed terminal, whose
    signals go to all of them.

    They inherit a mask that blocks SIGINT and SIGHUP; this process gets what was blocked meanwhile
    at the end.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGHUP))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
