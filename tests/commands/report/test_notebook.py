"""What a notebook displays: the curves, the groups and the report of a run, with all text escaped."""

import re

import pytest
from commands.report.made_runs import make_run
from support.browser import collect_complaints

from ratchet.errors import ConfigError, DataError, RunNotFound
from ratchet.notebook import RunView

HOSTILE = "<img src=x onerror=\"document.title='owned'\">\x1b[2J"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunView(make_run(tmp_path_factory.mktemp("runs") / "<b>", say=HOSTILE).path)


@pytest.mark.medium
def test_a_run_shows_its_curves(run):
    steps, rewards = run.read_curves()["reward"]
    assert steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert rewards.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    page = run._repr_html_()
    assert page.count("<svg") == len(run.read_curves())
    assert "&lt;b&gt; (stopped)" in page
    assert "0.1 -> 0.6" in repr(run)


def test_a_group_shows_its_attempts_coloured_by_token(run):
    group = run.show_group(6, 1)
    assert len(group.attempts) == 4
    page = group._repr_html_()
    numbers = [
        value
        for attempt in group.attempts
        for value, version in zip(
            attempt["tokens"]["logprob"], attempt["tokens"]["version"], strict=True
        )
        if version >= 0
    ]
    assert page.count("title='logprob ") == len(numbers) > 0
    least = min(numbers)  # at -5 nats the colour is full
    color = f"rgba(220, 60, 40, {0.75 * min(1, -least / 5):.2f})"
    assert f"title='logprob {least}' style='background:{color}'" in page


@pytest.mark.medium
def test_no_text_of_a_run_is_markup(run):
    pages = [run._repr_html_(), run.show_group(1)._repr_html_(), run.show_report()._repr_html_()]
    assert not any("<img" in page for page in pages)
    assert re.match("<iframe sandbox='allow-scripts' ", pages[2])
    shown = repr(run.show_group(1))
    assert "<img" in shown
    assert "\x1b" not in shown


def test_what_is_not_there_is_named(run, tmp_path):
    with pytest.raises(DataError, match="it has steps 1 to 6"):
        run.show_group(7)
    with pytest.raises(DataError, match="step 6 has 2 groups"):
        run.show_group(6, 2)
    with pytest.raises(ConfigError, match="use one of logprob, advantage"):
        run.show_group(6, color_by="reward")
    with pytest.raises(ConfigError, match="use 0 or more"):
        run.show_report(rollouts=-1)
    with pytest.raises(RunNotFound):
        RunView(tmp_path)


@pytest.mark.slow
@pytest.mark.needs("chromium", "playwright")
def test_a_browser_draws_the_report_inside_the_notebook(run, browser):
    complaints = []
    page = browser.new_page()
    collect_complaints(page, complaints)
    page.set_content(run._repr_html_() + run.show_report()._repr_html_())
    page.frame_locator("iframe").get_by_text("rollout/reward").first.wait_for()
    assert page.title() == ""
    assert complaints == []
