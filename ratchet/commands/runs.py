"""The command `ratchet runs`: list and compare runs, remove those without steps, and prune
checkpoints."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.prompt import Confirm
from rich.table import Table
from rich.text import Text

from ratchet.errors import CheckpointError, RunDirectoryError, RunNotFound
from ratchet.observe.progress import draw_curves, format_duration
from ratchet.observe.sinks import MAX_VALUE, iter_jsonl
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.resolve import fetch_run_record, list_runs_at
from ratchet.runs.run_dir import RunDirectory, list_config_differences
from ratchet.runs.without_steps import has_no_finished_step, remove_run_without_steps
from ratchet.utils.object_store import is_address
from ratchet.utils.terminal_text import make_console, shorten_text

Value = TypeVar("Value")

COMPARED_METRICS = ("eval/accuracy", "eval/loss", "rollout/reward", "policy/loss")


@dataclass(frozen=True)
class RunRow:
    """A row of the list of runs."""

    path: str
    """The run's directory or address."""
    state: str
    """"running", "finished", or "stopped" if it can be resumed; "mirrored" for an unfinished run in
    an object store; "damaged" if its recipe can't be read."""
    step: int
    """The last step with metrics; 0 if no step has any."""
    steps: int
    """Number of steps in the recipe."""
    seconds: float
    """The sum of the steps' times."""
    accuracy: float | None
    """The latest held-out accuracy."""
    loss: float | None
    """The latest held-out loss."""
    checkpoints: int
    """Size of all checkpoints, in bytes."""


def find_runs(directory: Path) -> list[RunDirectory]:
    """Return `directory` itself if it is a run, else the runs directly in it.

    Raises RunNotFound if there is none.
    """
    run = RunDirectory(directory)
    runs_here = (
        [run]
        if run.is_used
        else [
            RunDirectory(path)
            for path in sorted(directory.glob("*/"))
            if RunDirectory(path).is_used
        ]
    )
    if not runs_here:
        raise RunNotFound(
            f"{directory} holds no runs (directories with a config.yaml): name one that does"
        )
    return runs_here


def describe_run(run: RunDirectory) -> RunRow:
    """Return the row of a run, read from its files."""
    step, seconds = 0, 0.0
    latest: dict[str, float | None] = {"eval/accuracy": None, "eval/loss": None}
    for row in iter_jsonl(run.metrics):  # 200,000 rows would take 2 GB at once
        step = row["step"]
        seconds += sum(_list_finite_metrics([row], "time/step_s"))
        for name in latest:
            value = _find_last([row], name)
            latest[name] = latest[name] if value is None else value
    return RunRow(
        path=str(run.path),
        state="running" if run.is_locked else "finished" if run.summary.exists() else "stopped",
        step=step,
        steps=sum(_read_stage_values(run, int, "steps")),
        seconds=seconds,
        accuracy=latest["eval/accuracy"],
        loss=latest["eval/loss"],
        checkpoints=_measure_bytes(run.checkpoints),
    )


def _describe_even_if_damaged(run: RunDirectory) -> RunRow:
    try:
        return describe_run(run)
    except RunDirectoryError:  # a damaged run must not hide the other runs
        return RunRow(
            str(run.path), "damaged", 0, 0, 0.0, None, None, _measure_bytes(run.checkpoints)
        )


def _read_stage_values(run: RunDirectory, kind: type[Value], *path: str) -> list[Value]:
    """Return the value of type `kind` at a path of keys in the recipe, one for each stage.

    Raises RunDirectoryError if the recipe is damaged.
    """
    values = []
    stages: Any = run.read_config().get("stages")
    for stage in stages if isinstance(stages, list) and stages else [None]:
        value: Any = stage
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if type(value) is not kind:
            raise RunDirectoryError(
                f"{run.config} has a stage without {'.'.join(path)}, so it is not a resolved "
                "recipe: restore the recipe of the run's newest checkpoint"
            )
        values.append(value)
    return values


