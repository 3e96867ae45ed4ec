"""What scripts write of the documentation is up to date."""

import site_index


def test_the_navigation_is_that_of_the_index():
    text = site_index.CONFIG.read_text(encoding="utf-8")
    assert text == site_index.make_config(text), "run `python tests/site_index.py`"
    assert site_index.LLMS.read_text(encoding="utf-8") == site_index.make_llms()


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(site_index.DOCS).as_posix() for path in site_index.DOCS.rglob("*.md")}
    assert pages - set(site_index.list_pages()) == set()
