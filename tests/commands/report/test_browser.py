"""The page in a real browser: what is drawn, opened, filtered and compared; that what a model wrote
does nothing; and that no request leaves."""

import json
import os
import re
import shutil

import pytest
from commands.report.made_runs import grow, make_run, row_of, write_record, write_results
from commands.report.picture_run import make_picture_run
from support.browser import collect_complaints

from ratchet.commands.report import write_report
from ratchet.commands.report.server import HOST, bind, make_app
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.web.server import ServerThread

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "playwright")]

SIZE = {"width": 1366, "height": 820}  # a laptop's
HOSTILE = "</script><img src=x onerror=\"document.title='owned'\"><b>bold</b>"
INKED = """canvas => { // pixels that are not the background, by colour
  const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height), counts = {};
  for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200) {
    const color = [data[i], data[i + 1], data[i + 2]].join();
    counts[color] = (counts[color] || 0) + 1;
  }
  return counts;
}"""


@pytest.fixture
def show(browser):
    """Opens an address in a page of its own. Ends with the test, which fails for an error on the
    console, and for a request for anything but what was opened."""
    pages, complaints, requests = [], [], []

    def opened(address, view="curves", scheme="light"):
        context = browser.new_context(viewport=SIZE, color_scheme=scheme)
        page = context.new_page()
        collect_complaints(page, complaints)
        context.route(
            re.compile("^(?!data:)"),
            lambda route: (requests.append(route.request.url), route.continue_()),
        )
        pages.append((page, address))
        page.goto(f"{address}#{view}")
        ready(page, view)
        return page

    yield opened
    for page, _ in pages:
        page.context.close()
    assert complaints == []
    bases = [address.partition("#")[0] for _, address in pages]
    assert [
        url
        for url in requests
        if not any(url == base or url.startswith(f"{base}api/") for base in bases)
    ] == []


def ready(page, view):
    page.wait_for_selector(f"body[data-ready={view}]")