def _list_finite_metrics(rows: Sequence[Mapping[str, Any]], ending: str) -> list[float]:
    """Return the finite values of the metrics whose names end with `ending`, by step."""
    return [
        value
        for row in rows
        for name, value in row.items()
        if name.endswith(ending) and type(value) in (int, float) and abs(value) < MAX_VALUE
    ]


def _find_last(rows: Sequence[Mapping[str, Any]], ending: str) -> float | None:
    """Return the last finite value of the metrics whose names end with `ending`, or None."""
    return next(reversed(_list_finite_metrics(rows, ending)), None)


def list_run_rows(path_or_address: str | Path) -> list[RunRow]:
    """Return the rows of the runs in a directory or at an address.

    Raises RunDirectoryError if there is none.
    """
    if not isinstance(path_or_address, str) or not is_address(path_or_address):
        runs_here = find_runs(Path(path_or_address))
        if len(runs_here) == 1:
            return [describe_run(runs_here[0])]
        return [_describe_even_if_damaged(run) for run in runs_here]
    rows = []
    for address, checkpoints in list_runs_at(path_or_address):
        row = describe_run(
            RunDirectory(
                fetch_run_record(address, ("config.yaml", "metrics.jsonl", "summary.json"))
            )
        )
        # Only the machine that trains can tell a running run from a stopped one.
        rows.append(
            replace(
                row,
                path=address,
                checkpoints=checkpoints,
                state=row.state.replace("stopped", "mirrored"),
            )
        )
    return rows


def list_runs(path_or_address: str | Path, *, as_json: bool) -> None:
    rows = list_run_rows(path_or_address)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    # A long name is wrapped, not cut off, because names often differ only at their ends.
    table.add_column("run", overflow="fold")
    for name in ("state", "step", "train time", "accuracy", "loss", "checkpoints"):
        table.add_column(name, no_wrap=True, justify="left" if name == "state" else "right")
    parent = f"{path_or_address}".rstrip("/")
    for row in rows:
        accuracy, loss = (
            "-" if value is None else f"{value:.3f}" for value in (row.accuracy, row.loss)
        )
        step = f"{row.step:,} of {row.steps:,}"
        table.add_row(
            Text(row.path.removeprefix(f"{parent}/")),
            row.state,
            step,
            format_duration(row.seconds),
            accuracy,
            loss,
            _format_size(row.checkpoints),
        )
    if len(rows) > 1:
        make_console(soft_wrap=True).print(f"in {parent}", markup=False, highlight=False)
    make_console().print(table)


def _format_size(size: int) -> str:
    mib = size / 2**20
    return f"{mib:,.1f} MiB" if mib < 1000 else f"{mib / 1024:,.1f} GiB"


CURVE_WIDTH = 48  # largest number of characters of a curve
MAX_LINE_CHARS = 300  # characters of a difference that are printed


def compare_runs(paths: Sequence[str | Path], *, as_json: bool) -> None:
    """Print how the first run differs from each of the other runs.

    Print the recipe keys that differ (stages are matched by name), the first step whose metrics
    differ, and of COMPARED_METRICS the last values and the curves in the last stage.
    """
    first, *others = [_ComparedRun.read(path) for path in paths]
    comparisons = [_compare_pair(first, other) for other in others]
    if as_json:
        print_json(comparisons)
        return
    console = make_console(soft_wrap=True)
    for comparison, other in zip(comparisons, others, strict=True):
        console.print(
            f"{comparison['a']} -> {comparison['b']}", style="bold", markup=False, highlight=False
        )
        for line in comparison["recipe"] or ["the recipes are the same"]:
            console.print(f"  {shorten_text(line, MAX_LINE_CHARS)}", markup=False, highlight=False)
        step = comparison["first_different_step"]
        shared = comparison["shared_steps"]
        console.print(
            f"  the numbers differ from step {step} on"
            if step is not None
            else f"  the numbers of all {shared:,} common steps are equal"
            if shared
            else "  the two runs have no step in common"
        )
        for name, last_values in comparison["last"].items():
            a, b = ("-" if value is None else f"{value:.4g}" for value in last_values)
            console.print(f"  {name}: {a} -> {b}", markup=False, highlight=False)
            for line in _draw_metric((first, other), name):
                console.print(f"    {line}", markup=False, highlight=False)
    command = shlex.join(["ratchet", "report", *map(str, paths), "--out", "compare.html"])
    console.print(f"curves  {command}", markup=False, highlight=False)


