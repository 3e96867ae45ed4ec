"""Curves of numbers that no axis can hold, in a real browser: they are left out or the axis is
widened, and nothing breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands.report.made_runs import make_run

# Its page that fails a test for any complaint.
from commands.report.test_browser import card, inked, show, until  # noqa: F401

from ratchet.commands.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "playwright")]

# As they stand in metrics.jsonl; 1e999 is read as infinity.
ODD = {
    "plain": ["1.5", "2.5", "0.5"],
    "huge": ["1e308", "-1e308", "1.7e308"],
    "huge constant": ["1e308"] * 3,
    "large constant": ["9007199254740993"] * 3,
    "large and close": ["1e17", "100000000000000016", "100000000000000032"],
    "tiny": ["5e-324", "1e-320", "2e-308"],
    "tiny constant": ["5e-324"] * 3,
    "close to one": ["1", "1.0000000000000002", "1"],
    "wide": ["1e-300", "1", "1e300"],
    "infinite": ["1e999", "-1e999", "3"],
    "infinite alone": ["1e999", "1e999", "1e999"],
    "zero": ["0", "-0.0", "0"],
    "negative": ["-1", "-1e-9", "-1e9"],
    "nothing": ["null", "null", "null"],
    'a "quoted" <b>name</b>\\': ["1", "2", "3"],
    "time/step_s": ["1e999", "1e308", "1e308"],
    "rollout/trained_tokens": ["1e300", "1e-300", "-1e300"],
}


@pytest.fixture
def odd(tmp_path: Path) -> str:
    """The address of a report of two runs, the second at enormous steps."""
    for run, steps in (("one", (1, 2, 3)), ("two", (2**53, 2**53 + 2, 2**60))):
        lines = [
            "{"
            + ", ".join(
                [
                    f'"step": {step}',
                    *(f"{json.dumps(name)}: {values[i]}" for name, values in ODD.items()),
                ]
            )
            + "}\n"
            for i, step in enumerate(steps)
        ]
        (make_run(tmp_path / run, steps=1).metrics).write_text("".join(lines))
    return write_report(
        [tmp_path / "one", tmp_path / "two"], tmp_path / "r.html", rollouts=8
    ).as_uri()


DRAW_ALL = (
    "for (const card of document.querySelectorAll('.card')) if (!Curves.plots.has(card)) "
    "Curves.plot(card)"
)
ALL_DRAWN = (
    "[...document.querySelectorAll('.card')].every((card) => card.querySelector('canvas, .note'))"
)


@pytest.mark.fault("S17")
def test_odd_numbers_draw_without_an_error(show, odd) -> None:  # noqa: F811
    page = show(odd)
    page.fill("#metric-filter", "/./")
    until(page, "Curves.filtered")
    for logarithmic in (False, True):
        for axis in ("step", "tokens", "time"):
            page.get_by_label("logarithmic").set_checked(logarithmic)
            page.select_option("select[aria-label=Over]", axis)
            page.evaluate(DRAW_ALL)
            until(page, ALL_DRAWN)
    page.select_option("select[aria-label=Over]", "step")
    page.get_by_label("logarithmic").set_checked(False)
    page.fill("#metric-filter", "plain")
    until(page, "document.querySelectorAll('.card canvas').length === 1")
    assert sum(inked(page, "plain").values()) > 20


ZOOMS = [
    *([1, 1], [2, 1], [1, 1 + 1e-15], [2**53, 2**53 + 2], [2**53, 2**53 + 8], [1e17, 1e17 + 64]),
    *([-1e308, 1e308], [1e300, 2e300], [0, 5e-324], [1, 3]),
]


@pytest.mark.fault("S17")
def test_no_zoom_breaks_a_chart(show, odd) -> None:  # noqa: F811
    page = show(odd)
    page.fill("#metric-filter", "plain")
    until(page, "document.querySelectorAll('.card canvas').length === 1")
    for low, high in ZOOMS:
        page.evaluate(
            "([min, max]) => { for (const plot of charts) plot.setScale('x', {min, max}) }",
            [low, high],
        )
        page.wait_for_timeout(20)
    page.click("button.run >> text=two")
    box = card(page, "plain").locator(".u-over").bounding_box()
    for width in (1, 3, 100):
        page.mouse.move(box["x"] + 50, box["y"] + 20)
        page.mouse.down()
        page.mouse.move(box["x"] + 50 + width, box["y"] + 20)
        page.mouse.up()
    page.mouse.dblclick(box["x"] + 50, box["y"] + 20)
    assert sum(inked(page, "plain").values()) > 20
