"""Run `ratchet convert`, which converts the weights of a model from one format into another.

The new directory is written file by file, beside the target and under a hidden name. An interrupted
conversion continues with the first missing file. A complete conversion is compared with its source
if `verify` is true, and then renamed to the target.
"""

from __future__ import annotations

import fcntl
import filecmp
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.commands.convert.formats import (
    FORMATS,
    READABLE_FORMATS,
    Config,
    Record,
    Weights,
    WriteEntry,
    detect_format,
)
from ratchet.commands.convert.merge_lora import merge_adapter
from ratchet.commands.convert.verify import N_TOKENS, compute_test_logits, explain_missing_logits
from ratchet.errors import CheckpointError, ConfigError, ModelError
from ratchet.models.load import copy_companions, find_model
from ratchet.models.lora.files import WEIGHTS as ADAPTER_WEIGHTS
from ratchet.models.lora.files import StoredAdapter, load_adapter
from ratchet.models.weights.checksums import checksum
from ratchet.models.weights.hf_weights import read_json
from ratchet.observe.progress_bar import show_bar
from ratchet.runs.run_dir import ADAPTER, AVERAGE, MODEL
from ratchet.utils import safe_read
from ratchet.utils.atomic_files import write_json
from ratchet.utils.summarize import summarize_names

FILE_BYTES = 2**31
# Largest accepted difference of logits, relative to the largest logit. The logits may come from two
# implementations, both in float32.
TOLERANCE = 1e-4
# Directory of a conversion's completion markers, plan and lock, inside the output directory.
STATE_DIR = ".convert"
Say = Callable[[str], None]


@dataclass(frozen=True)
class StoredModel:
    """A model on disk."""

    directory: Path
    """The directory of its weights."""
    format: str
    """The format of its weights, a key of READABLE_FORMATS."""
    companion_dir: Path
    """The directory of its config.json and tokenizer."""
    config: Config
    """The content of its config.json."""
    adapter: StoredAdapter | None = None
    """An adapter that is merged into its weights when they are read."""

    @property
    def logits_format(self) -> str:
        """Return the format whose implementation computes the logits (`compute_test_logits`).

        With an adapter it is "hf", because Megatron's implementation reads the weight files itself
        and would miss the merged adapter.
        """
        return self.format if self.adapter is None else "hf"

    def open(self) -> Weights:
        weights = READABLE_FORMATS[self.format].open(self.directory, self.config)
        if self.adapter is None:
            return weights
        return merge_adapter(weights, self.adapter, str(self.config.get("model_type")))


@dataclass(frozen=True)
class OutputFile:
    """A file to write. Its marker is a JSON file that exists once the file is complete."""

    path: Path
    entries: tuple[WriteEntry, ...]

    @property
    def marker(self) -> Path:
        return self.path.parent / STATE_DIR / f"{self.path.name}.json"

    def read_records(self) -> list[Record] | None:
        """Return the descriptions of the tensors in the written file (see `Record`).

        None if the file is missing or incomplete.
        """
        try:
            marker = safe_read.read_json(self.marker)
            return marker["records"] if self.path.stat().st_size == marker["size"] else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def mark_incomplete(self) -> None:
        self.marker.unlink(missing_ok=True)