@dataclass(frozen=True)
class _ComparedRun:
    """The parts of a run that a comparison shows, which are read once."""

    label: str
    """The path or address by which the user named the run."""
    recipe: Mapping[str, Any]
    """The resolved recipe."""
    rows: Sequence[Mapping[str, Any]]
    """The step and the compared metrics of each row, by increasing step."""
    digests: Mapping[int, int]
    """A hash of all numbers of each row but timings, by step."""
    last_start: int
    """The first step of its last stage."""

    @classmethod
    def read(cls, path: str | Path) -> _ComparedRun:
        run = _open_run(path)
        _read_stage_values(run, str, "name")
        start = sum(_read_stage_values(run, int, "steps")[:-1])
        rows, digests = [], {}
        for row in iter_jsonl(run.metrics):
            compared = {name: row[name] for name in row if name.endswith(COMPARED_METRICS)}
            rows.append({"step": row["step"], **compared})
            digests[row["step"]] = hash(json.dumps(_drop_timings(row), sort_keys=True))
        return cls(str(path), run.read_config(), rows, digests, start)


def _draw_metric(runs: Sequence[_ComparedRun], metric: str) -> list[str]:
    """Return a line with the curve of a metric in the last stage for each run, on one scale.

    Return [] if a run has fewer than two values there.
    """
    curves = [_read_last_stage(run, metric) for run in runs]
    if min(map(len, curves)) < 2:
        return []
    lines = draw_curves(curves, CURVE_WIDTH)
    return [f"{line}  {run.label}" for line, run in zip(lines, runs, strict=True)]


def _read_last_stage(run: _ComparedRun, metric: str) -> dict[int, float]:
    """Return the finite values of a metric in the run's last stage, by the stage's step."""
    # The evaluation after the stage before is the one before the first step of this stage.
    first = run.last_start if metric.startswith("eval/") else run.last_start + 1
    curve = {}
    for row in run.rows:
        values = _list_finite_metrics([row], metric) if row["step"] >= first else []
        if values:
            curve[row["step"] - run.last_start] = values[0]
    return curve


def _list_recipe_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """Return a line for each key whose values differ, and for each stage of one recipe only.

    Stages are compared by name.
    """
    stages_by_name = [{stage["name"]: stage for stage in recipe["stages"]} for recipe in (a, b)]
    shared_names = [name for name in stages_by_name[0] if name in stages_by_name[1]]
    before, after = (
        {**recipe, "stages": {name: recipe_stages[name] for name in shared_names}}
        for recipe, recipe_stages in zip((a, b), stages_by_name, strict=True)
    )
    lines = list_config_differences(before, after)
    for ordinal, recipe_stages in zip(("first", "second"), stages_by_name, strict=True):
        for name in [name for name in recipe_stages if name not in shared_names]:
            stage = recipe_stages[name]
            algorithm = stage.get("algorithm")
            kind = algorithm.get("kind", "") if isinstance(algorithm, Mapping) else ""
            lines.append(f"stages.{name}: only in the {ordinal} ({kind}, {stage['steps']} steps)")
    return lines


def _compare_pair(a: _ComparedRun, b: _ComparedRun) -> dict[str, Any]:
    """Return the differences of two runs in the form that `--json` writes."""
    shared_steps = sorted(a.digests.keys() & b.digests.keys())
    different_step = next(
        (step for step in shared_steps if a.digests[step] != b.digests[step]), None
    )
    return {
        "a": a.label,
        "b": b.label,
        "recipe": _list_recipe_differences(a.recipe, b.recipe),
        "first_different_step": different_step,
        "shared_steps": len(shared_steps),
        "last": {
            name: (_find_last(a.rows, name), _find_last(b.rows, name)) for name in COMPARED_METRICS
        },
    }


