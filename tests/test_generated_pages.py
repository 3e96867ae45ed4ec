"""What scripts write of the documentation is up to date."""

import importlib

import gallery
import papers
import pytest
import site_index


def test_the_navigation_is_that_of_the_index():
    text = site_index.CONFIG.read_text(encoding="utf-8")
    assert text == site_index.make_config(text), "run `python tests/site_index.py`"
    assert site_index.LLMS.read_text(encoding="utf-8") == site_index.make_llms()


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(site_index.DOCS).as_posix() for path in site_index.DOCS.rglob("*.md")}
    assert pages - set(site_index.list_pages()) == set()


@pytest.mark.medium
def test_the_gallery_is_that_of_the_recipes():
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.make_page(), "tests/gallery.py"
    assert gallery.CHART.read_text(encoding="utf-8") == gallery.make_chart()


@pytest.mark.medium
def test_the_papers_are_those_of_the_source():
    assert papers.PAGE.read_text(encoding="utf-8") == papers.make_page(), "tests/papers.py"


@pytest.mark.medium
def test_the_hardware_tables_are_what_the_planner_computes(repository, monkeypatch):
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    hardware = importlib.import_module("hardware")
    text = hardware.PAGE.read_text(encoding="utf-8")
    assert text == hardware.make_page(text), "run `python benchmarks/hardware.py`"
