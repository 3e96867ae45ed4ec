"""Save and restore the checkpoints of a stage."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

from ratchet.checkpoint.async_writer import BackgroundTask
from ratchet.checkpoint.serialization import WriteFiles, defer_writes, load_state, save_state
from ratchet.config.base import Section
from ratchet.config.outputs import CheckpointConfig
from ratchet.config.schema import RunConfig, StageConfig
from ratchet.data.jsonl import fingerprint
from ratchet.errors import CheckpointError, DataError, RunDirectoryError, link_symptom
from ratchet.evals.early_stopping import get_signed_metric
from ratchet.models.weights.file_fingerprint import (
    fingerprint_weight_files,
    list_small_files,
)
from ratchet.observe.provenance import read_first_data
from ratchet.observe.sinks import read_jsonl
from ratchet.observe.summary import StageSummary
from ratchet.runs.checkpoints import Checkpoint, CheckpointStore
from ratchet.runs.remote_sync import FileSnapshot, Mirror
from ratchet.runs.run_dir import RunDirectory, list_config_differences
from ratchet.runs.stage_progress import Progress
from ratchet.training.run import StageRun
from ratchet.utils import failpoints

log = logging.getLogger(__name__)


class CheckpointSaver:
    """The saver of a stage's checkpoints.

    A checkpoint holds each role's state, the position in the data and the stage's progress.

    `saved_step` is the step of the latest complete checkpoint.

    Args:
        store: The run's checkpoints.
        config: The section `checkpoint` of the stage.
        summaries: Results of the finished stages, saved with each checkpoint.
        command: The command line that began the run, saved with each checkpoint.
        saved_step: The step at which the stage starts, or from whose checkpoint it resumes.
        inputs: Fingerprints of the files that the stage reads (`fingerprint_inputs`), by path. They
            are saved, because a run continues as it began only with the same files.
        recipe: The resolved recipe, saved so that later changes of it are reported.
        mirror: Uploads each checkpoint once it is complete.
    """

    def __init__(
        self,
        store: CheckpointStore,
        config: CheckpointConfig,
        summaries: Sequence[StageSummary],
        command: str,
        *,
        saved_step: int = 0,
        inputs: Mapping[str, str] | None = None,
        recipe: Mapping[str, Any] | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self.store = store
        self.config = config
        self.summaries = summaries
        self.command = command
        self.recipe = dict(recipe or {})
        self.mirror = mirror
        self.inputs = dict(inputs or {})
        self.saved_step = saved_step
        self._tolerates_errors = config.on_error == "warn"
        self._background = BackgroundTask()
        self._background_step = 0
        # The latest evaluated step and its score; higher is better.
        self._score: tuple[int, float | None] = (0, None)

    def observe(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Note the score of this step's checkpoint, if it was measured.

        Raises:
            CheckpointError: A background write has failed, and `checkpoint.on_error` is not "warn".
        """
        self._score = step, get_signed_metric(self.config.metric, metrics)
        if self._background.has_finished:
            self.wait_for_write()

    async def save(self, run: StageRun, steps_done: int) -> None:
        """Save the checkpoint of `run` after `steps_done` steps.

        The last checkpoint of a stage is complete when this returns. Others may be written in the
        background.

        Raises:
            CheckpointError: The checkpoint can't be written, and `checkpoint.on_error` is not
                "warn". The error of a background write is raised later, by `observe`,
                `wait_for_write` or the next `save`.
        """
        self.wait_for_write()
        if run.verify_directory is not None:
            run.verify_directory()
        # A run that resumes from this checkpoint needs the records of all its steps.
        if run.recorder is not None:
            run.recorder.flush()
        meta = {
            "command": self.command,
            "summaries": [asdict(summary) for summary in self.summaries],
            "progress": asdict(run.progress),
            "state": asdict(run.state),
            "sentinels": {} if run.sentinels is None else run.sentinels.state(),
            "data": self.inputs,
            "recipe": self.recipe,
            "score": self._get_score(run, steps_done),
        }
        source_state = await run.batcher.source.snapshot()
        mirror_snapshot = {} if self.mirror is None else self.mirror.take_snapshot()
        run_continues = (
            run.stop.status is None and not run.progress.ended and steps_done < run.end_step
        )
        if self.config.background and run_continues:
            write = self._copy(run, source_state)
            self._background_step = steps_done
            failpoints.point("checkpoint.copied")
            self._background.begin(lambda: self._store(steps_done, write, meta, mirror_snapshot))
            return
        # A run that stops here can resume only from this checkpoint, so errors are raised.
        with self._tolerate_errors(run.stop.status is None):
            self._store(
                steps_done,
                lambda directory: _write(run, directory, source_state),
                meta,
                mirror_snapshot,
            )
            self.saved_step = steps_done

    def _store(
        self,
        steps_done: int,
        write: WriteFiles,
        meta: Mapping[str, Any],
        mirror_snapshot: Mapping[str, FileSnapshot],
    ) -> None:
        """Write a checkpoint with `write`, then upload the files listed in `mirror_snapshot`."""
        self.store.save(steps_done, write, meta)
        if self.mirror is not None:
            self.mirror.push(mirror_snapshot, in_background=self.config.background)

    def wait_for_write(self) -> None:
        """Wait for the background write.

        Raises:
            CheckpointError: See `save`.
        """
        with self._tolerate_errors():
            if self._background.wait():
                self.saved_step = self._background_step

    def _copy(self, run: StageRun, source_state: Mapping[str, Any]) -> WriteFiles:
        """Copy the current state, and return a function that writes the copy."""
        with defer_writes() as writes:
            _write(run, Path(), source_state)

        def write(directory: Path) -> None:
            for write_part in writes:
                write_part(directory)

        return write

    @contextmanager
    def _tolerate_errors(self, tolerable: bool = True) -> Iterator[None]:
        """Log a CheckpointError of the block if `tolerable` and `checkpoint.on_error` is "warn"."""
        try:
            yield
        except CheckpointError as error:
            if not (self._tolerates_errors and tolerable):
                raise
            log.warning("%s: training continues, and the next checkpoint replaces it", error)

    async def restore(
        self,
        run: StageRun,
        checkpoint: Checkpoint,
        *,
        changed_recipe: bool = False,
    ) -> None:
        """Load a checkpoint into the parts of a run, which was built at the checkpoint's position.

        Args:
            run: The run.
            checkpoint: The checkpoint.
            changed_recipe: Do not warn about changes of the recipe, which were announced already.
        """
        meta = checkpoint.meta
        recipe_changes = list_config_differences(meta["recipe"], self.recipe)
        if recipe_changes and not changed_recipe:
            log.warning(
                "the recipe was edited since step %d; the new values apply from here on: %s",
                checkpoint.step,
                "; ".join(recipe_changes),
            )
        _load(run, checkpoint)
        await run.batcher.source.restore(load_state(checkpoint.path, "source"))
        if run.sentinels is not None:
            run.sentinels.restore(meta["sentinels"])
        await run.weight_sync.push(version=checkpoint.step)
        if run.progress.unevaluated is not None:
            await run.make_up_evaluation()
            self._replace_progress(run, checkpoint)
        failpoints.point("resume.done")

    def _replace_progress(self, run: StageRun, checkpoint: Checkpoint) -> None:
        """Store the progress and the score of a checkpoint that was evaluated after a restore."""
        score = self._get_score(run, checkpoint.step)
        meta = {**checkpoint.meta, "progress": asdict(run.progress), "score": score}
        with self._tolerate_errors():
            self.store.replace_meta(checkpoint.step, meta)

    def _get_score(self, run: StageRun, step: int) -> float | None:
        """Return the score of the checkpoint of `step`; None if it was not measured.

        A checkpoint that is saved only because of a stop request gets no score, so that it is never
        chosen as the best: an uninterrupted run would not have this checkpoint.
        """
        is_scored = self._score[0] == step and run.is_save_due(step)
        return self._score[1] if is_scored else None

    async def end_with_best(self, run: StageRun) -> None:
        """Load the stage's best checkpoint if `checkpoint.end_with=best` and one has a score."""
        best = (
            self.store.best(first_step=run.start_step + 1)
            if self.config.end_with == "best"
            else None
        )
        if best is None or best.step == run.steps_done:
            return
        log.info(
            "stage %s ends with the weights of step %d, its best by %s",
            run.name,
            best.step,
            self.config.metric or "evaluation",
        )
        _load(run, best)
        await run.return_to(Progress(**best.meta["progress"]))


