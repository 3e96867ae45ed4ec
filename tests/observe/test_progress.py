"""What is shown, on a terminal and elsewhere, with a clock of our own."""

from __future__ import annotations

import io
from collections.abc import Callable

import pytest
from rich.console import Console

from ratchet.observe.progress import Mode, draw_curves, format_duration, show_progress, sparkline


def console(*, terminal: bool, encoding: str = "utf-8") -> tuple[Console, Callable[[], str]]:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, write_through=True)
    made = Console(
        file=file, force_terminal=terminal, width=140, color_system=None, legacy_windows=False
    )
    return made, lambda: raw.getvalue().decode(encoding)


def run(
    mode: Mode,
    *,
    terminal: bool = False,
    encoding: str = "utf-8",
    every: int = 10,
    stage: str = "rl [bold]",
    steps: int = 25,
) -> str:
    """A stage of steps 101 to 125, two seconds each."""
    screen, text = console(terminal=terminal, encoding=encoding)
    now = [50.0]
    options = {"after_step": 100, "end_step": 125, "mode": mode, "every": every, "console": screen}
    with show_progress(stage, **options, clock=lambda: now[0]) as observe:  # pyright: ignore[reportArgumentType]
        for step in range(101, 101 + steps):
            now[0] += 2.0
            observe(
                step,
                {
                    "rollout/reward": (step - 100) / 25,
                    "policy/loss": 9.0,
                    "time/tokens_per_s": 1234.4,
                },
            )
    return text()


def test_plain_lines() -> None:
    assert run("plain").splitlines() == [
        "rl [bold] 110/125  reward 0.400  1,234 tokens/s  ETA 30s",
        "rl [bold] 120/125  reward 0.800  1,234 tokens/s  ETA 10s",
        "rl [bold] 125/125  reward 1.000  1,234 tokens/s",
    ]


def test_auto_is_plain_elsewhere_and_live_on_a_terminal() -> None:
    assert run("auto") == run("plain")
    assert run("auto", terminal=True) == run("live", terminal=True)


def test_off_is_silent() -> None:
    assert run("off", terminal=True) == ""


def test_live_shows_a_sparkline_and_ends_at_the_last_step() -> None:
    last = run("live", terminal=True).rpartition("rl [bold]")[2]
    for part in ("125/125", "reward ", "▁", "█", "1.000", "1,234 tokens/s"):
        assert part in last


def test_a_terminal_without_unicode_gets_no_blocks() -> None:
    shown = run("live", terminal=True, encoding="ascii")
    assert "125/125" in shown
    assert "reward 1.000" in shown


def test_a_number_that_is_missing_or_null() -> None:
    screen, text = console(terminal=False)
    with show_progress(
        "sft", after_step=0, end_step=2, mode="plain", every=1, console=screen, clock=lambda: 0.0
    ) as observe:
        observe(1, {"policy/loss": None, "policy/loss/nan": 1.0})
        observe(2, {"policy/loss": 2.5})
    assert text().splitlines() == ["sft 1/2  ETA 0s", "sft 2/2  loss 2.500"]


def test_a_reward_takes_the_place_of_the_loss() -> None:
    screen, text = console(terminal=False)
    with show_progress(
        "x", after_step=0, end_step=2, mode="plain", every=1, console=screen, clock=lambda: 0.0
    ) as observe:
        observe(1, {"policy/loss": 1.0})
        observe(2, {"policy/loss": 1.0, "rollout/reward": 0.25})
    assert text().splitlines()[-1] == "x 2/2  reward 0.250"


def test_kl_and_entropy_stand_beside_the_reward() -> None:
    screen, text = console(terminal=False)
    with show_progress(
        "x", after_step=0, end_step=3, mode="plain", every=1, console=screen, clock=lambda: 0.0
    ) as observe:
        observe(
            1,
            {
                "rollout/reward": 0.5,
                "policy/policy_gradient/old_kl": 0.00123,
                "policy/entropy/entropy": 1.5,
            },
        )
        observe(
            2, {"rollout/reward": 0.5, "policy/policy_gradient/old_kl": 0.1, "policy/kl/kl": 0.25}
        )
        observe(3, {"rollout/reward": 0.5, "policy/kl/kl": None, "policy/kl/kl/nan": 1.0})
    assert text().splitlines() == [
        "x 1/3  reward 0.500  KL 0.00123  entropy 1.5  ETA 0s",
        "x 2/3  reward 0.500  KL 0.25  ETA 0s",
        "x 3/3  reward 0.500",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], ""),
        ([3.0], "▅"),
        ([1.0, 1.0], "▅▅"),
        ([0.0, 1.0], "▁█"),
        ([float(i) for i in range(8)], "▁▂▃▄▅▆▇█"),
        ([-1.7e308, 0.0, 1.7e308], "▁▅█"),
    ],
)
def test_sparkline(values: list[float], expected: str) -> None:
    assert sparkline(values) == expected


def test_curves_share_their_scales_and_leave_gaps() -> None:
    assert draw_curves([{1: 0.0, 2: 7.0}, {2: 3.5, 4: 7.0}], 8) == ["▁█ ", " ▅█"]
    # Two steps a character: their means are 0.5 and 2.5, and 7 of a curve that ends first.
    assert draw_curves([{0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}, {0: 7.0}], 2) == ["▁▃", "█ "]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (185, "3m05s"),
        (3599.7, "1h00m"),
        (7620, "2h07m"),
        (360_000, "100h00m"),
    ],
)
def test_duration(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
