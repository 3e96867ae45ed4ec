"""Records whose checksums are right and whose contents no run writes: a sentence names the file."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from commands.report.made_runs import make_run

from ratchet.commands.report import write_report
from ratchet.commands.report.server import Pages, RunReaders
from ratchet.errors import DataError
from ratchet.observe.records.reader import INDEX, Record, RecordFile, StepFacts, hash_file

Rewrite = Callable[[pa.Table], pa.Table]


def column(name: str, kind: pa.DataType | None, value: Any) -> Rewrite:
    """Return a function that fills a column; kind None keeps the column's type."""

    def rewrite(table: pa.Table) -> pa.Table:
        values = pa.array([value] * table.num_rows, kind or table.schema.field(name).type)
        return table.set_column(table.schema.get_field_index(name), name, values)

    return rewrite


TABLES: dict[str, Rewrite] = {
    "no column": lambda table: table.drop_columns(["task"]),
    "no rows": lambda table: table.slice(0, 0),
    "text for numbers": column("reward", pa.string(), "x"),
    "numbers for text": column("task", pa.int64(), 3),
    "text for tokens": column("tokens", pa.list_(pa.string()), ["a"]),
    "text for messages": column("messages", pa.string(), "hello"),
    "bytes for text": column("answer", pa.binary(), b"\xff"),
    "no task": column("task", None, None),
    "no length": column("length", None, None),
    "no tokens": column("tokens", None, None),
    "negative tokens": column("tokens", None, [-5]),
    "too few advantages": column("advantages", None, [1.0]),
    "a number that is none": column("advantages", None, [None]),
}
FACTS: dict[str, dict[str, Any]] = {
    "more rows": {"rows": 1000},
    "fewer rows": {"rows": 1},
    "negative rows": {"rows": -3},
    "rows as text": {"rows": "8"},
    "half a row": {"rows": 2.5},
    "many rows": {"rows": 10**30},
    "a late step": {"step": 2**31},
    "steps in a list": {"step": [1]},
    "a stage that is a number": {"stage": 5},
    "fingerprints in a list": {"fingerprints": [1]},
    "fingerprints that are numbers": {"fingerprints": {"policy": 1}},
}


def forge(steps: Path, rewrite: Rewrite, changes: dict[str, Any]) -> None:
    """Rewrite the record's only file and its line of the index, with the right checksums."""
    (file,) = Record(steps).files
    path = steps / file.name
    pq.write_table(rewrite(pq.read_table(path)), path)
    first = StepFacts(**{**dataclasses.asdict(file.steps[0]), **changes})
    forged = RecordFile(file.name, path.stat().st_size, hash_file(path), (first, *file.steps[1:]))
    (steps / INDEX).write_text(forged.line())


def answer_all(run: Path) -> list[tuple[int, str]]:
    """Return the status and the body of each page's answer about the run's record."""
    pages = Pages(RunReaders(run.parent))
    rollout = {"run": run.name, "step": "1", "row_indices": "0"}
    paths = ("/api/rollouts", "/api/details", "/api/media", "/api/search")
    queries = ({"run": run.name}, rollout, rollout, {"run": run.name, "text": "a"})
    answers = [pages._answer(path, query) for path, query in zip(paths, queries, strict=True)]
    return [(status, body.decode(errors="replace")) for status, _, body in answers]


CASES = [(name, rewrite, {}) for name, rewrite in TABLES.items()]
CASES += [(name, lambda table: table, changes) for name, changes in FACTS.items()]


@pytest.mark.fault("S20")
@pytest.mark.parametrize(("rewrite", "changes"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_forged_records_are_refused_by_their_file(
    tmp_path: Path, rewrite: Rewrite, changes: dict[str, Any]
) -> None:
    run = make_run(tmp_path / "x", steps=2).path
    assert {status for status, _ in answer_all(run)} == {200}
    forge(run / "steps", rewrite, changes)
    refusals = [body for status, body in answer_all(run) if status != 200]
    assert refusals
    with pytest.raises(DataError) as raised:
        write_report([run], tmp_path / "report.html", rollouts=4)
    for refusal in [*refusals, str(raised.value)]:
        assert refusal.startswith(str(run / "steps")), refusal
        assert ".parquet" in refusal or INDEX in refusal


def test_a_request_that_lacks_a_value_is_told_which(tmp_path: Path) -> None:
    make_run(tmp_path / "x", steps=1)
    pages = Pages(RunReaders(tmp_path))
    _, _, lacking = pages._answer("/api/details", {"run": "x"})
    _, _, odd = pages._answer("/api/details", {"run": "x", "step": "one"})
    assert lacking == b"the request lacks step"
    assert odd.startswith(b"a value of the request can't be read")
