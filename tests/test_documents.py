"""Every path, module and test that a document names exists, and every page that a message of the library names."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

import pytest

from ratchet.errors import BY_SYMPTOM, Symptom
from ratchet.observe.sentinels import SYMPTOMS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"`((?:ratchet|tests|docs|recipes|benchmarks|\.ci)/[\w./*-]+)`")
TEST = re.compile(r"`(tests/[\w./-]+\.py)::(\w+)`")
PAGE = re.compile(r"(?<![\w/.])(docs(?:/[\w-]+)+(?:\.md)?)(#[\w-]+)?")
LINK = re.compile(r"link_symptom\(\s*['\"]([\w-]+)['\"]")
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


def list_anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(), re.M)
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-") for heading in headings
    }


def test_messages_name_pages_and_sections_that_exist():
    code = "\n".join(path.read_text() for path in (ROOT / "ratchet").rglob("*.py"))
    pages = {(page, anchor) for page, anchor in PAGE.findall(code)}
    assert len(pages) > 20
    assert sorted(page for page, _ in pages if not (ROOT / page).exists()) == []
    linked = [(page, anchor) for page, anchor in pages if anchor]
    assert [link for link in linked if link[1][1:] not in list_anchors(link[0])] == []
    symptoms = set(get_args(Symptom))
    assert symptoms - list_anchors(BY_SYMPTOM) == set()
    assert symptoms == {*LINK.findall(code), *SYMPTOMS.values()}, "each is linked from a message"


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
