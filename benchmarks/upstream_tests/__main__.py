"""Run upstream's unit tests and write docs/upstream-tests.md:
`python -m benchmarks.upstream_tests NEMO_RL VERL ROLL`, three checkouts.

The tests run as they are, from copies in a temporary directory, with "cpu" for "cuda" and without
their skips for a missing accelerator. Exit 1 if a test fails or passes that `expected.py` does not
list so, or with `--check` if the page differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.upstream_tests import modules, nemo_rl_names, other_names
from benchmarks.upstream_tests.expected import FAILURES, SUITES, Suite
from benchmarks.upstream_tests.players import AutoTokenizer, make_ray

PAGE = Path(__file__).resolve().parents[2] / "docs" / "upstream-tests.md"
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"
# What is written differently in the copies.
REPLACEMENTS = (
    ('"cuda"', '"cpu"'),
    ("torch.cuda.is_available()", "True"),
    ("torch.cuda.empty_cache()", "None"),
    ("torch.cuda.manual_seed_all(42)", "None"),
    ("from transformers import AutoTokenizer", "from upstream_tokenizer import AutoTokenizer"),
)


class Recorder:
    """It records the outcome of each test: passed, or the text of its failure or skip."""

    def __init__(self, copies: dict[str, Suite]) -> None:
        self.copies = copies
        self.outcomes: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests that do not count."""
        items[:] = [item for item in items if self.copies[item.path.name].covers(item.name)]

    def pytest_collection_finish(self) -> None:
        modules.Placeholder.collecting = False

    def pytest_runtest_logreport(self, report: Any) -> None:
        name = report.nodeid.replace("::", "/", 1)
        if report.when == "call" and report.passed and name not in self.outcomes:
            self.outcomes[name] = ("passed", "")
        elif report.skipped:
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
            self.outcomes[name] = ("skipped", str(text).removeprefix("Skipped: "))
        elif report.failed and report.when != "teardown":
            crash = getattr(report.longrepr, "reprcrash", None)
            text = str(report.longrepr) if crash is None else crash.message
            kind = "failed" if report.when == "call" else "skipped"
            self.outcomes[name] = (kind, text.splitlines()[0] if text else "")


def run(suites: Sequence[Suite], roots: dict[str, Path]) -> dict[Suite, dict[str, tuple[str, str]]]:
    """Run the suites, and return the outcome of each test."""
    modules.install({**nemo_rl_names.NAMES, **other_names.NAMES})
    tokenizer: Any = type(sys)("upstream_tokenizer")
    tokenizer.AutoTokenizer = AutoTokenizer
    sys.modules["upstream_tokenizer"] = tokenizer
    sys.modules["ray"] = make_ray()
    # Helpers of NeMo RL's tests are imported as tests.unit...
    sys.path.insert(0, str(roots["nemo-rl"]))
    copies: dict[str, Suite] = {}
    recorder = Recorder(copies)
    with tempfile.TemporaryDirectory() as directory:
        for number, suite in enumerate(suites):
            text = (roots[suite.peer] / suite.path).read_text(encoding="utf-8")
            if "AutoTokenizer" in text:
                AutoTokenizer.corpus = text
            for old, new in REPLACEMENTS:
                text = text.replace(old, new)
            copy = Path(directory) / f"test_{number}_{Path(suite.path).stem}.py"
            copy.write_text(text, encoding="utf-8")
            copies[copy.name] = suite
        (Path(directory) / "pytest.ini").write_text("[pytest]\naddopts =\n", encoding="utf-8")
        os.chdir(directory)
        options = ["-q", "--tb=no", "--disable-warnings", "-p", "no:cacheprovider", "--rootdir=."]
        pytest.main([*options, *copies], plugins=[recorder])
        os.chdir("/")
    results: dict[Suite, dict[str, tuple[str, str]]] = {suite: {} for suite in suites}
    for name, outcome in recorder.outcomes.items():
        file, _, test = name.partition("/")
        results[copies[file]][test] = outcome
    return results


def _sort(suite: Suite, test: str, outcome: tuple[str, str]) -> tuple[str, str]:
    """Return the class of a test and the reason: passed, differs, not here, or unexpected."""
    kind, text = outcome
    keys = (
        key for key in FAILURES if f"{test}[".startswith(f"{key}[") or test.startswith(f"{key}-")
    )
    expected = next((FAILURES[key] for key in keys), None)
    if kind == "passed":
        return ("unexpected", "passes, and is listed") if expected else ("passed", "")
    if expected is not None:
        return expected
    if kind == "skipped" and text.startswith("not here: "):
        return "not here", text.removeprefix("not here: ")
    reason = next((suite.other[key] for key in suite.other if key in test), None)
    if reason is not None:
        return "not here", reason
    return "unexpected", f"{kind}: {text}"


def _write(results: dict[Suite, dict[str, tuple[str, str]]]) -> Iterator[str]:
    yield "| | Applicable | Passed | Differ | Not here |"
    yield "|---|---|---|---|---|"
    totals: Counter[str] = Counter()
    reasons: dict[tuple[str, str], list[str]] = defaultdict(list)
    for suite, outcomes in results.items():
        counts: Counter[str] = Counter()
        for test, outcome in outcomes.items():
            kind, reason = _sort(suite, test, outcome)
            counts[kind] += 1
            if kind != "passed":
                reasons[kind, reason].append(test.partition("[")[0])
        totals += counts
        yield _write_counts(f"{suite.title}, `{suite.path.rpartition('/')[2]}`", counts)
    yield _write_counts("**all**", totals)
    for kind, title in (("differs", "Differ"), ("not here", "Not here")):
        yield from ("", f"### {title}", "", "| Tests | Why |", "|---|---|")
        for (other, reason), tests in sorted(reasons.items(), key=lambda pair: pair[0]):
            if other == kind:
                names = ", ".join(f"`{name}`" for name in sorted(set(tests)))
                yield f"| {names} | {reason.replace('|', '/')} |"


def _write_counts(title: str, counts: Counter[str]) -> str:
    applicable = counts["passed"] + counts["differs"]
    share = f" ({100 * counts['passed'] / applicable:.0f} %)" if applicable else ""
    passed = f"{counts['passed']}{share}"
    return f"| {title} | {applicable} | {passed} | {counts['differs']} | {counts['not here']} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for peer in ("nemo_rl", "verl", "roll"):
        parser.add_argument(peer, type=Path, help=f"a checkout of {peer}")
    parser.add_argument("--check", action="store_true", help="compare the page, do not write it")
    options = parser.parse_args()
    roots = {"nemo-rl": options.nemo_rl, "verl": options.verl, "roll": options.roll}
    roots = {peer: root.resolve() for peer, root in roots.items()}
    results = run(SUITES, roots)
    surprises = [
        f"{suite.path}::{test}: {reason}"
        for suite, outcomes in results.items()
        for test, outcome in outcomes.items()
        for kind, reason in [_sort(suite, test, outcome)]
        if kind == "unexpected"
    ]
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    lines = "\n".join(_write(results))
    page = f"{before}{BEGIN}{lines}\n{END}{rest.partition(END)[2]}"
    print(lines.partition("\n\n")[0])
    if surprises:
        sys.exit("\n".join(["unexpected:", *surprises]))
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    elif page != text:
        sys.exit(f"{PAGE} differs: write it anew without --check")


if __name__ == "__main__":
    main()
