"""Print the output of `ratchet plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from ratchet.commands.plan.cluster import ClusterPlan, plan_cluster
from ratchet.commands.plan.command import (
    Device,
    MemoryPlan,
    StagePlan,
    frozen_parameters,
    plan_stage,
    read_shape,
    run_peak,
    trained_parameters,
)
from ratchet.commands.plan.probe import Probed, empty_process, probe
from ratchet.config.loader import plain
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import write_text
from ratchet.errors import ConfigError
from ratchet.executors.datasheets import ClusterSpec
from ratchet.executors.freeze import freeze
from ratchet.models.flops import DecoderCost
from ratchet.observe.write_files import replace_text
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.terminal_text import make_console


def show_plan(
    config: RunConfig,
    *,
    cluster: str | None,
    probe_s: float | None,
    directory: RunDirectory | None,
    as_json: bool,
) -> None:
    """Print the plan of a recipe. directory: the run directory, where the plan is also saved.

    Raises ConfigError for a recipe that can't be planned or doesn't fit, RatchetError for a failed
    probe.
    """
    if cluster is not None and (probe_s is not None or directory is not None):
        raise ConfigError(
            "--probe and --run-dir are about this machine, and --cluster plans for another: remove "
            "it, or them"
        )
    recipe = plain(config)
    if directory is not None:
        directory.expect(recipe)
    config, spec = freeze(config), None if cluster is None else ClusterSpec.parse(cluster)
    cost, stages = (
        DecoderCost(read_shape(config), config.kernels == "compiled"),
        range(len(config.stages)),
    )
    device = Device(config.device, empty_process(config) if spec is None else 0)
    plans = [plan_stage(config, index, cost, device) for index in stages]
    probed = None if probe_s is None else probe(config, limit_s=probe_s)
    clusters = [
        None if spec is None else on_cluster(config, index, plan, cost, spec)
        for index, plan in enumerate(plans)
    ]
    stage_plans = list(
        zip(plans, [None] * len(plans) if probed is None else probed.stages, clusters, strict=True)
    )
    peak = run_peak(plans, probed) if spec is None else None
    numbers = {
        "name": config.name,
        "peak_bytes": peak,
        "stages": [_numbers(*each) for each in stage_plans],
    }
    if directory is not None:
        directory.path.mkdir(parents=True, exist_ok=True)
        replace_text(directory.plan, json.dumps({**numbers, "recipe": recipe}, indent=2) + "\n")
    if as_json:
        Console(soft_wrap=True).print_json(json.dumps(numbers))
        return
    console = make_console()
    console.print(
        f"{config.name}: {cost.parameters:,} parameters, {cost.multiplied:,} of them multiplied "
        "with each token"
    )
    for plan, tried, divided in stage_plans:
        _show(console, plan, tried, divided, spec)
    if peak is not None:
        how = (
            "by shapes alone"
            if probed is None
            else f"of which a run of {sum(s.steps for s in probed.stages)} steps had "
            f"{_mib(probed.peak)}"
        )
        console.print(f"\nThe run takes {_mib(peak)} of main memory, {how}.")


def on_cluster(
    config: RunConfig, index: int, plan: StagePlan, cost: DecoderCost, spec: ClusterSpec
) -> ClusterPlan:
    stage = config.stages[index]
    algorithm = build(stage.algorithm)
    trained, frozen = (
        trained_parameters(stage, algorithm, cost),
        frozen_parameters(stage, algorithm, cost),
    )
    return plan_cluster(stage, cost, plan.load, trained, frozen, spec)


def _show(
    console: Console,
    stage: StagePlan,
    probed: Probed | None,
    divided: ClusterPlan | None,
    spec: ClusterSpec | None,
) -> None:
    load = stage.load
    console.print(
        f"\n[bold]{stage.name}[/bold]: {stage.steps:,} steps of {load.rows:,} sequences, at most "
        f"{load.length:,} tokens each "
        f"({load.tokens:,} a step); {sum(stage.flop.values()) / 1e12:.3g} TFLOP a step at most"
    )
    if divided is not None and spec is not None:
        console.print(
            f"on {spec.count} {spec.kind}, by data sheets and not by measurements, at least:"
        )
        console.print(_memory_table(divided.memory, "memory of one accelerator"))
        console.print(_time_table(divided.seconds, stage.steps))
        console.print(f"limited by {divided.bound}. In the recipe:\n")
        console.print(write_text(divided.division.recipe()), markup=False, highlight=False)
        return
    console.print(_memory_table(stage.memory, "memory of the process, by shapes"))
    if probed is None:
        console.print("time: not known before it is tried: add --probe 30")
        return
    console.print(_time_table(probed.seconds, stage.steps))
    longest = max(probed.seconds, key=lambda part: probed.seconds[part])
    console.print(
        f"the median of the first {probed.steps} steps, with {probed.processor_s:.3g} s of "
        f"processors; limited by {longest}"
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _memory_table(memory: MemoryPlan, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("when")
    table.add_column("what")
    table.add_column("MiB", justify="right")
    for when, parts in (("always", memory.held), *memory.phases.items()):
        for what, size in parts.items():
            table.add_row(when, what, f"{size / 2**20:,.1f}")
    table.add_section()
    table.add_row(
        "peak", "by turns" if memory.by_turns else "all together", f"{memory.peak / 2**20:,.1f}"
    )
    return table


def _time_table(seconds: Mapping[str, float], steps: int) -> Table:
    table = Table(title="time", title_justify="left")
    table.add_column("phase")
    table.add_column("s a step", justify="right")
    table.add_column("share", justify="right")
    total = sum(seconds.values())
    for phase, taken in seconds.items():
        table.add_row(phase, f"{taken:.3g}", f"{taken / total:.0%}")
    table.add_section()
    table.add_row(f"{steps:,} steps", _duration(total * steps), "")
    return table


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _numbers(
    stage: StagePlan, probed: Probed | None, divided: ClusterPlan | None
) -> dict[str, Any]:
    memory = stage.memory if divided is None else divided.memory
    seconds: Mapping[str, float] | None = None if probed is None else probed.seconds
    plain: dict[str, Any] = {
        "stage": stage.name,
        "steps": stage.steps,
        "tokens": stage.load.tokens,
        "flop": dict(stage.flop),
        "memory": {
            "held": dict(memory.held),
            **{name: dict(parts) for name, parts in memory.phases.items()},
        },
        "shape_bytes": memory.peak,
    }
    if probed is not None:
        plain |= {"probed_steps": probed.steps, "processor_s": probed.processor_s}
    if divided is not None:
        seconds = divided.seconds
        plain |= {"bound": divided.bound, "recipe": divided.division.recipe()}
    if seconds is not None:
        plain |= {"seconds": dict(seconds), "step_s": sum(seconds.values())}
    return plain