def convert(
    source: str,
    target: Path,
    *,
    to: str,
    config: Path | None,
    verify: bool,
    say: Say,
    adapter: Path | None = None,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Convert a model.

    Args:
        source: A model in any format, a run directory with a trained model, or a Hub id.
        target: The new directory.
        to: The format of the new weights, a key of FORMATS.
        config: A Hugging Face directory with the config.json and the tokenizer, if the source has
            none.
        verify: True compares all weights, and the logits of a few tokens, with the source.
        say: A function that prints a line.
        adapter: A directory with an adapter in peft's format, which is merged into the weights.
        file_bytes: The maximum size of a file, unless one weight is larger.

    Raises ConfigError, CheckpointError or ModelError.
    """
    if to not in FORMATS:
        raise ConfigError(
            f"--to {to} is not a format of weights: choose one of {', '.join(FORMATS)}"
        )
    _require_free_target(target)
    stored = find_stored_model(source, config)
    if adapter is not None:
        stored = replace(stored, adapter=_load_adapter(source, adapter))
    weights = stored.open()
    if weights.ignored:
        say(f"ignored: {summarize_names(list(weights.ignored))}")
    partial_dir = target.absolute().with_name(f".{target.name}.partial")
    files = _group_entries(
        FORMATS[to].entries(weights, stored.config), partial_dir, FORMATS[to].name_file, file_bytes
    )
    with _lock(partial_dir):
        _require_free_target(target)  # another process may have finished before the lock
        _save_plan(
            partial_dir, {"to": to, "file_bytes": file_bytes, "source": _fingerprint(stored)}
        )
        records = _write_files(files, FORMATS[to].write, say)
        copy_companions(stored.companion_dir, partial_dir)
        FORMATS[to].finish(partial_dir, records, stored.config)
        if verify:
            converted = StoredModel(partial_dir, to, partial_dir, stored.config)
            _compare_weights(weights, converted, files, source, say)
            _compare_logits(stored, converted, weights, say)
        partial_dir.replace(target)
    shutil.rmtree(target / STATE_DIR)
    say(
        f"{source} ({stored.format}) -> {target} ({to}): {len(weights.shapes)} weights, files: "
        f"{len(files)}"
    )


def _require_free_target(target: Path) -> None:
    """Raise ConfigError if the target is a link, a file, or a directory with files."""
    if target.is_symlink():  # a directory can't take the place of a link
        raise ConfigError(f"{target} is a link: give the place that it names, or remove it first")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists: give another place, or delete it first")


def find_stored_model(source: str, config: Path | None = None) -> StoredModel:
    """Return the model at `source`.

    Raises CheckpointError or ModelError if there is none, or it has no config.json.
    """
    is_run = (Path(source) / "config.yaml").is_file()
    directory = find_model(Path(source) / MODEL if is_run else source)
    weight_format = detect_format(directory)
    companion_dir = config or directory
    if not (companion_dir / "config.json").exists():
        raise ModelError(
            f"{companion_dir} has no config.json: name a Hugging Face directory of this model by "
            "--config DIRECTORY"
        )
    content = read_json(companion_dir / "config.json")
    return StoredModel(directory, weight_format, companion_dir, content)


def _load_adapter(source: str, adapter: Path) -> StoredAdapter:
    path = Path(source).resolve()
    run = path.parent if path.name in (MODEL, AVERAGE) else path
    if (run / "config.yaml").is_file():
        check_not_merged(source, run, adapter)
    return load_adapter(adapter)


def check_not_merged(source: str, run: Path, adapter: Path) -> None:
    """Raise ConfigError if `run` trained the adapter, which its model `source` has merged."""
    own_weights, weights = (path / ADAPTER_WEIGHTS for path in (run / ADAPTER, adapter))
    has_both = own_weights.is_file() and weights.is_file()
    if has_both and filecmp.cmp(own_weights, weights, shallow=False):
        raise ConfigError(
            f"{run} trained this adapter, which is merged in {source} already: name the base model "
            "(adapter_config.json has its name), or remove --merge-lora"
        )


@contextmanager
def _lock(partial_dir: Path) -> Iterator[None]:
    """Lock the partial output directory.

    Raises CheckpointError if another process holds the lock, or has just renamed the directory, and
    ConfigError if it holds files of something other than a conversion.
    """
    if (
        partial_dir.exists()
        and any(partial_dir.iterdir())
        and not (partial_dir / STATE_DIR).is_dir()
    ):
        raise ConfigError(
            f"{partial_dir} is needed for this conversion, and holds other files: move them away"
        )
    lock = partial_dir / STATE_DIR / "lock"
    busy = CheckpointError(f"another process is writing to {partial_dir}: wait for it, or end it")
    try:
        lock.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    except FileNotFoundError:  # it was renamed meanwhile
        raise busy from None
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            has_lock = os.path.samestat(os.fstat(descriptor), lock.stat())
        except (BlockingIOError, FileNotFoundError):
            has_lock = False
        if not has_lock:
            raise busy
        yield
    finally:
        os.close(descriptor)


def _fingerprint(stored: StoredModel) -> dict[str, Any]:
    """Return JSON values that identify a model: its files' sizes and times, config and adapter."""
    files = sorted(path for path in stored.directory.iterdir() if path.is_file())
    file_stats = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    fingerprint = {
        "directory": str(stored.directory.resolve()),
        "format": stored.format,
        "files": file_stats,
        "config": dict(stored.config),
    }
    if stored.adapter is None:
        return fingerprint
    weight_checksums = {name: checksum(weight) for name, weight in stored.adapter.weights.items()}
    return {
        **fingerprint,
        "adapter": {"scale": stored.adapter.adapter.lora.scale, "weights": weight_checksums},
    }


def _read_plan(path: Path) -> Any:
    try:
        return safe_read.read_json(path)
    except (OSError, ValueError):  # an incomplete file
        return None


def _save_plan(partial_dir: Path, plan: Mapping[str, Any]) -> None:
    """Save the plan, or raise CheckpointError if an interrupted conversion had another plan."""
    path = partial_dir / STATE_DIR / "plan.json"
    if not path.exists():
        write_json(path, plan)
    elif _read_plan(path) != json.loads(json.dumps(plan)):
        raise CheckpointError(
            f"{partial_dir} belongs to an interrupted conversion with another source, adapter or "
            "--to, or the source has changed since: delete this directory to start again"
        )


def _group_entries(
    entries: Iterator[WriteEntry],
    partial_dir: Path,
    name_file: Callable[[int, int], str],
    file_bytes: int,
) -> list[OutputFile]:
    """Put as many entries into each file as fit into `file_bytes`, in their order."""
    groups: list[list[WriteEntry]] = []
    bytes_left = 0
    for entry in entries:
        if not groups or entry.bytes > bytes_left:
            groups.append([])
            bytes_left = file_bytes
        groups[-1].append(entry)
        bytes_left -= entry.bytes
    return [
        OutputFile(partial_dir / name_file(number, len(groups)), tuple(group))
        for number, group in enumerate(groups)
    ]


def _write_files(
    files: Sequence[OutputFile],
    write: Callable[[Path, Sequence[WriteEntry]], list[Record]],
    say: Say,
) -> list[Record]:
    """Write the files that are not complete yet. Return the records of all files, in order."""
    all_records: list[Record] = []
    existing_records = [file.read_records() for file in files]
    if any(existing_records):
        say(
            f"continuing: {sum(records is not None for records in existing_records)} of "
            f"{len(files)} files are complete"
        )
    with show_bar("files written", len(files)) as advance:
        for file, records in zip(files, existing_records, strict=True):
            if records is None:
                records = write(file.path, file.entries)
                write_json(file.marker, {"size": file.path.stat().st_size, "records": records})
            all_records += records
            advance(1)
    return all_records


def _compare_weights(
    weights: Weights, converted: StoredModel, files: Sequence[OutputFile], source: str, say: Say
) -> None:
    """Compare every weight by its checksum.

    The markers of files with a wrong weight are removed, so that the next attempt writes the files
    again.
    """
    copies = converted.open()
    wrong_names = []
    with show_bar("weights compared", len(weights.shapes)) as advance:
        for name in weights.shapes:
            if name not in copies.shapes or not _is_equal(weights, copies, name):
                wrong_names.append(name)
            advance(1)
    if not wrong_names:
        say(f"compared: all {len(weights.shapes)} weights have the checksums of the source")
        return
    for file in files:
        if any(name in wrong_names for entry in file.entries for name in entry.weights):
            file.mark_incomplete()
    raise CheckpointError(
        f"{len(wrong_names)} weights in {converted.directory} are not those of {source}: "
        f"{summarize_names(wrong_names)}; repeat the command, which writes their files again"
    )


def _compare_logits(
    stored: StoredModel, converted: StoredModel, weights: Weights, say: Say
) -> None:
    """Compare the logits of source and copy, or print why they can't be computed.

    Raises CheckpointError if they differ by more than TOLERANCE.
    """
    if reason := explain_missing_logits(
        weights, stored.config, (stored.logits_format, converted.logits_format)
    ):
        say(f"logits not compared: {reason}")
        return
    source_logits, converted_logits = (
        compute_test_logits(model.logits_format, model.directory, model.open(), model.config)
        for model in (stored, converted)
    )
    max_difference = float((converted_logits - source_logits).abs().max())
    say(
        f"logits of {N_TOKENS} tokens, vocabulary {source_logits.shape[1]}: max difference "
        f"{max_difference:.1e}"
    )
    if max_difference > TOLERANCE * max(1.0, float(source_logits.abs().max())):
        raise CheckpointError(
            f"the logits of {converted.directory} differ by up to {max_difference:.1e}, although "
            "its weights are the same"
        )


def _is_equal(weights: Weights, copies: Weights, name: str) -> bool:
    expected = checksum(weights.read_whole(name).contiguous())
    try:
        copy = copies.read_whole(name)
    except (CheckpointError, ModelError):
        return False
    return copy.dtype == weights.dtypes[name] and checksum(copy.contiguous()) == expected
