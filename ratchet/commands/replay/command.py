"""The command `ratchet replay`: compute a step again and report where its result is not bit-equal
to the run's."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Column, Table

from ratchet.commands.replay.engine import Played, Replay, changed_config
from ratchet.observe.metrics import OF_THE_MACHINE
from ratchet.observe.records.schema import LEARNED
from ratchet.observe.sinks import read_jsonl
from ratchet.utils.temp_dirs import TemporaryFolder
from ratchet.utils.terminal_text import make_console

NOT_EQUAL = 1  # the exit status


@dataclass(frozen=True)
class Difference:
    """A difference between a recorded and a replayed value; None where a value is missing."""

    what: str  # a metric, a column with the place in it, or the weights of a role
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return (
            f"{self.what}: recorded {self.recorded!r}, replayed "
            f"{self.replayed!r}{_distance(self.recorded, self.replayed)}"
        )


@dataclass(frozen=True)
class ReplayVerdict:
    """The comparison of a replayed step with the recorded one."""

    played: Played
    begun_at: int  # step of the checkpoint that the replay started from; 0: the start of the run
    recorded: Mapping[str, float | None]  # metrics
    compared: int  # number of metrics that were compared
    differences: Sequence[Difference]
    earlier: int | None  # first replayed step before this one after which weights differed
    changed: Played | None = None  # the step under another recipe

    @property
    def equal(self) -> bool:
        return not self.differences


def replay_steps(
    path: Path, steps: Sequence[int], *, changes: Sequence[str] = (), as_json: bool = False
) -> int:
    """Print the verdict on each step, in increasing order. Return the exit status: 0 if all were
    bit-equal, else 1."""
    console = make_console()
    equal = True

    async def run() -> None:
        nonlocal equal
        async for verdict in verdicts(Replay(path), steps, changes):
            equal &= verdict.equal
            if as_json:
                console.out(json.dumps(as_plain(verdict)), highlight=False)
            else:
                show(verdict, changes, console)

    asyncio.run(run())
    return 0 if equal else NOT_EQUAL


async def verdicts(
    replay: Replay, steps: Sequence[int], changes: Sequence[str] = ()
) -> AsyncIterator[ReplayVerdict]:
    """Yield one verdict for each step, in increasing order. Raise the errors of `Replay`."""
    rows = {row["step"]: row for row in read_jsonl(replay.directory.metrics)}
    for step in sorted(set(steps)):
        await replay.before(step)
        earlier, changed = replay.diverged, None
        if changes:
            config = changed_config(replay, changes)
            with TemporaryFolder("replay") as states:
                changed = await replay.play_changed(config, states)
        played = await replay.play()
        recorded = {name: value for name, value in rows.get(step, {}).items() if name != "step"}
        unequal = list(differences(replay, played, recorded))
        compared = sum(name in recorded for name in comparable(played))
        yield ReplayVerdict(played, replay.begun_at, recorded, compared, unequal, earlier, changed)


def comparable(played: Played) -> list[str]:
    return [name for name in played.metrics if not name.startswith(OF_THE_MACHINE)]


def differences(
    replay: Replay, played: Played, recorded: Mapping[str, float | None]
) -> Iterator[Difference]:
    """Yield differences in metrics, in the learner's columns, and in the recorded fingerprints of
    the weights after the step."""
    for name in comparable(played):
        value = played.metrics[name]
        if name not in recorded or recorded[name] != value:
            yield Difference(name, recorded.get(name), value)
    recorded_table, replayed_table = replay.record.step(played.step), played.table
    for name in LEARNED:
        columns = recorded_table.column(name), replayed_table.column(name)
        place = _first_unequal(*columns)
        if place is not None:
            yield Difference(
                f"{name} of {_describe_place(recorded_table, place)}",
                *(_entry(column, place) for column in columns),
            )
    for role, fingerprint in replay.record.steps[played.step].fingerprints.items():
        if played.fingerprints.get(role) != fingerprint:
            yield Difference(
                f"weights of {role} after the step", fingerprint, played.fingerprints.get(role)
            )


def _first_unequal(recorded: pa.ChunkedArray, replayed: pa.ChunkedArray) -> tuple[int, int] | None:
    """Return (row, token) of the first difference between two columns of lists; None if there is
    none. NaN equals NaN."""
    if recorded.equals(replayed):
        return None
    for row, cells in enumerate(zip(recorded, replayed, strict=True)):
        if cells[0].is_valid != cells[1].is_valid:
            return row, 0
        if cells[0].is_valid:
            x, y = (np.asarray(cell.values.to_numpy(zero_copy_only=False)) for cell in cells)
            unequal = np.flatnonzero(~((x == y) | ((x != x) & (y != y))))
            if len(unequal):
                return row, int(unequal[0])
    return None


def _describe_place(table: pa.Table, place: tuple[int, int]) -> str:
    row, token = place
    group, row_in_group = (table.column(name)[row].as_py() for name in ("group", "row"))
    return f"group {group}, row {row_in_group}, token {token}"


def _entry(column: pa.ChunkedArray, place: tuple[int, int]) -> Any:
    row, token = place
    cell = column[row].as_py()
    return None if cell is None else cell[token]


def _distance(recorded: Any, replayed: Any) -> str:
    """Return the relative difference of two finite floats as text (absolute if `recorded` is 0)."""
    if not (isinstance(recorded, float) and isinstance(replayed, float)):
        return ""
    if not (math.isfinite(recorded) and math.isfinite(replayed)):
        return ""
    difference = replayed - recorded
    return f" ({difference / abs(recorded):+.1e})" if recorded else f" ({difference:+.1e})"


# --- output


def as_plain(verdict: ReplayVerdict) -> dict[str, Any]:
    """Return the verdict in the form that `--json` writes."""
    played = verdict.played
    return {
        "step": played.step,
        "stage": played.stage,
        "from_step": verdict.begun_at,
        "equal": verdict.equal,
        "weights_differ_since": verdict.earlier,
        "compared_metrics": verdict.compared,
        "differences": [vars(difference) for difference in verdict.differences],
        "fingerprints": dict(played.fingerprints),
        "metrics": {name: played.metrics[name] for name in comparable(played)},
        "changed": None
        if verdict.changed is None
        else {name: verdict.changed.metrics[name] for name in comparable(verdict.changed)},
    }


def show(verdict: ReplayVerdict, changes: Sequence[str], console: Console) -> None:
    played = verdict.played
    origin = (
        f"the checkpoint of step {verdict.begun_at}" if verdict.begun_at else "the start of the run"
    )
    between = played.step - 1 - verdict.begun_at
    replayed_before = f" and {between} recorded step{'s' * (between != 1)}" if between else ""
    lines = [
        f"step {played.step} ({played.stage}), from {origin}{replayed_before}: "
        f"{'' if verdict.equal else 'NOT '}bit-equal"
    ]
    if verdict.equal:
        fingerprints = ", ".join(
            f"{role} {fingerprint[:12]}" for role, fingerprint in played.fingerprints.items()
        )
        tokens = f"{played.batch.n_tokens:,} tokens"
        lines.append(
            f"  {verdict.compared} metrics, the columns of {tokens}, and the weights after it "
            f"({fingerprints})"
        )
    elif verdict.earlier is not None:
        lines.append(f"  the weights are others since step {verdict.earlier}: replay that one")
    lines += [f"  {difference}" for difference in verdict.differences]
    loss, norm = (played.metrics.get(f"policy/{name}") for name in ("loss", "grad_norm"))
    lines.append(f"  loss {loss!r}, gradient norm {norm!r}")
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if verdict.changed is not None:
        console.print(_side_by_side(verdict, changes))


def _side_by_side(verdict: ReplayVerdict, changes: Sequence[str]) -> Table:
    assert verdict.changed is not None, "there is something to compare"
    replayed, changed = verdict.played.metrics, verdict.changed.metrics
    table = Table(
        Column("metric", overflow="fold"),
        "recorded",
        "replayed",
        ", ".join(changes),
        title=f"step {verdict.played.step}",
    )
    for name in dict.fromkeys([*comparable(verdict.played), *comparable(verdict.changed)]):
        if replayed.get(name) != changed.get(name) or name in ("policy/loss", "policy/grad_norm"):
            metrics = (verdict.recorded, replayed, changed)
            table.add_row(name, *(_number(values.get(name)) for values in metrics))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
