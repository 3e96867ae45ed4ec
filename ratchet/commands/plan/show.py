"""Print the output of `ratchet plan`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from ratchet.commands.plan.cluster import ClusterPlan, plan_cluster
from ratchet.commands.plan.command import (
    MemoryPlan,
    ProcessMemory,
    StagePlan,
    count_frozen_parameters,
    count_trained_parameters,
    estimate_run_peak,
    plan_stage,
    read_shape,
)
from ratchet.commands.plan.pipeline import PURPOSES, RankPlan, plan_pipeline_ranks
from ratchet.commands.plan.probe import StageProbe, measure_empty_process, probe
from ratchet.config.loader import dump_plain
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig
from ratchet.config.yaml_tree import write_text
from ratchet.errors import ConfigError
from ratchet.executors.freeze import freeze
from ratchet.experience.sources.passes import resolve_passes
from ratchet.models.flops import DecoderCost
from ratchet.models.memory import memory_bytes
from ratchet.observe.write_files import replace_text
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.saved_weights import replace_saved_model
from ratchet.utils.datasheets import ClusterSpec
from ratchet.utils.terminal_text import make_console

BAR_WIDTH = 24  # characters of a bar that is the whole


def show_plan(
    config: RunConfig,
    *,
    cluster: str | None,
    probe_s: float | None,
    directory: RunDirectory | None,
    as_json: bool,
) -> None:
    """Print the plan of a recipe.

    Args:
        config: The recipe.
        cluster: Accelerators to plan for, such as "2x8xH100"; None plans for this machine.
        probe_s: Seconds for which each stage is trained and measured; None measures nothing.
        directory: Run directory to save the plan in.
        as_json: True prints JSON instead of tables.

    Raises ConfigError for a recipe that can't be planned or doesn't fit, RatchetError for a failed
    probe.
    """
    if cluster is not None and (probe_s is not None or directory is not None):
        raise ConfigError(
            "--probe and --run-dir plan for this machine, and --cluster for another one: remove "
            "--cluster, or the other options"
        )
    recipe = dump_plain(config)
    if directory is not None:
        directory.check_recipe(recipe)
    resolved_recipe = resolve_passes(replace_saved_model(config))
    config = freeze(resolved_recipe.config)
    spec = None if cluster is None else ClusterSpec.parse(cluster)
    cost = read_cost(config)
    stage_indices = range(len(config.stages))
    empty_bytes = measure_empty_process(config) if spec is None else 0
    accelerator_bytes = _get_accelerator_bytes(config.device)
    process = ProcessMemory(config.device, empty_bytes, config.rounds_products, accelerator_bytes)
    plans = [plan_stage(config, index, cost, process) for index in stage_indices]
    run_probe = None if probe_s is None else probe(config, limit_s=probe_s)
    cluster_plans = [
        None if spec is None else plan_on_cluster(config, index, plan, cost, spec)
        for index, plan in enumerate(plans)
    ]
    stage_plans = list(
        zip(
            plans,
            [None] * len(plans) if run_probe is None else run_probe.stages,
            cluster_plans,
            _plan_ranks(config, cost, process, plans),
            strict=True,
        )
    )
    peak_bytes = estimate_run_peak(plans, run_probe) if spec is None else None
    plan_json = {
        "name": config.name,
        "peak_bytes": peak_bytes,
        "stages": [_stage_to_json(*stage_plan) for stage_plan in stage_plans],
    }
    if directory is not None:
        directory.path.mkdir(parents=True, exist_ok=True)
        replace_text(directory.plan, json.dumps({**plan_json, "recipe": recipe}, indent=2) + "\n")
    if as_json:
        Console(soft_wrap=True).print_json(json.dumps(plan_json))
        return
    console = make_console()
    console.print(
        f"{config.name}: {cost.parameters:,} parameters, {cost.matrix_entries:,} of them "
        "multiplied with each token"
    )
    for note in resolved_recipe.lines:
        console.print(note)
    for plan, stage_probe, cluster_plan, ranks in stage_plans:
        _show_stage(console, plan, stage_probe, cluster_plan, spec, ranks)
    if peak_bytes is not None:
        peak_origin = (
            "computed from shapes"
            if run_probe is None
            else f"of which a probe of {sum(s.steps for s in run_probe.stages)} steps used "
            f"{_format_mib(run_probe.peak_bytes)}"
        )
        console.print(f"\nThe run takes {_format_mib(peak_bytes)} of main memory, {peak_origin}.")


def _get_accelerator_bytes(device: str) -> int:
    """Return the total memory of a CUDA device; 0 if it is not here, or another device."""
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return 0
    return memory_bytes(torch.device(device)) or 0


def _plan_ranks(
    config: RunConfig, cost: DecoderCost, process: ProcessMemory, plans: Sequence[StagePlan]
) -> list[tuple[RankPlan, ...]]:
    """Return the pipeline ranks of each stage's learner, see `plan_pipeline_ranks`."""
    return [
        plan_pipeline_ranks(stage, build(stage.algorithm), cost, process, plan.workload)
        for stage, plan in zip(config.stages, plans, strict=True)
    ]


