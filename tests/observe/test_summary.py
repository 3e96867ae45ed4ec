"""The schema of summary.json, and the table beside it."""

from __future__ import annotations

import io
import json
import math
import platform
import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

import ratchet
from ratchet.observe.summary import RunSummary, StageSummary, get_installed_versions

SFT = StageSummary(
    "sft", "sft", 60, 120.0, 0.1, 0.5, trained_tokens=6000.0, computed_tokens=60_000.0
)
RL = StageSummary(
    "rl [x]", "grpo", 300, 200.0, 0.5, 0.875, trained_tokens=50_000.0, generated_tokens=40_000.0
)


def summary(*stages: StageSummary) -> RunSummary:
    return RunSummary(stages, "ratchet train x.yaml", 7, 2, "cpu", versions={"ratchet": "0.1.0"})


def shown(made: RunSummary) -> str:
    console = Console(file=io.StringIO(), width=120)
    for table in made.make_tables():
        console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_schema(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    summary(SFT, RL).write(path)
    assert json.loads(path.read_text()) == {
        "stages": [
            {
                "name": "sft",
                "algorithm": "sft",
                "steps": 60,
                "seconds": 120.0,
                "accuracy_before": 0.1,
                "accuracy_after": 0.5,
                "is_share": True,
                "loss_before": None,
                "loss_after": None,
                "tokens_per_s": {"trained": 50.0, "generated": 0.0, "computed": 500.0},
            },
            {
                "name": "rl [x]",
                "algorithm": "grpo",
                "steps": 300,
                "seconds": 200.0,
                "accuracy_before": 0.5,
                "accuracy_after": 0.875,
                "is_share": True,
                "loss_before": None,
                "loss_after": None,
                "tokens_per_s": {"trained": 250.0, "generated": 200.0, "computed": 0.0},
            },
        ],
        "command": "ratchet train x.yaml",
        "seed": 7,
        "versions": {"ratchet": "0.1.0"},
        "threads": 2,
        "device": "cpu",
        "peak_mib": None,
    }
    assert [item.name for item in tmp_path.iterdir()] == ["summary.json"]


def test_what_was_not_measured_is_null(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    path.write_text("old")
    summary(StageSummary("a", "sft", 0, 0.0, None, math.nan)).write(path)
    (stage,) = json.loads(path.read_text())["stages"]
    assert (stage["accuracy_before"], stage["accuracy_after"]) == (None, None)
    assert stage["tokens_per_s"] == {
        "trained": None,
        "generated": None,
        "computed": None,
    }


def test_table() -> None:
    lines = shown(summary(SFT, RL, StageSummary("none", "dpo", 1, 0.0, None, None))).splitlines()
    sft, rl, none = (
        next(line for line in lines if name in line) for name in ("sft", "rl [x]", "none")
    )
    for part in ("10.0 %", "50.0 %", "+40.0", "2m00s", " 500 "):
        assert part in sft
    for part in ("grpo", "87.5 %", "+37.5", "3m20s", " 200 "):
        assert part in rl
    assert none.split("dpo")[1].count("-") == 4


def test_table_on_a_terminal_without_unicode() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    Console(file=file, width=120, force_terminal=True).print(
        *summary(SFT, StageSummary("x", "y", 1, 0.0, None, None)).make_tables()
    )


def test_versions_without_importing() -> None:
    code = (
        "import sys; from ratchet.observe.summary import get_installed_versions as v; print(v()); "
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(get_installed_versions()), "False"]
    assert get_installed_versions() == {
        "ratchet": None if ratchet.__version__ == "unknown" else ratchet.__version__,
        **{name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
    }


def test_a_mean_of_rewards_beyond_0_and_1_is_a_plain_number() -> None:
    text = shown(summary(SFT, replace(RL, accuracy_after=-12.0, is_share=False)))
    assert "Held-out reward" in text
    assert "%" not in text
    assert "-12.000" in text
    assert "-12.500" in text