def _write(run: StageRun, directory: Path, source_state: Mapping[str, Any]) -> None:
    for role, learner in run.roles.items():
        learner.save(directory / role)
        failpoints.point("checkpoint.role")
    save_state(directory, source_state, "source")


def _load(run: StageRun, checkpoint: Checkpoint) -> None:
    for role, learner in run.roles.items():
        failpoints.point("resume.role")
        learner.load(checkpoint.path / role)


def get_last_logged_step(checkpoint: Checkpoint | None) -> int:
    """Return the last step whose metrics a resumed run keeps; -1 if it keeps none.

    If the evaluation after the checkpoint's step was postponed, that step is logged again together
    with the evaluation.
    """
    if checkpoint is None:
        return -1
    return checkpoint.step - (checkpoint.meta["progress"].get("unevaluated") is not None)


FILE_LIST = "names of files: "  # begins the keys of fingerprints of lists of files


def fingerprint_inputs(config: RunConfig, stage: StageConfig) -> dict[str, str]:
    """Return the fingerprints of a stage's data, judges, teachers and templates, by path.

    The names of the data files, and of the small files of each model, have a fingerprint too, under
    a key that begins with `FILE_LIST`: a new file in a directory would move the rows of the others,
    or replace a template.

    Models at the Hub are left out: `revision` pins these. So are the weights of `model.path`,
    which only the first step reads (`fingerprint_start`).
    """
    rewards = (stage.rewards, stage.eval_rewards, stage.sentinels.second_opinion)
    models = {
        *(judge.path for judge in config.judges),
        *stage.algorithm.teacher_paths,
        *_list_values((config.judges, *rewards), "path"),
    }
    directories = [path for path in sorted(models) if Path(path).is_dir()]
    templates = _list_values((config.tokenizer, config.judges, *rewards), "template")
    files_by_list = {f"{FILE_LIST}data": stage.environment.list_data_files()}
    for path in [*directories, config.model.path, *_list_values(config.tokenizer, "path")]:
        if path is not None and Path(path).is_dir():
            files_by_list[f"{FILE_LIST}{path}"] = list_small_files(Path(path))
    files = [path for path in (*models, *templates) if os.path.isfile(path)]
    return {
        **{str(path): fingerprint(path) for path in (*chain(*files_by_list.values()), *files)},
        **{path: fingerprint_weight_files(Path(path)) for path in directories},
        **{name: _fingerprint_names(paths) for name, paths in files_by_list.items() if paths},
    }