def until(page, condition, within_ms=15_000):
    """Waits for an expression of the page's. Not `wait_for_function`, which the page's own policy
    stops."""
    for _ in range(within_ms // 50):
        if page.evaluate(condition):
            return
        page.wait_for_timeout(50)
    raise AssertionError(
        f"not in {within_ms} ms: {condition}; there is: {page.locator('main').inner_text()[:500]}"
    )


def go(page, view):
    page.click(f"#tab-{view}")
    ready(page, view)


@pytest.fixture
def report(tmp_path):
    """The address of a report of two runs; from step 4 on they differ."""
    make_run(tmp_path / "one")
    make_run(tmp_path / "two", lr=3e-3, differs_from=4)
    return write_report(
        [tmp_path / "one", tmp_path / "two"], tmp_path / "r.html", rollouts=48
    ).as_uri()


def card(page, metric):
    return page.locator(f".card[data-metric='{metric}']").first


def inked(page, metric):
    return card(page, metric).locator("canvas").evaluate(INKED)


# --- curves


def test_curves_of_both_runs_are_drawn(show, report):
    page = show(report)
    colors = inked(page, "rollout/reward")
    for name in ("--run-0", "--run-1"):
        red, green, blue = (int(page.evaluate(f"css('{name}')")[i : i + 2], 16) for i in (1, 3, 5))
        assert colors.get(f"{red},{green},{blue}", 0) > 50
    assert card(page, "rollout/reward").locator(".legend").inner_text().split() == ["0.6", "0.65"]
    assert page.locator("table.runs tbody tr").count() == 2


def test_what_sentinels_said_is_shown(show, report):
    page = show(report)
    page.click("summary >> text=alarms")
    assert page.locator(".alarms tbody tr").first.inner_text().split("\t") == [
        "one",
        "3",
        "entropy",
        "step 3: good",
    ]


def test_a_run_can_be_hidden(show, report):
    page = show(report)
    page.click("button.run >> text=two")
    card(page, "rollout/reward").locator(".legend >> text=0.65").wait_for(state="detached")
    card(page, "rollout/reward").locator(".legend >> text=0.6").wait_for()
    assert card(page, "rollout/reward").locator(".legend").inner_text() == "0.6"


def test_metrics_are_chosen_smoothed_and_drawn_over_other_axes(show, report):
    page = show(report)
    page.fill("#metric-filter", "/entropy|loss/")
    until(page, "document.querySelectorAll('.card').length === 2")
    before = page.locator("canvas").count()
    page.select_option("select[aria-label=Over]", "tokens")
    page.get_by_label("logarithmic").check()
    page.locator("#smoothing").fill("0.9")
    until(page, "document.querySelectorAll('.card canvas').length === 2")
    assert before == 2
    assert sum(inked(page, "policy/entropy/entropy").values()) > 100


def test_the_cursor_shows_numbers_of_a_step(show, report):
    page = show(report)
    box = card(page, "rollout/reward").locator(".u-over").bounding_box()
    page.mouse.move(box["x"] + 1, box["y"] + 20)
    until(
        page,
        'document.querySelector(\'.card[data-metric="rollout/reward"] '
        ".legend').innerText.split(/\\s+/).join() === '0.1,0.1'",
    )


# --- light and dark


def test_dark_is_the_systems_and_can_be_chosen(show, report):
    page = show(report, scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(background)
    page.click("#theme")  # light
    light = page.evaluate(background)
    page.click("#theme")  # dark
    assert page.evaluate(background) == dark != light
    page.reload()
    ready(page, "curves")
    assert page.locator("#theme").inner_text().endswith("dark")  # it is remembered


# --- rollouts


def listed(page):
    return page.locator("#found").inner_text().split(" of ")[0]


def test_rollouts_are_filtered(show, report):
    page = show(report, "rollouts")
    assert listed(page) == "48"
    page.fill("#from", "2")
    page.fill("#to", "3")
    until(page, "document.getElementById('found').innerText.startsWith('16 ')")
    page.fill("#least", "0.5")
    until(page, "document.getElementById('found').innerText.startsWith('2 ')")
    page.fill("#least", "")
    until(page, "document.getElementById('found').innerText.startsWith('16 ')")
    page.select_option("select[aria-label=Outcome]", "failed")
    assert listed(page) == "2"
    page.select_option("select[aria-label=Outcome]", "")
    page.select_option("select[aria-label=Tag]", "hard")
    assert listed(page) == "8"
    page.select_option("select[aria-label=Became]", "trained")
    assert listed(page) == "0"
    page.select_option("select[aria-label=Became]", "zero")
    assert listed(page) == "8"
    page.fill("#text", "GOOD 3.1")
    until(page, "document.getElementById('found').innerText.startsWith('1 ')")
    assert page.locator(".row").count() == 1


def test_a_rollout_is_opened_with_its_tools(show, report):
    page = show(report, "rollouts")
    page.locator(".row").nth(1).click()
    article = page.locator("article.rollout")
    assert article.locator("h3").inner_text().startswith("one, step 1, attempt 2")
    assert article.locator(".message .who").first.inner_text() == "system"
    facts = dict(
        zip(*(article.locator(part).all_inner_texts() for part in ("dt", "dd")), strict=True)
    )
    assert facts["turn rewards"] == "0.25, –"
    assert facts["outcome"] == "scored"
    assert article.locator(".call b").inner_text() == "calculator"
    assert '"sum"' in article.locator(".call pre").inner_text()
    assert article.locator(".message.tool .text").inner_text() == "the tool says 7"
    assert article.locator(".message.assistant .text").last.inner_text() == "good 1.1"
    page.keyboard.press("ArrowDown")  # the next
    page.wait_for_selector("article h3:has-text('attempt 3')")
    assert "Traceback" in page.locator(".failure").inner_text()


def test_tokens_are_coloured_by_each_of_their_numbers(show, report):
    page = show(report, "rollouts")
    page.locator(".row").first.click()
    page.click("#view-tokens")
    assert page.locator(".stretch.prompt .text").inner_text() == "add 0"
    assert page.locator(".stretch.policy .text").inner_text() == "good 1.0"
    backgrounds = set()
    for colouring in ("logprob", "advantage", "ratio", "version", "share"):
        page.select_option("select[aria-label='Colour by']", colouring)
        page.wait_for_selector(".stretch.policy .t[style]")
        backgrounds.add(page.locator(".stretch.policy .t[style]").last.get_attribute("style"))
        assert page.locator(".stretch.prompt .t[style]").count() == 0
    assert len(backgrounds) >= 4
    page.locator(".stretch.policy .t").nth(1).hover()
    tip = page.locator("#tip.on").inner_text()
    assert '"o"' in tip
    assert "-0.5" in tip


def test_end_tokens_are_marked_and_so_is_a_missing_one(show, tmp_path):
    directory = make_run(tmp_path / "one", steps=1)
    tokenizer = byte_tokenizer()
    rows = [row_of(2, 0, attempt, "scored", 1.0, "yes") for attempt in range(2)]
    end = tokenizer.eos_ids[0]
    rows[0]["tokens"] = [*rows[0]["tokens"][:-1], end]
    rows[1] |= {"truncated": True, "outcome": "truncated"}
    write_record(directory.steps, [2], rows)
    page = show(write_report([directory.path], tmp_path / "r.html", rollouts=64).as_uri())
    go(page, "rollouts")
    page.fill("#from", "2")
    until(page, "document.getElementById('found').innerText.startsWith('2 ')")
    page.locator(".row").first.click()
    page.click("#view-tokens")
    page.wait_for_selector(".t.special")
    assert page.locator(".t.special").all_inner_texts() == [
        tokenizer.decode([end], skip_special=False)
    ]
    assert page.locator(".cut").count() == 0
    page.locator(".row").last.click()
    page.wait_for_selector(".cut >> text=no end token")
    assert page.locator(".t.special").count() == 0


def test_the_same_prompt_stands_side_by_side(show, report):
    page = show(report, "rollouts")
    page.locator(".row").first.click()
    draws = page.locator(".occurrences .draw")
    assert draws.count() == 12  # six steps of two runs
    page.locator(".occurrences .siblings", has_text="two").locator(".draw").last.click()
    until(page, "document.querySelectorAll('article.rollout').length === 2")
    headings = page.locator("article.rollout h3").all_inner_texts()
    assert headings[0].startswith("one, step 1")
    assert headings[1].startswith("two, step 6")
    page.locator(".draw.on").click()
    until(page, "document.querySelectorAll('article.rollout').length === 1")


def test_a_click_is_not_lost_when_the_list_is_painted_meanwhile(show, report):
    page = show(report, "rollouts")
    second = page.locator(".row").nth(1)
    second.hover()
    page.mouse.down()
    # as a scroll's event does, whenever it comes
    page.evaluate("Browser.list.scrollTop = 1, Browser.paint()")
    page.mouse.up()
    until(page, "document.querySelectorAll('.row')[1].classList.contains('chosen')")


def test_rows_stand_in_order_wherever_the_list_is_scrolled_to(show, report):
    page = show(report, "rollouts")
    placed = """top => {
      Browser.list.scrollTop = top, Browser.paint();
      return [...document.querySelectorAll('.row')].map((row) => parseInt(row.style.top) / 28);
    }"""
    for top in (300, 10_000, 500, 0):
        places = page.evaluate(placed, top)
        assert places == list(range(places[0], places[-1] + 1))
        assert 28 * places[0] <= page.evaluate("Browser.list.scrollTop")
    assert places[0] == 0


def test_a_rollout_whose_texts_are_not_in_the_file_says_so(show, tmp_path):
    make_run(tmp_path / "one")
    address = write_report([tmp_path / "one"], tmp_path / "r.html", rollouts=4).as_uri()
    page = show(address, "rollouts")
    assert listed(page) == "4"
    page.get_by_label("only with texts").uncheck()
    assert listed(page) == "48"
    page.locator(".row").last.click()
    page.wait_for_selector("text=not in this file")


# --- tokens, time, differences


def test_the_waterfall_adds_up(show, report):
    page = show(report, "tokens")
    panel = page.locator(".panel").first
    labels = panel.locator(".waterfall .label").all_inner_texts()
    amounts = panel.locator(".waterfall .amount").all_inner_texts()[::2]
    # Six steps of eight answers of 8 tokens: 2 train, 1 fails, 1 is cut off, and 4 have equal
    # rewards.
    assert dict(zip(labels, amounts, strict=True)) == {
        "Sampled": "384",
        "Failed": "−48",
        "Truncated": "−48",
        "Zero variance": "−192",
        "Trained": "96",
        "… clipped": "24",
    }
    assert (
        panel.locator(".prompts").inner_text() == "Prompts of the whole run: 3 issued, 1 trained."
    )
    page.fill("#waterfall-to", "1")
    until(page, "document.querySelector('.waterfall .amount').innerText === '64'")
    assert sum(panel.locator("canvas").evaluate(INKED).values()) > 1000


def test_the_phases_of_the_steps(show, report):
    page = show(report, "time")
    phases, machine = page.locator(".panel").first.locator("table").all()
    rows = phases.locator("tbody tr").all_inner_texts()
    assert [row.split("\t")[:2] for row in rows] == [
        ["Drawing groups and rollouts", "50.0 %"],
        ["Optimizer steps", "25.0 %"],
        ["Everything else", "25.0 %"],
    ]
    found = {
        row.split("\t")[0]: row.split("\t")[1:]
        for row in machine.locator("tbody tr").all_inner_texts()
    }
    assert found["FLOP utilisation (MFU)"] == ["25.0 %"] * 4
    assert found["Memory of the run's processes, GiB"][1] == "2"
    assert found["Used of the run's disk"][0] == "50.0 %"
    assert found["Samples/s"][1] == "10"
    assert sum(page.locator("canvas").first.evaluate(INKED).values()) > 1000


def test_what_was_planned_stands_beside_what_was_measured(show, tmp_path):
    run = make_run(tmp_path / "one")
    stage = {"stage": "rl", "steps": 6, "step_s": 1.25}
    run.plan.write_text(json.dumps({"peak_bytes": 96 * 2**20, "stages": [stage]}))
    page = show(write_report([run.path], tmp_path / "r.html", rollouts=8).as_uri(), "time")
    rows = page.locator(".predicted tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["peak memory", "96 MiB", "–", "–"],  # it has not ended
        ["rl: a step", "1.25 s", "1 s", "125.0 %"],
    ]


def test_the_first_step_that_differs(show, report):
    page = show(report, "differences")
    firsts = {
        row.split("\t")[0]: row.split("\t")[1:]
        for row in page.locator(".firsts tbody tr").all_inner_texts()
    }
    assert firsts["Tasks drawn"][0] == "none"
    assert firsts["What was sampled"] == ["4", "rollout 3: reward 0 and 0.5"]
    assert firsts["Metrics"][0] == "4"
    assert "rollout/reward: 0.4 and 0.45" in firsts["Metrics"][1]
    assert firsts["Weights after the step"][0] == "none"
    (leaf,) = page.locator(".panel", has_text="Recipe").locator("tbody tr").all_inner_texts()
    assert leaf.split() == ["stages.rl.optimizer.lr", "0.001", "0.003"]
    page.select_option("select[aria-label=against]", "one")
    until(page, "!document.querySelector('.firsts')")
    assert page.locator(".leaves tbody tr").count() > 3


# --- what a model wrote


def test_what_a_model_wrote_is_inert(show, tmp_path):
    directory = make_run(tmp_path / "one", steps=1, say=HOSTILE)
    rows = [
        row_of(2, group, attempt, "scored", attempt % 2, HOSTILE)
        for group in range(2)
        for attempt in range(4)
    ]
    for row in rows:
        for name in (
            "task",
            "environment",
            "tag",
            "stage",
            "failure",
            "failure_detail",
            "group",
            "answer",
            "task_meta",
        ):
            row[name] = f"{HOSTILE}{row['group_index']}" if name in ("task", "tag") else HOSTILE
        row["reward_parts"] = {HOSTILE: 1.0, "other": 2.0}
        row["metrics"] = {HOSTILE: 1.0}
        row["messages"][2]["tool_calls"][0] |= {
            "name": HOSTILE,
            "arguments": HOSTILE,
            "id": HOSTILE,
        }
        row["messages"][3] |= {"content": HOSTILE, "tool_call_id": HOSTILE, "role": HOSTILE}
        row["messages"][1]["parts"] = [
            {"type": "image", "value": HOSTILE},
            {"type": "text", "value": HOSTILE},
        ]
    write_record(directory.steps, [2], rows)
    write_results(directory, "rl/step-00000000", [(HOSTILE, HOSTILE, 0.0, HOSTILE)])
    directory.log.write_text(f"2026-01-01T00:00:00.000Z WARNING a: {HOSTILE}\n{HOSTILE}\n")
    grow_metrics = directory.metrics.read_text().replace(
        '"rollout/reward"', '"rollout/<img src=x onerror=1>"'
    )
    directory.metrics.write_text(grow_metrics)
    page = show(write_report([directory.path], tmp_path / "r.html", rollouts=64).as_uri())
    title = page.title()
    go(page, "rollouts")
    page.locator(".row").last.click()
    page.wait_for_selector("article h3:has-text('step 2')")
    assert page.locator(".message.assistant .text").last.inner_text() == HOSTILE
    page.click("#view-tokens")
    assert page.locator(".stretch.policy .text").inner_text() == HOSTILE
    page.locator(".stretch.policy .t").first.hover()
    for view in ("tokens", "time", "answers", "recipe", "differences", "curves"):
        go(page, view)
    assert page.locator("img, main b:has-text('bold')").count() == 0
    assert page.title() == title


def test_markup_that_got_in_after_all_would_do_nothing(browser, report):
    """A page of its own: the console tells of what the policy stopped."""
    page = browser.new_page()
    page.goto(report)
    ready(page, "curves")
    title = page.title()
    with page.expect_console_message(lambda message: "Content Security Policy" in message.text):
        page.evaluate(
            """document.body.insertAdjacentHTML('afterbegin', `<i onclick="document.title='owned'" id=x>x</i>`)"""
        )
        page.evaluate("document.getElementById('x').click()")
    assert page.title() == title
    page.close()


# --- live


@pytest.fixture
def served(tmp_path):
    directory = make_run(tmp_path / "runs" / "one")
    server = ServerThread(make_app(tmp_path / "runs"), bind(0))
    yield directory, f"http://{HOST}:{server.address[1]}/"
    server.close()


def test_a_live_page_follows_a_run(show, served, tmp_path):
    directory, address = served
    page = show(address)
    assert card(page, "rollout/reward").locator(".legend").inner_text() == "0.6"
    grow(directory, [7, 8])
    until(
        page,
        "document.querySelector('.card[data-metric=\"rollout/reward\"] .legend').innerText === "
        "'0.8'",
    )
    make_run(tmp_path / "runs" / "two", steps=3)
    page.wait_for_selector("button.run.on >> text=two")


def test_of_many_runs_the_newest_are_shown_and_others_when_they_are_chosen(show, served, tmp_path):
    _, address = served
    for number in range(5):
        path = make_run(tmp_path / "runs" / f"more-{number}", steps=2).metrics
        os.utime(path, (10**9 + number, 10**9 + number))  # long ago
    page = show(address)
    assert page.locator("button.run.on").all_inner_texts() == ["more-2", "more-3", "more-4", "one"]
    page.click("button.run >> text=more-0")
    page.wait_for_selector("table.runs >> text=more-0")
    assert len(card(page, "rollout/reward").locator(".legend").inner_text().split()) == 5


def test_a_live_page_opens_any_rollout(show, served):
    directory, address = served
    page = show(address, "rollouts")
    assert listed(page) == "48"
    page.select_option("select[aria-label=Order]", "-step")
    page.locator(".row").first.click()
    page.wait_for_selector("article h3:has-text('step 6')")
    page.fill("#text", "good 5.1")
    until(page, "document.getElementById('found').innerText.startsWith('2 ')")
    page.fill("#text", "")
    grow(directory, [7])
    until(page, "app.runs[0].rollouts.count === 56")


PICTURES = """() => [...document.querySelectorAll('.rollout')].map(rollout =>
  [...rollout.querySelectorAll('.picture img')].map(image => [image.alt, image.naturalWidth, image.naturalHeight]))"""


@pytest.mark.parametrize("live", [False, True])
def test_images_and_clips_are_in_the_conversation(live, show, tmp_path):
    make_picture_run(tmp_path / "run", question=f"How many circles? {HOSTILE}")
    server = None
    if live:
        server = ServerThread(make_app(tmp_path), bind(0))
        address = f"http://{HOST}:{server.address[1]}/"
    else:
        address = write_report([tmp_path / "run"], tmp_path / "r.html", rollouts=8).as_uri()
    try:
        page = show(address, "rollouts")
        page.click(".row >> nth=0")
        until(page, "document.querySelectorAll('.picture img').length >= 3")
        until(
            page,
            "[...document.querySelectorAll('.picture img')].every(image => image.complete && "
            "image.naturalWidth)",
        )
        first, *_ = page.evaluate(PICTURES)
        # The one in a file is known by its place among those that the model was shown; the large
        # one was scaled down.
        assert first == [
            ["image 1 of the user", 48, 48],
            ["image 1 of the user", 640, 457],
            ["image 2 of the user: far.png", 48, 48],
        ]
        until(page, "document.querySelector('audio').readyState >= 1")
        assert page.evaluate("document.querySelector('audio').duration") == pytest.approx(
            0.2, abs=0.02
        )
        assert page.locator("audio").first.get_attribute("aria-label") == "audio 1 of the user"
        assert page.locator(".media").all_inner_texts()[:2] == [
            "video: not in this page",
            "image: not in this page",
        ]
        page.click(".picture >> nth=0")
        large = page.locator("dialog.enlarged[open] img")
        assert (
            large.bounding_box()["width"]
            > 300
            > page.locator(".picture img").first.bounding_box()["width"]
        )
        page.keyboard.press("Escape")
        until(page, "!document.querySelector('dialog')")
        assert page.title() != "owned"
        assert "owned" in page.locator(".conversation").first.inner_text()
    finally:
        if server is not None:
            server.close()


def test_a_run_that_was_copied_without_its_media_says_so(show, tmp_path):
    directory = make_picture_run(tmp_path / "run")
    shutil.rmtree(directory.steps / "media")
    page = show(
        write_report([tmp_path / "run"], tmp_path / "r.html", rollouts=8).as_uri(), "rollouts"
    )
    page.click(".row >> nth=0")
    page.wait_for_selector(".conversation .media")
    assert page.locator(".picture").count() == 0
    assert page.locator(".media").first.inner_text() == "image: not in this page"
