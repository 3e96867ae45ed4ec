"""Every path, module and test that a document names exists."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"`((?:ratchet|tests|docs|recipes|benchmarks|\.ci)/[\w./*-]+)`")
TEST = re.compile(r"`(tests/[\w./-]+\.py)::(\w+)`")
MODULE = re.compile(r"`(ratchet(?:\.[a-z_0-9]+)+)(?:[:.][A-Z]\w*)?`")


def is_test(path: str, name: str) -> bool:
    """Return True if the file exists and defines this test."""
    file = ROOT / path
    return (
        file.is_file() and re.search(rf"^(async )?def {name}\(", file.read_text(), re.M) is not None
    )


def is_module(name: str) -> bool:
    """Return True if `name` is a module, or a name within one."""
    for candidate in (name, name.rpartition(".")[0]):
        with suppress(ModuleNotFoundError):
            if find_spec(candidate) is not None:
                return True
    return False


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_paths_and_modules_that_are_named_exist(document: Path):
    text = document.read_text()
    missing = [path for path in PATH.findall(text) if not any(ROOT.glob(path.rstrip("/")))]
    missing += [f"{path}::{name}" for path, name in TEST.findall(text) if not is_test(path, name)]
    missing += [name for name in MODULE.findall(text) if not is_module(name)]
    assert missing == []


def test_each_part_of_upstream_has_tests_and_says_what_it_lacks():
    """The overviews of NeMo RL and ROLL name 63 parts."""
    text = (ROOT / "docs" / "upstream-rows.md").read_text()
    lines = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    rows = [[cell.strip() for cell in line] for line in lines if "State" not in line[1]]
    assert len(rows) == 63
    for part, state, lacks, tests in rows:
        assert state in ("whole", "in part"), part
        assert PATH.search(tests) or TEST.search(tests), part
        needs_accelerator = lacks.startswith("needs an accelerator")
        assert (state == "in part") == (bool(lacks) and not needs_accelerator), part
