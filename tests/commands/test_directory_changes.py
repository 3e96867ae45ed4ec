"""A run whose directory is deleted, replaced or changed under it notices, says so and overwrites
nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from ratchet.errors import RunDirectoryError
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.training import session
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

RECIPE = {
    "name": "probe",
    "threads": 1,
    "device": "cpu",
    "model": {"preset": "tiny", "overrides": {"hidden_size": 32, "n_layers": 1}},
    "tokenizer": {"kind": "characters", "alphabet": "0123456789="},
    "environment": {"kind": "sorting", "digits": 2},
    "sampling": {"max_new_tokens": 3},
    "evaluation": {"tasks": 4, "every": 1},
    "logging": {"progress": "off", "tensorboard": False},
    "algorithm": {"kind": "sft"},
    "checkpoint": {"every": 1, "keep": 9},
    "steps": 4,
    "batch_size": 4,
}


@pytest.fixture
def train(tmp_path) -> Iterator[Callable[..., int]]:
    """Return a function that trains in `tmp_path/run` and calls `interfere` at a passage of a
    failpoint."""
    recipe = tmp_path / "probe.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))

    def start(
        interfere: Callable[[Path], object] = lambda run: None,
        *overrides: str,
        point: str = "step.update",
        passage: int = 2,
    ) -> int:
        passages = 0

        def at_point(name: str) -> None:
            nonlocal passages
            passages += name == point
            if name == point and passages == passage:
                interfere(tmp_path / "run")

        failpoints._listen(at_point)
        return start_run(recipe, overrides, tmp_path / "run", command="ratchet train probe.yaml")

    yield start
    failpoints.disarm()


def tree(path: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()
    }


def delete(run: Path) -> None:
    shutil.rmtree(run)


def move(run: Path) -> None:
    run.rename(run.with_name("moved"))


def replace_by_another(run: Path) -> None:
    move(run)
    run.mkdir()
    (run / "config.yaml").write_text("another: run")
    (run / "metrics.jsonl").write_text("")


@pytest.mark.slow
@pytest.mark.fault("P22")
@pytest.mark.parametrize("point", ["step.update", "step.log", "checkpoint.published"])
@pytest.mark.parametrize("interfere", [delete, move, replace_by_another])
def test_a_lost_directory_stops_the_run(interfere, point, train, tmp_path) -> None:
    with pytest.raises(RunDirectoryError, match="was deleted, moved or replaced"):
        train(interfere, point=point)
    left = tree(tmp_path / "run") if (tmp_path / "run").exists() else {}
    expected = (
        {"config.yaml": b"another: run", "metrics.jsonl": b""}
        if interfere is replace_by_another
        else {}
    )
    assert left == expected
    if interfere is not delete:  # what was moved away is whole, and goes on
        moved = tmp_path / "moved"
        assert CheckpointStore(moved / "checkpoints").latest() is not None
        assert resume_run(moved, command="resume") == 0


@pytest.mark.medium
@pytest.mark.fault("P22")
@pytest.mark.parametrize("moment", ["load", "stage.begin"])
def test_a_directory_replaced_before_the_first_step_stays_as_it_is(
    moment, train, tmp_path, monkeypatch
) -> None:
    run = tmp_path / "run"
    others_files = {"metrics.jsonl": b'{"step": 1}\n', "ledger.jsonl": b"{}\n", ".lock": b""}

    def replace(_: object) -> None:
        move(run)
        (run / "steps").mkdir(parents=True)
        shutil.copy(tmp_path / "moved" / "config.yaml", run)
        for name, content in others_files.items():
            (run / name).write_bytes(content)

    if moment == "load":
        monkeypatch.setattr(session, "start_judges", lambda *arguments: replace(run) or {})
    with pytest.raises(RunDirectoryError, match="was deleted, moved or replaced"):
        train(replace, point=moment, passage=1)
    recipe = (tmp_path / "moved" / "config.yaml").read_bytes()
    assert tree(run) == {**others_files, "config.yaml": recipe}


@pytest.mark.slow
@pytest.mark.fault("P23")
def test_a_lost_lock_and_recipe_are_restored(train, tmp_path) -> None:
    def interfere(run: Path) -> None:
        (run / ".lock").unlink()
        (run / "config.yaml").unlink()

    assert train(interfere) == 0
    log = (tmp_path / "run" / "run.log").read_text()
    assert "/.lock was deleted while the run was using it; it is locked again" in log
    assert "/config.yaml was deleted while the run was using it; it is written again" in log
    assert resume_run(tmp_path / "run", command="resume") == 0


@pytest.mark.medium
def test_a_second_run_that_took_the_lock_ends_the_first(train, tmp_path) -> None:
    with RunDirectory(tmp_path / "other").locked():

        def interfere(run: Path) -> None:
            (tmp_path / "other" / ".lock").replace(run / ".lock")

        with pytest.raises(RunDirectoryError, match="in use by process"):
            train(interfere)
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == [1]


@pytest.mark.medium
@pytest.mark.fault("P23")
@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoints"])
def test_lost_files_are_named_and_training_goes_on(name, train, tmp_path) -> None:
    def interfere(run: Path) -> None:
        shutil.rmtree(run / name) if (run / name).is_dir() else (run / name).unlink()

    assert train(interfere) == 0
    log = (tmp_path / "run" / "run.log").read_text()
    assert (
        "was deleted by another program" if name == "metrics.jsonl" else "steps [1] were deleted"
    ) in log
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == (
        [2, 3, 4] if name == "metrics.jsonl" else [0, 1, 2, 3, 4]
    )


@pytest.mark.slow
@pytest.mark.fault("P23")
def test_lines_lost_before_a_resume_are_counted(train, tmp_path) -> None:
    assert train() == 0
    metrics = tmp_path / "run" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    metrics.write_text("".join(lines[:2]))
    assert resume_run(tmp_path / "run", command="resume") == 0
    assert (
        "lacks 3 of the 4 steps up to the resumed checkpoint (2-4)"
        in (tmp_path / "run" / "run.log").read_text()
    )


@pytest.mark.medium
@pytest.mark.fault("P26")
def test_a_ledger_that_becomes_a_directory_is_named(train) -> None:
    def interfere(run: Path) -> None:
        (run / "ledger.jsonl").unlink()
        (run / "ledger.jsonl").mkdir()

    with pytest.raises(RunDirectoryError, match=r"can't be used: .*ledger\.jsonl"):
        train(interfere)


@pytest.mark.medium
@pytest.mark.fault("P23")
def test_a_finished_run_that_lost_its_only_checkpoint_does_not_begin_again(train, tmp_path) -> None:
    assert train(lambda run: None, "checkpoint.every=0") == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").mkdir()
    with pytest.raises(RunDirectoryError, match=r"has no checkpoint, but .*has 4 steps"):
        resume_run(tmp_path / "run", command="resume")


@pytest.mark.medium
@pytest.mark.fault("P23")
def test_a_file_in_place_of_the_checkpoints_costs_no_step(train, tmp_path) -> None:
    assert train() == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    (tmp_path / "run" / "checkpoints").write_text("")
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(RunDirectoryError, match="checkpoints is not a directory"):
        resume_run(tmp_path / "run", command="resume")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.medium
@pytest.mark.fault("P26")
@pytest.mark.parametrize("odd", ["directory", "link", "pipe"])
def test_a_ledger_that_is_no_file_at_the_start_is_named(train, tmp_path, odd) -> None:
    assert train() == 0
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.unlink()
    make = {"directory": Path.mkdir, "link": lambda p: p.symlink_to("x"), "pipe": os.mkfifo}
    make[odd](ledger)
    with pytest.raises(RunDirectoryError, match=r"can't be used: .*ledger\.jsonl"):
        resume_run(tmp_path / "run", command="resume")


@pytest.mark.slow
@pytest.mark.fault("P27")
def test_a_full_disk_at_the_end_is_a_sentence(train, tmp_path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr("ratchet.observe.summary.replace_text", fail)
        with pytest.raises(RunDirectoryError, match="No space left on device"):
            train()
    assert resume_run(tmp_path / "run", command="resume") == 0


@pytest.mark.medium
@pytest.mark.fault("P23")
def test_a_run_that_lost_its_checkpoints_does_not_begin_again(train, tmp_path) -> None:
    assert train() == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    before = tree(tmp_path / "run")
    with pytest.raises(
        RunDirectoryError, match=r"has no checkpoint, but .*metrics\.jsonl has 4 steps"
    ):
        resume_run(tmp_path / "run", command="resume")
    del before["run.log"]
    assert {
        name: content for name, content in tree(tmp_path / "run").items() if name != "run.log"
    } == before
