"""The checkpoints of a stage: what is written with the weights, and how a run finds itself again in
them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ratchet.algorithms.base import AlgoState
from ratchet.checkpoint.async_writer import Background
from ratchet.checkpoint.serialization import Write, load_state, putting_off, save_state
from ratchet.config.base import Section
from ratchet.config.schema import CheckpointConfig, StageConfig
from ratchet.data.jsonl import fingerprint
from ratchet.errors import CheckpointError, DataError, RunDirectoryError
from ratchet.evals.early_stopping import signed
from ratchet.observe.sinks import read_jsonl
from ratchet.observe.summary import StageSummary
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.runs.remote_sync import Mirror, Noted
from ratchet.runs.run_dir import RunDirectory, differences
from ratchet.training.run import Progress, Run
from ratchet.utils import failpoints

log = logging.getLogger(__name__)


class Saver:
    """Writes and reads the checkpoints of one stage: every role's state, the position in the data,
    and what was measured.

    data: the files that the stage's tasks come from. A position in them means nothing in others, so
    their fingerprints, which are taken here, are saved with it. recipe: the resolved one, which is
    saved so that a change of it is told. mirror: gets each as soon as it is whole.
    """

    def __init__(
        self,
        store: CheckpointStore,
        run: Run,
        config: CheckpointConfig,
        summaries: Sequence[StageSummary],
        command: str,
        *,
        data: Sequence[Path] = (),
        recipe: Mapping[str, Any] | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.store, self.run, self.config, self.summaries, self.command = (
            store,
            run,
            config,
            summaries,
            command,
        )
        self.recipe, self.mirror = dict(recipe or {}), mirror
        self.data = {str(path): fingerprint(path) for path in data}
        self.saved = run.first_step
        self._goes_on = config.on_error == "warn"
        self._background, self._writing = Background(), 0
        # after so many steps; the higher the better
        self._score: tuple[int, float | None] = (0, None)

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Notes what says how good the checkpoint of this step is, where that was measured. Raises
        CheckpointError where one that was written beside the training has failed, and the recipe
        doesn't say to go on."""
        self._score = step, signed(self.config.metric, metrics)
        if self._background.ended:
            self.settle()

    async def save(self, done: int) -> None:
        """Raises CheckpointError where it can't be written and the recipe doesn't say to go on:
        where it is written beside the training, later (`observe`, `settle`, the next `save`). The
        last one is there when this returns."""
        self.settle()
        run = self.run
        if run.verify_directory is not None:
            run.verify_directory()
        if run.recorder is not None:  # a run that goes on from here finds all its steps
            run.recorder.flush()
        meta = {
            "command": self.command,
            "summaries": [asdict(summary) for summary in self.summaries],
            "progress": asdict(run.progress),
            "state": asdict(run.state),
            "sentinels": {} if run.sentinels is None else run.sentinels.state(),
            "data": self.data,
            "recipe": self.recipe,
            "score": self._score[1] if self._score[0] == done else None,
        }
        source = await run.batcher.source.snapshot()
        noted = {} if self.mirror is None else self.mirror.note()
        goes_on = run.stop.status is None and not run.progress.ended and done < run.last_step
        if self.config.background and goes_on:
            write = self._copy(source)
            self._writing = done
            failpoints.point("checkpoint.copied")
            self._background.begin(lambda: self._store(done, write, meta, noted))
            return
        # Who is told to go on where it ends needs one.
        with self._borne(run.stop.status is None):
            self._store(done, lambda directory: self._write(directory, source), meta, noted)
            self.saved = done

    def _store(
        self, done: int, write: Write, meta: Mapping[str, Any], noted: Mapping[str, Noted]
    ) -> None:
        self.store.save(done, write, meta)
        if self.mirror is not None:
            self.mirror.push(noted, beside=self.config.background)

    def settle(self) -> None:
        """Waits for what is written beside the training. Raises CheckpointError as `save` does."""
        with self._borne():
            if self._background.settle():
                self.saved = self._writing

    def _write(self, directory: Path, source: Mapping[str, Any]) -> None:
        for role, learner in self.run.roles.items():
            learner.save(directory / role)
            failpoints.point("checkpoint.role")
        save_state(directory, source, "source")

    def _copy(self, source: Mapping[str, Any]) -> Write:
        """What writes all of it as it is now."""
        with putting_off() as writes:
            self._write(Path(), source)

        def write(directory: Path) -> None:
            for one in writes:
                one(directory)

        return write

    @contextmanager
    def _borne(self, bearable: bool = True) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            if not (self._goes_on and bearable):
                raise
            log.warning("%s: training goes on, and what is saved next replaces it", error)

    async def restore(self, checkpoint: Checkpoint, *, changed_data: bool = False) -> None:
        """Raises DataError where the data are no longer those of the checkpoint, unless that is
        allowed."""
        run, meta = self.run, checkpoint.meta
        changed = [path for path, was in meta["data"].items() if self.data.get(path) != was]
        if changed and not changed_data:
            raise DataError(
                f"{', '.join(changed)} changed since step {checkpoint.step}, so its position in "
                "the data means nothing now: "
                "put back what was there, allow it with --changed-data, or begin a new run from an "
                "exported model"
            )
        if changed:
            log.warning(
                "%s changed since step %d: rows may come twice, or never",
                ", ".join(changed),
                checkpoint.step,
            )
        if edited := differences(meta["recipe"], self.recipe):
            log.warning(
                "the recipe was edited since step %d, and holds from here on: %s",
                checkpoint.step,
                "; ".join(edited),
            )
        self._load(checkpoint)
        await run.batcher.source.restore(load_state(checkpoint.path, "source"))
        run.progress, run.state = Progress(**meta["progress"]), AlgoState(**meta["state"])
        if run.sentinels is not None:
            run.sentinels.restore(meta["sentinels"])
        run.first_step = run.done = self.saved = checkpoint.step
        await run.link.push(version=checkpoint.step)
        failpoints.point("resume.done")

    async def end_with_best(self) -> None:
        """Gives the run the weights of the stage's best checkpoint, where the recipe wants them and
        one was measured."""
        best = (
            self.store.best(first=self.run.origin + 1) if self.config.end_with == "best" else None
        )
        if best is None or best.step == self.run.done:
            return
        log.info(
            "stage %s ends with the weights of step %d, its best by %s",
            self.run.name,
            best.step,
            self.config.metric,
        )
        self._load(best)
        self.run.progress.accuracy = best.meta["progress"]["accuracy"]
        await self.run.link.push(version=self.run.done)

    def _load(self, checkpoint: Checkpoint) -> None:
        for role, learner in self.run.roles.items():
            failpoints.point("resume.role")
            learner.load(checkpoint.path / role)


