"""Held-out answers, and the recipe and log of a run, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands.report.made_runs import make_run, write_results
from commands.report.test_browser import show, until  # noqa: F401

from ratchet.commands.report import write_report
from ratchet.commands.report.server import HOST, bind, make_app
from ratchet.web.server import ServerThread

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "playwright")]

BEFORE = [("t/0", "1+1", 0.0, "3"), ("t/1", "2+2", 1.0, "4"), ("t/2", "3+3", 0.0, "5")]
AFTER = [("t/0", "1+1", 1.0, "2"), ("t/1", "2+2", 0.5, "5"), ("t/2", "3+3", 0.0, "7")]
BEFORE += [("t/3", "4+4", 1.0, "8"), ("t/4", "5+5", None, "")]
AFTER += [("t/3", "4+4", 1.0, "8"), ("t/4", "5+5", 1.0, "10"), ("t/9", "another", 1.0, "x")]


def make_evaluated_run(path: Path) -> Path:
    directory = make_run(path)
    write_results(directory, "rl/step-00000000", BEFORE)
    write_results(directory, "rl/step-00000003", [(*row[:2], 0.0, "halfway") for row in BEFORE])
    write_results(directory, "rl/step-00000006", AFTER)
    return path


@pytest.fixture(params=["file", "live"])
def address(request, tmp_path):
    """The address of two runs with the same held-out tasks, as a report and by the server."""
    paths = [make_evaluated_run(tmp_path / "runs" / name) for name in ("one", "two")]
    if request.param == "file":
        yield write_report(paths, tmp_path / "r.html", rollouts=8).as_uri()
        return
    server = ServerThread(make_app(tmp_path / "runs"), bind(0))
    yield f"http://{HOST}:{server.address[1]}/"
    server.close()


def read_rows(page) -> list[list[str]]:
    rows = page.locator("table.answers tbody tr").all()
    return [
        [part for text in row.locator("td").all_inner_texts() for part in text.split("\n")]
        for row in rows
    ]


def choose(page, change: str) -> list[str]:
    page.click(f"button[data-change='{change}']")
    return [row[0] for row in read_rows(page)]


def test_answers_of_the_first_and_last_evaluation(show, address):  # noqa: F811
    page = show(address, "answers")
    assert read_rows(page)[0] == ["t/0", "became right · easy", "1+1", "0", "3", "1", "2"]
    assert page.locator("table.answers th").all_inner_texts()[2:] == [
        "one, rl, step 0",
        "one, rl, step 6",
    ]
    assert choose(page, "") == [f"t/{i}" for i in range(5)]  # t/9 is in one of them alone
    assert choose(page, "right") == ["t/0"]
    assert choose(page, "wrong") == ["t/1"]
    assert choose(page, "still-wrong") == ["t/2"]
    assert choose(page, "still-right") == ["t/3"]
    assert choose(page, "unjudged") == ["t/4"]
    assert "failed" in read_rows(page)[0]
    choose(page, "")
    page.fill("#answer-filter", "3+3")
    until(page, "document.querySelectorAll('table.answers tbody tr').length === 1")


def test_answers_of_two_runs(show, address):  # noqa: F811
    page = show(address, "answers")
    page.select_option("select[aria-label='to']", "two")
    page.wait_for_selector("table.answers th >> text=two, rl, step 6")
    page.select_option("select[aria-label='at']", "rl/step-00000006")
    page.wait_for_selector("table.answers th >> text=one, rl, step 6")
    assert page.locator("button[data-change='right']").count() == 0
    assert choose(page, "still-right") == ["t/0", "t/3", "t/4", "t/9"]


def test_other_evaluations_are_read_from_a_live_page(show, tmp_path):  # noqa: F811
    make_evaluated_run(tmp_path / "runs" / "one")
    server = ServerThread(make_app(tmp_path / "runs"), bind(0))
    try:
        page = show(f"http://{HOST}:{server.address[1]}/", "answers")
        page.select_option("select[aria-label='to']", "rl/step-00000003")
        page.wait_for_selector("table.answers >> text=halfway")
        assert choose(page, "wrong") == ["t/1", "t/3"]
    finally:
        server.close()


def test_a_run_without_answers_says_so(show, tmp_path):  # noqa: F811
    path = make_run(tmp_path / "one").path
    page = show(write_report([path], tmp_path / "r.html", rollouts=8).as_uri(), "answers")
    assert "No evaluation of the shown runs has answers" in page.locator("main").inner_text()


def test_the_recipe_and_the_log_of_a_run(show, address, tmp_path):  # noqa: F811
    page = show(address, "recipe")
    keys = page.locator("table.leaves tbody tr").all_inner_texts()
    assert "stages.rl.optimizer.lr" in "".join(keys)
    assert "There is no run.log." in page.locator("main").inner_text()
    page.click("summary >> text=config.yaml")
    assert "kind: bytes" in page.locator("details pre").inner_text()


def test_warnings_of_the_log_are_chosen(show, tmp_path):  # noqa: F811
    directory = make_run(tmp_path / "one")
    time = "2026-01-01T00:00:00.000Z"
    lines = [f"{time} INFO a: fine"] * 600
    lines[550:550] = [f"{time} ERROR b: broken", "Traceback", "  <b>line</b> 3"]
    directory.log.write_text("\n".join(lines) + "\n")
    page = show(write_report([directory.path], tmp_path / "r.html", rollouts=8).as_uri(), "recipe")
    assert page.locator(".log div").count() == 500
    page.get_by_label("warnings and errors only").check()
    assert page.locator(".log div").all_inner_texts() == [
        f"{time} ERROR b: broken",
        "Traceback",
        "  <b>line</b> 3",
    ]
