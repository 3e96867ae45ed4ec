"""A bar appears on a terminal once work takes longer than two seconds, with the remaining time."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ratchet.observe.progress_bar import show_bar


@pytest.mark.parametrize(
    ("seconds", "is_terminal", "is_shown"),
    [(1.5, True, True), (0.5, True, False), (9, False, False)],
)
def test_only_slow_work_on_a_terminal_shows_a_bar(seconds, is_terminal, is_shown):
    screen, now = io.StringIO(), [50.0]
    console = Console(file=screen, force_terminal=is_terminal, width=80, color_system=None)
    with show_bar("rows", 10, console=console, clock=lambda: now[0]) as advance:
        for _ in range(4):
            now[0] += seconds
            advance(1)
    text = screen.getvalue()
    assert bool(text) is is_shown
    if is_shown:
        assert "rows" in text
        assert "4/10" in text
        assert "0:00:09" in text  # the 6 rows that remain take 1.5 s each
