"""docs/papers.md, made of the algorithms' classes and of what the library's source cites:
`python tests/papers.py` writes it anew."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from ratchet.algorithms.config.policy_gradient import PolicyGradientConfig
from ratchet.config.base import Section
from ratchet.config.loader import load_config
from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.recipes import list_recipes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "papers.md"
HEAD = """\
# Papers

<!-- Made by `python tests/papers.py` of the algorithms' classes and of the library's source. -->

A kind that has a paper's name has that paper's objective by default, to the last normaliser; its page has the equation and says which keys are the
variants. `ratchet explain-algorithm NAME` prints the parts of one with the place in the paper of each. *Equation* is what the source cites of the paper;
*settings* are the kind's defaults that differ from plain `policy_gradient`.

## Algorithms

| Paper | Kind, and what it is | Equation | Settings | Recipe |
|---|---|---|---|---|
"""
OTHERS = """
## Everything else that is cited

Estimators, corrections, optimizers, layers, statistics: the module's documentation says what is taken from the paper. Those of datasets and benchmarks
are named in `ratchet/data/presets`.

| Paper | Module |
|---|---|
"""
PAPER = re.compile(r"arXiv:(\d{4}\.\d{5})")
PLACE = re.compile(r"arXiv:(\d{4}\.\d{5})\)?,? (eqs?\. [\d, -]*\d|section [\d.]*\d|algorithm \d+)")
TITLE = re.compile(r"^(.*?) ?\((?:[^()]*, )?arXiv:[\d.]+\)")
PARTS = (
    "shaping",
    "advantage",
    "loss",
    "weighting",
    "equal_rewards",
    "kl",
    "critic",
    "old_logprobs",
    "correction",
)
SOURCES = ("algorithms", "config", "evals", "experience", "learners", "models")


def read_source() -> dict[str, str]:
    """Return each module's text by its path, with its lines joined: citations cross lines."""
    paths = [path for name in SOURCES for path in (ROOT / "ratchet" / name).rglob("*.py")]
    return {
        path.relative_to(ROOT).as_posix(): " ".join(path.read_text(encoding="utf-8").split())
        for path in sorted(paths)
    }


def group_recipes() -> dict[str, list[str]]:
    """Return the recipes by the algorithm of their last stage."""
    recipes: dict[str, list[str]] = defaultdict(list)
    for name, path in list_recipes().items():
        recipes[load_config(path).stages[-1].algorithm.kind].append(name)
    return recipes


def describe_settings(kind: str) -> str:
    """Return the defaults of a policy gradient that are not those of `policy_gradient`."""
    fields = section_class("algorithm", kind).model_fields
    settings = []
    for key in PARTS:
        if key not in fields or key not in PolicyGradientConfig.model_fields:
            continue
        value, plain = (
            section.get_default(call_default_factory=True)
            for section in (fields[key], PolicyGradientConfig.model_fields[key])
        )
        settings += list_differences(key, value, plain)
    return ", ".join(f"`{setting}`" for setting in settings)


def list_differences(key: str, value: Any, plain: Any) -> list[str]:
    """Return the keys in which a default differs from another, with their values."""
    if value == plain:
        return []
    if not isinstance(value, Section):
        return [f"{key}: {value}"]
    names = type(value).model_fields
    if plain is None and "kind" not in names:
        return [key]
    if getattr(value, "kind", None) != getattr(plain, "kind", None):
        return [f"{key}: {getattr(value, 'kind', key)}"]
    return [
        f"{key}.{name}: {getattr(value, name)}"
        for name in names
        if getattr(value, name) != getattr(plain, name)
    ]


def link(paper: str) -> str:
    return f"[arXiv:{paper}](https://arxiv.org/abs/{paper})"


def make_rows(source: dict[str, str]) -> tuple[list[str], set[str]]:
    """Return the rows of the algorithms with a paper, and these papers."""
    places: dict[str, set[str]] = defaultdict(set)
    for text in source.values():
        for paper, place in PLACE.findall(text):
            places[paper].add(place)
    recipes, rows, papers = group_recipes(), [], set[str]()
    for kind in KINDS["algorithm"]:
        about = " ".join((section_class("algorithm", kind).__doc__ or "").split())
        # The title is the first sentence; that of "Dr. GRPO" has a full stop of its own.
        first = about.split(". ")[0] if "arXiv" in about.split(". ")[0] else about
        if (cited := PAPER.search(first)) is None:
            continue
        title = TITLE.match(first)
        assert title is not None, about
        papers.add(cited[1])
        rows.append(
            f"| {link(cited[1])} | [{kind}](algorithms/{kind}.md): {title[1]} | "
            f"{', '.join(sorted(places[cited[1]]))} | {describe_settings(kind)} | "
            f"{', '.join(f'`{name}`' for name in recipes[kind])} |"
        )
    return rows, papers


def make_other_rows(source: dict[str, str], listed: set[str]) -> list[str]:
    """Return a row for each other paper that the source cites, by number."""
    modules: dict[str, list[str]] = defaultdict(list)
    for path, text in source.items():
        for paper in dict.fromkeys(PAPER.findall(text)):
            if paper not in listed:
                modules[paper].append(f"`{path}`")
    return [f"| {link(paper)} | {', '.join(modules[paper])} |" for paper in sorted(modules)]


def make_page() -> str:
    """Return the page of papers."""
    source = read_source()
    rows, papers = make_rows(source)
    others = make_other_rows(source, papers)
    return HEAD + "\n".join(rows) + "\n" + OTHERS + "\n".join(others) + "\n"


if __name__ == "__main__":
    PAGE.write_text(make_page(), encoding="utf-8")
