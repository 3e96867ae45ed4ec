"""The state of a stage (`StageRun`) and the work around each step of the training loop.

That work is metrics, evaluation, early stopping, sentinels and checkpoints.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Protocol

from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState
from ratchet.batch import Batch
from ratchet.errors import ConfigError
from ratchet.evals.early_stopping import EarlyStopping
from ratchet.evals.evaluator import report_failures
from ratchet.evals.report import save_report
from ratchet.evals.stage_evaluator import StageEvaluator, list_answer_results
from ratchet.executors.signals import reinstall_handlers
from ratchet.experience.checks.logprob_parity import ParityGate
from ratchet.experience.checks.reward_hacking import ProbeFindings, RewardHackingProbes
from ratchet.experience.rollout.manager import GroupPlayer
from ratchet.experience.rollout.metrics import (
    DISTRIBUTION_REDUCERS,
    iterate_attempt_samples,
    measure_groups,
    measure_staleness,
)
from ratchet.experience.sources.batcher import Batcher
from ratchet.observe.metrics import MetricsManager
from ratchet.observe.sentinels import Sentinels
from ratchet.observe.summary import StageSummary
from ratchet.observe.tracing.profiler import Profiler
from ratchet.protocols import Learner, WeightSync
from ratchet.runs.stage_progress import Progress, StopRequest
from ratchet.types import Group
from ratchet.utils import failpoints
from ratchet.utils.process_settings import restore_settings
from ratchet.utils.tracer import TRACER, span

log = logging.getLogger(__name__)

STEPS = "steps"  # the trace track of steps and their phases

Observer = Callable[[int, Mapping[str, float | None]], None]


class StepRecorder(Protocol):
    """A recorder of steps, such as `ratchet.observe.records.writer.Recorder`.

    A replay compares the steps with an earlier record instead.
    """

    def add(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        weights: Callable[[Batch], Tensor],
        roles: Mapping[str, Learner],
    ) -> None:
        """Record a step.

        Args:
            step: Number of finished steps of the run, this one included.
            stage: Name of the stage.
            groups: The groups that the step trained on.
            batch: The batch of these groups, with its columns.
            weights: Returns the loss weight of each token of a batch.
            roles: The trained learners by role.
        """
        ...

    def flush(self) -> None: ...


class StepMeter(Protocol):
    """A meter of a step's work (`ratchet.training.metering.StageMeter`)."""

    def begin(self, step: int) -> None: ...
    def measure(self, groups: Sequence[Group], seconds: float) -> Mapping[str, Mapping[str, float]]:
        """Return metrics by prefix; `seconds` is the time since the step began."""
        ...

    def end(self) -> None: ...


# Exit status EX_TEMPFAIL of sysexits.h: time ran out; the same command resumes the run.
OUT_OF_TIME = 75
# Minimum number of steps under `limit_s`: the first is warm-up, and two more are needed to judge a
# typical step.
MIN_LIMITED_STEPS = 3
# Exit status EX_NOPERM when a sentinel paused the run. Inspect it, then resume.
PAUSED = 77


