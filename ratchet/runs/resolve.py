"""What commands are pointed at: a place on this machine, or an address, of which they read a copy
in the cache."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from ratchet.errors import CheckpointError, ConfigError, RunDirectoryError
from ratchet.models.load import find_model
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.remote_run import INDEX, Index, MirroredRun, Stored, belongs, name_of
from ratchet.runs.remote_sync import IDENTITY, Mirror, work_copy
from ratchet.runs.run_dir import RunDirectory
from ratchet.utils.object_store import Store, alone, cached, fetch_directory, is_address, unfit

CHECKPOINT = re.compile(r"(.+)/checkpoints/step-(\d{8,})")
WEIGHTS = ("model", "model-ema", "adapter", "base")  # what a run has beside its record

# of the checkpoints there, the newest first
Choose = Callable[[dict[int, Stored]], Sequence[Stored]]


def check_address(address: str) -> None:
    """Raises ConfigError where no run or model can be there."""
    if why := unfit(address):
        raise ConfigError(f"{address} can't hold a run or a model: {why}")


def directory_of(place: str | Path) -> Path:
    """Where a run trains that is called by a path or an address. Raises ConfigError."""
    if not isinstance(place, str) or not is_address(place):
        return Path(place)
    check_address(place)
    return work_copy(place)


def open_run(place: str | Path) -> tuple[RunDirectory, CheckpointStore, Mirror | None]:
    """To train there: its directory on this machine, its checkpoints, and what mirrors them where
    it has an address. Raises ConfigError, DataError, MissingDependency."""
    directory = RunDirectory(directory_of(place))
    store = CheckpointStore(directory.checkpoints)
    mirror = (
        Mirror(place, directory, store) if isinstance(place, str) and is_address(place) else None
    )
    return directory, store, mirror


def here(place: str) -> Path:
    """Raises ConfigError for an address: a command that changes a run, or asks its process, needs
    the run itself."""
    if is_address(place):
        raise ConfigError(
            f"{place} is an address, and this is done where the run trains: give its directory "
            "there"
        )
    return Path(place)


def record_of(place: str | Path, names: Sequence[str] = ()) -> Path:
    """What a run has written down: all but weights, or the files of these names. Raises
    RunDirectoryError, CheckpointError."""
    if not isinstance(place, str) or not is_address(place):
        return Path(place)
    return _copy(place, lambda name: name in names if names else _first(name) not in WEIGHTS)


def runs_at(address: str) -> list[tuple[str, int]]:
    """The run at an address, or those directly below it, each with the bytes of its checkpoints.
    Raises RunDirectoryError where there is none."""
    check_address(address)
    with _said(address):
        entries = Store(address).entries()
    found = (
        [""]
        if INDEX in entries
        else [name.removesuffix(INDEX) for name in entries if _is_index_of_a_run(name)]
    )
    if not found:
        raise RunDirectoryError(
            f"{address} holds no runs ({INDEX}): name one, or the address that they are below"
        )

    def size(below: str) -> int:
        return sum(
            entry.size for name, entry in entries.items() if name.startswith(f"{below}checkpoints/")
        )

    return [(f"{address.rstrip('/')}/{below}".rstrip("/"), size(below)) for below in found]


def _is_index_of_a_run(name: str) -> bool:
    return PurePosixPath(name).name == INDEX and len(PurePosixPath(name).parts) == 2


def replayable(place: str, steps: Sequence[int]) -> Path:
    """With the nearest checkpoint before each of these steps, and what adapters belong to."""
    if not is_address(place):
        return Path(place)

    def choose(whole: dict[int, Stored]) -> Sequence[Stored]:
        nearest = {max((saved for saved in whole if saved < step), default=0) for step in steps}
        return [whole[saved] for saved in sorted(nearest - {0})]

    return _copy(place, lambda name: _first(name) not in WEIGHTS[:-1], choose)


def model_of(place: str, step: int | None = None) -> Path:
    """What the weights of a run, of a checkpoint in it, or of a model directory need. step: of the
    run's checkpoint; None: its trained model. Raises RunDirectoryError, CheckpointError,
    ModelError."""
    if not is_address(place):
        return Path(place)
    check_address(place)
    named = CHECKPOINT.fullmatch(place.rstrip("/"))
    if named is not None and step is None:
        step = int(named[2])
        return model_of(named[1], step) / name_of(step)
    if step is not None:
        return _copy(
            place,
            lambda name: _first(name) in ("config.yaml", "base"),
            lambda whole: [_of_step(place, step, whole)],
        )
    with _said(place):
        index = MirroredRun(place).index()
    if index is None:
        return find_model(place)
    if "model/config.json" not in index.files:
        raise RunDirectoryError(
            f"{place} has no finished model yet: go on with `ratchet train --resume {place}`, or "
            "name a step of a checkpoint"
        )
    return _copy(place, lambda name: _first(name) in ("config.yaml", "model", "adapter"))


def weights_of(place: str) -> Path:
    """As `model_of`, of any form of weights."""
    check_address(place)
    with _said(place):
        return fetch_directory(place) if MirroredRun(place).index() is None else model_of(place)


def _first(name: str) -> str:
    return PurePosixPath(name).parts[0]


def _of_step(address: str, step: int, whole: dict[int, Stored]) -> Stored:
    if step not in whole:
        raise CheckpointError(
            f"no whole checkpoint of step {step} at {address}: it has {sorted(whole) or 'none'}"
        )
    return whole[step]


def _copy(address: str, wanted: Callable[[str], bool], choose: Choose = lambda whole: ()) -> Path:
    """Of the run at an address; what is there already and has the checksum that is listed is not
    fetched again."""
    check_address(address)
    there, directory = MirroredRun(address), cached("copies", address)
    with _said(address), alone(directory):
        index = there.index()
        if index is None:
            raise RunDirectoryError(
                f"{address} holds no run (no {INDEX}): give the address that a run was begun with"
            )
        whole, _ = there.checkpoints()
        chosen = choose(whole)
        _clear(directory, index, set(whole))
        there.fetch_files(index, directory, wanted)
        for stored in chosen:
            there.fetch_checkpoint(stored, directory / "checkpoints")
    return directory


def _clear(directory: Path, index: Index, steps: set[int]) -> None:
    """Removes what is no longer there, or is of the run that was there before."""
    identity = directory / IDENTITY
    if not identity.exists() or identity.read_text(encoding="utf-8") != index.run:
        shutil.rmtree(directory)
        directory.mkdir()
        identity.write_text(index.run, encoding="utf-8")
    for path in list(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if path.is_file() and belongs(name) and name not in index.files:
            path.unlink()
    names = {name_of(step) for step in steps}
    for path in (directory / "checkpoints").glob("*"):
        if path.relative_to(directory).as_posix() not in names:
            shutil.rmtree(path)


@contextmanager
def _said(address: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(f"{address} can't be fetched: {error}") from error
