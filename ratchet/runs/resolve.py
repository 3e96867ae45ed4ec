"""Resolve the RUN argument of commands, which is a local path or an address.

A run at an address is copied to the cache.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ratchet.errors import CheckpointError, ConfigError, RunDirectoryError, RunNotFound
from ratchet.models.load import find_model
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.remote_run import (
    INDEX,
    MirroredRun,
    MirrorIndex,
    RemoteCheckpoint,
    get_checkpoint_name,
    is_mirrored,
)
from ratchet.runs.remote_sync import IDENTITY, Mirror, get_mirror_work_dir
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.object_store import (
    Store,
    explain_bad_address,
    fetch_directory,
    get_cached_path,
    is_address,
    lock_cache_dir,
)

CHECKPOINT = re.compile(r"(.+)/checkpoints/step-(\d{8,})")
# The folders of a run directory that hold weights. The other entries are the run's record.
TRAINED_WEIGHTS = ("model", "model-ema", "adapter")
START_WEIGHTS = "base"
WEIGHT_ENTRIES = (*TRAINED_WEIGHTS, START_WEIGHTS)

# (a run's complete checkpoints by step, newest first) -> the checkpoints to fetch
SelectCheckpoints = Callable[[dict[int, RemoteCheckpoint]], Sequence[RemoteCheckpoint]]


def check_address(address: str) -> None:
    """Raise ConfigError if no run or model can be at the address."""
    if problem := explain_bad_address(address):
        raise ConfigError(f"{address} can't hold a run or a model: {problem}")


def resolve_run_dir(location: str | Path) -> Path:
    """Return the local directory in which the run at a path or address trains.

    Raises:
        ConfigError: No run can be at the address.
    """
    if not isinstance(location, str) or not is_address(location):
        return Path(location)
    check_address(location)
    return get_mirror_work_dir(location)


def open_run(location: str | Path) -> tuple[RunDirectory, CheckpointStore, Mirror | None]:
    """Open a run for training.

    Returns:
        Its local directory, its checkpoints, and its mirror if `location` is an address.

    Raises:
        ConfigError, DataError, MissingDependency: The address can't be used.
    """
    directory = RunDirectory(resolve_run_dir(location))
    store = CheckpointStore(directory.checkpoints)
    mirror = (
        Mirror(location, directory, store)
        if isinstance(location, str) and is_address(location)
        else None
    )
    return directory, store, mirror


def require_local_run(location: str) -> Path:
    """Return the path of a local run.

    Raises:
        ConfigError: `location` is an address. Commands that change a run or query its process need
            the directory in which it trains.
    """
    if is_address(location):
        raise ConfigError(
            f"{location} is an address, and this command needs the directory in which the run "
            "trains. Give that directory, on the machine of the run"
        )
    return Path(location)


def fetch_run_record(location: str | Path, names: Sequence[str] = ()) -> Path:
    """Return a local directory with the record of a run: everything but weights.

    Args:
        location: A path or an address.
        names: Fetch only these files; empty fetches all.

    Raises:
        RunDirectoryError, CheckpointError: The run can't be fetched.
    """
    if not isinstance(location, str) or not is_address(location):
        return Path(location)
    return _copy_to_cache(
        location,
        lambda name: name in names if names else _get_first_part(name) not in WEIGHT_ENTRIES,
    )


def list_runs_at(address: str) -> list[tuple[str, int]]:
    """Return the address of each run at or directly below `address`, and its checkpoints' bytes.

    Raises:
        RunDirectoryError: The address holds no run.
    """
    check_address(address)
    with _translate_os_errors(address):
        entries = Store(address).entries()
    prefixes = (
        [""]
        if INDEX in entries
        else [name.removesuffix(INDEX) for name in entries if _is_index_below(name)]
    )
    if not prefixes:
        raise RunNotFound(
            f"{address} holds no runs (no {INDEX}). Give the address of a run, or of a folder of "
            "runs"
        )

    def sum_checkpoint_bytes(prefix: str) -> int:
        return sum(
            entry.size
            for name, entry in entries.items()
            if name.startswith(f"{prefix}checkpoints/")
        )

    return [
        (f"{address.rstrip('/')}/{prefix}".rstrip("/"), sum_checkpoint_bytes(prefix))
        for prefix in prefixes
    ]


def _is_index_below(name: str) -> bool:
    """True if `name` is the index of a run directly below the address."""
    return PurePosixPath(name).name == INDEX and len(PurePosixPath(name).parts) == 2


def fetch_run_for_replay(location: str, steps: Sequence[int]) -> Path:
    """Return a local directory with the files that a replay of `steps` needs.

    They are the run's record, the last checkpoint before each step, and the base model of the
    run's adapters.
    """
    if not is_address(location):
        return Path(location)

    def select_checkpoints(checkpoints: dict[int, RemoteCheckpoint]) -> Sequence[RemoteCheckpoint]:
        nearest = {
            max((saved_step for saved_step in checkpoints if saved_step < step), default=0)
            for step in steps
        }
        return [checkpoints[saved_step] for saved_step in sorted(nearest - {0})]

    return _copy_to_cache(
        location, lambda name: _get_first_part(name) not in TRAINED_WEIGHTS, select_checkpoints
    )


def fetch_run_model(location: str, step: int | None = None) -> Path:
    """Return a local directory with the weights of a run, of a checkpoint in it, or of a model.

    Args:
        location: A path or an address.
        step: The step of the run's checkpoint; None takes its trained model.

    Raises:
        RunDirectoryError, CheckpointError, ModelError: The weights can't be fetched.
    """
    if not is_address(location):
        return Path(location)
    check_address(location)
    checkpoint = CHECKPOINT.fullmatch(location.rstrip("/"))
    if checkpoint is not None and step is None:
        step = int(checkpoint[2])
        return fetch_run_model(checkpoint[1], step) / get_checkpoint_name(step)
    if step is not None:
        return _copy_to_cache(
            location,
            lambda name: _get_first_part(name) in ("config.yaml", "base"),
            lambda checkpoints: [_select_step(location, step, checkpoints)],
        )
    with _translate_os_errors(location):
        index = MirroredRun(location).read_index()
    if index is None:
        return find_model(location)
    if "model/config.json" not in index.files:
        raise RunDirectoryError(
            f"{location} has no finished model yet. Continue with `ratchet train --resume "
            f"{location}`, or give the step of a checkpoint"
        )
    return _copy_to_cache(
        location, lambda name: _get_first_part(name) in ("config.yaml", "model", "adapter")
    )


def fetch_weights(location: str) -> Path:
    """Return a local directory with the final weights of the run at an address.

    If the address holds no run, return a copy of the whole directory, with weights of any format.
    """
    check_address(location)
    with _translate_os_errors(location):
        return (
            fetch_directory(location)
            if MirroredRun(location).read_index() is None
            else fetch_run_model(location)
        )


def _get_first_part(name: str) -> str:
    """Return the first component of a path."""
    return PurePosixPath(name).parts[0]


def _select_step(
    address: str, step: int, checkpoints: dict[int, RemoteCheckpoint]
) -> RemoteCheckpoint:
    if step not in checkpoints:
        raise CheckpointError(
            f"no complete checkpoint of step {step} at {address}: it has "
            f"{sorted(checkpoints) or 'none'}"
        )
    return checkpoints[step]


def _copy_to_cache(
    address: str,
    is_selected: Callable[[str], bool],
    select_checkpoints: SelectCheckpoints = lambda checkpoints: (),
) -> Path:
    """Copy a part of the run at an address into the cache, and return the directory.

    Cached files with the listed checksum are not fetched again.

    Args:
        address: The address of the run.
        is_selected: A function that returns True for the names of files to fetch.
        select_checkpoints: A function that returns the checkpoints to fetch.
    """
    check_address(address)
    remote = MirroredRun(address)
    directory = get_cached_path("copies", address)
    with _translate_os_errors(address), lock_cache_dir(directory):
        index = remote.read_index()
        if index is None:
            raise RunNotFound(
                f"{address} holds no run (no {INDEX}). Give the address that the run was started "
                "with (--run-dir)"
            )
        checkpoints, _ = remote.list_checkpoints()
        selected = select_checkpoints(checkpoints)
        _remove_stale_files(directory, index, set(checkpoints))
        remote.fetch_files(index, directory, is_selected)
        for checkpoint in selected:
            remote.fetch_checkpoint(checkpoint, directory / "checkpoints")
    return directory


def _remove_stale_files(directory: Path, index: MirrorIndex, steps: set[int]) -> None:
    """Remove local files that belong to another run or are no longer at the address."""
    identity = directory / IDENTITY
    if not identity.exists() or identity.read_text(encoding="utf-8") != index.run:
        shutil.rmtree(directory)
        directory.mkdir()
        identity.write_text(index.run, encoding="utf-8")
    for path in list(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and is_mirrored(name) and name not in index.files:
            path.unlink()
    names = {get_checkpoint_name(step) for step in steps}
    for path in (directory / "checkpoints").glob("*"):
        if path.relative_to(directory).as_posix() not in names:
            shutil.rmtree(path)


@contextmanager
def _translate_os_errors(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{address} can't be fetched: {error}") from error
