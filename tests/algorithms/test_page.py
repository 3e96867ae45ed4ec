"""docs/algorithms/policy_gradient.md: its recipe is valid, and its part of one's own trains."""

from __future__ import annotations

import re
import sys
import types

import pytest
import torch
import yaml

from ratchet.algorithms.base import AlgoState
from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve, section_class
from ratchet.data.packing import pack
from ratchet.testing.builders import make_group, make_trajectory


@pytest.fixture
def blocks(repository) -> dict[str, list[str]]:
    page = (repository / "docs" / "algorithms" / "policy_gradient.md").read_text(encoding="utf-8")
    found: dict[str, list[str]] = {}
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        found.setdefault(language, []).append(text)
    return found


def test_its_recipe_is_valid(blocks):
    section = yaml.safe_load(blocks["yaml"][0])["algorithm"]
    assert build(resolve("algorithm", section)).name == "policy_gradient"


def test_its_own_part_gives_the_bonus_to_the_best(blocks, monkeypatch):
    module = types.ModuleType("my_pkg.mine")
    exec(compile(blocks["python"][0], "mine.py", "exec"), vars(module))
    monkeypatch.setitem(sys.modules, "my_pkg", types.ModuleType("my_pkg"))
    monkeypatch.setitem(sys.modules, "my_pkg.mine", module)
    section_class.cache_clear()
    part = yaml.safe_load(blocks["yaml"][1])["advantage"]
    algorithm = build(resolve("algorithm", {"kind": "policy_gradient", "advantage": part}))
    rows = [make_trajectory([1], [2, 3], reward=float(i), attempt=i) for i in range(3)]
    batch = algorithm.advantage(pack([make_group("g", rows)]), AlgoState())
    torch.testing.assert_close(
        batch.need("advantages"), torch.tensor([0, 0, 0] * 2 + [0, 0.5, 0.5], dtype=torch.float64)
    )


@pytest.mark.parametrize("kind", KINDS["algorithm"])
def test_every_algorithm_has_a_page_and_the_index_lists_it(kind, repository):
    folder = repository / "docs" / "algorithms"
    assert (folder / f"{kind}.md").is_file()
    assert f"({kind}.md)" in (folder / "README.md").read_text(encoding="utf-8")