@dataclass
class StageRun:
    """The state of a stage's training, and the parts that it calls around each step.

    It is complete once it is constructed: only its own methods change it.
    """

    name: str
    algorithm: Algorithm
    roles: Mapping[str, Learner]
    """The learners by role."""
    batcher: Batcher
    weight_sync: WeightSync
    start_step: int
    """The first step of the stage. Steps are numbered from 0 over the whole run."""
    end_step: int
    """The first step after the stage."""
    first_step: int
    """The first step that this object trains: `start_step`, or in a resumed run the step of the
    checkpoint."""
    state: AlgoState = field(default_factory=AlgoState)
    metrics: MetricsManager = field(default_factory=MetricsManager)
    observers: Sequence[Observer] = ()
    """Functions called with every step's number and metrics."""
    recorder: StepRecorder | None = None
    evaluator: StageEvaluator | None = None
    managers: Sequence[GroupPlayer] = ()
    """Rollout managers, closed with the run."""
    trainable: Mapping[str, float] = field(default_factory=dict)
    """Number and share of the trained parameters, logged with the first step."""
    measure_environment: Callable[[Sequence[Group]], Mapping[str, float]] | None = None
    """Returns the environment's own metrics of the groups of a step that were not trained on
    before."""
    evaluate_every: int = 0
    early_stopping: EarlyStopping | None = None
    evaluations_dir: Path | None = None
    """The directory for results of evaluations, by step."""
    save: Callable[[StageRun, int], Awaitable[None]] | None = None
    """Writes a checkpoint of this run after the given number of steps."""
    save_every: int = 0
    verify_directory: Callable[[], None] | None = None
    """Raises RunDirectoryError if the run may no longer write to its directory. It is called before
    any files of a step or an evaluation are written."""
    stop: StopRequest = field(default_factory=StopRequest)
    deadline: float | None = None
    """Monotonic time by which the run must end. A step that may end later is not begun."""
    limit_s: float | None = None
    """Seconds of training after which the stage ends as if it had no more steps. At least
    `MIN_LIMITED_STEPS` steps run."""
    progress: Progress = field(default_factory=Progress)
    profiler: Profiler | None = None
    meter: StepMeter | None = None
    parity: ParityGate | None = None
    sentinels: Sentinels | None = None
    probes: RewardHackingProbes | None = None
    _unsent_version: int | None = None  # weight version that the generator does not have yet
    _update_metrics: list[dict[str, float]] = field(
        default_factory=list
    )  # metrics of the current step
    _step_start: float = 0.0
    _process_time_start: float = 0.0
    _longest_step_s: float = 0.0  # seconds of the longest step, evaluation and saving included

    def __post_init__(self) -> None:
        self.steps_done = self.first_step  # number of finished steps of the whole run
        self.metrics.declare("rollout", DISTRIBUTION_REDUCERS)

    def steps(self) -> Iterator[int]:
        """Yield the numbers of the remaining steps, until a stop is requested.

        Raises ConfigError if this run has trained all its steps already.
        """
        if self.first_step < self.end_step <= self.steps_done:
            raise ConfigError(
                f"stage {self.name} has trained its steps. Make another run to train on (make_run)"
            )
        for step in range(self.steps_done, self.end_step):
            # A library may have replaced the signal handlers; restore them before reading `stop`.
            reinstall_handlers()
            if self.stop.status is not None or self.progress.ended:
                return
            self._update_metrics = []
            if self.profiler is not None:
                self.profiler.begin_step()
            if self.meter is not None:
                self.meter.begin(step)
            self._step_start = time.monotonic()
            self._process_time_start = time.process_time()
            with span(STEPS, f"step {step + 1}"):
                yield step
            if self.meter is not None:
                self.meter.end()
            self._longest_step_s = max(self._longest_step_s, time.monotonic() - self._step_start)
            if self.profiler is not None:
                self.profiler.end_step()

    def reopen(self) -> None:
        """Let a stage that ended early continue, because its recipe was changed since."""
        progress, early_stopping = self.progress, self.early_stopping
        progress.ended = False
        if early_stopping is not None and progress.fruitless >= early_stopping.n_evaluations:
            progress.fruitless = 0

    async def measure_start(self) -> Mapping[str, float | None]:
        """Evaluate the weights before the stage, and return the metrics.

        If they are as good as `evaluation.stop_at`, the stage has no steps.

        Raises:
            ConfigError: If the evaluation does not report the metric of early stopping.
        """
        with span(STEPS, "evaluate"):
            results = await self.evaluate()
        self.progress.accuracy_before = results.get("accuracy")
        self.progress.loss_before = results.get("loss")
        metrics = self.metrics.flush(self.first_step)
        if self.early_stopping is not None:
            self.early_stopping.check_start(metrics)
            self._end_early(self.early_stopping.explain_end(metrics, 0))
        return metrics

    def keep_accuracy(self, accuracy: float | None, *, is_share: bool) -> None:
        """Take over the last accuracy of the previous stage, which was evaluated in the same way.

        Args:
            accuracy: The accuracy.
            is_share: True if every reward of the evaluation was from 0 to 1, so that the accuracy
                can be shown as a percentage.
        """
        self.progress.accuracy_before, self.progress.is_share = accuracy, is_share

    async def return_to(self, progress: Progress) -> None:
        """Push earlier weights, which the learners have loaded, and restore their results.

        Args:
            progress: The progress when the learners had these weights.
        """
        self.progress.accuracy, self.progress.loss = progress.accuracy, progress.loss
        await self.weight_sync.push(version=self.steps_done)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step, which becomes the metric `time/<phase>_s`."""
        restore_settings()  # threads and libraries may change them at any time
        with TRACER.phase(STEPS, name, self.steps_done + 1) as phase:
            yield
        self.metrics.add("time", {f"{name}_s": phase.seconds}, merge="sum")

    async def check_parity(self, step: int, batch: Batch) -> None:
        """Check the sampler's log-probabilities against the learner's, while both have the same
        weights."""
        if self.parity is not None and self.parity.is_due(step - self.start_step):
            self.metrics.add("parity", await self.parity.check(batch, version=step))

    def measure(self, role: str, update_metrics: Mapping[str, float]) -> None:
        """Add the metrics of one optimizer step; a batch with several steps logs their mean."""
        self.metrics.add(role, update_metrics)
        self._update_metrics.append(
            {f"{role}/{key}": value for key, value in update_metrics.items()}
        )

    @property
    def mean_metrics(self) -> dict[str, float]:
        """Return the mean of each metric over the optimizer steps of this batch."""
        names = dict.fromkeys(name for update in self._update_metrics for name in update)
        return {
            name: fmean(update[name] for update in self._update_metrics if name in update)
            for name in names
        }

    async def sync(self, version: int) -> None:
        """Sync the learner's weights to the generator, at once if training samples from it.

        Otherwise they are pushed only before the next evaluation or check for reward hacking.
        """
        self._unsent_version = version
        if self.algorithm.source == "rollouts":
            await self._push_weights()

    async def _push_weights(self) -> None:
        if self._unsent_version is not None:
            await self.weight_sync.push(version=self._unsent_version)
            self._unsent_version = None

    async def after(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        """Finish a step: acknowledge its groups, record, log, evaluate and save."""
        with span(STEPS, "after"):
            await self._after(step, groups, batch)

    async def _after(self, step: int, groups: Sequence[Group], batch: Batch) -> None:
        if self.verify_directory is not None:
            self.verify_directory()
        self.batcher.ack(groups, step)
        if self.recorder is not None:
            trained_roles = {name: self.roles[name] for name in self.algorithm.losses}
            self.recorder.add(
                step + 1, self.name, groups, batch, self.algorithm.token_weights, trained_roles
            )
        seconds = time.monotonic() - self._step_start
        processor_s = time.process_time() - self._process_time_start
        rollout_metrics = (
            measure_groups(groups) | measure_staleness(groups, step) | self.batcher.measure(groups)
        )
        self.batcher.adapt(groups, step, self.mean_metrics)
        if self.measure_environment is not None:
            new_groups = [group for group in groups if not group.n_uses]
            rollout_metrics |= {
                f"environment/{name}": value
                for name, value in self.measure_environment(new_groups).items()
            }
        self.progress.seconds += seconds
        self.progress.trained_tokens += rollout_metrics["trained_tokens"]
        self.progress.generated_tokens += rollout_metrics.get("generated_tokens", 0.0)
        self.progress.computed_tokens += rollout_metrics["tokens"]
        self.progress.silent_steps += self.mean_metrics.get("batch/advantage/zero_share") == 1.0
        self.metrics.add("rollout", rollout_metrics)
        for labels, samples in iterate_attempt_samples(groups):
            self.metrics.add("rollout", samples, labels=labels)
        if step == self.start_step:
            self.metrics.add("policy", self.trainable)
        tokens = rollout_metrics.get("generated_tokens", rollout_metrics["tokens"])
        self.metrics.add(
            "time",
            {
                "step_s": seconds,
                "processor_s": processor_s,
                "tokens_per_s": tokens / seconds,
            },
        )
        if self.meter is not None:
            for prefix, meter_metrics in self.meter.measure(groups, seconds).items():
                self.metrics.add(prefix, meter_metrics)
        steps_done = step + 1
        self.steps_done = steps_done
        self._check_time_limits()
        # A stop request postpones evaluations until the run is resumed, so that it saves at once.
        # The evaluation after the last step is not postponed, because it ends the stage.
        is_due = self._is_due(steps_done, self.evaluate_every)
        is_postponed = is_due and self.stop.status is not None and not self._is_last_step
        if self._is_last_step or (is_due and not is_postponed):
            with TRACER.phase(STEPS, "evaluate", steps_done):
                await self.evaluate()
        findings = await self._check_reward_hacking(steps_done, groups)
        failpoints.point("step.log")
        flushed = self.metrics.flush(steps_done, groups)
        self.progress.unevaluated = dict(flushed) if is_postponed else None
        if is_due and not is_postponed:
            self._update_early_stopping(flushed)
        for observe in self.observers:
            observe(steps_done, flushed)
        if (
            self.sentinels is not None
            and self.sentinels.check(steps_done, flushed, groups, findings.exhibits)
            and self.stop.status is None
        ):
            log.warning("a sentinel pauses the run; saving")
            self.stop.status = PAUSED
        is_save_due = self.stop.status is not None or self.is_save_due(steps_done)
        if self.save is not None and is_save_due:
            with TRACER.phase(STEPS, "save", steps_done):
                await self.save(self, steps_done)

    async def make_up_evaluation(self) -> None:
        """Evaluate the restored weights if a stop request postponed this, and log the whole step.

        So early stopping and the best checkpoint depend on the same evaluations as in an
        uninterrupted run. Sentinels do not see these metrics.
        """
        step_metrics, self.progress.unevaluated = self.progress.unevaluated, None
        if step_metrics is None:
            return
        with TRACER.phase(STEPS, "evaluate", self.steps_done):
            await self.evaluate()
        metrics = step_metrics | dict(self.metrics.flush(self.steps_done))
        self._update_early_stopping(metrics)
        for observe in self.observers:
            observe(self.steps_done, metrics)

    def is_save_due(self, steps_done: int) -> bool:
        """True if an uninterrupted run saves a checkpoint after this step."""
        return self._is_last_step or self._is_due(steps_done, self.save_every)

    def _update_early_stopping(self, metrics: Mapping[str, float | None]) -> None:
        """End the stage after this step if the evaluation reached the rule of early stopping."""
        early_stopping = self.early_stopping
        if early_stopping is None:
            return
        progress = self.progress
        progress.best, progress.fruitless = early_stopping.update(
            metrics, progress.best, progress.fruitless
        )
        self._end_early(early_stopping.explain_end(metrics, progress.fruitless))

    def _end_early(self, reason: str | None) -> None:
        """End the stage here, and log the reason; None: the stage continues."""
        if reason is not None and self.steps_done < self.end_step:
            log.info(
                "stage %s ends after step %d of %d: %s",
                self.name,
                self.steps_done,
                self.end_step,
                reason,
            )
            self.progress.ended = True

    def _check_time_limits(self) -> None:
        """Request a stop if another step would miss the deadline; end the stage after `limit_s`."""
        now = time.monotonic()
        next_step_s = max(self._longest_step_s, now - self._step_start)
        if (
            self.deadline is not None
            and self.stop.status is None
            and now + next_step_s > self.deadline
        ):
            log.warning(
                "no time for another step: it may take %.0f s, and checkpoint.limit_s leaves "
                "%.0f s; saving",
                next_step_s,
                max(self.deadline - now, 0.0),
            )
            self.stop.status = OUT_OF_TIME
        if (
            self.limit_s is not None
            and self.progress.seconds >= self.limit_s
            and self.steps_done >= self.start_step + MIN_LIMITED_STEPS
        ):
            self.progress.ended = True

    async def _check_reward_hacking(self, done: int, groups: Sequence[Group]) -> ProbeFindings:
        if self.probes is None or not self.probes.is_due(done - self.start_step):
            return ProbeFindings()
        await self._push_weights()
        findings = await self.probes.check(groups)
        for prefix, probe_metrics in findings.metrics.items():
            self.metrics.add(prefix, probe_metrics)
        return findings

    async def evaluate(self) -> dict[str, float]:
        """Evaluate the present weights on held-out tasks. Return {} without an evaluator."""
        await self._push_weights()
        if self.evaluator is None:
            return {}
        results = await self.evaluator.run()
        is_first = self.steps_done == self.start_step and self.batcher.max_failed_share < 1
        for answers in list_answer_results(results):
            report_failures(answers, is_first=is_first)
        if self.verify_directory is not None:
            self.verify_directory()
        if self.evaluations_dir is not None:
            directory = self.evaluations_dir / f"step-{self.steps_done:08d}"
            for answers in list_answer_results(results):
                save_report(answers, directory, f"{self.name}, step {self.steps_done}")
        metrics = results.get_metrics()
        self.metrics.add("eval", metrics)
        self.progress.accuracy = metrics.get("accuracy")
        self.progress.loss = metrics.get("loss")
        if metrics.get("min_reward", 0.0) < 0 or metrics.get("max_reward", 1.0) > 1:
            self.progress.is_share = False
        return metrics

    def summarise(self) -> StageSummary:
        """Return the results of the finished stage."""
        progress = self.progress
        return StageSummary(
            name=self.name,
            algorithm=self.algorithm.name,
            steps=self.steps_done - self.start_step,
            seconds=progress.seconds,
            accuracy_before=progress.accuracy_before,
            accuracy_after=progress.accuracy,
            is_share=progress.is_share,
            loss_before=progress.loss_before,
            loss_after=progress.loss,
            trained_tokens=progress.trained_tokens,
            generated_tokens=progress.generated_tokens,
            computed_tokens=progress.computed_tokens,
        )

    async def close(self) -> None:
        await self.batcher.source.close()
        for manager in self.managers:
            await manager.close()
        await self.weight_sync.close()

    @property
    def _is_last_step(self) -> bool:
        return self.progress.ended or self.steps_done == self.end_step

    def _is_due(self, steps_done: int, every: int) -> bool:
        return every > 0 and (steps_done - self.start_step) % every == 0