def refuse_lost_checkpoints(
    directory: RunDirectory, store: CheckpointStore, stage: StageConfig
) -> None:
    """Raise RunDirectoryError if a run without checkpoints has trained past those of its first
    stage.

    It would begin again at step 0 and replace its metrics and ledger. A checkpoint may be one
    behind when it is written in the background, and may be missing where the recipe goes on without
    it.
    """
    config = stage.checkpoint
    first = min(config.every or stage.steps, stage.steps)
    rows = read_jsonl(directory.metrics)
    if store.steps() or config.on_error == "warn" or not rows or rows[-1]["step"] <= 2 * first:
        return
    raise RunDirectoryError(
        f"{store.root} has no checkpoint, though {directory.metrics} tells of {rows[-1]['step']} "
        "steps: it was "
        "deleted. Put it back, or begin a new run with another --run-dir"
    )


def files_of(section: Any) -> list[Path]:
    """The files that a section and those inside it name, in order; of a section with patterns or
    directories, as it says."""
    if isinstance(section, Path):
        return [section] if section.is_file() else []
    if hasattr(section, "data_files"):
        return list(section.data_files)
    if isinstance(section, Section):
        section = [getattr(section, name) for name in type(section).model_fields]
    if isinstance(section, dict):
        section = list(section.values())
    return (
        [path for part in section for path in files_of(part)]
        if isinstance(section, list | tuple)
        else []
    )
