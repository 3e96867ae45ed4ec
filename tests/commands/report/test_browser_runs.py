"""Many runs, stages and constant metrics in a real browser: the list of runs, the colours of those
that are shown, the boundaries of stages, and lines that have no range."""

from __future__ import annotations

import json
import re
from itertools import combinations
from math import dist
from pathlib import Path

import pytest
from commands.report.made_runs import make_run
from commands.report.test_browser import (  # noqa: F401
    card,
    inked,
    ready,
    show,
    until,
)

from ratchet.commands.report import write_report
from ratchet.commands.report.page import read_asset
from ratchet.commands.report.server import HOST, bind, make_app
from ratchet.runs.run_dir import RunDirectory
from ratchet.web.server import ServerThread

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "playwright")]

STAGES = [{"name": "sft", "steps": 4}, {"name": "rl", "steps": 6}]


def make_stage_run(path: Path, rows: list[dict], stages: list[dict] = STAGES) -> RunDirectory:
    """Return a run of two stages with these metrics of the steps from 1 on."""
    directory = make_run(path, steps=1)
    directory.config.write_text(json.dumps({"name": "staged", "stages": stages}))
    directory.metrics.write_text(
        "".join(json.dumps({"step": step, **row}) + "\n" for step, row in enumerate(rows, 1))
    )
    return directory


@pytest.fixture
def many(tmp_path):
    """The address of eight runs: run-K has K + 1 of 10 steps, `empty` has none."""
    root = tmp_path / "runs"
    for number in range(7):
        rows = [{"eval/accuracy": number / 10, "time/step_s": 2.0}] * (number + 1)
        directory = make_stage_run(root / f"run-{number}", rows)
        directory.log.write_text(f"2026-01-0{number + 1}T10:20:30.000Z INFO a: b\n")
    (root / "run-3" / ".status").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    make_stage_run(root / "empty", [])
    server = ServerThread(make_app(root), bind(0))
    yield root, f"http://{HOST}:{server.address[1]}/"
    server.close()


def read_list(page) -> list[list[str]]:
    rows = page.locator("table.list tbody tr").all_inner_texts()
    return [row.strip().split("\t") for row in rows]


def names(page) -> list[str]:
    return [row[0] for row in read_list(page)]


def test_many_runs_stand_in_a_list_newest_first(show, many):  # noqa: F811
    page = show(many[1], "runs")
    assert page.locator("button.run").count() == 0
    rows = read_list(page)
    assert [row[0] for row in rows] == [*(f"run-{i}" for i in (6, 5, 4, 3, 2, 1, 0)), "empty"]
    assert rows[3][1:] == ["running", "4 of 10", "12 s", "2026-01-04 10:20", "30.0 %", "–"]
    assert rows[0][1:4] == ["stopped", "7 of 10", "–"]
    # An empty run changed last, and is not chosen.
    shown = page.evaluate("app.shown.map((run) => run.name)")
    assert len(shown) == 4
    assert "empty" not in shown


def test_rewards_outside_0_and_1_are_no_percentages(show, many):  # noqa: F811
    page = show(many[1], "runs")
    shown = page.evaluate(
        """() => {
          const run = app.runs.find((run) => run.name === "run-3");
          Object.assign(run.progress, { accuracy: -12, is_share: false });
          RunList.draw();
          return document.querySelector("table.list").innerText;
        }"""
    )
    assert "-12" in shown
    assert "-1200" not in shown


def test_the_list_is_searched_and_sorted(show, many):  # noqa: F811
    page = show(many[1], "runs")
    page.click("th button >> text=Held-out accuracy")
    assert names(page)[0] == "run-6"
    page.click("th button >> text=Held-out accuracy")
    assert (names(page)[0], names(page)[-1]) == ("run-0", "empty")  # what is missing stays last
    page.click("th button >> text=Run")
    assert names(page) == ["empty", *(f"run-{i}" for i in range(7))]
    page.fill("#run-filter", "running")
    assert names(page) == ["run-3"]


def test_runs_are_shown_and_hidden_from_the_list(show, many):  # noqa: F811
    page = show(many[1], "runs")
    page.click("#hide-all")
    until(page, "document.querySelector('.run-count').innerText === '0 of 8 runs shown'")
    page.get_by_label("show run-2").check()
    until(page, "document.querySelector('.run-count').innerText === '1 of 8 runs shown'")
    page.click("#tab-curves")
    ready(page, "curves")
    assert page.locator("table.runs tbody tr").count() == 1
    assert page.locator("table.runs tbody").inner_text().split("\t")[:3] == [
        "run-2",
        "stopped",
        "3 of 10",
    ]


def test_a_run_that_begins_later_is_shown_from_its_first_step_on(show, many):  # noqa: F811
    root, address = many
    page = show(address, "runs")
    directory = make_stage_run(root / "later", [])
    page.wait_for_selector("table.list >> text=later")
    assert not page.get_by_label("show later").is_checked()
    directory.metrics.write_text('{"step": 1, "eval/accuracy": 0.5}\n')
    until(page, "app.shown.some((run) => run.name === 'later')")


