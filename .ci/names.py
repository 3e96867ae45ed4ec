"""Keeps names apart and folders small: `python .ci/names.py ratchet`. Exit 1 if two public classes
share a name, a folder holds more than 20 modules, or more attributes than now are read by
`getattr` with a literal name; see CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

FOLDER_MODULES = 20
LITERAL_GETATTRS = 22  # the number in the library; lower it when one goes


def shared_class_names(files: list[Path]) -> Iterator[str]:
    """Yield an error for each name that several public classes have."""
    places: dict[str, list[str]] = defaultdict(list)
    for path in files:
        for node in ast.parse(path.read_text(encoding="utf-8"), str(path)).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(f"{path}:{node.lineno}")
    for name, where in sorted(places.items()):
        if len(where) > 1:
            yield f"error: {len(where)} public classes are called {name}: {', '.join(where)}"


def full_folders(files: list[Path]) -> Iterator[str]:
    """Yield an error for each folder with too many modules."""
    modules: dict[Path, int] = defaultdict(int)
    for path in files:
        modules[path.parent] += path.name != "__init__.py"
    for folder, count in sorted(modules.items()):
        if count > FOLDER_MODULES:
            yield f"error: {folder}/ holds {count} modules (limit {FOLDER_MODULES})"


def literal_getattrs(files: list[Path]) -> Iterator[str]:
    """Yield an error if more calls of `getattr` than allowed have a literal name."""
    places: list[str] = []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
            match node:
                case ast.Call(func=ast.Name("getattr"), args=[_, ast.Constant(), *_]):
                    places.append(f"{path}:{node.lineno}")
    if len(places) > LITERAL_GETATTRS:
        yield (
            f"error: {len(places)} calls of getattr with a literal name (limit "
            f"{LITERAL_GETATTRS}); declare the attribute, or read it plainly: {', '.join(places)}"
        )


def main(roots: list[str]) -> int:
    files = sorted(path for root in roots for path in Path(root).rglob("*.py"))
    if not files:
        print(
            f"names: no Python file under {' '.join(roots) or '(nothing given)'}", file=sys.stderr
        )
        return 2
    errors = [*shared_class_names(files), *full_folders(files), *literal_getattrs(files)]
    for error in errors:
        print(error)
    print(f"names: {len(files)} files, {len(errors)} errors")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
