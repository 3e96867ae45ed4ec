"""docs/integrations: each page is run by a test, and the table of versions is that of the tests."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "integrations"
TABLE = PAGES / "versions.md"
PINS = ("constraints.txt", ".ci/clients.txt", ".ci/npm-clients.txt", ".ci/nemo-gym", "Makefile")
ROW = re.compile(r"\| (.+) \| (.+) \| (.*) ?\| (.+) \| `(tests/\S+\.py)` \|")


def read_table() -> list[tuple[str, ...]]:
    rows = [ROW.fullmatch(line) for line in TABLE.read_text(encoding="utf-8").splitlines()]
    return [tuple(cell.strip() for cell in row.groups()) for row in rows if row is not None]


@pytest.mark.parametrize("row", read_table(), ids=lambda row: row[0])
def test_versions_are_those_that_the_tests_install(row: tuple[str, ...]) -> None:
    _, package, version, _, test = row
    assert (ROOT / test).is_file()
    if not package.startswith("`"):
        assert not version
        return
    name = package.strip("`")
    pins = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in PINS)
    pinned = re.findall(rf"(?:^|\s){re.escape(name)}(?:\[\S+\])?(?:==|@)(\S+)", pins)
    if not pinned:  # another package requires it
        try:
            pinned = [importlib.metadata.version(name)]
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    assert version in pinned


def test_each_page_is_in_the_table_and_is_read_by_a_test() -> None:
    links = {name for row in read_table() for name in re.findall(r"\((\S+?\.md)", row[3])}
    names = {path.name for path in PAGES.glob("*.md")} - {TABLE.name}
    assert names <= links
    tests = "\n".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/test_*.py"))
    for name in names:
        page = name.removesuffix(".md")
        assert f'"{name}"' in tests or f'"{page}"' in tests, f"no test reads {name}"


def test_each_client_that_is_installed_has_a_row() -> None:
    clients = (ROOT / ".ci/clients.txt").read_text(encoding="utf-8")
    packages = re.findall(r"^([\w-]+)(?:\[\S+\])?==", clients, re.MULTILINE)
    in_table = {row[1].strip("`") for row in read_table()}
    assert set(packages) - {"torch"} <= in_table