def test_shown_runs_have_distinct_colours_and_keep_them(show, tmp_path):  # noqa: F811
    paths = [make_run(tmp_path / f"run-{i:02d}", steps=1).path for i in range(12)]
    page = show(write_report(paths, tmp_path / "r.html", rollouts=8).as_uri())
    looks = "app.shown.map((run) => run.color + run.dash)"
    colors = page.evaluate(looks)
    assert len(set(colors)) == 12
    assert page.evaluate("app.runs.map((run) => run.dash.length > 0)") == [False] * 10 + [True] * 2
    page.evaluate("app.showRun(app.runs[3], false)")
    until(page, "app.shown.length === 11")
    assert page.evaluate(looks) == [*colors[:3], *colors[4:]]
    page.evaluate("app.showRun(app.runs[3], true)")
    until(page, "app.shown.length === 12")
    assert page.evaluate(looks) == colors


def to_lab(color: str) -> tuple[float, float, float]:
    """Return CIELAB coordinates of #rrggbb (D65), in which distances are those that are seen."""
    channels = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    x = (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047
    y = 0.2126 * r + 0.7152 * g + 0.0722 * b
    z = (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883
    x, y, z = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in (x, y, z)]
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_the_ten_colours_are_told_apart():
    colors = re.findall(r"--run-\d: (#[0-9a-f]{6});", read_asset("style.css"))
    assert len(colors) == 30  # light, dark, and dark by the system
    for first in (0, 10):
        labs = [to_lab(color) for color in colors[first : first + 10]]
        assert min(dist(a, b) for a, b in combinations(labs, 2)) > 30
    assert colors[10:20] == colors[20:]


# --- stages


def test_a_metric_of_other_scale_gets_a_chart_for_each_stage(show, tmp_path):  # noqa: F811
    rows = [{"policy/loss": 3 - i / 2, "policy/lr": 1 + i} for i in range(4)]
    rows += [{"policy/loss": i / 1000, "policy/lr": 1 + i} for i in range(6)]
    directory = make_stage_run(tmp_path / "run", rows)
    page = show(write_report([directory.path], tmp_path / "r.html", rollouts=8).as_uri())
    page.fill("#metric-filter", "policy/")
    until(page, "document.querySelectorAll('.card canvas').length === 3")
    cards = page.locator(".card[data-metric='policy/loss']")
    assert cards.locator(".stage").all_inner_texts() == ["sft", "rl"]
    assert cards.locator(".legend").all_inner_texts() == ["1.5", "0.005"]
    assert page.locator(".card[data-metric='policy/lr']").count() == 1
    page.get_by_label("by stage, where scales differ").uncheck()
    until(page, "document.querySelectorAll('.card canvas').length === 2")


def test_stage_boundaries_are_marked_on_every_axis(show, tmp_path):  # noqa: F811
    rows = [{"policy/lr": i, "time/step_s": 2.0, "rollout/trained_tokens": 5.0} for i in range(10)]
    paths = [make_stage_run(tmp_path / name, rows).path for name in ("one", "two")]
    page = show(write_report(paths, tmp_path / "r.html", rollouts=8).as_uri())
    for axis, x in (("step", 5), ("time", 10), ("tokens", 25)):
        found = page.evaluate(f"boundaries(app.shown, '{axis}')")
        assert found == [{"x": x, "name": "rl", "color": "var(--muted)"}]
    page.fill("#metric-filter", "policy/lr")
    until(page, "document.querySelectorAll('.card canvas').length === 1")
    muted = page.evaluate("css('--muted')")
    gray = ",".join(str(int(muted[i : i + 2], 16)) for i in (1, 3, 5))
    with_mark = inked(page, "policy/lr").get(gray, 0)
    page.evaluate("app.runs.forEach((run) => run.facts.progress.stages = [])")
    page.evaluate("Curves.draw()")
    until(page, "document.querySelectorAll('.card canvas').length === 1")
    assert with_mark > inked(page, "policy/lr").get(gray, 0) + 20


# --- lines without a range


@pytest.mark.parametrize(
    ("metric", "value"),
    [
        ("batch/advantage/zero_share", 0.0),
        ("batch/zero", 0.0),
        ("batch/five", 5.0),
        ("batch/minus", -2e9),
        ("batch/share", 1.0),
    ],
)
@pytest.mark.parametrize("steps", [1, 9, 100])
def test_a_constant_metric_is_drawn(show, tmp_path, metric, value, steps):  # noqa: F811
    directory = make_stage_run(tmp_path / "run", [{metric: value}] * steps, stages=[])
    page = show(write_report([directory.path], tmp_path / "r.html", rollouts=8).as_uri())
    until(page, "document.querySelectorAll('.card canvas').length === 1")
    blue = page.evaluate("css('--run-0')")
    line = ",".join(str(int(blue[i : i + 2], 16)) for i in (1, 3, 5))
    assert inked(page, metric).get(line, 0) > (3 if steps == 1 else 200)
    low, high = page.evaluate("(([plot]) => [plot.scales.y.min, plot.scales.y.max])([...charts])")
    assert low < value < high or (metric.endswith("share") and value == high)
