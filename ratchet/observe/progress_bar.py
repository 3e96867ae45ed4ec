"""A bar with the remaining time, for commands that work on many things of one kind."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ratchet.utils.terminal_text import make_console

BAR_DELAY_S = 2.0  # work that takes less time shows no bar


@contextmanager
def show_bar(
    unit: str,
    total: int | None,
    *,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Yield a function that counts things that are done.

    On a terminal, a bar appears once the work takes longer than BAR_DELAY_S, and goes at the end.
    Elsewhere nothing is shown.

    Args:
        unit: What is counted, in the plural.
        total: Number of all things; None if it is unknown, and then the bar has no remaining time.
        console: The terminal; None: standard error.
        clock: A clock in seconds.
    """
    console = console or make_console(sys.stderr)
    bar = Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        transient=True,
        redirect_stdout=False,  # results that are piped elsewhere stay there
        get_time=clock,
    )
    task, start_s = bar.add_task(unit, total=total), clock()

    def advance(count: int) -> None:
        bar.advance(task, count)
        if console.is_terminal and not bar.live.is_started and clock() - start_s > BAR_DELAY_S:
            bar.start()

    try:
        yield advance
    finally:
        if bar.live.is_started:
            bar.stop()
