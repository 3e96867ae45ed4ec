"""Run all stages of a recipe in one run directory, across interruptions (`ratchet train`)."""

from __future__ import annotations

import errno
import gc
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, nullcontext
from functools import partial
from pathlib import Path

from ratchet.config.loader import dump_plain
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.executors import env_vars
from ratchet.executors.freeze import get_peak_memory, prepare_process
from ratchet.executors.signals import SecondSignal, handle_stop_signals
from ratchet.executors.torchrun import TorchrunRank
from ratchet.experience.sources.passes import ResolvedRecipe
from ratchet.experience.sources.prompt_ledger import PromptLedger
from ratchet.learners.compute.flop_counter import wrap_with_flop_counter
from ratchet.observe.console import make_robust_console
from ratchet.observe.log import log_to
from ratchet.observe.progress import show_progress
from ratchet.observe.provenance import record_provenance
from ratchet.observe.records.writer import Recorder
from ratchet.observe.sentinels import Sentinels
from ratchet.observe.sinks import Sinks
from ratchet.observe.stall_report import log_stalls
from ratchet.observe.summary import RunSummary, StageSummary
from ratchet.observe.tracing.perfetto import Trace, open_trace
from ratchet.processes.left_processes import end_left_processes
from ratchet.protocols import Learner
from ratchet.rewards.judge_models.base import Judges
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.runs.live_status import serve_status
from ratchet.runs.remote_sync import Mirror
from ratchet.runs.run_dir import ADAPTER, RunDirectory
from ratchet.runs.stage_progress import Progress, SignalStopRequest, StagePosition, StopRequest
from ratchet.training.build import RolesWrapper
from ratchet.training.checkpointing import (
    CheckpointSaver,
    check_changed_inputs,
    fingerprint_inputs,
    get_last_logged_step,
    refuse_lost_checkpoints,
)
from ratchet.training.from_config import (
    build_executor,
    build_policy,
    check_stages,
    resolve_resume_config,
    start_processes,
)
from ratchet.training.loop import train
from ratchet.training.metering import log_stage, make_meter, warn_of_steps_without_signal
from ratchet.training.open_records import open_recorder, open_sinks
from ratchet.training.profiling import StageProfiling, choose_profiled_stage
from ratchet.training.run import PAUSED, Observer, StageRun
from ratchet.training.saved_weights import (
    check_start,
    export_models,
    keep_base,
    load_start_state,
    use_start_copy,
)
from ratchet.training.stage import Policy
from ratchet.training.stage_from_config import build_run
from ratchet.training.workers.judges import close_judges, make_judge_check, start_judges
from ratchet.utils import failpoints
from ratchet.utils.process_settings import keep_settings
from ratchet.utils.temp_dirs import sweep

log = logging.getLogger("ratchet.train")


# Error numbers of a disk that is full, over quota, read-only or broken.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
NOT_MIRRORED = 74  # exit status: the run is finished, but its upload is incomplete


