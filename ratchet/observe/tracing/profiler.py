"""Profile a few steps of a stage.

The result is a trace of every operation in every thread, and a table of where the time goes. The
profiler costs nothing before it starts and after it has stopped. It changes no result: it draws no
random number and touches no tensor.

On an accelerator a decoding step has hundreds of kernels and a step hundreds of decoding steps. So
only the first steps of the generator are recorded there, and no evaluation; updates are recorded
whole. PyTorch can pause only the recording of the thread that asks for it, which is the one that
launches all kernels.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

# The only way to profile threads that already exist.
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from ratchet.kernels.cpu import STEP
from ratchet.observe.matmul_rate import Gemm, measure_gemm_rate
from ratchet.observe.tracing.profile_table import GENERATING_PHASE, OTHER, PhaseWork, Profile
from ratchet.observe.write_files import replace_text
from ratchet.utils.tracer import Span

WARM_UP = 3  # steps until caches, pools and the allocator have reached their final size
EXCLUDED_PHASES = ("evaluate", "save")  # phases inside a step that are not part of training
# Steps of the generator that are recorded in each training step on an accelerator, with a prefill
# or one token of each request.
RECORDED_GENERATOR_STEPS = 32
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
# A product of shapes (rows, inputs) and (outputs, inputs), whose FLOP PyTorch does not count.
ONEDNN = "mkldnn::_linear_pointwise"
ACCELERATOR_ACTIVITIES = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
EMBEDDING = "aten::embedding"  # the first operation of a model on its rows


@dataclass(frozen=True)
class ProfiledStage:
    """The stage that is profiled, and the facts about its model and machine."""

    stage: str
    device: torch.device
    """Device of the matrix products."""
    dtype: torch.dtype
    """Type of the matrix products."""
    threads: int
    """Number of threads of the whole run, on a CPU."""
    vocab_size: int
    largest_layer: tuple[int, int]
    """(inputs, outputs) of the model's largest layer."""
    requested_tokens: Callable[[], float]
    """Returns the number of tokens that models were asked to compute so far."""
    generated_tokens: Callable[[], float]
    """Returns the number of tokens that the policy generated so far."""


class TraceEvent(NamedTuple):
    """An operation, a kernel or a range of the trace."""

    name: str
    start: int
    """Start in nanoseconds."""
    end: int
    """End in nanoseconds."""
    is_host: bool = True
    """True if it ran on a CPU thread."""
    is_range: bool = False
    """True if it is a phase or another named range."""
    flop: int = 0
    shapes: Sequence[Sequence[int]] = ()


