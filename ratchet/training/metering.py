"""Measure each step: FLOP/s and MFU (model FLOP utilization), idle time, system load.

Log a stage's cautions before it starts, and warn afterwards if most of its steps trained nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ratchet.algorithms.base import Algorithm
from ratchet.config.checks.staleness import cautions
from ratchet.config.resolve import build
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.learners.compute.flop_counter import FlopCounter
from ratchet.models.flops import TokenCost
from ratchet.observe.matmul_rate import Gemm, GemmTimer, measure_gemm_rate
from ratchet.observe.system import SystemMeter, load_nvml
from ratchet.observe.tracing.busy_time import BUSY_TIME, BusyTime
from ratchet.observe.tracing.perfetto import Trace
from ratchet.runs.run_dir import RunDirectory
from ratchet.training.run import StageRun
from ratchet.training.stage import Policy
from ratchet.types import Group
from ratchet.utils.datasheets import DATASHEET_BY_KIND

log = logging.getLogger("ratchet.train")

# Size of the square matrices that measure the CPU peak; a product takes 5 ms on one core.
MATRIX_SIDE = 512
ROUND_S = 0.01  # seconds per round of the peak measurement
REPEAT_SHARE = 0.01  # largest share of the time that repeated measurements of the peak take


@dataclass
class PeakRate:
    """The highest FLOP/s that all devices of a stage are known to reach together.

    A data sheet's rate never changes. A measured rate is too low if other programs were using the
    machine, and the MFU would then exceed 100 %. So it is replaced by each higher rate that a later
    measurement or a training step reaches.
    """

    flop_s: float
    """The rate in FLOP/s."""
    is_measured: bool = False
    """True if the rate was measured; False if it is a data sheet's."""
    remeasure: Callable[[], float] | None = None
    """Measures the rate once more; None if the measurement is never repeated."""
    clock: Callable[[], float] = time.perf_counter
    _next_at: float = 0.0

    def observe(self, flop_s: float) -> None:
        """Note a rate that the devices reached."""
        if self.is_measured:
            self.flop_s = max(self.flop_s, flop_s)

    def repeat(self) -> None:
        """Measure again, unless this would take more than REPEAT_SHARE of the time."""
        start = self.clock()
        if self.remeasure is None or start < self._next_at:
            return
        self.observe(self.remeasure())
        end = self.clock()
        self._next_at = end + (end - start) / REPEAT_SHARE


class StageMeter:
    """The meter of a stage's steps.

    Args:
        flop_counter: Counts the learners' FLOP; `measure` adds those of sampling.
        peak: Peak FLOP/s of all devices together. Steps may raise it.
        system: Measures CPU, memory and accelerators; None measures none.
        trace: Receives the steps; None writes no trace.
        busy_time: Records when learners and generators are busy.
    """

    def __init__(
        self,
        flop_counter: FlopCounter,
        peak: PeakRate,
        *,
        system: SystemMeter | None = None,
        trace: Trace | None = None,
        busy_time: BusyTime = BUSY_TIME,
    ) -> None:
        self.flop_counter = flop_counter
        self.peak = peak
        self.system = system
        self.trace = trace
        self.busy_time = busy_time
        self._flop_before = self._busy_s_before = 0.0

    def begin(self, step: int) -> None:
        self.peak.repeat()
        self._flop_before, self._busy_s_before = self.flop_counter.flop, self.busy_time.seconds
        if self.trace is not None:
            self.trace.begin_step(step)

    def measure(self, groups: Sequence[Group], seconds: float) -> Mapping[str, Mapping[str, float]]:
        """Return the metrics of a step by prefix.

        Args:
            groups: The groups of the step.
            seconds: Time since the step began.
        """
        rows = [row for group in groups for row in group.trajectories]
        new_rows = [row for group in groups if not group.n_uses for row in group.trajectories]
        self.flop_counter.add("policy", [len(row) for row in new_rows if row.sampled])
        flop = self.flop_counter.flop - self._flop_before
        idle = 1 - (self.busy_time.seconds - self._busy_s_before) / seconds
        # The two clocks are not read at the same instant, so the share may lie outside [0, 1].
        metrics = {"samples_per_s": len(rows) / seconds, "idle_share": min(max(idle, 0.0), 1.0)}
        if self.flop_counter.cost_by_role:
            self.peak.observe(flop / seconds)
            metrics |= {
                "tflop": flop / 1e12,
                "tflop_per_s": flop / seconds / 1e12,
                "mfu": flop / seconds / self.peak.flop_s,
            }
        return {"time": metrics, "system": {} if self.system is None else self.system.measure()}

    def end(self) -> None:
        if self.trace is not None:
            self.trace.flush()