class TrainingSession:
    """The part of a run in one process: from the newest checkpoint to the run's end or a stop.

    Args:
        config: The frozen recipe.
        directory: The run directory, locked by the caller.
        store: The run's checkpoints.
        command: The command line that began this process.
        profile: Number of steps to profile; None profiles none.
        changed_data: True to resume even if data files have changed.
        changed_recipe: True if the recipe was changed for this resumption, so that a stage that
            ended early may continue.
        try_s: Seconds of training after which each stage ends early; None sets no limit.
        resolved_recipe: The recipe after `passes` became numbers of steps, with the environments
            that were built for this; None if they are built later.
        mirror: Uploads the run to a remote address; None keeps it local.
        notes: Sentences for the beginning of run.log and the console.
    """

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        store: CheckpointStore,
        command: str,
        profile: int | None = None,
        *,
        changed_data: bool = False,
        changed_recipe: bool = False,
        try_s: float | None = None,
        resolved_recipe: ResolvedRecipe | None = None,
        mirror: Mirror | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.config = use_start_copy(config, directory.path)
        self.directory = directory
        self.command = command
        self.profile = profile
        self.store = store
        self.mirror = mirror
        self._plain_config = dump_plain(config)
        self._verify_directory = partial(directory.verify, self._plain_config)
        self.changed_data = changed_data
        self.changed_recipe = changed_recipe
        self.try_s = try_s
        self.environments = {} if resolved_recipe is None else dict(resolved_recipe.environments)
        self.notes = [*(() if resolved_recipe is None else resolved_recipe.lines), *notes]
        self.console = make_robust_console()
        self.summaries: list[StageSummary] = []  # of finished stages
        self.ledger = PromptLedger(directory.ledger)
        self.judges: Judges = {}
        self.sinks = Sinks([])
        self.recorder: Recorder | None = None
        self.trace: Trace | None = None
        self.started_at = time.monotonic()
        # The fingerprints that were computed before a stage began, by the stage's index.
        self.fingerprints: dict[int, dict[str, str]] = {}
        self.start_model: str | None = None  # fingerprint of the weights that the run starts from
        self._profiled_stage = 0  # index of the stage that is profiled
        self._show_step: Observer | None = None  # shows a step in the progress bar
        self.measured = frozenset[str]()  # quantities that the latest stage's evaluator measures

    async def run(self) -> int:
        """Run to the end or to a stop request, and return the exit status."""
        prepare_process(self.config.threads)
        stop = SignalStopRequest(is_forwarded=TorchrunRank.from_environment() is not None)
        log_file = log_to(self.directory.log, console=self.console)
        signal_handlers = handle_stop_signals(
            stop.request, forwarded=stop.is_forwarded or env_vars.is_supervised()
        )
        with log_file, signal_handlers, serve_status(self.directory), end_left_processes():
            log.info("%s", self.command)
            for directory in sweep():
                log.info("removed %s, which a killed process has left", directory)
            for note in [*self.notes, *(() if self.mirror is None else self.mirror.notes)]:
                self._log_and_show(note)
            try:
                status = await self._run_from_latest(stop)
            except BaseException as error:
                # The log keeps the reason even if the terminal is closed.
                log.info("the run ends here", exc_info=True)
                if self.mirror is not None and not isinstance(error, SecondSignal):
                    self.mirror.finish()
                raise
            is_mirrored = self.mirror is None or self.mirror.finish()
            return status if is_mirrored else status or NOT_MIRRORED

    def _log_and_show(self, note: str) -> None:
        """Write a note into the log and onto the terminal."""
        log.info("%s", note)
        self._show(note)

    async def _run_from_latest(self, stop: StopRequest) -> int:
        """Run the remaining stages from the newest checkpoint, and return the exit status."""
        checkpoint = self.store.latest()
        if checkpoint is not None:
            total = sum(stage.n_steps for stage in self.config.stages)
            self._log_and_show(f"resuming {self.place} from step {checkpoint.step} of {total}")
            failpoints.point("resume.begin")
            self.summaries = [StageSummary(**summary) for summary in checkpoint.meta["summaries"]]
            self.command = checkpoint.meta["command"]  # the command that began the run
        else:
            refuse_lost_checkpoints(self.directory, self.store, self.config.stages[0])
        async with AsyncExitStack() as exit_stack:
            exit_stack.callback(self.ledger.close)
            trace_path = self.directory.trace if self.config.logging.trace else None
            self.trace = exit_stack.enter_context(open_trace(trace_path))
            # Inputs and processes are checked before `_open_records` drops the steps after the
            # checkpoint, so that a run that can't be resumed loses nothing.
            self._check_inputs(checkpoint)
            policy = await self._start_policy(exit_stack, checkpoint)
            self._open_records(exit_stack, checkpoint)
            exit_stack.enter_context(keep_settings())
            return await self._train_stages(policy, stop, checkpoint)

    def _check_inputs(self, checkpoint: Checkpoint | None) -> None:
        """Raise DataError if data, judges or teachers changed since the run used them.

        `changed_data` allows the change.
        """
        index = len(self.summaries)
        self.fingerprints[index] = fingerprint_inputs(self.config, self.config.stages[index])
        check_changed_inputs(
            self.fingerprints[index],
            checkpoint,
            self.directory.provenance,
            changed_data=self.changed_data,
        )

    def _open_records(self, exit_stack: AsyncExitStack, checkpoint: Checkpoint | None) -> None:
        """Open ledger, sinks and recorder, and drop their entries of steps after the checkpoint."""
        self._verify_directory()  # loading a model takes minutes
        if checkpoint is None:
            self.ledger.cut(0)
        self.sinks = open_sinks(
            self.config,
            self._plain_config,
            self.directory,
            keep_through=get_last_logged_step(checkpoint),
        )
        exit_stack.callback(self.sinks.close)
        self.recorder = open_recorder(
            self.config, self.directory, keep_through=0 if checkpoint is None else checkpoint.step
        )
        exit_stack.callback(self.recorder.close)

    async def _start_policy(
        self, exit_stack: AsyncExitStack, checkpoint: Checkpoint | None
    ) -> Policy:
        """Start the processes of learner, generator and judges, and return the policy.

        `exit_stack` later closes everything that is opened here.
        """
        config = self.config
        if checkpoint is not None:
            config = resolve_resume_config(config, len(self.summaries), self.directory.path)
        executor = build_executor(config)
        exit_stack.callback(executor.close)
        policy = build_policy(config)
        exit_stack.push_async_callback(policy.close)
        check_stages(config, policy, first_stage=len(self.summaries))
        if checkpoint is None:
            self.start_model = check_start(config, self.directory, policy.model)
        policy = start_processes(config, executor, policy)
        self.judges = start_judges(config, executor)
        exit_stack.push_async_callback(close_judges, self.judges)
        return policy

    async def _train_stages(
        self, policy: Policy, stop: StopRequest, checkpoint: Checkpoint | None
    ) -> int:
        """Train the remaining stages, export the models, and return the exit status."""
        # Objects that exist by now stay alive. If each garbage collection traversed them, it would
        # take a third of the time of a small step.
        gc.collect()
        gc.freeze()
        learner: Learner | None = None
        self._profiled_stage = choose_profiled_stage(self.config, len(self.summaries))
        for index in range(len(self.summaries), len(self.config.stages)):
            # Free the previous stage's optimizer state. Its run may be in reference cycles.
            learner = None
            gc.collect()
            learner = await self._train_stage(index, policy, stop, checkpoint)
            if stop.status is not None:
                outcome = "Stopped"
                if not self.store.steps():
                    outcome = "Stopped before the first step, so the run begins anew"
                elif stop.status == PAUSED:
                    outcome = "Paused by a sentinel (run.log says why)"
                self._show(f"{outcome}. Continue with: ratchet train --resume {self.place}")
                return stop.status
            checkpoint = None  # later stages start from the model in memory
        assert learner is not None, "a checkpoint always belongs to an unfinished stage"
        self._finish(policy, learner)
        return 0

    @property
    def place(self) -> str | Path:
        """The path or address of the run, as commands take it."""
        return self.directory.path if self.mirror is None else self.mirror.address

    async def _train_stage(
        self, index: int, policy: Policy, stop: StopRequest, checkpoint: Checkpoint | None
    ) -> Learner:
        """Train one stage, and return the policy's learner."""
        stage = self.config.stages[index]
        self.store.keep = stage.checkpoint.keep
        self.store.keep_best = stage.checkpoint.keep_best
        self.store.keep_every = stage.checkpoint.keep_every
        start = sum(earlier.n_steps for earlier in self.config.stages[:index])
        position = (
            StagePosition(start)
            if checkpoint is None
            else StagePosition.from_meta(checkpoint.step, checkpoint.meta)
        )
        saver = CheckpointSaver(
            self.store,
            stage.checkpoint,
            self.summaries,
            self.command,
            saved_step=position.step,
            inputs=self.fingerprints.pop(index, None) or fingerprint_inputs(self.config, stage),
            recipe=self._plain_config,
            mirror=self.mirror,
        )
        profiling = self._make_profiling(
            index, policy, range(position.step, start + stage.n_steps), position.progress
        )
        run = self._build_run(index, policy, stop, saver, position, profiling)
        measured_before = self.measured
        self.measured = frozenset() if run.evaluator is None else run.evaluator.measured_quantities
        if checkpoint is not None:
            await self._restore(checkpoint, run, saver)
        else:
            failpoints.point("stage.begin")
            if not index:
                load_start_state(run, self.directory.path)
            keep_base(self.config, index, self.directory.path, policy, run)
            was_measured_before = bool(self.measured) and self.measured <= measured_before
            await self._measure_start(index, run, was_measured_before=was_measured_before)
        self._verify_directory()
        record_provenance(
            self.directory.provenance,
            after_step=run.first_step,
            data=saver.inputs,
            model=self.start_model,
        )
        progress_bar = show_progress(
            run.name,
            after_step=run.first_step,
            end_step=run.end_step,
            mode=self.config.logging.progress,
            console=self.console,
        )
        with (
            progress_bar as self._show_step,
            nullcontext() if profiling is None else profiling.profile_stage(),
            log_stalls(self.config.logging.stall_s),
        ):
            async with AsyncExitStack() as exit_stack:
                exit_stack.push_async_callback(run.close)
                exit_stack.callback(saver.wait_for_write)
                await train(run)
                if stop.status is None:
                    saver.wait_for_write()
                    await saver.end_with_best(run)
        if stop.status is not None:
            # The step may have been saved before the signal came.
            if saver.saved_step < run.steps_done:
                await saver.save(run, run.steps_done)
            return run.roles["policy"]
        warn_of_steps_without_signal(run)
        failpoints.point("stage.end")
        self.summaries.append(run.summarise())
        return run.roles["policy"]

    def _build_run(
        self,
        index: int,
        policy: Policy,
        stop: StopRequest,
        saver: CheckpointSaver,
        position: StagePosition,
        profiling: StageProfiling | None,
    ) -> StageRun:
        """Return the run of a stage with its meter, recorder, sentinels and observers."""
        stage = self.config.stages[index]
        run_limit_s = stage.checkpoint.limit_s
        meter = make_meter(policy, self.config, index, self.directory, self.trace)
        wrappers: list[RolesWrapper] = [
            partial(wrap_with_flop_counter, counter=meter.flop_counter),
            *(() if profiling is None else (profiling.wrap_learners,)),
        ]
        run = build_run(
            self.config,
            index,
            policy,
            directory=self.directory.path,
            environment=self.environments.pop(index, None),
            judges=self.judges,
            ledger=self.ledger,
            position=position,
            wrap_roles=wrappers,
            stop=stop,
            deadline=None if run_limit_s is None else self.started_at + run_limit_s,
            limit_s=self.try_s,
            sentinels=Sentinels(stage.sentinels, self.directory.sentinels),
            verify_directory=self._verify_directory,
            evaluations_dir=self.directory.evals / stage.name,
            save=saver.save,
            recorder=self.recorder,
            meter=meter,
            profiler=None if profiling is None else profiling.profiler,
            observers=(
                make_judge_check(self.judges),
                self.sinks.write,
                self._observe_step,
                saver.observe,
            ),
        )
        log_stage(run, stage)
        return run

    def _observe_step(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Show a step in the progress bar, which opens after the first evaluation."""
        if self._show_step is not None:
            self._show_step(step, metrics)

    async def _restore(self, checkpoint: Checkpoint, run: StageRun, saver: CheckpointSaver) -> None:
        self.store.tidy()
        await saver.restore(run, checkpoint, changed_recipe=self.changed_recipe)
        if self.changed_recipe:
            run.reopen()

    def _make_profiling(
        self, index: int, policy: Policy, remaining: range, progress: Progress
    ) -> StageProfiling | None:
        """Return the profiler of a stage; None if the stage is not profiled."""
        stage = self.config.stages[index].name
        if self.profile is None or index != self._profiled_stage:
            return None
        if not remaining:
            self._show(f"Nothing is profiled: stage {stage} has no step left.")
            return None
        return StageProfiling(
            policy,
            self.config,
            self.profile,
            stage=stage,
            remaining=remaining,
            progress=progress,
            directory=self.directory.profile,
            show=self._show,
        )

    def _show(self, text: str) -> None:
        """Print plain text on the terminal."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def _measure_start(self, index: int, run: StageRun, *, was_measured_before: bool) -> None:
        """Measure accuracy and loss before the stage.

        If the previous stage was evaluated in the same way, its last accuracy is reused, unless
        `evaluation.stop_at` needs all metrics.
        """
        if (
            index
            and was_measured_before
            and self.config.stages[index].evaluation.stop_at is None
            and _are_evaluated_alike(self.config.stages[index - 1], self.config.stages[index])
        ):
            previous = self.summaries[-1]
            run.keep_accuracy(previous.accuracy_after, is_share=previous.is_share)
            return
        start_metrics = await run.measure_start()
        # A later stage starts at the last step of the stage before it, for which that stage has
        # already written metrics.
        if index == 0:
            self.sinks.write(0, start_metrics)

    def _finish(self, policy: Policy, learner: Learner) -> None:
        """Export the models of the finished run, and write and show its summary."""
        self._verify_directory()
        config = self.config
        models = export_models(config, self.directory.path, policy, learner)
        peak_mib = get_peak_memory() / 2**20
        summary = RunSummary(
            tuple(self.summaries),
            self.command,
            config.seed,
            int(config.threads),
            config.device,
            peak_mib=peak_mib,
        )
        summary.write(self.directory.summary)
        failpoints.point("finish.summary")
        for table in summary.make_tables():
            self.console.print(table)
        rows: list[tuple[str, str | Path]] = [
            ("run", self.place),
            *models,
            ("summary", self.directory.summary),
        ]
        if config.stages[-1].lora is not None:
            rows.insert(-1, ("adapter", self.directory.path / ADAPTER))
            learner.export(self.directory.path / ADAPTER, part="adapter")
        rows.append(("curves", f"ratchet report {self.place}"))
        for name, path in rows:
            self._show(f"{name:8} {path}")


def _are_evaluated_alike(a: StageConfig, b: StageConfig) -> bool:
    """True if two stages evaluate the policy in the same way."""
    keys = ("environment", "eval_rewards", "evaluation", "sampling")
    return all(getattr(a, key) == getattr(b, key) for key in keys)