class Profiler:
    """The profiler of a stage.

    Args:
        steps: Number of steps to profile.
        first_step: The stage's next step, counted over the whole run from 0.
        steps_left: Number of steps that the stage has left.
        directory: Receives the trace and the table.
        show: Called with the table after the profiled steps.
    """

    def __init__(
        self,
        subject: ProfiledStage,
        steps: int,
        *,
        first_step: int,
        steps_left: int,
        directory: Path,
        show: Callable[[str], None],
    ) -> None:
        assert steps >= 1, steps
        self.subject = subject
        self.requested_steps = steps
        self.directory = directory
        self.show = show
        # A short stage gets fewer warm-up steps, but one if it has at least two steps.
        self.warm_up = min(WARM_UP, max(steps_left - steps, min(steps_left - 1, 1)))
        self.steps = min(steps, steps_left - self.warm_up)
        self.first_profiled_step = first_step + self.warm_up
        self.step = first_step
        self.profile: Profile | None = None  # the result, once finished
        self._warm_up_seconds: list[float] = []  # of each warm-up step, without excluded phases
        self._torch_profile: profile | None = None
        self._phases: dict[str, PhaseWork] = {}
        self._wall_s = self._busy_s = self._excluded_s = self._excluded_busy_s = (
            self._generated_before
        ) = 0.0
        self._step_start = self._step_busy_start = self._step_excluded_s = 0.0
        self._is_on_accelerator = subject.device.type == "cuda"
        self._generator_steps = 0  # in this training step
        self._paused_at: float | None = None  # the time from which nothing is recorded
        self._tokens_at_pause = 0.0
        self._other_unrecorded_s = 0.0  # outside of phases

    # --- Steps and phases.

    def begin_step(self) -> None:
        if self.step == self.first_profiled_step and self.profile is None:
            self._start()
        self._generator_steps = 0
        self._resume()
        self._step_excluded_s = 0.0
        self._step_busy_start = time.process_time()
        self._step_start = time.perf_counter()

    def end_step(self) -> None:
        seconds = time.perf_counter() - self._step_start
        busy_s = time.process_time() - self._step_busy_start
        self.step += 1
        if self._torch_profile is not None:
            self._wall_s += seconds
            self._busy_s += busy_s
            if self.step == self.first_profiled_step + self.steps:
                self.finish()
        elif self.profile is None:
            self._warm_up_seconds.append(seconds - self._step_excluded_s)

    def follow(self, span: Span) -> Callable[[], None] | None:
        """Mark a phase of a step as a range of the trace. This is a `Subscriber` of the tracer.

        Phases must neither nest nor overlap.
        """
        is_excluded = span.name in EXCLUDED_PHASES
        if self._torch_profile is None and not is_excluded:
            return None
        tokens_before = self.subject.requested_tokens()
        busy_before_s = time.process_time()
        if span.name != GENERATING_PHASE:
            self._resume()
        trace_range = record_function(span.name)
        trace_range.__enter__()
        if is_excluded:
            self._pause()

        def end() -> None:
            if is_excluded:
                self._resume(is_excluded=True)
            trace_range.__exit__(None, None, None)
            if is_excluded:
                self._step_excluded_s += span.seconds
                if self._torch_profile is not None:
                    self._excluded_s += span.seconds
                    self._excluded_busy_s += time.process_time() - busy_before_s
                return
            work = self._phases.setdefault(span.name, PhaseWork())
            work.seconds += span.seconds
            is_whole = self._paused_at is None
            tokens = self.subject.requested_tokens() if is_whole else self._tokens_at_pause
            work.tokens += tokens - tokens_before
            work.unrecorded_s += self._measure_unrecorded()

        return end

    def end_generator_step(self) -> None:
        """Pause recording on an accelerator after RECORDED_GENERATOR_STEPS steps of the generator.

        The next phase that does not generate is recorded again.
        """
        if self._paused_at is not None:
            return
        self._generator_steps += 1
        if self._generator_steps == RECORDED_GENERATOR_STEPS:
            self._pause()

    def _pause(self) -> None:
        """Stop recording operations and kernels on an accelerator."""
        if (
            self._torch_profile is None
            or not self._is_on_accelerator
            or self._paused_at is not None
        ):
            return
        torch.cuda.synchronize(self.subject.device)  # what was launched is recorded
        self._torch_profile.toggle_collection_dynamic(False, ACCELERATOR_ACTIVITIES)
        self._tokens_at_pause = self.subject.requested_tokens()
        self._paused_at = time.perf_counter()

    def _resume(self, *, is_excluded: bool = False) -> None:
        """Record again. is_excluded: True if no phase's time passed since the pause."""
        if self._torch_profile is None or self._paused_at is None:
            return
        if not is_excluded:
            self._other_unrecorded_s += self._measure_unrecorded()
        torch.cuda.synchronize(self.subject.device)  # nothing of before is recorded
        self._torch_profile.toggle_collection_dynamic(True, ACCELERATOR_ACTIVITIES)
        self._paused_at = None

    def _measure_unrecorded(self) -> float:
        """Return the seconds without recording since the last call."""
        if self._paused_at is None:
            return 0.0
        paused_at, self._paused_at = self._paused_at, time.perf_counter()
        return self._paused_at - paused_at

    def finish(self) -> None:
        """End the profile, even after fewer steps than requested, and write and show it.

        Do nothing if no profile is running.
        """
        if self._torch_profile is None:
            return
        self._resume()
        torch_profile, self._torch_profile = self._torch_profile, None
        if self._is_on_accelerator:
            torch.cuda.synchronize(self.subject.device)
        peak = _get_peak_bytes(self.subject.device)
        torch_profile.stop()
        self.directory.mkdir(parents=True, exist_ok=True)
        trace = self.directory / "trace.json.gz"
        torch_profile.export_chrome_trace(str(trace))
        self.profile = self._build_profile(read_events(torch_profile), peak)
        table = self.profile.table() + f"trace        {trace} (opens in https://ui.perfetto.dev)\n"
        replace_text(self.directory / "table.txt", table)
        self.show(table)

    def abandon(self) -> None:
        """Stop profiling after an error, without writing anything."""
        if self._torch_profile is not None:
            self._resume()
            self._torch_profile.stop()
            self._torch_profile = None

    # --- Start and result.

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._is_on_accelerator:
            activities = ACCELERATOR_ACTIVITIES
            torch.cuda.synchronize(self.subject.device)
            torch.cuda.reset_peak_memory_stats(self.subject.device)
        threads = _ExperimentalConfig(profile_all_threads=not self._is_on_accelerator)
        self._torch_profile = profile(
            activities=activities, record_shapes=True, with_flops=True, experimental_config=threads
        )
        self._torch_profile.start()
        self._generated_before = self.subject.generated_tokens()

    def _build_profile(self, events: Sequence[TraceEvent], peak: int) -> Profile:
        """Return the numbers of the profiled steps. peak: peak memory in bytes."""
        subject, wall_s = self.subject, self._wall_s - self._excluded_s
        phases = {
            **self._phases,
            OTHER: PhaseWork(
                wall_s - sum(work.seconds for work in self._phases.values()),
                unrecorded_s=self._other_unrecorded_s,
            ),
        }
        count_work(events, phases, vocab_size=subject.vocab_size)
        if self._is_on_accelerator:
            recorded_s = wall_s - sum(work.unrecorded_s for work in phases.values())
            kernel_s = measure_kernel_seconds(events, excluded=EXCLUDED_PHASES)
            idle_share = 1 - kernel_s / recorded_s
            idle_resource = "the accelerator"
        else:
            threads = subject.threads
            idle_share = 1 - (self._busy_s - self._excluded_busy_s) / (wall_s * threads)
            idle_resource = f"{threads} thread{'s' if threads > 1 else ''}"
        return Profile(
            stage=subject.stage,
            first_step=self.first_profiled_step + 1,
            steps=self.step - self.first_profiled_step,
            requested_steps=self.requested_steps,
            phases=phases,
            generated_tokens=subject.generated_tokens() - self._generated_before,
            wall_s=wall_s,
            excluded_s=self._excluded_s,
            unprofiled_s=median(self._warm_up_seconds) if self._warm_up_seconds else None,
            idle_share=max(0.0, idle_share),  # negative if other threads compute too
            idle_resource=idle_resource,
            peak_bytes=peak,
            gemm_rates=self._measure_gemm_rates(phases),
        )

    def _measure_gemm_rates(self, phases: Mapping[str, PhaseWork]) -> list[tuple[str, float]]:
        """Return the names and rates of a large product and of the model's largest layer.

        The layer gets as many rows as a forward pass has in the phase with the most rows.
        """
        subject = self.subject
        largest = max(phases.values(), key=lambda work: work.rows)
        layer = Gemm(max(1, largest.rows // max(1, largest.forwards)), *subject.largest_layer)

        def measure(gemm: Gemm) -> float:
            return measure_gemm_rate(gemm, device=subject.device, dtype=subject.dtype)

        square = Gemm.square(subject.device.type)
        kind = str(subject.dtype).removeprefix("torch.")
        return [
            (f"{square} {kind}", measure(square)),
            (f"{layer}, the model's largest layer", measure(layer)),
        ]


def read_events(torch_profile: profile) -> list[TraceEvent]:
    """Return the events that the table needs.

    PyTorch's `events()` takes 20 times as long, because it builds a tree of all events.
    """
    events = []
    results = torch_profile.profiler and torch_profile.profiler.kineto_results
    for event in results.events() if results else ():
        name, is_host = event.name(), event.device_type() == DeviceType.CPU
        has_flop = name in (*PRODUCTS, ONEDNN, EMBEDDING)
        is_step = name.startswith(STEP)
        is_range = event.is_user_annotation() and not is_step
        if is_host and not (has_flop or is_step or is_range):
            continue
        shapes = event.shapes() if name in (ONEDNN, EMBEDDING) else []
        start, flop = event.start_ns(), event.flops() if has_flop else 0
        if name == ONEDNN:
            flop = 2 * math.prod(shapes[0]) * shapes[1][0]
        elif is_step and is_host:
            flop = int(name.removeprefix(STEP))
        events.append(
            TraceEvent(name, start, start + event.duration_ns(), is_host, is_range, flop, shapes)
        )
    return events


def count_work(
    events: Sequence[TraceEvent], phases: dict[str, PhaseWork], *, vocab_size: int
) -> None:
    """Add each operation to the work of the phase in which it started, whichever thread ran it.

    Operations outside all phases count for OTHER; those in EXCLUDED_PHASES are not counted. Only
    embeddings of `vocab_size` entries count rows, because position tables are embeddings too.
    """
    names = {*phases, *EXCLUDED_PHASES}
    ranges = sorted(
        (e.start, e.end, e.name) for e in events if e.is_host and e.is_range and e.name in names
    )
    starts = [start for start, _, _ in ranges]
    for event in events:
        if not event.is_host or event.is_range:
            continue
        i = bisect_right(starts, event.start) - 1
        is_inside = i >= 0 and event.start <= ranges[i][1]
        work = phases.get(ranges[i][2] if is_inside else OTHER)
        if work is None:  # in an excluded phase
            continue
        if event.name != EMBEDDING:
            work.flop += event.flop
        elif event.shapes[0][0] == vocab_size:
            work.rows += math.prod(event.shapes[1])
            work.forwards += 1


def measure_kernel_seconds(events: Sequence[TraceEvent], *, excluded: Collection[str]) -> float:
    """Return the seconds in which the accelerator ran at least one kernel or copy.

    Kernels that start inside one of the host's ranges named in `excluded` do not count.
    """
    # Named ranges are among the accelerator's events too, but are no kernels.
    ranges = {event.name for event in events if event.is_host and event.is_range}
    excluded_ranges = [
        event for event in events if event.is_host and event.is_range and event.name in excluded
    ]
    spans = sorted(
        (e.start, e.end)
        for e in events
        if not e.is_host
        and e.name not in ranges
        and not any(span.start <= e.start <= span.end for span in excluded_ranges)
    )
    covered_ns, last_end = 0, 0
    for start, end in spans:
        covered_ns += max(0, end - max(start, last_end))
        last_end = max(last_end, end)
    return covered_ns / 1e9


def _get_peak_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes.

    On an accelerator it is the peak since profiling began. On a CPU it is the peak of the process
    since its start, because the system reports nothing else.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
