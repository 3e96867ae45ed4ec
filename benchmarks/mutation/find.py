"""Finds the mutants of a source file: small edits that change what its maths means.

Left alone: docstrings, annotations, decorators but `no_grad`, defaults of parameters (the
configuration gives them all), assertions and what is raised, and `clamp(min=1)`, which guards a
division.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from mutation.edits import Place, edits

SIMPLE = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.Return, ast.Expr)
SHOWN = (ast.expr, ast.keyword, *SIMPLE)
SKIPPED = (ast.Raise, ast.Assert, ast.Import, ast.ImportFrom, ast.JoinedStr)
ENOUGH, MOST = 30, 80  # characters of context beside an edit


@dataclass(frozen=True)
class Mutant:
    """One edit: `new` instead of a node of `tree`. `before` and `after` show it with a little
    context."""

    file: str
    line: int
    function: str
    kind: str
    before: str
    after: str
    tree: ast.Module = field(repr=False, compare=False)
    place: Place = field(repr=False, compare=False)
    new: ast.AST = field(repr=False, compare=False)

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.function, f"{self.before} -> {self.after}"

    def __str__(self) -> str:
        return (
            f"{self.file}:{self.line} {self.function} [{self.kind}] {self.before} -> {self.after}"
        )

    def code(self) -> ast.Module:
        """The mutated module. The edit stays in `tree`: call this only in a process that is thrown
        away afterwards."""
        self.place.put(self.new)
        return ast.fix_missing_locations(self.tree)


def find(source: str, file: str) -> list[Mutant]:
    """All mutants of a file, in its order; edits that come out the same are one."""
    tree = ast.parse(source, file)
    found: dict[tuple[int, str, str], Mutant] = {}
    for place, function in _places(tree, (), ""):
        for kind, new in edits(place):
            before, after = _shown(place, new)
            line = getattr(place.node, "lineno", 0)
            if before != after:
                mutant = Mutant(
                    file, line, function or "<module>", kind, before, after, tree, place, new
                )
                found.setdefault((line, before, after), mutant)
    return list(found.values())


def _places(
    node: ast.AST, above: tuple[ast.AST, ...], function: str
) -> Iterator[tuple[Place, str]]:
    for name, index, child in _children(node):
        if isinstance(child, SKIPPED):
            continue
        inside = (
            f"{function}.{child.name}".lstrip(".")
            if isinstance(child, (ast.FunctionDef, ast.ClassDef))
            else function
        )
        yield Place(child, (*above, node), name, index), function
        yield from _places(child, (*above, node), inside)


def _children(node: ast.AST) -> Iterator[tuple[str, int | None, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and name != "body":
            free = name == "decorator_list" and "torch.no_grad()" in map(ast.unparse, value)
            if not free:
                continue
        if name in ("annotation", "args") and isinstance(node, (ast.AnnAssign, ast.Lambda)):
            continue
        # The first argument of `zeros_like` gives a shape alone.
        shape = (
            name == "args"
            and isinstance(node, ast.Call)
            and ast.unparse(node.func).endswith("_like")
        )
        if isinstance(value, ast.AST):
            yield name, None, value
        elif isinstance(value, list):
            yield from (
                (name, i, item)
                for i, item in enumerate(value)
                if isinstance(item, ast.AST) and i >= shape
            )


def _shown(place: Place, new: ast.AST) -> tuple[str, str]:
    """The code before and after, of the smallest node around the edit that says enough."""
    chosen: ast.AST = place.node
    text = ast.unparse(chosen)
    for parent in reversed(place.above):
        if not isinstance(parent, SHOWN):
            break
        wider = ast.unparse(parent)
        if len(wider) > (MOST if len(text) >= ENOUGH else 2 * MOST):
            break
        chosen, text = parent, wider
    if chosen is place.node:
        return text, ast.unparse(ast.fix_missing_locations(new))
    place.put(new)
    after = ast.unparse(ast.fix_missing_locations(chosen))
    place.put(place.node)
    return text, after
