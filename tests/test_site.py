"""The site of docs/ in a real browser: every page is drawn without a complaint, every link leads
somewhere, no other host is asked for anything, the search answers, and the dark scheme is dark."""

from __future__ import annotations

import functools
import http.server
import re
import shutil
import sys
import threading
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin

import pytest
from site_index import list_pages
from support.browser import collect_complaints
from support.programs import run_program

import ratchet

pytestmark = [pytest.mark.slow, pytest.mark.needs("zensical", "chromium", "playwright")]

LINKED = "links => links.map(link => link.href)"
NAMED = "parts => parts.map(part => part.id)"
SEARCH_IS_READY = "[...document.querySelectorAll('div')].some(part => part.shadowRoot)"
BRIGHTNESS = """() => {
  const [red, green, blue] = getComputedStyle(document.body).backgroundColor.match(/\\d+/g);
  return (+red + +green + +blue) / 3;
}"""


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(repository, tmp_path_factory):
    """The address of the site, built strictly in a folder of its own."""
    folder: Path = tmp_path_factory.mktemp("site")
    # Copies, as the site is built beside what a link points to.
    shutil.copytree(repository / "docs", folder / "docs")
    shutil.copy(repository / "mkdocs.yml", folder)
    (folder / "ratchet").symlink_to(repository / "ratchet")
    run_program(sys.executable, "-m", "zensical", "build", "--strict", cwd=folder)
    handler = functools.partial(QuietHandler, directory=str(folder / "build" / "site"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def page(browser, site, request):
    """A page of the browser, in the scheme of the parameter. The test fails for an error on the console, an answer of status 400 or
    more, and a request to another host."""
    context = browser.new_context(
        viewport={"width": 1366, "height": 820}, color_scheme=getattr(request, "param", "light")
    )
    page = context.new_page()
    complaints: list[str] = []
    collect_complaints(page, complaints)
    page.on(
        "response",
        lambda answer: complaints.append(answer.url) if answer.status >= 400 else None,
    )
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((site, "data:", f"blob:{site}"))
            else complaints.append(request.url)
        ),
    )
    yield page
    context.close()
    assert complaints == []


def address_of(name: str) -> str:
    """Return the path of a page in the site, by its file below docs/."""
    return re.sub(r"(^|/)README/$", r"\1", f"{name.removesuffix('.md')}/")


def test_every_page_is_drawn_and_every_link_leads_somewhere(page, site):
    # The index of the search is a megabyte, which each page would read anew.
    empty = {"config": {"lang": ["en"], "separator": " "}, "items": []}
    page.route("**/search.json", lambda route: route.fulfill(json=empty))
    links: dict[str, str] = {}  # the page that has it, by address
    parts: dict[str, set[str]] = {}  # ids by address
    for name in list_pages():
        url = site + address_of(name)
        page.goto(url, wait_until="load")
        article = page.locator("article")
        assert article.locator("h1").count() == 1, name
        assert not re.search(r"^\|[ :-]+\|", article.inner_text(), flags=re.MULTILINE), name
        parts[url] = set(page.eval_on_selector_all("[id]", NAMED))
        links |= dict.fromkeys(page.eval_on_selector_all("a[href]", LINKED), name)
    internal = {link: name for link, name in links.items() if link.startswith(site)}
    assert len(internal) > 500
    broken = [
        (name, link)
        for link, name in internal.items()
        if not leads_somewhere(link, parts, page.request)
    ]
    assert broken == []


def leads_somewhere(link: str, parts: dict[str, set[str]], client) -> bool:
    """Return True if a link of the site leads to a page that was opened and to one of its parts, or
    to a file."""
    url, part = urldefrag(link)
    if url in parts:
        return part in ("", "__tabbed") or unquote(part) in parts[url]
    return client.head(url).ok


def test_the_search_answers(page, site):
    page.goto(site)
    page.wait_for_function(SEARCH_IS_READY)
    # A click is kept until the index has come; the shortcut is lost before that.
    page.click("[data-md-component=search] button")
    page.wait_for_function("document.activeElement.shadowRoot")
    page.keyboard.type("staleness")
    page.get_by_text("Attempts ahead of their step").first.wait_for()


@pytest.mark.parametrize("page", ["dark"], indirect=True)
def test_the_dark_scheme_is_dark_until_the_light_one_is_chosen(page, site):
    page.goto(urljoin(site, "algorithms/grpo/"))
    page.wait_for_function(f"({BRIGHTNESS})() < 60")
    page.click("label[title=Light]")
    page.wait_for_function(f"({BRIGHTNESS})() > 200")


def test_the_reference_has_every_name_of_the_package(page, site):
    page.goto(urljoin(site, "api/ratchet/"))
    text = page.locator("article").inner_text()
    page.goto(urljoin(site, "api/types/"))
    text += page.locator("article").inner_text()
    names = set(ratchet.__all__) - {"__version__"}
    assert {name for name in names if not re.search(rf"\b{name}\b", text)} == set()
