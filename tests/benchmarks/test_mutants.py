"""The mutation tester itself, and a sample of what it says about the maths."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.rotation import count_days, runs_all

MATHS = '''
"""Half of it has tests."""

LIMIT = 2


def distance(a: float, b: float) -> float:
    """Not 0, and not 1."""
    return abs(a - b) / 2


def forgotten(a: float, *, floor: float = 1) -> float:
    return max(a - 1, floor)
'''

TESTS = """
from maths import distance


def test_distance():
    assert distance(1.0, 4.0) == 1.5
    assert distance(4.0, 1.0) == 1.5
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "maths.py").write_text(MATHS, encoding="utf-8")
    (tmp_path / "test_maths.py").write_text(TESTS, encoding="utf-8")
    return tmp_path


def mutants(repository: Path, *arguments: str | Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(repository / "benchmarks/mutants.py"), *map(str, arguments)]
    # `.ci/versions.py` sets it, and the script imports what lies beside it.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=repository, env=environment
    )
    assert not done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_a_tested_function_has_no_survivors_and_an_untested_one_has(repository, tree):
    status, lines = mutants(repository, "maths.py", "--root", tree, "--tests", "test_maths.py")
    *survivors, summary = lines
    assert status == 1
    assert survivors == [
        "maths.py:4 <module> [constant] LIMIT = 2 -> LIMIT = 4",
        "maths.py:13 forgotten [sign] return max(a - 1, floor) -> return -max(a - 1, floor)",
        "maths.py:13 forgotten [sign] return max(a - 1, floor) -> return min(a - 1, floor)",
        "maths.py:13 forgotten [sign] return max(a - 1, floor) -> return max(a + 1, floor)",
        "maths.py:13 forgotten [sign] return max(a - 1, floor) -> return max(1 - a, floor)",
        "maths.py:13 forgotten [index] return max(a - 1, floor) -> return max(a, floor)",
        "maths.py:13 forgotten [constant] return max(a - 1, floor) -> return max(a - 2, floor)",
    ]
    counts = json.loads(summary)
    assert (counts["killed"], counts["survived"], counts["timeouts"]) == (5, 7, 0)


@pytest.mark.medium
def test_a_mutant_reaches_names_that_other_modules_took_over(repository, tree):
    (tree / "other.py").write_text(
        "from functools import partial\nfrom maths import distance\nfar = partial(distance, 0.0)\n"
    )
    (tree / "test_maths.py").write_text(
        "from other import far\n\n\ndef test_far():\n    assert far(3.0) == 1.5\n"
    )
    arguments = ("maths.py", "--root", tree, "--tests", "test_maths.py", "--only", "denominator")
    status, lines = mutants(repository, *arguments)
    assert (status, json.loads(lines[-1])["killed"]) == (0, 1)


@pytest.mark.slow
def test_what_never_ends_counts_as_killed(repository, tree):
    (tree / "maths.py").write_text(
        "def halve(x: int) -> None:\n    while x > 0:\n        x -= 1\n", encoding="utf-8"
    )
    (tree / "test_maths.py").write_text(
        "from maths import halve\n\n\ndef test_halve():\n    assert halve(2) is None\n"
    )
    arguments = ("maths.py", "--root", tree, "--tests", "test_maths.py", "--timeout", "3")
    _, lines = mutants(repository, *arguments)
    counts = json.loads(lines[-1])
    assert counts["timeouts"] >= 1


@pytest.mark.medium
def test_tests_that_fail_as_things_are_are_no_judges(repository, tree):
    (tree / "test_maths.py").write_text("def test_broken():\n    assert False\n", encoding="utf-8")
    status, lines = mutants(repository, "maths.py", "--root", tree, "--tests", "test_maths.py")
    assert status == 2
    assert "fail without a mutant" in lines[0]


@pytest.mark.medium
def test_listing_names_every_kind_of_edit(repository, tree):
    source = (
        "def loss(x_T: Tensor, keep_T: Tensor, clip: float) -> Tensor:\n"
        "    y_T = torch.where(keep_T & ~batch.train_S, x_T.detach()[1:], -x_T)\n"
        "    if clip:\n"
        "        y_T = torch.minimum(y_T.clamp(max=clip), 0.5 * y_T.sum(1))\n"
        "    return y_T / (x_T.sum() - 1).clamp(min=1)\n"
    )
    (tree / "maths.py").write_text(source, encoding="utf-8")
    status, lines = mutants(
        repository, "maths.py", "--root", tree, "--tests", "test_maths.py", "--list"
    )
    edits = {line.split("[", 1)[1] for line in lines}
    assert status == 0
    first = "torch.where(keep_T & ~batch.train_S, x_T.detach()[1:], -x_T)"
    for kind, after in [
        ("mask", "x_T.detach()[1:]"),
        ("mask", first.replace(" & ~batch.train_S", "")),
        ("mask", first.replace("~", "")),
        ("mask", first.replace("batch.train_S", "(batch.train_S | True)")),
        ("detach", first.replace(".detach()", "")),
        ("index", first.replace("1:", "0:")),
        ("sign", first.replace("-x_T", "x_T")),
    ]:
        assert f"{kind}] y_T = {first} -> y_T = {after}" in edits
    last = "y_T / (x_T.sum() - 1).clamp(min=1)"
    for kind, after in [
        ("denominator", "y_T"),
        ("denominator", last.replace("(x_T.sum() - 1)", "x_T.sum()")),
        ("denominator", last.replace("sum", "mean")),
        ("sign", f"-({last})"),
    ]:
        assert f"{kind}] return {last} -> return {after}" in edits
    assert {edit.split("]")[0] for edit in edits} == {
        *("sign", "mask", "denominator", "factor", "detach", "index", "constant", "branch")
    }
    assert not any("min=2" in edit for edit in edits)


@pytest.mark.medium
def test_a_part_is_one_of_equal_ones(repository, tree):
    words = ("maths.py", "--root", tree, "--tests", "test_maths.py", "--list")
    every, part = (mutants(repository, *words, *more)[1] for more in ((), ("--part", "1/3")))
    assert (len(every), part) == (12, every[4:8])


@pytest.mark.slow
def test_a_sample_of_the_mutants_of_the_maths_leaves_no_survivor(repository):
    """A third of it today, and all of it in three days."""
    part = [] if runs_all() else ["--part", f"{count_days() % 3}/3"]
    status, lines = mutants(repository, "--sample", "60", "--seed", "0", "--jobs", "2", *part)
    assert status == 0, "\n".join([*part, *lines])
