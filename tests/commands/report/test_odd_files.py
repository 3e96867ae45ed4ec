"""`ratchet ui` over a run whose files are not what a run writes: what can be read is shown, and
other runs too."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ratchet.commands.report import write_report
from ratchet.commands.report.files import read_files
from ratchet.commands.report.metrics import MAX_LINE_BYTES
from ratchet.commands.report.runs import RunReader
from ratchet.commands.report.server import RunReaders
from ratchet.errors import DataError, RunDirectoryError
from ratchet.observe.records.reader import INDEX, RecordFile, StepFacts
from ratchet.runs.run_dir import RunDirectory

HERE = os.uname().nodename
CONTENTS = [
    "",
    "null",
    "[]",
    "[1]",
    "5",
    '"x"',
    "{}",
    '{"stages": 5}',
    '{"step": 1}',
    '{"peak_bytes": "x", "stages": [1]}',
]
STATES = [
    '{"pid": 1e9}',
    json.dumps({"host": HERE, "pid": 10**20}),
    json.dumps({"host": HERE, "pid": "x"}),
]
NAMES = [
    "metrics.jsonl",
    "ledger.jsonl",
    ".status",
    "plan.json",
    "summary.json",
    "sentinels/step-1.json",
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for name in ("x", "y"):
        (tmp_path / name / "sentinels").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("name: x")
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "a": 2}\n')
    return tmp_path / "x"


def answered(run: Path) -> None:
    runs = RunReaders(run.parent)
    listed = json.loads(runs.list_runs({})[1])
    assert set(listed) == {"x", "y"}
    assert runs.run({"run": "x"})[1]


KINDS: dict[str, Callable[[Path], object]] = {
    "pipe": os.mkfifo,
    "device": lambda path: path.symlink_to("/dev/zero"),
    "directory": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
}


@pytest.mark.fault("S20")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_plain_file_is_passed_over(run: Path, name: str, kind: str) -> None:
    (run / name).unlink(missing_ok=True)
    KINDS[kind](run / name)
    answered(run)


@pytest.mark.parametrize("name", NAMES)
def test_files_of_other_shapes_are_passed_over(run: Path, name: str) -> None:
    for content in CONTENTS + STATES:
        (run / name).write_text(content)
        answered(run)


def test_steps_and_lines_beyond_all_bounds_are_damaged(run: Path) -> None:
    (run / "plan.json").write_text('{"stages": []}')
    lines = [
        '{"step": 1%s}' % ("0" * 400),
        '{"step": 9223372036854775808}',
        '{"step": 2, "a": "%s"}' % ("x" * MAX_LINE_BYTES),
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"step": 3, "a": 1}', ""]))
    answered(run)
    assert list(RunReaders(run.parent)["x"].metrics.read_part().columns["step"]) == [3]


@pytest.mark.fault("S20")
def test_directories_that_are_odd_hide_no_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that may not be read, a link to one above, and a name that is no UTF-8."""
    root, closed = run.parent, run.parent / "closed"
    closed.mkdir()
    (root / "above").symlink_to(root)
    (root / os.fsdecode(b"z\xff")).mkdir()
    (root / os.fsdecode(b"z\xff") / "config.yaml").write_text("name: z")
    iterdir = Path.iterdir

    def guarded(path: Path) -> Iterator[Path]:
        if path == closed:
            raise PermissionError(13, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", guarded)
    runs = RunReaders(root)
    assert set(json.loads(runs.list_runs({})[1])) == {"x", "y", "z\\udcff"}
    assert runs.run({"run": "z\\udcff"})[1]


def test_numbers_that_json_lacks_and_a_record_that_is_a_file_are_shown(run: Path) -> None:
    (run / "config.yaml").write_text("name: x\nlimit: .inf\n")
    (run / "summary.json").write_text('{"loss": NaN, "stages": [{"best": -Infinity}]}')
    (run / "steps").write_text("")
    answered(run)
    facts = RunReader(run).read_facts()
    assert facts["config"]["limit"] == "inf"
    assert facts["summary"] == {"loss": "nan", "stages": [{"best": "-inf"}]}
    assert write_report([run], rollouts=4)


def test_a_report_takes_the_place_of_plain_files_alone(run: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(RunDirectoryError, match=r"pipe is not a plain file; choose another --out"):
        write_report([run], tmp_path / "pipe", rollouts=0)
    assert (tmp_path / "pipe").is_fifo()
    (tmp_path / "real").write_text('{"row": 1}')
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(RunDirectoryError, match="link is not a report and is not overwritten"):
        write_report([run], tmp_path / "link", rollouts=0)
    assert (tmp_path / "real").read_text() == '{"row": 1}'
    (tmp_path / "real").write_text("")
    for _ in range(2):  # the second one replaces a report
        write_report([run], tmp_path / "link", rollouts=0)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text().startswith("<!doctype html>")


@pytest.mark.fault("S20")
def test_a_pipe_among_the_records_is_not_waited_for(run: Path) -> None:
    (run / "steps").mkdir()
    file = RecordFile("00000001-00000001.parquet", 1, "", (StepFacts(1, "rl", 1, 1, 1),))
    (run / "steps" / INDEX).write_text(file.line())
    os.mkfifo(run / "steps" / file.name)
    runs = RunReaders(run.parent)
    for ask in (runs.rollouts, runs.search):
        with pytest.raises(DataError, match="it is a pipe"):
            ask({"run": "x", "text": "a"})
    with pytest.raises(DataError, match="it is a pipe"):
        write_report([run], rollouts=4)
    answered(run)


def test_a_link_in_place_of_the_recipe_or_the_log_shows_no_other_file(
    run: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_text("name: secret\n")
    for name in ("config.yaml", "run.log"):
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(tmp_path / "secret")
    assert "secret" not in json.dumps(read_files(RunDirectory(run)))
