"""The result of profiling a few steps: its numbers, and the table that a user reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

OTHER = "other"  # work outside all phases: packing, advantages, recording
# The phase whose tokens/s count generated tokens; in other phases they count computed rows.
GENERATING_PHASE = "sample"


@dataclass
class PhaseWork:
    """The work of one phase over all profiled steps.

    rows: token positions that passed through the model's embedding, with padding.
    forwards: number of forward passes.
    tokens: token positions that the model was asked to compute, without padding; 0 if unknown.
    flop: floating-point operations of matrix products.
    unrecorded_s: seconds whose work is in `seconds` only.
    """

    seconds: float = 0.0
    rows: int = 0
    forwards: int = 0
    tokens: float = 0.0
    flop: float = 0.0
    unrecorded_s: float = 0.0

    @property
    def flop_rate(self) -> float:
        """Return the floating-point operations per second while work was recorded."""
        recorded_s = self.seconds - self.unrecorded_s
        return self.flop / recorded_s if recorded_s > 0 else 0.0

    @property
    def padding(self) -> float | None:
        """Return the share of rows that are padding; None if it is unknown."""
        return max(0.0, self.rows - self.tokens) / self.rows if self.rows and self.tokens else None


@dataclass(frozen=True)
class Profile:
    """The numbers of a profile.

    first_step: first profiled step of the run, counted from 1.
    steps: number of profiled steps.
    requested_steps: number of requested steps.
    wall_s: seconds of the profiled steps, without `excluded_s`.
    excluded_s: seconds of evaluation and saving.
    unprofiled_s: median seconds of a step before the profiler was on; None without such steps.
    idle_share: share of `wall_s` in which `idle_resource` (the accelerator or the threads) was
        idle.
    gemm_rates: (description, FLOP/s) of matrix products; the table's shares refer to the first.
    """

    stage: str
    first_step: int
    steps: int
    requested_steps: int
    phases: Mapping[str, PhaseWork]
    generated_tokens: float
    wall_s: float
    excluded_s: float
    unprofiled_s: float | None
    idle_share: float
    idle_resource: str
    peak_bytes: int
    gemm_rates: Sequence[tuple[str, float]]

    @property
    def unrecorded_s(self) -> float:
        """Return the seconds of `wall_s` in which operations were not recorded."""
        return sum(work.unrecorded_s for work in self.phases.values())

    def get_share(self, phase: str) -> float:
        return self.phases[phase].seconds / self.wall_s

    def tokens_per_s(self, phase: str) -> float | None:
        work = self.phases[phase]
        count = self.generated_tokens if phase == GENERATING_PHASE else work.rows
        return count / work.seconds if count and work.seconds else None

    def table(self) -> str:
        """Return the table in plain ASCII, for any terminal and any file."""
        rows = [HEADINGS, *(self._row(name) for name in self.phases), self._total()]
        widths = [max(len(row[column]) for row in rows) for column in range(len(HEADINGS))]
        lines = [
            "  ".join(
                [
                    f"{phase:<{widths[0]}}",
                    *(f"{cell:>{width}}" for cell, width in zip(cells, widths[1:], strict=True)),
                ]
            )
            for phase, *cells in rows
        ]
        return "\n".join([self._title(), "", *lines, "", *self._notes()]) + "\n"

    def _title(self) -> str:
        last = self.first_step + self.steps - 1
        profiled_steps = (
            f"step {self.first_step}" if self.steps == 1 else f"steps {self.first_step} to {last}"
        )
        shortfall = (
            ""
            if self.steps == self.requested_steps
            else f" (of {self.requested_steps} requested: the stage had no more)"
        )
        return f"Profile of stage {self.stage}, {profiled_steps}{shortfall}"

    def _row(self, name: str) -> Sequence[str]:
        work, speed = self.phases[name], self.tokens_per_s(name)
        rate = work.flop_rate
        return (
            name,
            f"{work.seconds / self.steps:.4f}",
            _percent(self.get_share(name)),
            f"{speed:,.0f}" if speed else "-",
            f"{work.rows / work.tokens:.3f}" if work.rows and work.tokens else "-",
            f"{rate / 1e9:,.2f}" if rate else "-",
            _percent(rate / self.gemm_rates[0][1]) if rate else "-",
        )

    def _total(self) -> Sequence[str]:
        rate = sum(work.flop for work in self.phases.values()) / (self.wall_s - self.unrecorded_s)
        speed = self.generated_tokens / self.wall_s
        speed_text = f"{speed:,.0f}" if speed else "-"
        share = _percent(sum(self.get_share(name) for name in self.phases))
        best_rate = self.gemm_rates[0][1]
        return (
            "step",
            f"{self.wall_s / self.steps:.4f}",
            share,
            speed_text,
            "-",
            f"{rate / 1e9:,.2f}",
            _percent(rate / best_rate),
        )

    def _notes(self) -> list[str]:
        paddings = [(name, work.padding) for name, work in self.phases.items()]
        padding_text = ", ".join(
            f"{name} {_percent(share)}" for name, share in paddings if share is not None
        )
        without_profiler = (
            f", {self.unprofiled_s:.4f} s before it" if self.unprofiled_s is not None else ""
        )
        unrecorded = (
            [
                f"unrecorded   {self.unrecorded_s:.2f} s of generation after its first steps, in "
                "s/step, share and tokens/s only"
            ]
            if self.unrecorded_s
            else []
        )
        gemm_text = "; ".join(
            f"{rate / 1e9:,.2f} GFLOP/s, {product}" for product, rate in self.gemm_rates
        )
        return [
            f"GEMM rate    {gemm_text}",
            f"padding      {padding_text or 'nothing went through the model'} (share of the rows "
            "computed)",
            f"idle         {_percent(self.idle_share)} of {self.idle_resource}",
            f"memory       {self.peak_bytes / 2**20:,.0f} MiB at most",
            f"profiler     a step took {self.wall_s / self.steps:.4f} s under it{without_profiler}",
            f"excluded     {self.excluded_s:.2f} s of evaluation and saving, in no number above",
            *unrecorded,
        ]


HEADINGS = ("phase", "s/step", "share", "tokens/s", "rows/token", "GFLOP/s", "of GEMM rate")


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
