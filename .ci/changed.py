"""Chooses the tests that a change touches: `python .ci/changed.py` prints one test file a line.

A changed file is one that differs from where the branch left main, or that git does not track yet.
It touches a test file that changed itself, that names a changed module of the library, or that
imports a helper of which one of the two holds. Where no test file names a module, those that name
the modules that name it are chosen, and so on. To name is to import, or to have the dotted name in
a text: the code of another process, the target of a monkeypatch, a table of kinds.

A test further away may fail too: `make test` runs them all.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path("ratchet")
TESTS = Path("tests")
ROOT_CONFTEST = TESTS / "conftest.py"  # touches every test; changing it calls for `make test`
DOTTED = re.compile(rf"\b{PACKAGE}(?:\.\w+)+")


def changed_files(base: str | None) -> set[Path]:
    """Return the files that differ from the merge base with `base`, by default with main.

    Raises SystemExit if git does not know `base`.
    """
    bases = [base] if base else ["origin/main", "main"]
    known = [name for name in bases if _git("rev-parse", "--verify", "--quiet", name)]
    if base and not known:
        raise SystemExit(f"changed: SINCE={base} is no commit. Set SINCE to a branch or a commit.")
    start = _git("merge-base", "HEAD", known[0])[0] if known else "HEAD"
    names = _git("diff", "--name-only", "--no-renames", start)
    return {Path(name) for name in [*names, *_git("ls-files", "--others", "--exclude-standard")]}


def _git(*words: str) -> list[str]:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else []


def module_name(path: Path) -> str:
    """Return the dotted name of a module of the library; of a data file, that of its folder."""
    parts = path.with_suffix("").parts if path.suffix == ".py" else path.parent.parts
    return ".".join(parts[:-1] if parts[-1:] == ("__init__",) else parts)


def named_modules(source: str, modules: set[str]) -> set[str]:
    """Return the modules of the library that a source file names."""
    names = set(DOTTED.findall(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for name in names if (module := _longest_module(name, modules))}


def _longest_module(name: str, modules: set[str]) -> str:
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name


def imported_helpers(path: Path, source: str, helpers: dict[str, Path]) -> set[Path]:
    """Return the files beside the tests that a test imports, and the `conftest.py` that it has."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    folders = path.relative_to(TESTS).parents
    conftests = {TESTS / folder / "conftest.py" for folder in folders} - {path, ROOT_CONFTEST}
    return {helpers[name] for name in names if name in helpers} | conftests


class TestMap:
    """What each test file reaches.

    Attributes:
        tests: The test files.
        helpers: By test file, the files beside the tests that it imports, at any depth, and itself.
        modules: By test file, the modules of the library that it or one of its helpers names.
        namers: By module, the modules of the library that name it.
    """

    def __init__(self) -> None:
        self.library = {module_name(path): path for path in PACKAGE.rglob("*.py")}
        names = set(self.library)
        self.namers: dict[str, set[str]] = defaultdict(set)
        for name, path in self.library.items():
            for named in named_modules(path.read_text(encoding="utf-8"), names) - {name}:
                self.namers[named].add(name)
        sources = {path: path.read_text(encoding="utf-8") for path in TESTS.rglob("*.py")}
        helpers = {".".join(p.relative_to(TESTS).with_suffix("").parts): p for p in sources}
        named_by = {path: named_modules(source, names) for path, source in sources.items()}
        imported = {
            path: imported_helpers(path, source, helpers) for path, source in sources.items()
        }
        self.tests = sorted(path for path in sources if path.name.startswith("test_"))
        self.helpers = {path: _closure(path, imported) for path in self.tests}
        self.modules = {
            path: set[str]().union(*(named_by[file] for file in self.helpers[path]))
            for path in self.tests
        }

    def nearest(self, module: str) -> set[Path]:
        """Return the tests that name `module`, or else those that name the nearest modules that
        lead to it. Where there are none (an empty `__init__.py`, a program that is started by its
        path), return those that name a module of its folder."""
        ring, seen = {module}, {module}
        while ring:
            if chosen := self._naming(ring):
                return chosen
            ring = set[str]().union(*(self.namers[name] for name in ring)) - seen
            seen |= ring
        is_package = self.library.get(module, PACKAGE).name == "__init__.py"
        folder = module if is_package else module.rpartition(".")[0]
        return self._naming({name for name in self.library if name.startswith(f"{folder}.")})

    def _naming(self, modules: set[str]) -> set[Path]:
        return {path for path in self.tests if self.modules[path] & modules}


def _closure(path: Path, imported: dict[Path, set[Path]]) -> set[Path]:
    reached, waiting = set[Path](), [path]
    while waiting:
        if (file := waiting.pop()) not in reached and file in imported:
            reached.add(file)
            waiting += imported[file]
    return reached


def choose(changed: Iterable[Path], tests: TestMap) -> list[Path]:
    """Return the test files that the changed files touch, sorted by path."""
    chosen: set[Path] = set()
    for file in changed:
        chosen |= {path for path in tests.tests if file in tests.helpers[path]}
        if file.is_relative_to(PACKAGE):
            chosen |= tests.nearest(module_name(file))
    return sorted(chosen)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--since", help="a branch or a commit; default: where HEAD left main")
    parser.add_argument("files", nargs="*", type=Path, help="changed files, instead of git's")
    options = parser.parse_args(arguments)
    changed = set(options.files) or changed_files(options.since or None)
    chosen = choose(changed, TestMap())
    print(f"changed: {len(changed)} files touch {len(chosen)} test files", file=sys.stderr)
    print(*chosen, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
