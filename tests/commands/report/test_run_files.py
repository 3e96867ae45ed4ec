"""What the page is given of a run's progress, held-out answers, recipe and log."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from commands.report.made_runs import make_run, write_results

from ratchet.commands.report import server
from ratchet.commands.report.answers import (
    MAX_REPORT_CHARS,
    list_evaluations,
    read_answers,
    sample_answers,
)
from ratchet.commands.report.files import list_changed_keys, read_files
from ratchet.commands.report.progress import ProgressReader
from ratchet.commands.report.texts import TokenTexts
from ratchet.config.loader import load_config
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.errors import DataError
from ratchet.runs.run_dir import RunDirectory

STAGES = [{"name": "a", "steps": 3}, {"name": "b", "steps": 5}]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = make_run(tmp_path / "run", steps=2)
    made.config.write_text(json.dumps({"stages": STAGES}))
    return made


# --- progress


def test_the_progress_of_a_run(directory: RunDirectory):
    directory.log.write_text("2026-01-02T03:04:05.678Z INFO a: b\n")
    reader = ProgressReader(directory)
    assert reader.read() == {
        "stages": [("a", 3), ("b", 5)],
        "step": 2,
        "steps": 8,
        "started": "2026-01-02T03:04:05.678Z",
        "seconds_left": 6.0,
        "accuracy": 0.2,
        "loss": None,
        "is_share": True,
    }
    with directory.metrics.open("a") as file:
        file.write('{"step": 3, "eval/loss": 0.5, "time/step_s": 4.0}\n{"step": 4, "eval/lo')
    after = reader.read()
    assert (after["step"], after["accuracy"], after["loss"]) == (3, 0.2, 0.5)
    assert after["seconds_left"] == pytest.approx(5 * (1 + 1 + 4) / 3)
    with directory.metrics.open("a") as file:
        file.write('ss": 0.25}\n')
    assert reader.read()["loss"] == 0.25


def test_one_list_of_runs_reads_only_some_recipes(
    directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(directory.path, tmp_path / "run-2")
    (tmp_path / "run-2" / "config.yaml").write_text("{")
    shutil.copytree(directory.path, tmp_path / "run-3")
    monkeypatch.setattr(server, "MAX_NEW_RECIPES", 2)
    runs = server.RunReaders(tmp_path)

    def list_steps() -> list[int | None]:
        versions = json.loads(runs.list_runs({})[1])
        return [versions[name]["progress"]["steps"] for name in ("run", "run-2", "run-3")]

    assert list_steps() == [8, None, None]
    assert list_steps() == [8, None, 8]


def test_a_run_that_another_one_replaced_is_read_from_its_start(tmp_path: Path):
    make_run(tmp_path / "run", steps=3)
    runs = server.RunReaders(tmp_path)

    def read() -> tuple[list[float], dict[str, int]]:
        runs.list_runs({})
        rewards = runs["run"].metrics.read_part().columns["rollout/reward"]
        return [round(float(reward), 3) for reward in rewards], runs["run"].count_prompts()

    assert read() == ([0.1, 0.2, 0.3], {"issued": 3, "trained": 1})
    packed = runs["run"].rollouts.pack_columns()
    known = json.loads(packed[4 : 4 + int.from_bytes(packed[:4], "little")])["files"]
    assert b'"after": 1' in runs["run"].rollouts.pack_columns(known)
    shutil.rmtree(tmp_path / "run")
    other = make_run(tmp_path / "run", steps=3, differs_from=1, say="fine", lr=1e-4)
    other.ledger.write_text('{"event": "issued", "ids": ["rl/1"]}\n' * 20)
    assert read() == ([0.15, 0.25, 0.35], {"issued": 20})
    assert b'"after": 0' in runs["run"].rollouts.pack_columns(known)


@pytest.mark.parametrize("bound", ['"eval/min_reward": -0.5', '"eval/max_reward": 12.0'])
def test_rewards_outside_0_and_1_are_no_shares(directory: RunDirectory, bound: str):
    with directory.metrics.open("a") as file:
        file.write(f'{{"step": 3, {bound}}}\n')
        file.write('{"step": 4, "eval/max_reward": 1.0}\n')
    assert ProgressReader(directory).read()["is_share"] is False


def test_results_far_from_the_end_are_found(directory: RunDirectory):
    rows = [{"step": step, "time/step_s": 1.0 if step < 50 else 2.0} for step in range(1, 101)]
    rows[4]["eval/accuracy"] = 0.75
    directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    progress = ProgressReader(directory).read()
    assert (progress["step"], progress["accuracy"]) == (100, 0.75)


def test_a_run_that_resumed_is_read_again(directory: RunDirectory):
    reader = ProgressReader(directory)
    assert reader.read()["step"] == 2
    directory.metrics.write_text('{"step": 1}\n')
    assert (reader.read()["step"], reader.read()["accuracy"]) == (1, None)


@pytest.mark.parametrize("config", ["{", "[]", "stages: 5", "stages: [5, {steps: x}]", ""])
def test_damaged_files_have_no_progress(directory: RunDirectory, config: str):
    directory.config.write_text(config)
    directory.metrics.write_bytes(b'\xff\n{"step": "x"}\n[1]\n{"step": 1, "eval/loss": NaN}\n')
    directory.log.write_text("no time\n")
    progress = ProgressReader(directory).read()
    assert progress["steps"] is progress["started"] is progress["loss"] is None
    json.dumps(progress, allow_nan=False)


# --- held-out answers


def test_evaluations_stand_in_the_order_of_their_steps(directory: RunDirectory):
    answers = [("t/0", "1+1", 1.0, "2")]
    for name in ("b/step-00000008", "a/step-00000000", "a/step-00000003", "policy@8"):
        write_results(directory, name, answers)
    (directory.evals / "a" / "step-00000001").mkdir()
    assert [(each["stage"], each["step"]) for each in list_evaluations(directory)] == [
        ("a", 0),
        ("a", 3),
        ("b", 8),
        ("policy@8", None),
    ]
    assert read_answers(directory, "a/step-00000000") == {
        "threshold": 1.0,
        "rows": [["t/0", "easy", "digest of t/0", "1+1", "scored", 1.0, "2"]],
    }


@pytest.mark.parametrize("name", ["../../other", "a/step-00000009", "", "/etc"])
def test_only_evaluations_of_the_run_are_read(directory: RunDirectory, name: str):
    write_results(directory, "a/step-00000000", [])
    with pytest.raises(DataError, match="no evaluation"):
        read_answers(directory, name)


def test_a_report_has_the_ends_of_each_stage_and_each_task_once(directory: RunDirectory):
    answers = [(f"t/{i}", f"prompt {i}", 1.0, "yes") for i in range(9)]
    for step in (0, 1, 2, 3):
        write_results(directory, f"a/step-{step:08d}", answers)
    write_results(directory, "b/step-00000008", answers)
    (directory.evals / "b" / "step-00000008" / "results.json").write_text("{")
    sample = sample_answers(directory, 4)
    assert [each["name"] for each in sample["evaluations"]] == [
        "a/step-00000000",
        "a/step-00000003",
    ]
    assert sample["task_counts"] == [4, 9]
    assert [task[3] for task in sample["tasks"]] == [f"prompt {i}" for i in range(4)]
    assert sample["answers"]["a/step-00000003"]["rows"][3] == [3, "scored", 1.0, "yes"]


def test_long_answers_are_bounded(directory: RunDirectory):
    write_results(
        directory, "a/step-00000000", [(f"t/{i}", "", 1.0, "x" * 9000) for i in range(99)]
    )
    sample = sample_answers(directory, 99)
    rows = sample["answers"]["a/step-00000000"]["rows"]
    assert 0 < len(rows) < 99
    assert sum(len(row[3]) for row in rows) <= MAX_REPORT_CHARS
    assert rows[0][3].startswith("… x")


# --- recipe and log


def test_the_keys_that_a_recipe_sets(tmp_path: Path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "model: {preset: tiny}\ntokenizer: {kind: bytes}\nenvironment: {kind: sorting, digits: 3}\n"
        "algorithm: {kind: grpo, loss: {kind: ppo, clip_low: 0.1}}\nsteps: 7\n"
        "sentinels: {loss_spike: {threshold: 3}}\n"
    )
    changed = list_changed_keys(load_config(recipe).model_dump(mode="json"))
    expected = {
        "model.preset": "tiny",
        "tokenizer.kind": "bytes",
        "stages.grpo.environment.digits": 3,
        "stages.grpo.algorithm.kind": "grpo",
        "stages.grpo.steps": 7,
    }
    assert expected.items() <= changed.items()
    assert [key for key in changed if "sentinels" in key] == [
        "stages.grpo.sentinels.loss_spike.threshold"
    ]
    assert [key for key in changed if "algorithm.loss" in key] == [
        "stages.grpo.algorithm.loss.clip_low"
    ]
    assert not [key for key in changed if "optimizer" in key]


def test_code_of_a_run_is_not_imported(tmp_path: Path):
    values = {"stages": [{"name": "a", "environment": {"kind": "no_module:Thing", "size": 1}}]}
    assert list_changed_keys(values)["stages.a.environment.size"] == 1


def test_a_damaged_recipe_is_shown_as_it_is(directory: RunDirectory):
    directory.config.write_text("stages: [")
    files = read_files(directory)
    assert files["changed"] == {}
    assert "can't be read" in files["config"]
    assert files["log"] == []


def test_the_end_of_a_long_log(directory: RunDirectory):
    directory.log.write_text("".join(f"line {i} {'x' * 900}\n" for i in range(1000)) + "y" * 9000)
    log = read_files(directory)["log"]
    assert len(log[-1]) == 2002
    assert log[-2].startswith("line 999 ")
    assert all(line.startswith("line ") for line in log[:-1])


# --- control tokens


def test_control_tokens_have_their_names_and_places():
    tokenizer = byte_tokenizer()
    texts = TokenTexts(tokenizer)
    (end,) = tokenizer.eos_ids
    name = tokenizer.decode([end], skip_special=False)
    ids = [*tokenizer.encode(f"é{name}"), end, end]
    assert "".join(texts(ids)) == f"é{name}{name}{name}"
    assert texts(ids)[-1] == name
    assert texts.find_special(ids) == [len(ids) - 2, len(ids) - 1]
    assert TokenTexts(None).find_special([1, 2]) == []
