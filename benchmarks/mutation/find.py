"""List the mutants of a source file: small edits that change the meaning of its maths.

Not edited are docstrings, annotations, decorators except `no_grad`, defaults of parameters (the
configuration sets all of them), assertions, `raise` statements, and `clamp(min=1)`, which guards a
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
# Characters of code shown with an edit: from MIN_SHOWN on, no wider code above MAX_SHOWN is shown.
MIN_SHOWN, MAX_SHOWN = 30, 80


@dataclass(frozen=True)
class Mutant:
    """The source file with one edit: `new` replaces the node of `tree` at `place`.

    before, after: the edited code with some context.
    """

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
        """Return the mutated module.

        This changes `tree`, so call it only in a process that tries no other mutant.
        """
        self.place.put(self.new)
        return ast.fix_missing_locations(self.tree)


def list_mutants(source: str, file: str) -> list[Mutant]:
    """Return all mutants of a file, in the file's order. Edits with equal results count once."""
    tree = ast.parse(source, file)
    mutants: dict[tuple[int, str, str], Mutant] = {}
    for place, function in _places(tree, (), ""):
        for kind, new in edits(place):
            before, after = _shown(place, new)
            line = getattr(place.node, "lineno", 0)
            if before != after:
                mutant = Mutant(
                    file, line, function or "<module>", kind, before, after, tree, place, new
                )
                mutants.setdefault((line, before, after), mutant)
    return list(mutants.values())


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
            is_no_grad = name == "decorator_list" and "torch.no_grad()" in map(ast.unparse, value)
            if not is_no_grad:
                continue
        if name in ("annotation", "args") and isinstance(node, (ast.AnnAssign, ast.Lambda)):
            continue
        # Skip the first argument of `zeros_like`, of which only the shape matters.
        n_skipped = (
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
                if isinstance(item, ast.AST) and i >= n_skipped
            )


def _shown(place: Place, new: ast.AST) -> tuple[str, str]:
    """Return the code before and after the edit, of a node around it that gives some context."""
    chosen: ast.AST = place.node
    text = ast.unparse(chosen)
    for parent in reversed(place.above):
        if not isinstance(parent, SHOWN):
            break
        wider = ast.unparse(parent)
        if len(wider) > (MAX_SHOWN if len(text) >= MIN_SHOWN else 2 * MAX_SHOWN):
            break
        chosen, text = parent, wider
    if chosen is place.node:
        return text, ast.unparse(ast.fix_missing_locations(new))
    place.put(new)
    after = ast.unparse(ast.fix_missing_locations(chosen))
    place.put(place.node)
    return text, after
