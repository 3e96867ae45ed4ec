"""The command `ratchet replay`: compute steps again, and report each result that is not equal to
the recorded one bit for bit."""

from __future__ import annotations

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

from ratchet.commands.replay.engine import Replay, ReplayedStep, load_changed_config
from ratchet.executors.event_loop import run_event_loop
from ratchet.observe.metrics import MACHINE_PREFIXES
from ratchet.observe.records.schema import LEARNED
from ratchet.observe.sinks import read_jsonl
from ratchet.utils.temp_dirs import TemporaryFolder
from ratchet.utils.terminal_text import make_console

NOT_EQUAL = 1  # exit status if a replayed step differs


@dataclass(frozen=True)
class Difference:
    """A difference between a recorded and a replayed value; None where a value is missing."""

    what: str  # a metric, a column with a position in it, or the weights of a role
    recorded: Any
    replayed: Any

    def __str__(self) -> str:
        return (
            f"{self.what}: recorded {self.recorded!r}, replayed "
            f"{self.replayed!r}{_format_distance(self.recorded, self.replayed)}"
        )


@dataclass(frozen=True)
class ReplayVerdict:
    """The comparison of a replayed step with the recorded one."""

    replayed: ReplayedStep
    start_step: int  # step of the checkpoint that the replay started from; 0: the start of the run
    recorded_metrics: Mapping[str, float | None]
    n_compared: int  # number of metrics that were compared
    differences: Sequence[Difference]
    # The first of the earlier replayed steps after which the weights differ; None if none differs.
    diverged_step: int | None
    changed_start: str | None  # see `Replay.changed_start`
    changed_step: ReplayedStep | None = None  # the step computed with the changed recipe

    @property
    def is_equal(self) -> bool:
        return not self.differences


def replay_steps(
    path: Path, steps: Sequence[int], *, changes: Sequence[str] = (), as_json: bool = False
) -> int:
    """Print the verdict on each step, in increasing order.

    Return the exit status: 0 if all steps are equal bit for bit, else 1.
    """
    console = make_console()
    all_equal = True

    async def run() -> None:
        nonlocal all_equal
        async for verdict in compare_steps(Replay(path), steps, changes):
            all_equal &= verdict.is_equal
            if as_json:
                console.out(json.dumps(to_json(verdict)), highlight=False)
            else:
                print_verdict(verdict, changes, console)

    run_event_loop(run())
    return 0 if all_equal else NOT_EQUAL


async def compare_steps(
    replay: Replay, steps: Sequence[int], changes: Sequence[str] = ()
) -> AsyncIterator[ReplayVerdict]:
    """Yield the verdict on each step, in increasing order. Raises the errors of `Replay`."""
    rows = {row["step"]: row for row in read_jsonl(replay.directory.metrics)}
    for step in sorted(set(steps)):
        await replay.advance_to(step)
        changed = None
        if changes:
            config = load_changed_config(replay, changes)
            with TemporaryFolder("replay") as directory:
                changed = await replay.replay_changed(config, directory)
        replayed = await replay.replay_next()
        yield compare_with_record(replay, replayed, rows.get(step, {}), changed)


def compare_with_record(
    replay: Replay,
    replayed: ReplayedStep,
    row: Mapping[str, float | None],
    changed: ReplayedStep | None = None,
) -> ReplayVerdict:
    """Return the verdict on the step that was replayed last.

    Args:
        replay: The replay.
        replayed: Its last step.
        row: The step's row in `metrics.jsonl`; empty if there is none.
        changed: The step computed with a changed recipe, if any.
    """
    recorded = {name: value for name, value in row.items() if name != "step"}
    diverged_step = replay.diverged_step
    return ReplayVerdict(
        replayed,
        replay.start_step,
        recorded,
        sum(name in recorded for name in list_comparable_metrics(replayed)),
        list(find_differences(replay, replayed, recorded)),
        None if diverged_step == replayed.step else diverged_step,
        replay.changed_start,
        changed,
    )


def list_comparable_metrics(replayed: ReplayedStep) -> list[str]:
    """Return the names of the metrics that do not depend on the machine, such as its speed."""
    return [name for name in replayed.metrics if not name.startswith(MACHINE_PREFIXES)]


def find_differences(
    replay: Replay, replayed: ReplayedStep, recorded: Mapping[str, float | None]
) -> Iterator[Difference]:
    """Yield the differences in metrics, in the learner's columns, and in the fingerprints of the
    weights after the step."""
    for name in list_comparable_metrics(replayed):
        value = replayed.metrics[name]
        if name not in recorded or recorded[name] != value:
            yield Difference(name, recorded.get(name), value)
    recorded_table = replay.record.step(replayed.step)
    replayed_table = replayed.table
    for name in LEARNED:
        columns = recorded_table.column(name), replayed_table.column(name)
        position = _find_first_difference(*columns)
        if position is not None:
            yield Difference(
                f"{name} of {_describe_position(recorded_table, position)}",
                *(_get_value(column, position) for column in columns),
            )
    for role, fingerprint in replay.record.steps[replayed.step].fingerprints.items():
        if replayed.fingerprints.get(role) != fingerprint:
            yield Difference(
                f"weights of {role} after the step", fingerprint, replayed.fingerprints.get(role)
            )