def _fingerprint_names(paths: Sequence[Path]) -> str:
    return hashlib.sha256("\n".join(map(str, paths)).encode("utf-8", "surrogateescape")).hexdigest()


def _list_values(value: object, key: str) -> Iterator[str]:
    """Yield every text at `key` in nested sections."""
    if isinstance(value, Section):
        value = dict(value)
    if isinstance(value, dict):
        if isinstance(text := value.get(key), str):
            yield text
        value = tuple(value.values())
    if isinstance(value, tuple | list):
        for item in value:
            yield from _list_values(item, key)


def check_changed_inputs(
    inputs: Mapping[str, str],
    checkpoint: Checkpoint | None,
    provenance: Path,
    *,
    changed_data: bool = False,
) -> None:
    """Compare data files, judges and teachers with those that the run used before.

    Args:
        inputs: Fingerprints of the first stage that remains, from `fingerprint_inputs`.
        checkpoint: The checkpoint to resume from; None if there is none.
        provenance: The run's `provenance.json`, which has the inputs of a run without checkpoints.
        changed_data: Continue even if inputs have changed.

    Raises:
        DataError: Inputs have changed since, and `changed_data` is False.
    """
    if checkpoint is None:
        saved = read_first_data(provenance)
        if not {path for path in saved if not path.startswith(FILE_LIST)} & inputs.keys():
            # The run never began, or these are inputs of a later stage that began at step 0 too.
            return
        start, reason = "the run began", "and it has no checkpoint yet"
        remedy = "Restore the files, or begin again on the changed ones with --changed-data"
        consequence = "it begins again on the changed data"
    else:
        saved = checkpoint.meta["data"]
        start = f"step {checkpoint.step}"
        reason = "so the run would not continue as it began"
        remedy = (
            "Restore the files, allow the change with --changed-data, or start a new run from this "
            "run's weights (--from)"
        )
        consequence = "rows may be repeated or skipped, or judged in another way"
    changed, missing, added = _list_input_changes(saved, inputs)
    faults = [f"{', '.join(changed)} changed since {start}"] * bool(changed)
    faults += [f"{', '.join(missing)} not found"] * bool(missing)
    faults += [f"{', '.join(added)} added since {start}"] * bool(added)
    if any(not os.path.isabs(path) for path in missing):
        reason += ". Relative paths need the working directory in which the run was started"
    if faults and not changed_data:
        raise DataError(
            f"{', and '.join(faults)}, {reason}. {remedy}. {link_symptom('a-resume-is-refused')}"
        )
    if faults:
        log.warning("%s: %s", ", and ".join(faults), consequence)