def read_cost(config: RunConfig) -> DecoderCost:
    """Return the cost of the model that the run starts with; see `read_shape`."""
    uses_transformers = config.model.backend == "transformers"
    return DecoderCost(
        read_shape(config), config.kernels == "compiled", uses_transformers, config.model.freeze
    )


def plan_on_cluster(
    config: RunConfig, index: int, plan: StagePlan, cost: DecoderCost, spec: ClusterSpec
) -> ClusterPlan:
    stage = config.stages[index]
    algorithm = build(stage.algorithm)
    n_trained = count_trained_parameters(stage, algorithm, cost)
    n_frozen = count_frozen_parameters(stage, algorithm, cost)
    return plan_cluster(stage, cost, plan.workload, n_trained, n_frozen, spec)


def _show_stage(
    console: Console,
    stage: StagePlan,
    stage_probe: StageProbe | None,
    cluster_plan: ClusterPlan | None,
    spec: ClusterSpec | None,
    ranks: Sequence[RankPlan],
) -> None:
    workload = stage.workload
    tflop = sum(stage.flop_by_phase.values()) / 1e12
    console.print(
        f"\n[bold]{stage.name}[/bold]: {stage.steps:,} steps of {workload.n_rows:,} sequences, "
        f"at most {workload.max_sequence_tokens:,} tokens each "
        f"({workload.max_trained_tokens:,} per step); {tflop:.3g} TFLOP per step at most"
    )
    if cluster_plan is not None and spec is not None:
        console.print(f"on {spec.count} {spec.kind} (from data sheets, not measured), at least:")
        console.print(_make_memory_table(cluster_plan.memory, "memory of one accelerator"))
        console.print(_make_time_table(cluster_plan.seconds_by_phase, stage.steps))
        console.print(
            f"limited by {cluster_plan.bottleneck}. To use this layout, set in the recipe:\n"
        )
        console.print(
            write_text(cluster_plan.layout.make_sections()), markup=False, highlight=False
        )
        return
    console.print(_make_memory_table(stage.memory, "memory of the process, computed from shapes"))
    if ranks:
        console.print(_make_rank_table(ranks))
    if stage_probe is None:
        console.print("time: unknown without a measurement: add --probe 30")
        return
    console.print(_make_time_table(stage_probe.seconds_by_phase, stage.steps))
    longest = max(stage_probe.seconds_by_phase, key=lambda part: stage_probe.seconds_by_phase[part])
    console.print(
        f"the median of the first {stage_probe.steps} steps, with {stage_probe.processor_s:.3g} s "
        f"of processor time; limited by {longest}"
    )