def _find_first_difference(
    recorded: pa.ChunkedArray, replayed: pa.ChunkedArray
) -> tuple[int, int] | None:
    """Return (row, token) of the first difference between two columns of lists.

    Return None if there is none. NaN equals NaN.
    """
    if recorded.equals(replayed):
        return None
    for row, cells in enumerate(zip(recorded, replayed, strict=True)):
        if cells[0].is_valid != cells[1].is_valid:
            return row, 0
        if cells[0].is_valid:
            a, b = (np.asarray(cell.values.to_numpy(zero_copy_only=False)) for cell in cells)
            unequal = np.flatnonzero(~((a == b) | ((a != a) & (b != b))))
            if len(unequal):
                return row, int(unequal[0])
    return None


def _describe_position(table: pa.Table, position: tuple[int, int]) -> str:
    row, token = position
    group, row_in_group = (table.column(name)[row].as_py() for name in ("group", "row"))
    return f"group {group}, row {row_in_group}, token {token}"


def _get_value(column: pa.ChunkedArray, position: tuple[int, int]) -> Any:
    row, token = position
    cell = column[row].as_py()
    return None if cell is None else cell[token]


def _format_distance(recorded: Any, replayed: Any) -> str:
    """Return the relative difference of two finite floats as text (absolute if `recorded` is 0)."""
    if not (isinstance(recorded, float) and isinstance(replayed, float)):
        return ""
    if not (math.isfinite(recorded) and math.isfinite(replayed)):
        return ""
    difference = replayed - recorded
    return f" ({difference / abs(recorded):+.1e})" if recorded else f" ({difference:+.1e})"


# --- output


def to_json(verdict: ReplayVerdict) -> dict[str, Any]:
    """Return the verdict in the form that `--json` writes."""
    replayed = verdict.replayed
    return {
        "step": replayed.step,
        "stage": replayed.stage,
        "from_step": verdict.start_step,
        "equal": verdict.is_equal,
        "weights_differ_since": verdict.diverged_step,
        "changed_start": verdict.changed_start,
        "compared_metrics": verdict.n_compared,
        "differences": [vars(difference) for difference in verdict.differences],
        "fingerprints": dict(replayed.fingerprints),
        "metrics": {name: replayed.metrics[name] for name in list_comparable_metrics(replayed)},
        "changed": None
        if verdict.changed_step is None
        else {
            name: verdict.changed_step.metrics[name]
            for name in list_comparable_metrics(verdict.changed_step)
        },
    }


def print_verdict(verdict: ReplayVerdict, changes: Sequence[str], console: Console) -> None:
    loss, norm = (verdict.replayed.metrics.get(f"policy/{name}") for name in ("loss", "grad_norm"))
    has_gradient = loss is not None or norm is not None
    gradient = f"loss {loss!r}, gradient norm {norm!r}" if has_gradient else "no token trained"
    lines = [*describe_comparison(verdict), f"  {gradient}"]
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    if verdict.changed_step is not None:
        console.print(_make_change_table(verdict, changes))


def describe_comparison(verdict: ReplayVerdict) -> list[str]:
    """Return the lines that say whether the step equals the recorded one, and what differs."""
    replayed = verdict.replayed
    origin = (
        f"the checkpoint of step {verdict.start_step}"
        if verdict.start_step
        else "the start of the run"
    )
    n_between = replayed.step - 1 - verdict.start_step
    intermediate_steps = (
        f" and {n_between} recorded step{'s' * (n_between != 1)}" if n_between else ""
    )
    lines = [
        f"step {replayed.step} ({replayed.stage}), from {origin}{intermediate_steps}: "
        f"{'' if verdict.is_equal else 'NOT '}bit-equal"
    ]
    if verdict.is_equal:
        fingerprints = ", ".join(
            f"{role} {fingerprint[:12]}" for role, fingerprint in replayed.fingerprints.items()
        )
        tokens = f"{replayed.batch.n_tokens:,} tokens"
        lines.append(
            f"  {verdict.n_compared} metrics, the columns of {tokens}, and the weights after the "
            f"step ({fingerprints})"
        )
    elif verdict.changed_start is not None:
        lines.append(f"  {verdict.changed_start}")
    elif verdict.diverged_step is not None:
        lines.append(f"  the weights differ since step {verdict.diverged_step}: replay that step")
    return lines + [f"  {difference}" for difference in verdict.differences]


def _make_change_table(verdict: ReplayVerdict, changes: Sequence[str]) -> Table:
    assert verdict.changed_step is not None, "the step was also computed with changes"
    replayed, changed = verdict.replayed.metrics, verdict.changed_step.metrics
    table = Table(
        Column("metric", overflow="fold"),
        "recorded",
        "replayed",
        ", ".join(changes),
        title=f"step {verdict.replayed.step}",
    )
    for name in dict.fromkeys(
        [*list_comparable_metrics(verdict.replayed), *list_comparable_metrics(verdict.changed_step)]
    ):
        if replayed.get(name) != changed.get(name) or name in ("policy/loss", "policy/grad_norm"):
            metrics = (verdict.recorded_metrics, replayed, changed)
            table.add_row(name, *(_format_number(values.get(name)) for values in metrics))
    return table


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