def make_meter(
    policy: Policy,
    config: RunConfig,
    index: int,
    directory: RunDirectory,
    trace: Trace | None,
) -> StageMeter:
    """Return the meter of stage `index`.

    Its FLOP counter must be passed to `wrap_with_flop_counter`, which wraps the stage's learners.
    """
    stage = config.stages[index]
    flop_counter = FlopCounter(
        _get_costs_by_role(policy, build(stage.algorithm)),
        # See `FlopCounter`: an adapter needs no gradients of the frozen weights.
        passes_per_update=3.0 if stage.lora is None else 2.0,
    )
    system = SystemMeter(directory.path, nvml=load_nvml()) if config.logging.system else None
    return StageMeter(
        flop_counter, estimate_peak_flops(policy, config, index), system=system, trace=trace
    )


def _get_costs_by_role(policy: Policy, algorithm: Algorithm) -> dict[str, TokenCost]:
    """Return the cost per token of each role whose model is the policy or a copy of it.

    The FLOP of other models are unknown.
    """
    cost = policy.model.token_cost
    copies = [name for name, role in algorithm.roles.items() if role.path is None]
    return {} if cost is None else dict.fromkeys(["policy", *copies], cost)


def estimate_peak_flops(policy: Policy, config: RunConfig, index: int) -> PeakRate:
    """Return the peak FLOP/s of all learners and generators together.

    The value is the data sheet's for a known accelerator, else the measured rate of a matrix
    product (under 0.2 s). On a CPU the measurement is repeated during the stage, because other
    programs may have slowed it down.
    """
    device = torch.device(config.device)
    learners = 1 if policy.ranks is None else policy.ranks.size
    section = config.stages[index].generator
    # Generators of other kinds share the learner's accelerator.
    generators = section.workers if isinstance(section, GeneratorWorkersConfig) else 0
    shares = config.cluster.shares_accelerators
    devices = max(learners, generators) if shares else learners + generators
    if device.type != "cuda":
        gemm = Gemm(MATRIX_SIDE, MATRIX_SIDE, MATRIX_SIDE)
        dtype = torch.bfloat16 if config.rounds_products else torch.float32
        timer = GemmTimer(gemm, device=device, dtype=dtype, round_s=ROUND_S)
        return PeakRate(
            devices * timer.measure(),
            is_measured=True,
            remeasure=lambda: devices * timer.measure(rounds=1),
        )
    device_name = torch.cuda.get_device_name(device).upper().replace(" ", "")
    datasheets = [kind for kind in DATASHEET_BY_KIND if kind.partition("-")[0] in device_name]
    if datasheets:
        return PeakRate(devices * DATASHEET_BY_KIND[datasheets[-1]].flop_s)
    rate = measure_gemm_rate(
        Gemm.square("cuda"), device=device, dtype=torch.bfloat16, round_s=ROUND_S
    )
    return PeakRate(devices * rate, is_measured=True)


def warn_of_steps_without_signal(run: StageRun) -> None:
    """Log a warning if most steps of a stage had no gradient."""
    steps = run.steps_done - run.start_step
    silent = run.progress.silent_steps
    if silent > steps / 2:
        log.warning(
            "stage %s: in %d of %d steps all advantages were 0 (no attempt beat another), "
            "so they trained nothing. Train longer before this stage, raise sampling.temperature, "
            "or use tasks of mixed difficulty",
            run.name,
            silent,
            steps,
        )


def log_stage(run: StageRun, stage: StageConfig) -> None:
    """Log the cautions of a stage and the size of its adapter."""
    for caution in cautions(stage):
        log.warning("stage %s: %s", run.name, caution)
    if run.trainable:
        log.info(
            "stage %s trains %s parameters of an adapter, %.2f %% of all",
            run.name,
            f"{run.trainable['trainable_parameters']:,}",
            100 * run.trainable["trainable_share"],
        )
