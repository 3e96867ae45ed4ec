"""The notebooks run whole, each in a process of its own: their assertions hold what they show."""

import sys
from pathlib import Path

import pytest
from support.programs import run_program

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_whole(notebook, tmp_path):
    run_program(sys.executable, notebook, cwd=tmp_path)


def test_the_page_lists_every_notebook(repository):
    page = (repository / "docs" / "notebooks.md").read_text(encoding="utf-8")
    assert [path.name for path in NOTEBOOKS if f"`notebooks/{path.name}`" not in page] == []
    assert page.count("| `notebooks/") == len(NOTEBOOKS)
