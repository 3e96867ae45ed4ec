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


def test_the_gallery_is_that_of_the_recipes():
    assert gallery.PAGE.read_text(encoding="utf-8") == gallery.make_page(), "tests/gallery.py"
    assert gallery.CHART.read_text(encoding="utf-8") == gallery.make_chart()


def test_the_papers_are_those_of_the_source():
    assert papers.PAGE.read_text(encoding="utf-8") == papers.make_page(), "tests/papers.py"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["Qwen3-0.6B", "Qwen3-30B-A3B"])
def test_the_hardware_table_is_what_the_planner_computes(repository, monkeypatch, model):
    """Two of its models: all ten take a minute."""
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))
    hardware = importlib.import_module("hardware")
    text = hardware.PAGE.read_text(encoding="utf-8")
    assert all(text.count(f"| {name} |") == 2 for name in hardware.MODELS)
    monkeypatch.setattr(hardware, "MODELS", {model: hardware.MODELS[model]})
    (row,) = hardware.list_rows("")
    assert row in text.splitlines(), "run `python benchmarks/hardware.py`"
