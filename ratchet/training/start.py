"""Start a run from a recipe, or resume one from its directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ratchet.config.length import shorten
from ratchet.config.loader import dump_plain, load_config
from ratchet.config.schema import RunConfig
from ratchet.errors import RunDirectoryError, RunDirectoryOccupied, RunNotFound
from ratchet.executors.event_loop import run_event_loop
from ratchet.executors.freeze import find_unfrozen_key, freeze
from ratchet.executors.signals import SecondSignal
from ratchet.executors.torchrun import TorchrunRank, serve_rank
from ratchet.experience.sources.passes import ResolvedRecipe, resolve_passes
from ratchet.observe.provenance import record_changes
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.recipe_changes import check_changes, list_changes, load_changed_config
from ratchet.runs.remote_sync import Mirror
from ratchet.runs.resolve import open_run
from ratchet.runs.run_dir import RunDirectory
from ratchet.runs.without_steps import (
    clear_run_without_steps,
    find_free_run_dir,
    has_no_finished_step,
)
from ratchet.training.preflight import run_preflight
from ratchet.training.saved_weights import (
    SavedWeights,
    check_overrides,
    copy_start,
    explain_relative_path,
    find_saved,
    find_start,
    with_model_path,
)
from ratchet.training.session import DISK_ERRORS, TrainingSession
from ratchet.utils.process_settings import keep_settings


def start_run(
    recipe: str | Path,
    overrides: Sequence[str],
    run_dir: str | Path | None,
    *,
    command: str,
    profile: int | None = None,
    try_s: float | None = None,
    try_steps: int | None = None,
    start_from: str | None = None,
    with_optimizer: bool = False,
) -> int:
    """Train by a recipe in a new run directory.

    Args:
        recipe: The recipe's file.
        overrides: Keys to set, as key=value.
        run_dir: A local directory, or an address to which the run is mirrored; None takes the
            recipe's, or else the first free runs/NAME.
        command: The command line, which is stored with the run.
        profile: The number of steps to profile; None profiles none.
        try_s: Seconds of training after which each stage ends; None sets no limit.
        try_steps: Maximum number of steps of each stage; None leaves the stages unchanged.
        start_from: The run whose weights the model starts with, or RUN@STEP; None starts from the
            recipe's model.
        with_optimizer: Start from the state of that run's optimizer too.

    Returns:
        The exit status: 0, 128 + the signal that stopped the run, `NOT_MIRRORED`, or `OUT_OF_TIME`
            or `PAUSED` of `ratchet.training.run`.
    """
    notes: list[str] = []
    torchrun_rank = TorchrunRank.from_environment()
    if torchrun_rank is not None and torchrun_rank.rank:
        return serve_rank(torchrun_rank)
    with keep_settings():  # the recipe's own modules are imported, and their rewards called
        unfrozen, saved = _load_recipe(recipe, overrides, start_from, with_optimizer=with_optimizer)
        if saved is not None:
            notes.append(f"starts from the weights of {saved.path}")
        if try_steps is not None:
            unfrozen, clip_notes = shorten(unfrozen, try_steps)
            notes += clip_notes
        # Check before the run directory exists, so that a failed start leaves none.
        report = run_preflight(unfrozen, scan=False)
        report.raise_problems()
        notes += report.warnings
        resolved_recipe = resolve_passes(unfrozen)
    config = freeze(resolved_recipe.config, notes)
    directory, store, mirror = _open_new_run(
        run_dir or config.run_dir or find_free_run_dir(config.name), notes
    )
    directory.check_recipe(dump_plain(unfrozen))
    with directory.locked():
        if mirror is not None:
            # Do this before any local write, so that the command can be repeated if it fails.
            mirror.begin()
        if saved is not None and saved.step is not None:
            copy_start(saved, config, directory.path, with_optimizer=with_optimizer)
        directory.write_or_check_config(dump_plain(config))
        if mirror is not None:
            mirror.begin()
        return _run(
            directory,
            lambda: TrainingSession(
                config,
                directory,
                store,
                command,
                profile,
                try_s=try_s,
                resolved_recipe=resolved_recipe,
                mirror=mirror,
                notes=notes,
            ),
        )


def _open_new_run(
    place: str | Path, notes: list[str]
) -> tuple[RunDirectory, CheckpointStore, Mirror | None]:
    """Open an empty directory or address for a new run, or one whose run never finished a step.

    Args:
        place: The directory or address.
        notes: Receives a note if an earlier run was cleared.

    Raises:
        RunDirectoryOccupied: The place holds another run, or other files.
    """
    directory, store, mirror = open_run(place)
    path = directory.path
    if mirror is not None:
        mirror.check_empty()
    if mirror is None and has_no_finished_step(directory):
        if directory.is_used:
            notes.append(f"takes the place of a run without steps in {path}")
        with directory.locked():
            clear_run_without_steps(directory)
    if directory.is_used:
        raise RunDirectoryOccupied(
            f"{path} holds a run. Continue it with --resume {place}, or choose another --run-dir"
        )
    names = [entry.name for entry in path.iterdir()] if path.is_dir() else []
    if any(not name.startswith((".", directory.plan.name)) for name in names):
        raise RunDirectoryOccupied(
            f"{path} holds other files. Choose a --run-dir that is empty or does not exist"
        )
    return directory, store, mirror


def _load_recipe(
    recipe: str | Path, overrides: Sequence[str], start_from: str | None, *, with_optimizer: bool
) -> tuple[RunConfig, SavedWeights | None]:
    """Return the recipe, and the run whose weights it starts from; None for any other model.

    If `model.path` names a run, it becomes the path of that run's model or checkpoint.
    """
    if start_from is None:
        config = load_config(recipe, overrides)
        saved = None if config.model.path is None else find_saved(config.model.path)
    else:
        saved = find_start(start_from, with_optimizer=with_optimizer)
        config = load_config(recipe, overrides, model_path=str(saved.path), model_option="--from")
    if saved is not None and config.model.path != str(saved.path):
        config = with_model_path(config, saved)
    if saved is not None:
        check_overrides(config, saved)
    return config, saved


def resume_run(
    place: str | Path,
    overrides: Sequence[str] = (),
    *,
    command: str,
    profile: int | None = None,
    changed_data: bool = False,
) -> int:
    """Continue the run in a directory or at an address from its newest complete checkpoint.

    A finished run only writes its results again, unless `overrides` give it more steps.

    Args:
        place: The directory or address.
        overrides: Keys to change from here on, as key=value.
        command: The command line, for the log.
        profile: The number of steps to profile; None profiles none.
        changed_data: Resume even if data files have changed.
    """
    torchrun_rank = TorchrunRank.from_environment()
    if torchrun_rank is not None and torchrun_rank.rank:
        return serve_rank(torchrun_rank)
    directory, store, mirror = open_run(place)
    if mirror is None and not directory.is_used:
        raise RunNotFound(
            f"{place} holds no run (no config.yaml). Pass the directory that `ratchet train` "
            "printed"
        )
    with directory.locked():
        if mirror is not None:
            mirror.resume()
        with keep_settings():  # the recipe's own modules are imported
            resolved_recipe, notes = _change_recipe(place, directory, store, overrides)
        config = resolved_recipe.config
        if mirror is not None:
            mirror.begin()
        if (unresolved_key := find_unfrozen_key(config)) is not None:
            raise RunDirectoryError(
                f"{directory.config}: {unresolved_key}=auto, but a run stores the value that it "
                f"used. Set {unresolved_key} to that value, or start a new run with this recipe"
            )
        with explain_relative_path(config, directory.path):
            return _run(
                directory,
                lambda: TrainingSession(
                    config,
                    directory,
                    store,
                    command,
                    profile,
                    changed_data=changed_data,
                    changed_recipe=bool(notes),
                    resolved_recipe=resolved_recipe,
                    mirror=mirror,
                    notes=notes,
                ),
            )


def _change_recipe(
    place: str | Path, directory: RunDirectory, store: CheckpointStore, overrides: Sequence[str]
) -> tuple[ResolvedRecipe, list[str]]:
    """Return the recipe of a run with changed keys, and a note of each change.

    The changes are written into `provenance.json` first, and then into `config.yaml`.

    Raises:
        ConfigError: The run can't continue with a change.
    """
    config = load_config(directory.config)
    if not overrides:
        return ResolvedRecipe(config), []
    resolved_recipe = resolve_passes(load_changed_config(directory.config, overrides, run=place))
    changes = list_changes(config, resolved_recipe.config)
    if not changes:
        return ResolvedRecipe(config), []
    checkpoint = next(iter(store.list_complete()), None)
    step, finished = (
        (0, 0) if checkpoint is None else (checkpoint.step, len(checkpoint.meta["summaries"]))
    )
    check_changes(changes, resolved_recipe.config, step=step, n_finished_stages=finished, run=place)
    try:
        record_changes(
            directory.provenance,
            after_step=step,
            changes=[change.as_json() for change in changes],
        )
    except OSError as error:
        raise RunDirectoryError(f"{directory.provenance} can't be written: {error}") from error
    directory.replace_config(dump_plain(resolved_recipe.config))
    return resolved_recipe, [f"changed after step {step}: {change}" for change in changes]


def _run(directory: RunDirectory, make_session: Callable[[], TrainingSession]) -> int:
    """Run a session, and return its exit status. Errors of the disk name the run directory."""
    try:
        return run_event_loop(make_session().run())
    except SecondSignal as second:  # the run stops at once, without saving
        return 128 + second.number
    except OSError as error:
        place = directory.path
        name = error.filename
        # Errors of writes to an open file have no file name.
        is_here = isinstance(name, str | bytes) and Path(os.fsdecode(name)).is_relative_to(place)
        if not is_here and (name is not None or error.errno not in DISK_ERRORS):
            raise
        raise RunDirectoryError(
            f"{place} can't be used: {error}. Fix this, then continue with --resume"
        ) from error