def _format_mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


def _make_memory_table(memory: MemoryPlan, title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("when")
    table.add_column("what")
    table.add_column("MiB", justify="right")
    table.add_column()
    peak_bytes = memory.peak_bytes
    for phase, bytes_by_purpose in (("always", memory.resident), *memory.phases.items()):
        for purpose, size in bytes_by_purpose.items():
            table.add_row(phase, purpose, f"{size / 2**20:,.1f}", _draw_bar(size / peak_bytes))
    table.add_section()
    table.add_row(
        "peak",
        "largest phase" if memory.phases_take_turns else "sum of phases",
        f"{peak_bytes / 2**20:,.1f}",
    )
    return table


def _make_rank_table(ranks: Sequence[RankPlan]) -> Table:
    title = "memory of the learner's pipeline ranks, without Python and PyTorch"
    table = Table(title=title, title_justify="left", collapse_padding=True, pad_edge=False)
    purposes = [
        purpose for purpose in PURPOSES if any(purpose in rank.bytes_by_purpose for rank in ranks)
    ]
    table.add_column("rank")
    for name in ("layers", *purposes, "MiB"):
        table.add_column(name, justify="right")
    for index, rank in enumerate(ranks):
        sizes = [rank.bytes_by_purpose.get(purpose, 0) for purpose in purposes]
        mib = [f"{size / 2**20:,.1f}" for size in (*sizes, rank.peak_bytes)]
        table.add_row(f"{index}", f"{rank.n_layers}", *mib)
    return table


def _make_time_table(seconds_by_phase: Mapping[str, float], steps: int) -> Table:
    table = Table(title="time", title_justify="left")
    table.add_column("phase")
    table.add_column("s a step", justify="right")
    table.add_column("share", justify="right")
    table.add_column()
    total = sum(seconds_by_phase.values())
    for phase, phase_s in seconds_by_phase.items():
        table.add_row(phase, f"{phase_s:.3g}", f"{phase_s / total:.0%}", _draw_bar(phase_s / total))
    table.add_section()
    table.add_row(f"{steps:,} steps", _format_duration(total * steps), "")
    return table


def _draw_bar(share: float) -> str:
    """Return a bar of a share of the whole, from 0 to 1."""
    return "█" * round(BAR_WIDTH * share)


def _format_duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.3g} s"


def _stage_to_json(
    stage: StagePlan,
    stage_probe: StageProbe | None,
    cluster_plan: ClusterPlan | None,
    ranks: Sequence[RankPlan],
) -> dict[str, Any]:
    memory = stage.memory if cluster_plan is None else cluster_plan.memory
    seconds_by_phase: Mapping[str, float] | None = (
        None if stage_probe is None else stage_probe.seconds_by_phase
    )
    stage_json: dict[str, Any] = {
        "stage": stage.name,
        "steps": stage.steps,
        "tokens": stage.workload.max_trained_tokens,
        "flop": dict(stage.flop_by_phase),
        "memory": {
            "held": dict(memory.resident),
            **{name: dict(bytes_by_purpose) for name, bytes_by_purpose in memory.phases.items()},
        },
        "computed_peak_bytes": memory.peak_bytes,
    }
    if ranks:
        stage_json["pipeline_ranks"] = [
            {"layers": rank.n_layers, **rank.bytes_by_purpose} for rank in ranks
        ]
    if stage_probe is not None:
        stage_json |= {"probed_steps": stage_probe.steps, "processor_s": stage_probe.processor_s}
    if cluster_plan is not None:
        seconds_by_phase = cluster_plan.seconds_by_phase
        stage_json |= {
            "bound": cluster_plan.bottleneck,
            "recipe": cluster_plan.layout.make_sections(),
        }
    if seconds_by_phase is not None:
        stage_json |= {"seconds": dict(seconds_by_phase), "step_s": sum(seconds_by_phase.values())}
    return stage_json
