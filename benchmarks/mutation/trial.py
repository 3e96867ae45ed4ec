"""Run tests against mutants, each in a fork of this process.

This process has imported the libraries that the tests need, but no module of the tree under test. In
a fork, every import of the mutated module gets the mutant. So names that other modules import from
it, and partials of its functions, are the mutant's too.
"""

from __future__ import annotations

import ast
import importlib
import importlib.machinery
import importlib.util
import json
import os
import selectors
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import Phase, settings

Label = TypeVar("Label")
# Maximum wall time of a process, as a multiple of its processor time: other programs run here too.
WAIT = 20


@dataclass(frozen=True)
class Result:
    """The result of a trial.

    status: pytest's exit status; None: the time was up.
    killer: the first test or file that failed.
    modules: modules that the process has imported; empty if a mutant was tried.
    cpu_s: processor seconds, which vary less than wall time on a shared machine.
    """

    status: int | None
    killer: str = ""
    modules: tuple[str, ...] = ()
    cpu_s: float = 0.0

    @property
    def is_killed(self) -> bool:
        return self.status != 0


@dataclass(frozen=True)
class Trial:
    """One run of a file's tests, with or without a mutant.

    code: returns the mutated module's tree, called in the fork; None: no mutant.
    first, hint, second: the order of the tests. Tests named in `first` run first, then those with
      `hint` in their name, then those named in `second`, then all others.
    examples: number of examples of each property; None: the default.
    """

    module: str
    path: Path
    code: Callable[[], ast.Module] | None
    tests: tuple[Path, ...]
    timeout_cpu_s: int
    first: tuple[str, ...] = ()
    hint: str = ""
    second: tuple[str, ...] = ()
    examples: int | None = None


def run(
    trials: Iterable[tuple[Label, Trial]], root: Path, jobs: int
) -> Iterator[tuple[Label, Result]]:
    """Yield (label, result) of each trial as it ends, with up to `jobs` at the same time.

    The next trial is taken from `trials` only when it can start.
    """
    waiting = iter(trials)
    with selectors.DefaultSelector() as running:
        while True:
            while len(running.get_map()) < jobs and (item := next(waiting, None)) is not None:
                pid, pipe = _fork(item[1], root)
                running.register(pipe, selectors.EVENT_READ, (item[0], pid, bytearray()))
            if not running.get_map():
                return
            for key, _ in running.select():
                label, pid, received = key.data
                if chunk := os.read(key.fd, 65536):
                    received.extend(chunk)
                    continue
                running.unregister(key.fd)
                os.close(key.fd)
                _, wait_status, usage = os.wait4(pid, 0)
                yield (
                    label,
                    replace(
                        _parse_result(received, wait_status), cpu_s=usage.ru_utime + usage.ru_stime
                    ),
                )


def preload(modules: Iterable[str], root: Path) -> None:
    """Import the libraries among the modules: those outside the tree under test."""
    if str(root) not in sys.path:
        # Otherwise an installed copy of the tree would count as a library.
        sys.path.insert(0, str(root))
    for name in modules:
        spec = _find_spec(name)
        if spec is not None and spec.origin and not _is_under_test(Path(spec.origin), root):
            importlib.import_module(name)


def _find_spec(name: str) -> importlib.machinery.ModuleSpec | None:
    if name.startswith(("_pytest", "pytest", "xdist")) or name in ("__main__", "conftest"):
        return None
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        return None


def _is_under_test(path: Path, root: Path) -> bool:
    return path.is_relative_to(root) and "site-packages" not in path.parts


def _parse_result(received: bytearray, wait_status: int) -> Result:
    if received:
        return Result(**json.loads(received))
    # A timer or the mutant killed the process. 70: an internal error.
    return Result(
        None
        if os.WIFSIGNALED(wait_status)
        and os.WTERMSIG(wait_status) in (signal.SIGPROF, signal.SIGALRM)
        else 70
    )


def _fork(trial: Trial, root: Path) -> tuple[int, int]:
    assert trial.module not in sys.modules, (
        f"{trial.module} is already imported here, so the forks would not import its mutant"
    )
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    # This is the child, which never returns.
    try:
        os.close(read_end)
        signal.setitimer(signal.ITIMER_PROF, trial.timeout_cpu_s)
        signal.alarm(WAIT * trial.timeout_cpu_s)
        report = _test(trial, root)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(json.dumps(report).encode())
    finally:
        os._exit(1)


def _test(trial: Trial, root: Path) -> dict[str, Any]:
    null_file = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null_file, stream)
    os.chdir(root)
    sys.path.insert(0, str(root))
    if trial.code is not None:
        sys.meta_path.insert(0, _TreeLoader(trial.module, trial.path, trial.code()))
    watcher = _Watcher(trial)
    arguments = [
        f"--rootdir={root}",
        "-x",
        "-q",
        "--no-header",
        "--tb=no",
        "-m",
        "not slow",
        "--import-mode=importlib",
    ]
    arguments += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    status = pytest.main([*arguments, *map(str, trial.tests)], plugins=[watcher])
    modules = () if trial.code is not None else tuple(sys.modules)
    return {"status": int(status), "killer": watcher.killer, "modules": modules}


class _TreeLoader(importlib.machinery.SourceFileLoader):
    """A finder and loader of one module, which comes from a syntax tree instead of its file."""

    def __init__(self, module: str, path: Path, tree: ast.Module) -> None:
        super().__init__(module, str(path))
        self._tree = tree

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self.name:
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=self)

    def get_code(self, fullname: str) -> Any:
        return compile(self._tree, self.path, "exec")


class _Watcher:
    """A pytest plugin. The likeliest killers run first, and failing examples are not shrunk."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self.killer = ""

    def pytest_configure(self, config: pytest.Config) -> None:
        changes: dict[str, Any] = {
            "phases": (Phase.explicit, Phase.generate),
            "report_multiple_bugs": False,
        }
        if self._trial.examples is not None:
            changes["max_examples"] = self._trial.examples
        settings.register_profile("mutants", settings.default, **changes)  # pyright: ignore[reportArgumentType]
        settings.load_profile("mutants")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: self._rank(item.nodeid))

    def _rank(self, name: str) -> tuple[int, int]:
        if name in self._trial.first:
            return 0, self._trial.first.index(name)
        if self._trial.hint and self._trial.hint in name:
            return 1, 0
        return (2, self._trial.second.index(name)) if name in self._trial.second else (3, 0)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.killer:
            self.killer = report.nodeid


class Killers:
    """A count of the tests that killed mutants, by victim: a file, or a function of a file."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[str]] = {}

    def add(self, killer: str, *victims: str) -> None:
        for victim in victims if killer else ():
            self._counts.setdefault(victim, Counter())[killer] += 1

    def get(self, victim: str) -> tuple[str, ...]:
        """Return up to 12 tests, those with the most kills first."""
        return tuple(name for name, _ in self._counts.get(victim, Counter()).most_common(12))
