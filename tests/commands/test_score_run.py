"""`ratchet score RUN`: recorded attempts are judged again, and compared with their rewards."""

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from ratchet.cli.main import app
from ratchet.observe.records.reader import Record
from ratchet.rewards.base import AnswerReward
from ratchet.training.start import start_run
from ratchet.types import Owner, Truncated

RECIPE = {
    "threads": 1,
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "rewards": [{"kind": f"{__name__}:odd"}],
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 0},
    "batch_size": 3,
    "steps": 2,
    "logging": {"progress": "off", "tensorboard": False},
    "stages": [
        {"name": "sft", "algorithm": {"kind": "sft"}},
        {"name": "rl", "algorithm": {"kind": "grpo", "group_size": 4}},
    ],
}


def odd(trajectory, task):
    """Depend on the sampled tokens and on the prompt."""
    sampled = trajectory.tokens[trajectory.owner == Owner.POLICY]
    return float((int(sampled.sum()) + len(task.messages[-1].text)) % 2)


def lower(trajectory, task):
    assert trajectory.outcome in (None, Truncated())  # as before it was judged
    return odd(trajectory, task) - 1


class Polite(AnswerReward):
    """1 for each answer that is not cut off."""

    name = "polite"

    def grade(self, text, task):
        return 1.0


def broken(trajectory, task):
    raise RuntimeError("out of order")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("score")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    assert start_run(folder / "recipe.yaml", [], folder / "run", command="train") == 0
    return folder / "run"


def said(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["score", *map(str, arguments)])
    return f"{result.exception or ''}{result.stdout}"


def scores(*arguments: object) -> list[dict]:
    return [json.loads(line) for line in said(*arguments, "--json").splitlines()]


@pytest.mark.slow
def test_its_own_rewards_give_the_same_again(run: Path) -> None:
    lines = scores(run)
    assert [line["step"] for line in lines] == [3] * 12 + [4] * 12
    table = Record(run / "steps").table(["step", "group", "attempt", "reward"], steps=[3, 4])
    for line, row in zip(lines, table.to_pylist(), strict=True):
        assert (line["group"], line["attempt"]) == (row["group"], row["attempt"])
        assert line["reward"] == line["recorded"] == row["reward"]
    assert {line["reward"] for line in lines} == {0.0, 1.0}
    summary = said(run, "--step", 3)
    assert "12" in summary
    assert "equal" in summary


def test_another_reward_is_compared_with_the_recorded_one(run: Path) -> None:
    lines = scores(run, "--reward", f"{__name__}:lower", "--step", 4)
    assert len(lines) == 12
    assert all(line["reward"] == line["recorded"] - 1 for line in lines)
    cells = said(run, "--reward", f"{__name__}:lower").split("lower now")[1]
    assert [part.strip() for part in cells.split("│")[2:5]] == ["0", "0", "24"]


def test_a_reward_of_tokens_reads_them(run: Path) -> None:
    lines = scores(run, "--reward", "length", "unit=tokens", "at_most=1")
    assert {line["outcome"] for line in lines} == {"scored", "truncated"}


def test_a_reward_that_breaks_fails_its_groups(run: Path) -> None:
    lines = scores(run, "--reward", f"{__name__}:broken", "--step", 3)
    assert {line["outcome"] for line in lines} == {"failed"}
    assert all("out of order" in line["detail"] for line in lines)


@pytest.mark.medium
def test_what_cant_be_judged_is_an_error(run: Path, tmp_path: Path) -> None:
    assert "step 9 is not in the record" in said(run, "--step", 9)
    assert "has recorded no attempts to judge" in said(run, "--step", 1)  # given text
    assert "at_most=1 is a key of a reward" in said(run, "at_most=1")
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert "--step is only for a run" in said(tmp_path / "rows.jsonl", "--step", 1)
    assert "is a directory, but not a run directory" in said(tmp_path, "--reward", "math")


@pytest.mark.medium
def test_what_was_cut_off_is_judged_so_and_turns_keep_their_rewards(tmp_path: Path) -> None:
    lake = {
        "tokenizer": {"kind": "characters", "alphabet": "P.OG\n!udlr", "template": "turns"},
        "environment": {"kind": "frozen_lake", "style": "compact", "max_moves": 3},
        "rewards": [{"kind": f"{__name__}:Polite"}],
        "sampling": {"max_new_tokens": 2},
        "stages": [{"name": "rl", "algorithm": {"kind": "grpo", "group_size": 8}}],
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({**RECIPE, **lake}))
    assert start_run(tmp_path / "recipe.yaml", [], tmp_path / "run", command="train") == 0
    lines = scores(tmp_path / "run")
    assert "truncated" in {line["outcome"] for line in lines}
    assert all(line["reward"] == line["recorded"] for line in lines)
    assert any("environment" in line["parts"] for line in lines)
