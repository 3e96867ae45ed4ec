"""Keeps files and functions small: `python .ci/sizes.py ratchet`. Exit 1 when a limit is broken;
see CONTRIBUTING.md.

A function's length counts its decorators, signature and docstring; nesting counts the blocks inside
a function that open one another (if, for, while, with, try, match), where `elif` is no deeper than
its `if`.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE_LINES, FILE_WARNING = 500, 400
FUNCTION_LINES, FUNCTION_WARNING = 80, 60
NESTING_WARNING = 4

Function = ast.FunctionDef | ast.AsyncFunctionDef
BLOCKS = (
    ast.If,
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.With,
    ast.AsyncWith,
    ast.Try,
    ast.TryStar,
    ast.Match,
)


class Finding(NamedTuple):
    fatal: bool
    text: str


def findings(path: Path, source: str) -> Iterator[Finding]:
    lines = source.count("\n")
    if lines > FILE_WARNING:
        yield Finding(
            lines > FILE_LINES,
            f"{path}: {lines} lines (limit {FILE_LINES}, aim below {FILE_WARNING})",
        )
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, Function):
            yield from _of_function(path, node)


def _of_function(path: Path, node: Function) -> Iterator[Finding]:
    where = f"{path}:{node.lineno} {node.name}()"
    start = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    length = (node.end_lineno or node.lineno) - start + 1
    if length > FUNCTION_WARNING:
        limits = f"(limit {FUNCTION_LINES}, aim below {FUNCTION_WARNING})"
        yield Finding(length > FUNCTION_LINES, f"{where}: {length} lines {limits}")
    depth = nesting(node)
    if depth > NESTING_WARNING:
        yield Finding(
            False, f"{where}: blocks nested {depth} deep (aim for at most {NESTING_WARNING})"
        )


def nesting(node: ast.AST) -> int:
    """Depth of the deepest block below `node`, not looking into functions and classes defined
    inside it."""
    deepest = 0
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (*(Function.__args__), ast.ClassDef, ast.Lambda)):
            continue
        is_elif = isinstance(node, ast.If) and isinstance(child, ast.If) and node.orelse == [child]
        opens = isinstance(child, BLOCKS) and not is_elif
        deepest = max(deepest, opens + nesting(child))
    return deepest


def main(roots: list[str]) -> int:
    files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    if not files:
        print(
            f"sizes: no Python file under {' '.join(roots) or '(nothing given)'}", file=sys.stderr
        )
        return 2
    found = [
        finding for path in files for finding in findings(path, path.read_text(encoding="utf-8"))
    ]
    for finding in sorted(found):
        print(f"{'error' if finding.fatal else 'warning'}: {finding.text}")
    fatal = sum(finding.fatal for finding in found)
    print(f"sizes: {len(files)} files, {fatal} over a limit, {len(found) - fatal} warnings")
    return 1 if fatal else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
