"""What every test shares: a quiet, offline, single-threaded process, and one rule for what may be
skipped.

A *component* (a package, a program) that a test needs is required where `CI=true`: missing, it
fails the test, so that a green run never means "not tried". Elsewhere it skips. *Data* beside the
repository (`../shared/data`) are no component: where they are absent a test skips with the reason,
in CI too. Hence no `pytest.importorskip` in any test.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch; xdist's workers and the tests' subprocesses inherit them. Two
# workers with one thread each beat one worker with two, and never oversubscribe a small machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from hypothesis import settings
from support.browser import browser  # noqa: F401  # a fixture
from support.rotation import is_todays
from support.warm_python import warm_environment  # noqa: F401  # a fixture

# A shell that starts the suite in the background, or by nohup, has these ignored, and children
# would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

settings.register_profile(
    "ratchet", derandomize=True, deadline=None, database=None, max_examples=40
)
# In `make test-slow`, which doesn't hold them to FAST_EXAMPLES.
settings.register_profile("thorough", parent=settings.get_profile("ratchet"))
settings.load_profile("ratchet")
FAST_EXAMPLES = 10
SETTINGS = "_hypothesis_internal_use_settings"  # where hypothesis's own plugin finds them

REPOSITORY = Path(__file__).resolve().parent.parent
Require = Callable[[str, str], None]
# Files with one test or two that take minutes. They start first: by the number of their tests they
# would come last, and a worker would end alone with one.
LONGEST_FILES = (
    "recipes/test_rotating.py",
    "recipes/test_in_part.py",
    "commands/test_ahead_deaths.py",
    "benchmarks/test_mutants.py",
    "recipes/test_quickstart.py",
    "test_wheel.py",
)
LAST_PYTHON = {"gem": (3, 11)}  # of components without a release for later versions of Python


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--in-turn",
        action="store_true",
        help="leave out the slow tests of long files whose turn is another day (support/rotation.py)",
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect without garbage collection, and leave what was collected out of later ones.

    Modules and thirteen thousand items stay alive to the end: looking through them again and again
    takes a third of the collection's time, and a quarter of that of small tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what has its turn another day, and order the files that xdist hands out one at a
    time: the longest first, then by tests."""
    if config.getoption("--in-turn"):
        tests_dir = REPOSITORY / "tests"
        files = {item.path for item in items}
        others = {path for path in files if not is_todays(str(path.relative_to(tests_dir)))}
        left_out = {
            item
            for item in items
            if item.path in others and item.get_closest_marker("slow") is not None
        }
        config.hook.pytest_deselected(items=[*left_out])
        items[:] = [item for item in items if item not in left_out]
    if not hasattr(config, "workerinput"):
        return
    tests = Counter(item.path for item in items)
    longest = {REPOSITORY / "tests" / name for name in LONGEST_FILES}
    items.sort(key=lambda item: (item.path not in longest, -tests[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Say what ended a worker that died: a signal prints nothing by itself."""
    if error:
        process = node.gateway._io.popen
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = process.wait(timeout=10)
            sys.stderr.write(f"\n{node.gateway.id} ended with status {status} (minus: a signal)\n")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Try a property on FAST_EXAMPLES at most; `make test-slow` runs each on all of its own."""
    if settings.get_current_profile_name() == "thorough":
        return
    test = getattr(item, "function", None)
    chosen = getattr(test, SETTINGS, None)
    if chosen is not None and chosen.max_examples > FAST_EXAMPLES:
        setattr(test, SETTINGS, settings(chosen, max_examples=FAST_EXAMPLES))


def require(component: str, reason: str) -> None:
    """Goes on where `component` is there; else fails in CI and skips elsewhere. Skips in CI too if
    it has no release for this version of Python.

    `component` is an importable module ("vllm", "ray"), a program on the PATH ("bwrap"), or a path
    (with a slash).
    """
    if _present(component):
        return
    message = f"'{component}' is missing: {reason}"
    if sys.version_info[:2] > LAST_PYTHON.get(component, sys.version_info):
        pytest.skip(f"'{component}' has no release for this version of Python: {reason}")
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{message} (required where CI=true)", pytrace=False)
    pytest.skip(message)


def _present(component: str) -> bool:
    if "/" in component:
        return Path(component).exists()
    try:
        module = importlib.util.find_spec(component)
    except ModuleNotFoundError:  # the parent package of a dotted name
        module = None
    return module is not None or shutil.which(component) is not None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.needs("ray", ...)` is `require` for each name before the test (and its
    fixtures) start."""
    for mark in item.iter_markers("needs"):
        for component in mark.args:
            require(
                component, mark.kwargs.get("reason", f"{item.name} tests against the real thing")
            )


@pytest.fixture(scope="session")
def ray_token(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The token of every Ray that a test starts in this process: Ray keeps the first it reads."""
    path = tmp_path_factory.mktemp("ray") / "token"
    path.write_text(secrets.token_hex(32))
    return str(path)


@pytest.fixture(name="require")
def require_fixture() -> Require:
    """`require(component, reason)` for a test that learns only while running what it needs."""
    return require


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the working tree."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Callable[[str], Path]:
    """`shared_data("gsm8k/test.jsonl")`: the path of a file of the optional data beside the
    repository; skips without it."""

    def locate(name: str) -> Path:
        path = REPOSITORY.parent / "shared" / "data" / name
        if not path.exists():
            pytest.skip(f"the optional data file shared/data/{name} isn't beside the repository")
        return path

    return locate


@pytest.fixture
def kernels(require: Require) -> Callable[[bool], None]:
    """`kernels(True)`: from here to the test's end this process computes with compiled kernels."""

    def choose(compiled: bool) -> None:
        from ratchet.kernels import cpu

        if compiled:
            require("cc", "the kernels are compiled by the machine's C compiler")
        cpu.set_enabled(compiled)

    return choose


@pytest.fixture
def bfloat16_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """`precision: bfloat16` works on any processor, though slowly where it has no instructions."""
    from support.emulated_bfloat16 import emulate_where_missing

    emulate_where_missing(monkeypatch)


@pytest.fixture(autouse=True)
def torch_kernels() -> Iterator[None]:
    """A run that a test does in this process leaves its choice behind: the next test must not
    depend on it."""
    yield
    if (cpu := sys.modules.get("ratchet.kernels.cpu")) is not None:
        cpu.set_enabled(False)
    if (bfloat16 := sys.modules.get("ratchet.kernels.bfloat16")) is not None:
        bfloat16.set_enabled(False)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Captured output with half a surrogate pair (tests of hostile text log some) could not travel
    between workers."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report
