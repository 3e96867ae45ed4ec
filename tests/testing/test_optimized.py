"""The kits check under `python -O` too, which leaves assertions out."""

import ast
from pathlib import Path

import pytest

import ratchet.testing
from ratchet.testing.harness import BrokenRule, require

FILES = sorted(Path(ratchet.testing.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_no_rule_is_a_bare_assertion(path):
    """`assert x is not None` is for the type checker alone."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assert):
            assert isinstance(node.test, ast.Compare), ast.unparse(node)
            assert isinstance(node.test.ops[0], ast.IsNot), ast.unparse(node)


def test_a_broken_rule_is_told_by_a_text_or_a_function():
    require(True, lambda: pytest.fail("an error that nobody reads"))
    for text in ("broken", lambda: "broken"):
        with pytest.raises(BrokenRule, match="broken"):
            require(False, text)
