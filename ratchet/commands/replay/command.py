"""The command `ratchet replay`: it computes a step again, and says where the result differs from
the run's, bit for bit."""

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
    """One difference. what: a metric, a column with the place in it, or the weights of a role.
    None: the side does not have it."""

    what: str
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return (
            f"{self.what}: recorded {self.recorded!r}, replayed "
            f"{self.replayed!r}{_distance(self.recorded, self.replayed)}"
        )


@dataclass(frozen=True)
class ReplayVerdict:
    """The result for a step.

    begun_at: the step of the checkpoint that it was played from; 0: the start of the run. compared:
    the number of metrics. earlier: the first step on the way after which weights differed; None:
    none. changed: the step under another recipe.
    """

    played: Played
    begun_at: int
    recorded: Mapping[str, float | None]
    compared: int
    differences: Sequence[Difference]
    earlier: int | None
    changed: Played | None = None

    @property
    def equal(self) -> bool:
        return not self.differences


def replay_steps(
    path: Path, steps: Sequence[int], *, changes: Sequence[str] = (), as_json: bool = False
) -> int:
    """Print the result of each step, in increasing order. Return the exit status: 0 if all were
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
    """Yield one verdict for each step, in increasing order. Raises as `ReplayBuffer` does."""
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
    """Yield differences of metrics, of the batch's columns, and of the weights after the step, as
    far as the run recorded them."""
    for name in comparable(played):
        now = played.metrics[name]
        if name not in recorded or recorded[name] != now:
            yield Difference(name, recorded.get(name), now)
    was, now = replay.record.step(played.step), played.table
    for name in LEARNED:
        place = _first_unequal(was.column(name), now.column(name))
        if place is not None:
            yield Difference(
                f"{name} of {_where(was, place)}",
                *(_entry(t.column(name), place) for t in (was, now)),
            )
    for role, print_ in replay.record.steps[played.step].fingerprints.items():
        if played.fingerprints.get(role) != print_:
            yield Difference(
                f"weights of {role} after the step", print_, played.fingerprints.get(role)
            )


def _first_unequal(was: pa.ChunkedArray, now: pa.ChunkedArray) -> tuple[int, int] | None:
    """Return (row, token) where two columns of lists differ first, NaN being equal to NaN; None if
    they don't."""
    if was.equals(now):
        return None
    for row, (a, b) in enumerate(zip(was, now, strict=True)):
        if a.is_valid != b.is_valid:
            return row, 0
        if a.is_valid:
            x, y = (np.asarray(cell.values.to_numpy(zero_copy_only=False)) for cell in (a, b))
            unequal = np.flatnonzero(~((x == y) | ((x != x) & (y != y))))
            if len(unequal):
                return row, int(unequal[0])
    return None


def _where(table: pa.Table, place: tuple[int, int]) -> str:
    row, token = place
    group, number = (table.column(name)[row].as_py() for name in ("group", "row"))
    return f"group {group}, row {number}, token {token}"


def _entry(column: pa.ChunkedArray, place: tuple[int, int]) -> Any:
    row, token = place
    cell = column[row].as_py()
    return None if cell is None else cell[token]


def _distance(a: Any, b: Any) -> str:
    if isinstance(a, float) and isinstance(b, float) and math.isfinite(a) and math.isfinite(b):
        return f" ({(b - a) / abs(a):+.1e})" if a else f" ({b - a:+.1e})"
    return ""


# --- what it says


def as_plain(verdict: ReplayVerdict) -> dict[str, Any]:
    """Return what `--json` writes."""
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
    way = f" and {between} recorded step{'s' * (between != 1)}" if between else ""
    lines = [
        f"step {played.step} ({played.stage}), from {origin}{way}: "
        f"{'' if verdict.equal else 'NOT '}bit-equal"
    ]
    if verdict.equal:
        prints = ", ".join(f"{role} {print_[:12]}" for role, print_ in played.fingerprints.items())
        tokens = f"{played.batch.n_tokens:,} tokens"
        lines.append(
            f"  {verdict.compared} metrics, the columns of {tokens}, and the weights after it "
            f"({prints})"
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
    now, other = verdict.played.metrics, verdict.changed.metrics
    table = Table(
        Column("metric", overflow="fold"),
        "recorded",
        "replayed",
        ", ".join(changes),
        title=f"step {verdict.played.step}",
    )
    for name in dict.fromkeys([*comparable(verdict.played), *comparable(verdict.changed)]):
        if now.get(name) != other.get(name) or name in ("policy/loss", "policy/grad_norm"):
            table.add_row(
                name, *(_number(numbers.get(name)) for numbers in (verdict.recorded, now, other))
            )
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