def _drop_timings(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the row without times and system metrics, which differ between any two runs."""
    return {
        name: value for name, value in row.items() if "time/" not in name and "system/" not in name
    }


def prune_runs(directory: Path, *, keep: int, confirmed: bool) -> None:
    """Remove all but the newest `keep` checkpoints of each run that is not running.

    Checkpoints that the recipe protects with `keep_best` and `keep_every` stay, and so do damaged
    ones.

    Args:
        directory: A run, or a directory of runs.
        keep: The number of newest checkpoints to keep.
        confirmed: True removes the other checkpoints; False only prints them.

    Raises:
        RunDirectoryError: Recipes of runs are damaged, all of which it names. Their checkpoints
            stay; the other runs are pruned first.
    """
    console = make_console(soft_wrap=True)
    freed_bytes, errors = 0, []
    for run in find_runs(directory):
        if run.is_locked:
            console.print(f"{run.path} is running, so its checkpoints are kept", markup=False)
            continue
        try:
            sizes = _prune_run(run, keep, confirmed=confirmed)
        except RunDirectoryError as error:
            errors.append(str(error))
            continue
        except CheckpointError as error:
            console.print(f"nothing is removed: {error}", markup=False, highlight=False)
            continue
        verb = "removed" if confirmed else "would remove"
        for path, size in sizes.items():
            console.print(f"{verb} {path} ({size / 2**20:,.1f} MiB)", markup=False, highlight=False)
        freed_bytes += sum(sizes.values())
    console.print(
        f"{freed_bytes / 2**20:,.1f} MiB"
        + ("" if confirmed or not freed_bytes else "; add --yes to remove these checkpoints")
    )
    if errors:
        raise RunDirectoryError("\n".join(errors))


def _prune_run(run: RunDirectory, keep: int, *, confirmed: bool) -> dict[Path, int]:
    """Remove a run's checkpoints beyond `keep`, if `confirmed`; return their sizes in bytes."""
    keep_best, keep_every = (
        max(_read_stage_values(run, int, "checkpoint", key)) for key in ("keep_best", "keep_every")
    )
    store = CheckpointStore(run.checkpoints, keep, keep_best=keep_best, keep_every=keep_every)
    with run.locked() if confirmed else nullcontext():
        # A damaged newest checkpoint is found here, and does not count as one to keep.
        store.latest()
        sizes = {item.path: _measure_bytes(item.path) for item in store.list_surplus()}
        if confirmed:
            store.tidy()
    return sizes


def clean_runs(directory: Path, *, confirmed: bool) -> None:
    """Remove the runs that never finished a step.

    Args:
        directory: A run, or a directory of runs.
        confirmed: True removes the runs without asking for confirmation. False asks for it on a
            terminal, and elsewhere only lists the runs.
    """
    console = make_console(soft_wrap=True)
    runs_without_steps = [run for run in find_runs(directory) if has_no_finished_step(run)]
    for run in runs_without_steps:
        console.print(f"{run.path} has no finished step", markup=False, highlight=False)
    if not runs_without_steps:
        console.print("every run has steps, or is under way")
        return
    if not confirmed:
        if not sys.stdin.isatty():
            console.print("add --yes to remove these runs")
            return
        if not Confirm.ask(f"remove these {len(runs_without_steps)} runs?", console=console):
            return
    for run in runs_without_steps:
        remove_run_without_steps(run)
    console.print(f"removed {len(runs_without_steps)}")


def _open_run(path: str | Path) -> RunDirectory:
    run = RunDirectory(fetch_run_record(path))
    if not run.is_used:
        raise RunNotFound(
            f"{path} holds no run (no config.yaml): give the directory that `ratchet train` printed"
        )
    return run


def _measure_bytes(path: Path) -> int:
    """Return the size of all files below a directory. A running run may remove some meanwhile."""
    size = 0
    for parent, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):
                size += os.stat(os.path.join(parent, name)).st_size
    return size


def print_json(value: Any) -> None:
    Console(soft_wrap=True).print_json(json.dumps(value))
