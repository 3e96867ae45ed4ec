"""The pages on environments: what they show runs as it stands, and what they list is what there
is."""

import asyncio
import re

import pytest
import yaml
from pages import run, written

from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve, section_class
from ratchet.environments.tool_use.base import Toolbox
from ratchet.types import ToolCall


@pytest.fixture
def page(repository, tmp_path):
    return written(repository / "docs" / "write-an-environment.md", tmp_path)


def train(tmp_path, *overrides):
    run(tmp_path, "-m", "ratchet", "train", "my_recipe.yaml", *overrides)


@pytest.mark.slow
def test_your_own_environment_trains_and_keeps_the_contract(page, tmp_path):
    assert all(
        len([line for line in code.splitlines() if line.strip()]) < 30 for code in page.values()
    )
    train(tmp_path)
    (metrics,) = tmp_path.glob("runs/*/metrics.jsonl")
    assert '"rollout/reward"' in metrics.read_text(encoding="utf-8")
    train(tmp_path, "algorithm={kind: sft}", "environment.kind=my_teacher:TaughtNim", "name=taught")
    run(tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_my_nim.py")


def test_the_table_lists_every_kind_with_every_key(repository):
    text = (repository / "docs" / "environments.md").read_text(encoding="utf-8")
    rows = {
        kind: set(re.findall(r"`(\w+)`", keys))
        for kind, keys in re.findall(r"^\| `(\w+)` \|.*\|([^|]*)\|$", text, re.MULTILINE)
    }
    assert rows == {
        kind: set(section_class("environment", kind).model_fields) - {"kind"}
        for kind in KINDS["environment"]
    }


@pytest.fixture
def examples(repository, tmp_path, monkeypatch):
    """The environments that docs/environments.md shows, with its modules on the import path."""
    text = (repository / "docs" / "environments.md").read_text(encoding="utf-8")
    for name, code in re.findall(r"```python\n# (\S+)\n(.*?)```", text, flags=re.DOTALL):
        (tmp_path / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    return [yaml.safe_load(block)["environment"] for block in blocks]


def test_the_examples_are_valid(examples):
    for example in examples:
        resolve("environment", example)


def test_the_tool_of_the_page_answers(examples):
    (config,) = (
        resolve("tool", tool)
        for example in examples
        for tool in example.get("tools", [])
        if tool["kind"] == "my_tools:Population"
    )
    toolbox = Toolbox([build(config)])
    answers = [
        asyncio.run(toolbox.run_call(ToolCall("1", "population", {"city": city}))).content
        for city in ("Paris", "Oslo")
    ]
    assert answers == ["2.1 million", "not listed"]


def test_the_function_of_the_page_answers(examples):
    toolbox = Toolbox([build(resolve("tool", {"kind": "my_functions.py:convert"}))])
    call = ToolCall("1", "convert", {"amount": 10})
    assert asyncio.run(toolbox.run_call(call)).content == "9.00 EUR"
