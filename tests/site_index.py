"""What is made of docs/README.md, the index of the site: the navigation in mkdocs.yml, and
docs/llms.txt for readers that are programs. `python tests/site_index.py` writes both anew.

A heading of the index is a section, and a line of its lists, "- [title](page): what it has", is a
page.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
CONFIG = ROOT / "mkdocs.yml"
LLMS = DOCS / "llms.txt"
BEGIN, END = "# nav: begin (python tests/site_index.py)\n", "# nav: end\n"
SECTION = re.compile(r"^## (.+)$")
ENTRY = re.compile(r"^- \[([^]]+)\]\(([^)#]+\.md)\): (.+)$")


class Entry(NamedTuple):
    """A page of the index: its title, its path below docs/, and what it has."""

    title: str
    page: str
    about: str


def read_sections() -> dict[str, list[Entry]]:
    """Return the entries of the index by section, in order."""
    sections: dict[str, list[Entry]] = {}
    entries: list[Entry] = []
    for line in (DOCS / "README.md").read_text(encoding="utf-8").splitlines():
        if section := SECTION.match(line):
            entries = sections.setdefault(section[1], [])
        elif entry := ENTRY.match(line):
            entries.append(Entry(*entry.groups()))
    return {name: entries for name, entries in sections.items() if entries}


def list_pages() -> list[str]:
    """Return all pages of the navigation, by their paths below docs/."""
    entries = [entry for entries in read_sections().values() for entry in entries]
    return ["README.md", *(page for entry in entries for page in [entry.page, *_siblings(entry)])]


def _siblings(entry: Entry) -> list[str]:
    """Return the other pages of a folder whose README is an entry."""
    if not entry.page.endswith("/README.md"):
        return []
    paths = sorted((DOCS / entry.page).parent.glob("*.md"))
    return [path.relative_to(DOCS).as_posix() for path in paths if path.name != "README.md"]


def make_navigation() -> str:
    """Return the `nav` of mkdocs.yml."""
    lines = ["nav:", "  - Home: [README.md]"]
    for section, entries in read_sections().items():
        lines.append(f"  - {section}:")
        for entry in entries:
            if siblings := _siblings(entry):
                lines += [f"      - {entry.title}:", f"          - {entry.page}"]
                lines += [f"          - {Path(page).stem}: {page}" for page in siblings]
            else:
                lines.append(f'      - "{entry.title}": {entry.page}')
    return "\n".join(lines) + "\n"


def make_config(text: str) -> str:
    """Return the text of mkdocs.yml with the navigation as the index has it now."""
    head, _, rest = text.partition(BEGIN)
    return head + BEGIN + make_navigation() + END + rest.partition(END)[2]


def make_llms() -> str:
    """Return docs/llms.txt, in the form of llmstxt.org: each page with a line on it."""
    lines = [
        "# Ratchet",
        "",
        "> A Python library and command line that post-trains language models: supervised,",
        "> by preferences, by distillation, and by reinforcement learning. One path from a",
        "> laptop's CPU to a cluster.",
        "",
        "Begin with the first ten minutes. `ratchet help KEY` explains any key of a recipe,",
        "`ratchet check RECIPE` validates one without training, and an error says what is wrong,",
        "where, and the smallest fix.",
    ]
    for section, entries in read_sections().items():
        lines += ["", f"## {section}", ""]
        lines += [f"- [{entry.title}]({entry.page}): {entry.about}" for entry in entries]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    CONFIG.write_text(make_config(CONFIG.read_text(encoding="utf-8")), encoding="utf-8")
    LLMS.write_text(make_llms(), encoding="utf-8")
