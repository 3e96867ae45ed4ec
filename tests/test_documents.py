"""Every path and module that a document names exists."""

import re
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PATH = re.compile(r"`((?:ratchet|tests|docs|recipes|benchmarks|\.ci)/[\w./*-]+)`")
MODULE = re.compile(r"`(ratchet(?:\.[a-z_0-9]+)+)(?:[:.][A-Z]\w*)?`")


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
    missing += [name for name in MODULE.findall(text) if not is_module(name)]
    assert missing == []
