"""`ratchet check my_pkg.my_algo:MINE`: what the path may name, what is said of it, and what is
wrong with others."""

from __future__ import annotations

import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.algorithms.config.preference import SimPOConfig
from ratchet.algorithms.loss_aggregation import token_mean
from ratchet.algorithms.losses.common import nll
from ratchet.algorithms.sft import SFT_EXEMPTIONS
from ratchet.cli.main import app
from ratchet.config.resolve import section_class
from ratchet.errors import ConfigError
from ratchet.testing.check_command import check_named, find_algorithm

MINE = Algorithm(
    "mine", {"policy": (AlgorithmTerm("nll", nll, token_mean),)}, "rows", exempt=SFT_EXEMPTIONS
)
CLAIMS = Algorithm("claims", MINE.losses, "rows")


class Margin(SimPOConfig):
    """SimPO by another name."""


def make(coef: float, steps: int = 1) -> Algorithm:
    return Algorithm(
        "made",
        {"policy": (AlgorithmTerm("nll", nll, token_mean, coef=coef),)},
        "rows",
        epochs=steps,
        exempt=SFT_EXEMPTIONS,
    )


def other(size: int = 1) -> list[int]:
    return [size]


NUMBER = 3


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    made = types.ModuleType("algorithms_for_test")
    for name in ("MINE", "CLAIMS", "Margin", "make", "other", "NUMBER"):
        setattr(made, name, globals()[name])
    monkeypatch.setitem(sys.modules, "algorithms_for_test", made)
    section_class.cache_clear()


def test_an_algorithm_a_section_and_a_function_are_all_found():
    assert find_algorithm("algorithms_for_test:MINE") is MINE
    made = find_algorithm("algorithms_for_test:Margin", ["minibatches=2", "sft_coef=0.5"])
    assert (made.name, made.minibatches, len(made.losses["policy"])) == (
        "algorithms_for_test:Margin",
        2,
        2,
    )
    made = find_algorithm("algorithms_for_test:make", ["coef=0.25", "steps=3"])
    assert (made.name, made.epochs, made.losses["policy"][0].coef) == ("made", 3, 0.25)


@pytest.mark.parametrize(
    ("path", "overrides", "message"),
    [
        ("algorithms_for_test:MNIE", [], "has no 'MNIE'; did you mean 'algorithms_for_test:MINE'"),
        ("absent_for_test:MINE", [], "'absent_for_test:MINE' can't be imported"),
        (
            "algorithms_for_test:NUMBER",
            [],
            "is an int: name an Algorithm, a section, or a function",
        ),
        ("algorithms_for_test:other", [], "makes a list, not an Algorithm"),
        (
            "algorithms_for_test:MINE",
            ["coef=1"],
            "is an Algorithm object, which takes no overrides",
        ),
        ("algorithms_for_test:make", [], "coef"),
        ("algorithms_for_test:make", ["coef"], "override 'coef' is not of the form key=value"),
        (
            "algorithms_for_test:Margin",
            ["bta=1"],
            "command line: bta: unknown key; did you mean 'beta'",
        ),
        ("algorithms_for_test:Margin", ["beta=0"], "command line: beta: 0 must be more than 0"),
    ],
)
def test_a_wrong_path_or_key_says_what_is_wrong(path: str, overrides: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        find_algorithm(path, overrides)


def test_the_table_has_a_line_for_each_invariance_and_property():
    text, holds = check_named("algorithms_for_test:MINE")
    assert holds
    assert text.splitlines() == [
        "mine: rows, micro-batches by sequence",
        "",
        "  micro_batches  holds",
        "  packing        holds",
        "  shards         holds",
        "  order          holds",
        "  learns         holds",
        "  isolated       holds",
        "  on_policy      n/a     no policy gradient: answers are given, not sampled",
        "  equal_rewards  n/a     no advantages: the answers are not judged",
        "  lone_attempt   n/a     no advantages: each row is a datum of its own",
    ]


def test_reward_functions_of_other_libraries_are_checked_as_rewards(tmp_path, monkeypatch):
    (tmp_path / "library_rewards.py").write_text(
        "def of_trl(completions, **kwargs):\n    return [1.0 for _ in completions]\n\n\n"
        "def not_applicable(completions, **kwargs):\n    return [None for _ in completions]\n\n\n"
        "def of_verl(data_source, solution_str, ground_truth, extra_info):\n    return 0.5\n\n\n"
        "def short(completions, **kwargs):\n    return [1.0]\n\n\n"
        "def number():\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("of_trl", "not_applicable", "of_verl"):
        table, holds = check_named(f"library_rewards:{name}")
        assert holds, table
        assert f"{name}: a reward" in table
    table, holds = check_named("library_rewards:short")
    assert (holds, "returned 1 rewards for 3 completions" in " ".join(table.split())) == (
        False,
        True,
    )
    with pytest.raises(ConfigError, match=r"not an Algorithm. A reward takes \(trajectory, task\)"):
        check_named("library_rewards:number")


@pytest.mark.medium
def test_the_command_ends_with_1_where_something_fails():
    good = CliRunner().invoke(app, ["check", "algorithms_for_test:MINE"])
    assert (good.exit_code, "mine: rows" in good.output) == (0, True)
    bad = CliRunner().invoke(app, ["check", "algorithms_for_test:CLAIMS"])
    assert (
        bad.exit_code,
        "on_policy      fails   is claimed, but there are no advantages" in bad.output,
    ) == (1, True)


def test_a_recipe_is_still_a_recipe(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no recipe"):
        CliRunner().invoke(app, ["check", str(tmp_path / "absent.yaml")], catch_exceptions=False)


@pytest.mark.slow
def test_the_directory_that_one_starts_from_is_searched(tmp_path: Path):
    source = (
        "from ratchet.algorithms.config.sft import SFTConfig\n\n\nclass Mine(SFTConfig):\n   "
        " "
        "'''Mine.'''\n"
    )
    (tmp_path / "beside_the_recipe.py").write_text(source, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ratchet.cli.main",
        "check",
        "beside_the_recipe:Mine",
        "weighting=sequence_mean",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "micro_batches  holds" in done.stdout