def _list_input_changes(
    saved: Mapping[str, str], inputs: Mapping[str, str]
) -> tuple[list[str], list[str], list[str]]:
    """Return the paths of inputs that changed, that are missing, and that were added."""
    different = [path for path, value in saved.items() if inputs.get(path, value) != value]
    changed = [path for path in different if not path.startswith(FILE_LIST)]
    # A path that is not in `inputs` but exists is no longer read, because the recipe was changed.
    missing = [
        path
        for path in saved
        if path not in inputs and not path.startswith(FILE_LIST) and not os.path.exists(path)
    ]
    # If no list of files changed, a new path is of a reward or a judge that the recipe names now.
    has_changed_list = len(changed) < len(different)
    new_paths = [path for path in inputs if path not in saved and not path.startswith(FILE_LIST)]
    return changed, missing, new_paths if has_changed_list else []


def refuse_lost_checkpoints(
    directory: RunDirectory, store: CheckpointStore, stage: StageConfig
) -> None:
    """Raise RunDirectoryError if a run's checkpoints were deleted.

    Without checkpoints the run would restart at step 0, and replace its metrics and ledger. They
    count as deleted if the run has finished, or if the metrics reach beyond two checkpoint
    intervals, because background writes may be one checkpoint behind. If the recipe tolerates
    failed checkpoints, an unfinished run may have none.

    Also raise it if `checkpoints` is not a directory, because the first save would fail.
    """
    if os.path.lexists(store.root) and not store.root.is_dir():
        raise RunDirectoryError(
            f"{store.root} is not a directory, so no checkpoint can be written. Move it away"
        )
    config = stage.checkpoint
    first_save = min(config.every or stage.n_steps, stage.n_steps)
    rows = read_jsonl(directory.metrics)
    must_exist = bool(rows) and rows[-1]["step"] > 2 * first_save and config.on_error != "warn"
    # A run whose only stage was good enough before its first step (`evaluation.stop_at`) has none.
    has_steps = bool(rows) and rows[-1]["step"] > 0
    if store.steps() or not (must_exist or (has_steps and directory.summary.exists())):
        return
    raise RunDirectoryError(
        f"{store.root} has no checkpoint, but {directory.metrics} has {rows[-1]['step']} steps: "
        "the checkpoint was deleted. Put it back, or begin a new run with another --run-dir"
    )
