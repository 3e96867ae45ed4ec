"""`ratchet train`: all stages of a recipe in one run directory, interrupted and resumed as often as
need be."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext
from pathlib import Path

from ratchet.config.checks.staleness import cautions
from ratchet.config.loader import load_config, plain
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.errors import RunDirectoryError
from ratchet.executors.freeze import freeze, left_to_machine, peak_memory, prepare_process
from ratchet.executors.signals import SecondSignal, spares_programs, stops_on_signals
from ratchet.executors.torchrun import Launched, serve_rank
from ratchet.experience.sources.prompt_ledger import Ledger
from ratchet.learners.config import SpreadConfig
from ratchet.observe.console import lasting_console
from ratchet.observe.learning_curve import write_curve
from ratchet.observe.log import log_to
from ratchet.observe.progress import show_progress
from ratchet.observe.provenance import note_provenance
from ratchet.observe.records.writer import Recorder
from ratchet.observe.sentinels import Sentinels
from ratchet.observe.sinks import JsonlSink, Sink, Sinks, TensorBoardSink
from ratchet.observe.stall_report import stalls_told
from ratchet.observe.summary import RunSummary, StageSummary
from ratchet.observe.tracing.perfetto import Trace, tracing
from ratchet.observe.trackers import Tracked, run_id, track
from ratchet.protocols import Learner
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.runs.live_status import answers_status
from ratchet.runs.remote_sync import Mirror
from ratchet.runs.resolve import open_run
from ratchet.runs.run_dir import ADAPTER, AVERAGE, MODEL, RunDirectory
from ratchet.training.checkpointing import Saver, files_of, refuse_lost_checkpoints
from ratchet.training.from_config import (
    base_directory,
    begins_with,
    build_executor,
    build_policy,
    build_run,
    check_stages,
    start_processes,
)
from ratchet.training.loop import train
from ratchet.training.metering import metering
from ratchet.training.profiling import profiled_stage, profiling
from ratchet.training.run import PAUSED, Run, StopRequest
from ratchet.training.stage import Policy
from ratchet.utils import failpoints
from ratchet.utils.temp_dirs import sweep

log = logging.getLogger("ratchet.train")


# Error numbers of a disk that is full, over quota, read-only or broken.
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
NOT_MIRRORED = 74  # the exit status: the run is done, and its address lacks some of it


def start_run(
    recipe: Path,
    overrides: Sequence[str],
    run_dir: str | Path | None,
    *,
    command: str,
    profile: int | None = None,
    try_s: float | None = None,
) -> int:
    """Trains by a recipe in a fresh directory. run_dir: of this machine, or an address, which the
    run is mirrored to. Returns the exit status: 0, 128 + the signal that stopped it, NOT_MIRRORED,
    or what `ratchet.training.run` names. profile: how many steps; None: none. try_s: seconds of
    training after which each stage ends."""
    written = load_config(recipe, overrides)
    config = freeze(written)
    launched = Launched.here()
    if launched is not None and launched.rank:
        return serve_rank(launched)
    directory, store, mirror = open_run(
        run_dir or config.run_dir or _numbered(Path("runs") / config.name)
    )
    path, place = directory.path, directory.path if mirror is None else mirror.address
    if mirror is not None:
        mirror.expect_nothing()
    if directory.used:
        raise RunDirectoryError(
            f"{path} holds a run: continue it with --resume {place}, or choose another --run-dir"
        )
    known = (".", directory.plan.name)
    if path.is_dir() and any(not entry.name.startswith(known) for entry in path.iterdir()):
        raise RunDirectoryError(
            f"{path} holds other files: choose a --run-dir that is empty or does not exist"
        )
    directory.expect(plain(written))
    with directory.locked():
        if mirror is not None:
            # before anything is written here: a store that can't be written needs another command
            mirror.begin()
        directory.settle(plain(config))
        if mirror is not None:
            mirror.begin()
        return _run(Session(config, directory, store, command, profile, try_s=try_s, mirror=mirror))


def resume_run(
    place: str | Path, *, command: str, profile: int | None = None, changed_data: bool = False
) -> int:
    """Continues the run in a directory, or at an address, from its newest whole checkpoint. A
    finished run only writes its results again. changed_data: also where files of its data are not
    what they were."""
    launched = Launched.here()
    if launched is not None and launched.rank:
        return serve_rank(launched)
    directory, store, mirror = open_run(place)
    if mirror is None and not directory.used:
        raise RunDirectoryError(
            f"{place} holds no run (no config.yaml): give the directory that `ratchet train` named"
        )
    with directory.locked():
        if mirror is not None:
            mirror.take_up()
            mirror.begin()
        config = load_config(directory.config)
        if (key := left_to_machine(config)) is not None:
            raise RunDirectoryError(
                f"{directory.config}: {key}=auto, but a run writes down what the machine gave it. "
                f"Set {key} as it was, or "
                "start a new run by this recipe"
            )
        return _run(
            Session(
                config, directory, store, command, profile, changed_data=changed_data, mirror=mirror
            )
        )


def _run(session: Session) -> int:
    try:
        return asyncio.run(session.run())
    except SecondSignal as second:  # at once, without saving
        return 128 + second.number
    except OSError as error:
        place, name = session.directory.path, error.filename
        # What writes to an open file, reports no name.
        is_here = isinstance(name, str | bytes) and Path(os.fsdecode(name)).is_relative_to(place)
        if not is_here and (name is not None or error.errno not in DISK_ERRORS):
            raise
        raise RunDirectoryError(
            f"{place} can't be used: {error}. Mend that, then go on with --resume"
        ) from error


def _numbered(path: Path) -> Path:
    """`path`, or `path-2`, `path-3`, ...: a new run never writes into an old one."""
    candidate, number = path, 1
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    return candidate


class _StopAfterStep(StopRequest):
    """A request that a signal makes: the loop finishes its step and saves.

    forwarded: as `stops_on_signals` has it.
    """

    def __init__(self, *, forwarded: bool) -> None:
        super().__init__()
        self.forwarded = forwarded

    def make(self, number: signal.Signals) -> None:
        self.status = 128 + number
        again = "" if self.forwarded else "; Ctrl-C or SIGTERM to stop at once"
        log.warning("%s: finishing this step, then saving%s", number.name, again)


class Session:
    """One process's share of a run: it picks up where the checkpoints end, and goes on to the last
    stage or to a signal."""

    def __init__(
        self,
        config: RunConfig,
        directory: RunDirectory,
        store: CheckpointStore,
        command: str,
        profile: int | None = None,
        *,
        changed_data: bool = False,
        try_s: float | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.config, self.directory, self.command, self.profile = (
            config,
            directory,
            command,
            profile,
        )
        self.store, self.mirror = store, mirror
        self._plain = plain(config)
        self.changed_data, self.try_s = changed_data, try_s
        self.console = lasting_console()
        self.summaries: list[StageSummary] = []  # of finished stages
        self.ledger = Ledger(directory.ledger)
        self.sinks = Sinks([])
        self.recorder: Recorder | None = None
        self.trace: Trace | None = None
        self.began = time.monotonic()
        self._profiled = 0  # the stage, where one is profiled
        self.measures: str | None = None  # what the latest stage was evaluated by

    async def run(self) -> int:
        prepare_process(self.config.threads)
        stop = _StopAfterStep(forwarded=Launched.here() is not None)
        logged = log_to(self.directory.log, console=self.console)
        signals = stops_on_signals(stop.make, forwarded=stop.forwarded)
        with logged, signals, answers_status(self.directory):
            log.info("%s", self.command)
            for left in sweep():
                log.info("removed %s, which a killed process has left", left)
            for note in () if self.mirror is None else self.mirror.notes:
                log.info("%s", note)
                self.console.print(note, markup=False, highlight=False, soft_wrap=True)
            try:
                status = await self._trained(stop)
            except BaseException as error:
                # a closed terminal would take the reason with it
                log.info("the run ends here", exc_info=True)
                if self.mirror is not None and not isinstance(error, SecondSignal):
                    self.mirror.finish()
                raise
            there = self.mirror is None or self.mirror.finish()
            return status if there else status or NOT_MIRRORED

    async def _trained(self, stop: StopRequest) -> int:
        checkpoint = self.store.latest()
        if checkpoint is not None:
            log.info("continuing after step %d", checkpoint.step)
            failpoints.point("resume.begin")
            self.summaries = [StageSummary(**summary) for summary in checkpoint.meta["summaries"]]
            self.command = checkpoint.meta["command"]  # the one that began the run reproduces it
        else:
            refuse_lost_checkpoints(self.directory, self.store, self.config.stages[0])
            self.ledger.cut(0)
        kept = 0 if checkpoint is None else checkpoint.step
        self.sinks = self._open_sinks(-1 if checkpoint is None else kept)
        elsewhere = self.config.device != "cpu" or any(
            isinstance(stage.learner, SpreadConfig) for stage in self.config.stages
        )
        self.recorder = Recorder(
            self.config.record,
            self.directory.steps,
            seed=self.config.seed,
            keep_through=kept,
            beside=elsewhere,
        )
        try:
            async with AsyncExitStack() as ends:
                wanted = self.directory.trace if self.config.logging.trace else None
                self.trace = ends.enter_context(tracing(wanted))
                return await self._stages(await self._policy(ends, checkpoint), stop, checkpoint)
        finally:
            self.recorder.close()
            self.sinks.close()
            self.ledger.close()

    async def _policy(self, ends: AsyncExitStack, checkpoint: Checkpoint | None) -> Policy:
        """With the processes that train it and generate. ends: closes what is opened here, whatever
        happens to the rest."""
        config = self.config
        if checkpoint is not None:
            config = begins_with(config, len(self.summaries), self.directory.path)
        executor = build_executor(config)
        ends.callback(executor.close)
        policy = build_policy(config)
        ends.push_async_callback(policy.close)
        check_stages(config, policy, first=len(self.summaries))
        return start_processes(config, executor, policy)

    async def _stages(
        self, policy: Policy, stop: StopRequest, checkpoint: Checkpoint | None
    ) -> int:
        # What is loaded by now stays: the collector would walk all of it again and again, for a
        # third of a small step.
        gc.collect()
        gc.freeze()
        trained: Learner | None = None
        self._profiled = profiled_stage(self.config, len(self.summaries))
        for index in range(len(self.summaries), len(self.config.stages)):
            trained = await self._stage(index, policy, stop, checkpoint)
            if stop.status is not None:
                why = (
                    "Paused by a sentinel (run.log says why)"
                    if stop.status == PAUSED
                    else "Stopped"
                )
                saved = (
                    why
                    if self.store.steps()
                    else "Stopped before the first step, so it begins anew"
                )
                again = f"{saved}. Continue with: ratchet train --resume {self.place}"
                self.console.print(again, markup=False, highlight=False, soft_wrap=True)
                return stop.status
            checkpoint = None  # the stages after it start from the model in memory
        assert trained is not None, "every checkpoint is of a stage: there is one to finish"
        self._finish(policy, trained)
        return 0

    @property
    def place(self) -> str | Path:
        """What the run is called by."""
        return self.directory.path if self.mirror is None else self.mirror.address

    def _open_sinks(self, keep_through: int) -> Sinks:
        sinks: list[Sink] = [JsonlSink(self.directory.metrics, keep_through=keep_through)]
        if self.config.logging.tensorboard:
            sinks.append(TensorBoardSink(self.directory.tensorboard, keep_through=keep_through))
        if self.config.logging.sinks:
            path = self.directory.path
            tracked = Tracked(
                self.config.name, run_id(path), path, plain(self.config), resumed=keep_through >= 0
            )
            with spares_programs():
                sinks += track(self.config.logging.sinks, tracked)
        return Sinks(sinks)

    async def _stage(
        self, index: int, policy: Policy, stop: StopRequest, checkpoint: Checkpoint | None
    ) -> Learner:
        """The learner of the policy, which knows all that belongs to the model."""
        stage = self.config.stages[index]
        policies = stage.checkpoint
        self.store.keep, self.store.keep_best, self.store.keep_every = (
            policies.keep,
            policies.keep_best,
            policies.keep_every,
        )
        run = build_run(
            self.config, index, policy, directory=self.directory.path, ledger=self.ledger, stop=stop
        )
        for caution in cautions(stage):
            log.warning("stage %s: %s", run.name, caution)
        if run.trainable:
            trains, share = run.trainable["trainable_parameters"], run.trainable["trainable_share"]
            log.info(
                "stage %s trains %s parameters of an adapter, %.2f %% of all",
                run.name,
                f"{trains:,}",
                100 * share,
            )
        before, self.measures = self.measures, run.evaluator and run.evaluator.measures
        run.deadline = None if policies.limit_s is None else self.began + policies.limit_s
        run.limit_s = self.try_s
        run.sentinels = Sentinels(stage.sentinels, self.directory.sentinels)
        data, recipe = files_of(stage.environment), self._plain
        saver = Saver(
            self.store,
            run,
            policies,
            self.summaries,
            self.command,
            data=data,
            recipe=recipe,
            mirror=self.mirror,
        )
        run.verify_directory = self._verify_directory
        run.evaluations = self.directory.evals / stage.name
        run.save, run.recorder = saver.save, self.recorder
        if checkpoint is not None:
            self.store.tidy()
            await saver.restore(checkpoint, changed_data=self.changed_data)
        else:
            failpoints.point("stage.begin")
            self._keep_base(index, run, policy)
            await self._measure_start(index, run, alike=before == self.measures)
        self._note_provenance(run.first_step, saver.data)
        mode = self.config.logging.progress
        progress = show_progress(
            run.name,
            first_step=run.first_step,
            last_step=run.last_step,
            mode=mode,
            console=self.console,
        )
        measured = metering(run, policy, self.config, index, self.directory, self.trace)
        with (
            progress as show,
            measured,
            self._profiling(index, run, policy),
            stalls_told(self.config.logging.stall_s),
        ):
            run.observers = (self.sinks.write, show, saver.observe)
            async with AsyncExitStack() as ends:
                ends.push_async_callback(run.close)
                ends.callback(saver.settle)
                await train(run)
                if stop.status is None:
                    saver.settle()
                    await saver.end_with_best()
        if stop.status is not None:
            if saver.saved < run.done:  # the signal came after the step had been saved, or not
                await saver.save(run.done)
            return run.roles["policy"]
        steps, silent = run.done - run.origin, run.progress.silent_steps
        if silent > steps / 2:
            log.warning(
                "stage %s: in %d of %d steps all advantages were 0 (no attempt beat another), "
                "which teaches nothing: "
                "train longer before it, raise sampling.temperature, or make tasks of mixed "
                "difficulty",
                run.name,
                silent,
                steps,
            )
        failpoints.point("stage.end")
        self.summaries.append(_summary(run))
        return run.roles["policy"]

    def _verify_directory(self) -> None:
        self.directory.verify(self._plain)

    def _note_provenance(self, after_step: int, data: Mapping[str, str]) -> None:
        try:
            note_provenance(self.directory.provenance, after_step=after_step, data=data)
        except OSError as error:
            log.warning(
                "%s can't be written, so nothing says what this run was made of: %s",
                self.directory.provenance,
                error,
            )

    def _keep_base(self, index: int, run: Run, policy: Policy) -> None:
        """The model that the stage's adapter belongs to, where only this run has it."""
        base = base_directory(self.config, index, self.directory.path)
        if self.config.stages[index].lora is not None and base is not None:
            run.roles["policy"].export(base, part="base")
            policy.tokenizer.save(base)

    def _profiling(self, index: int, run: Run, policy: Policy) -> AbstractContextManager[None]:
        if self.profile is None or index != self._profiled:
            return nullcontext()
        return profiling(
            run, policy, self.config, self.profile, self.directory.profile, self.console
        )

    async def _measure_start(self, index: int, run: Run, *, alike: bool) -> None:
        """Accuracy before the stage: what the stage before it reached, if that was measured in the
        same way."""
        if (
            index
            and alike
            and _measured_alike(self.config.stages[index - 1], self.config.stages[index])
        ):
            run.progress.accuracy_before = self.summaries[-1].accuracy_after
            return
        numbers = await run.evaluate()
        run.progress.accuracy_before = numbers.get("accuracy")
        flushed = run.metrics.flush(run.first_step)
        if index == 0:  # the curve begins here; later stages begin at a step that has its line
            self.sinks.write(0, flushed)

    def _finish(self, policy: Policy, trained: Learner) -> None:
        self._verify_directory()
        config, models = self.config, [("model", self.directory.path / MODEL)]
        trained.export(models[0][1])
        failpoints.point("finish.exported")
        if config.stages[-1].optimizer.ema_decay is not None:
            models.append(("average", self.directory.path / AVERAGE))
            trained.export(models[1][1], averaged=True)
        for _, path in models:
            policy.tokenizer.save(path)
        failpoints.point("finish.tokenizer")
        peak_mib = peak_memory() / 2**20
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
        self.console.print(summary.table())
        rows: list[tuple[str, str | Path]] = [
            ("run", self.place),
            *models,
            ("summary", self.directory.summary),
        ]
        if config.stages[-1].lora is not None:
            rows.insert(-1, ("adapter", self.directory.path / ADAPTER))
            trained.export(self.directory.path / ADAPTER, part="adapter")
        if write_curve(self.directory.metrics, self.directory.curve):
            rows.append(("curve", self.directory.curve))
        for name, path in rows:
            self.console.print(f"{name:8} {path}", markup=False, highlight=False, soft_wrap=True)


def _measured_alike(a: StageConfig, b: StageConfig) -> bool:
    keys = ("environment", "yardstick", "evaluation", "sampling")
    return all(getattr(a, key) == getattr(b, key) for key in keys)


def _summary(run: Run) -> StageSummary:
    progress = run.progress
    return StageSummary(
        name=run.name,
        algorithm=run.algorithm.name,
        steps=run.done - run.origin,
        seconds=progress.seconds,
        accuracy_before=progress.accuracy_before,
        accuracy_after=progress.accuracy,
        trained_tokens=progress.trained_tokens,
        generated_tokens=progress.generated_tokens,
    )
