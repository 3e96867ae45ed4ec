"""Passes over the data become steps, once the data are read."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.config.loader import load_config
from ratchet.environments.datasets.dataset import Dataset
from ratchet.errors import ConfigError
from ratchet.experience.sources.passes import resolve_passes
from ratchet.observe.sinks import read_jsonl
from ratchet.training.start import resume_run, start_run

RECIPE = {
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters"},
    "environment": {"kind": "dataset", "train": "rows.jsonl", "test_share": 0},
    "algorithm": {"kind": "sft"},
    "evaluation": {"tasks": 0},
    "passes": 2,
    "batch_size": 8,
    "logging": {"progress": "off", "tensorboard": False},
}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(30)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    return Path("recipe.yaml")


def count_steps(recipe: Path, *overrides: str) -> list[int]:
    return [stage.n_steps for stage in resolve_passes(load_config(recipe, overrides)).config.stages]


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        ((), 8),  # 60 rows by 8, rounded up
        (("passes=1",), 4),
        (("passes=0.2",), 1),
        (("passes=0.01",), 1),
        (("batch_size=10",), 6),
        (("batch_size=3", "passes=0.1"), 1),  # 0.1 x 30 is a little more than 3 in floats
        (("examples=12",), 3),
        (("examples=1000",), 8),
        (("steps=5",), 5),
        (("environment.test_share=0.5",), 4),
    ],
)
def test_steps_by_hand(recipe: Path, overrides: tuple[str, ...], steps: int) -> None:
    assert count_steps(recipe, *overrides) == [steps]


def test_a_pass_over_a_mixture_is_one_over_all_its_parts(recipe: Path) -> None:
    parts = (
        "[{kind: dataset, train: rows.jsonl, test_share: 0, tag: a}, {kind: gsm8k, train: g.jsonl}]"
    )
    row = {"question": "1 + 1?", "answer": "#### 2"}
    Path("g.jsonl").write_text(
        "".join(json.dumps({**row, "question": f"{n}?"}) + "\n" for n in range(20))
    )
    mixture = resolve_passes(
        load_config(recipe, [f"environment={{kind: mixture, parts: {parts}}}"])
    )
    train = next(iter(mixture.environments.values()))
    count = train.task_count()
    assert count is not None
    assert 40 < count < 50  # some of the 20 are held out
    assert mixture.config.stages[0].n_steps == -(-2 * count // 8)


def test_endless_tasks_have_no_pass_but_over_examples(recipe: Path) -> None:
    endless = ["environment={kind: sorting}"]
    with pytest.raises(ConfigError, match=r"passes=2 .*sorting, which are endless\. Set steps"):
        count_steps(recipe, *endless)
    assert count_steps(recipe, *endless, "examples=16") == [4]


def test_keys_are_checked_again_with_the_steps(recipe: Path) -> None:
    late = load_config(recipe, ["optimizer.warmup_steps=9"])
    with pytest.raises(ConfigError, match=r"stage sft: optimizer.warmup_steps=9 is more than"):
        resolve_passes(late)


@pytest.mark.medium
def test_a_run_keeps_its_steps_and_resumes_with_them(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scans = []
    scan = Dataset._scan
    monkeypatch.setattr(
        Dataset, "_scan", lambda self, table: (scans.append(table), scan(self, table))[1]
    )
    assert start_run(recipe, [], "run", command="train") == 0
    assert len(scans) == 1  # counted and trained by one scan
    stage = load_config("run/config.yaml").stages[0]
    assert (stage.steps, stage.passes) == (8, None)
    assert read_jsonl(Path("run/metrics.jsonl"))[-1]["step"] == 8
    assert "stage sft: 2 passes over 30 tasks, 8 a step: 8 steps" in Path("run/run.log").read_text()
    assert resume_run("run", command="train") == 0


def said(*arguments: str) -> str:
    return CliRunner().invoke(app, [*arguments], catch_exceptions=False).stdout


@pytest.mark.slow
def test_check_and_plan_say_how_many_steps(recipe: Path) -> None:
    line = "2 passes over 30 tasks, 8 a step: 8 steps"
    text = said("check", str(recipe))
    assert line in text
    assert "(steps 1 to 8 of 8)" in text
    assert line in said("plan", str(recipe))


def test_check_tells_why_it_can_not_count(recipe: Path) -> None:
    Path("rows.jsonl").unlink()
    text = CliRunner().invoke(app, ["check", str(recipe)]).stdout
    assert (
        "2 passes; the number of steps depends on the data, which can't be read here: rows.j"
        in text
    )
    assert "steps 1 to" not in text


@pytest.mark.medium
def test_a_try_has_so_many_steps_and_says_what_it_clipped(recipe: Path) -> None:
    overrides = ["optimizer.warmup_steps=6", "checkpoint.every=4"]
    assert start_run(recipe, overrides, "run", command="train", try_steps=2) == 0
    assert read_jsonl(Path("run/metrics.jsonl"))[-1]["step"] == 2
    note = (
        "stage sft is only tried: 2 steps of the 2 passes in the recipe; clipped: "
        "optimizer.warmup_steps=6 to 2, checkpoint.every=4 to 2"
    )
    assert note in Path("run/run.log").read_text()
