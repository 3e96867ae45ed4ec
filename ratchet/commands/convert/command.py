"""Run `ratchet convert`, which converts the weights of a model from one form into another.

The new directory is written file by file, beside the target and under a hidden name. An interrupted
conversion continues with the first missing file. A complete one is compared with its source (if
`verify` is true), and then renamed to the target.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.commands.convert.formats import (
    FORMS,
    READABLE,
    Config,
    Record,
    Weights,
    WriteEntry,
    detect_form,
)
from ratchet.commands.convert.merge_lora import with_adapter
from ratchet.commands.convert.verify import TOKENS, sample_logits, why_not
from ratchet.errors import CheckpointError, ConfigError, ModelError
from ratchet.models.load import copy_companions, find_model
from ratchet.models.lora.files import StoredAdapter, load_adapter
from ratchet.models.weights.hf_weights import read_json, summarize_names
from ratchet.runs.run_dir import ADAPTER, MODEL
from ratchet.utils import safe_read
from ratchet.utils.atomic_files import write_json
from ratchet.weight_sync.checksums import checksum

FILE_BYTES = 2**31
# Largest accepted difference of logits, relative to the largest logit. They come from two
# implementations in float32.
TOLERANCE = 1e-4
WORK = ".convert"  # directory of a conversion's notes and lock, inside the one that it writes
Say = Callable[[str], None]


@dataclass(frozen=True)
class StoredModel:
    """A model on disk.

    Attributes:
        beside: The directory of its config.json and tokenizer.
        adapter: An adapter that is merged into its weights when they are read.
    """

    directory: Path
    form: str
    beside: Path
    config: Config
    adapter: StoredAdapter | None = None

    @property
    def runner(self) -> str:
        """Return the form whose implementation computes the logits.

        With an adapter it is "hf", because Megatron reads the files itself, which lack the adapter.
        """
        return self.form if self.adapter is None else "hf"

    def open(self) -> Weights:
        weights = READABLE[self.form].open(self.directory, self.config)
        return weights if self.adapter is None else with_adapter(weights, self.adapter)


@dataclass(frozen=True)
class File:
    """A file to write; its note states that it is complete."""

    path: Path
    entries: tuple[WriteEntry, ...]

    @property
    def note(self) -> Path:
        return self.path.parent / WORK / f"{self.path.name}.json"

    def records(self) -> list[Record] | None:
        """Return the records of the written file; None if it is missing or incomplete."""
        try:
            note = safe_read.read_json(self.note)
            return note["records"] if self.path.stat().st_size == note["size"] else None
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def forget(self) -> None:
        self.note.unlink(missing_ok=True)


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
        source: A model in any form, a run directory with a trained one, or a Hub id.
        config: A Hugging Face directory with the config.json and the tokenizer, if the source has
            none.
        adapter: A directory with an adapter in peft's format, which is merged into the weights.

    Raises ConfigError, CheckpointError or ModelError.
    """
    if to not in FORMS:
        raise ConfigError(f"--to {to} is no form of weights: there are {', '.join(FORMS)}")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{target} exists: give another place, or delete it first")
    stored = find_stored(source, config)
    if adapter is not None:
        stored = replace(stored, adapter=_adapter_for(source, adapter))
    weights = stored.open()
    if weights.left_out:
        say(f"left out: {summarize_names(list(weights.left_out))}")
    work = target.absolute().with_name(f".{target.name}.partial")
    files = _plan(FORMS[to].entries(weights, stored.config), work, FORMS[to].file, file_bytes)
    with _held(work):
        _settle(work, {"to": to, "file_bytes": file_bytes, "source": _fingerprint(stored)})
        records = _write_files(files, FORMS[to].write, say)
        copy_companions(stored.beside, work)
        FORMS[to].finish(work, records, stored.config)
        if verify:
            converted = StoredModel(work, to, work, stored.config)
            _compare_weights(weights, converted, files, source, say)
            _compare_logits(stored, converted, weights, say)
        work.replace(target)
    shutil.rmtree(target / WORK)
    say(
        f"{source} ({stored.form}) -> {target} ({to}): {len(weights.shapes)} weights, files: "
        f"{len(files)}"
    )


def find_stored(source: str, config: Path | None = None) -> StoredModel:
    """Return the model at `source`.

    Raises CheckpointError or ModelError if there is none, or it has no config.json.
    """
    run = (Path(source) / "config.yaml").is_file()
    directory = find_model(Path(source) / MODEL if run else source)
    form, beside = detect_form(directory), config or directory
    if not (beside / "config.json").exists():
        raise ModelError(
            f"{beside} has no config.json: name a Hugging Face directory of this model by --config "
            "DIRECTORY"
        )
    return StoredModel(directory, form, beside, read_json(beside / "config.json"))


def _adapter_for(source: str, adapter: Path) -> StoredAdapter:
    if (Path(source) / "config.yaml").is_file() and (Path(source) / ADAPTER).is_dir():
        raise ConfigError(
            f"{source} trained an adapter, which its {MODEL}/ has already: name the base "
            "(adapter_config.json says which) or "
            "leave out --merge-lora"
        )
    return load_adapter(adapter)


@contextmanager
def _held(work: Path) -> Iterator[None]:
    """Lock the work directory for this process."""
    (work / WORK).mkdir(parents=True, exist_ok=True)
    descriptor = os.open(work / WORK / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CheckpointError(
            f"another process is writing to {work}: wait for it, or end it"
        ) from None
    finally:
        os.close(descriptor)


def _fingerprint(stored: StoredModel) -> dict[str, Any]:
    files = sorted(path for path in stored.directory.iterdir() if path.is_file())
    sizes = {path.name: [path.stat().st_size, path.stat().st_mtime_ns] for path in files}
    states = {
        "directory": str(stored.directory.resolve()),
        "form": stored.form,
        "files": sizes,
        "config": dict(stored.config),
    }
    if stored.adapter is None:
        return states
    weights = {name: checksum(weight) for name, weight in stored.adapter.weights.items()}
    return {**states, "adapter": {"scale": stored.adapter.adapter.lora.scale, "weights": weights}}


def _plan_in(path: Path) -> Any:
    try:
        return safe_read.read_json(path)
    except (OSError, ValueError):  # an incomplete file equals no plan
        return None


def _settle(work: Path, plan: Mapping[str, Any]) -> None:
    """Save the plan, or raise CheckpointError if an interrupted conversion had another one."""
    path = work / WORK / "plan.json"
    if not path.exists():
        write_json(path, plan)
    elif _plan_in(path) != json.loads(json.dumps(plan)):
        raise CheckpointError(
            f"{work} was begun from another source or adapter, with another --to, or the source "
            "has changed since: delete it "
            "to begin anew"
        )


def _plan(
    entries: Iterator[WriteEntry], work: Path, name: Callable[[int, int], str], file_bytes: int
) -> list[File]:
    """Put as many entries into each file as fit into `file_bytes`, in their order."""
    runs: list[list[WriteEntry]] = []
    room = 0
    for entry in entries:
        if not runs or entry.bytes > room:
            runs.append([])
            room = file_bytes
        runs[-1].append(entry)
        room -= entry.bytes
    return [File(work / name(number, len(runs)), tuple(run)) for number, run in enumerate(runs)]


def _write_files(
    files: Sequence[File], write: Callable[[Path, Sequence[WriteEntry]], list[Record]], say: Say
) -> list[Record]:
    written: list[Record] = []
    there = [file.records() for file in files]
    if any(there):
        say(
            f"going on: {sum(records is not None for records in there)} of {len(files)} files are "
            "there"
        )
    for file, records in zip(files, there, strict=True):
        if records is None:
            records = write(file.path, file.entries)
            write_json(file.note, {"size": file.path.stat().st_size, "records": records})
        written += records
    return written


def _compare_weights(
    weights: Weights, made: StoredModel, files: Sequence[File], source: str, say: Say
) -> None:
    """Compare every weight by its checksum.

    The notes of files with a wrong weight are removed, so that the next attempt writes the files
    again.
    """
    copies = made.open()
    wrong = [
        name
        for name in weights.shapes
        if name not in copies.shapes or not _same(weights, copies, name)
    ]
    if not wrong:
        say(f"compared: all {len(weights.shapes)} weights have the checksums of the source")
        return
    for file in files:
        if any(name in wrong for entry in file.entries for name in entry.weights):
            file.forget()
    raise CheckpointError(
        f"{len(wrong)} weights in {made.directory} are not those of {source}: "
        f"{summarize_names(wrong)}; "
        "repeat the command, which writes "
        "their files again"
    )


def _compare_logits(stored: StoredModel, made: StoredModel, weights: Weights, say: Say) -> None:
    if reason := why_not(weights, stored.config, (stored.runner, made.runner)):
        say(f"logits not compared: {reason}")
        return
    before, after = (
        sample_logits(x.runner, x.directory, x.open(), x.config) for x in (stored, made)
    )
    largest = float((after - before).abs().max())
    say(f"logits of {TOKENS} tokens, vocabulary {before.shape[1]}: max difference {largest:.1e}")
    if largest > TOLERANCE * max(1.0, float(before.abs().max())):
        raise CheckpointError(
            f"the logits of {made.directory} differ by up to {largest:.1e}, though its weights are "
            "the same"
        )


def _same(weights: Weights, copies: Weights, name: str) -> bool:
    expected = checksum(weights.whole(name).contiguous())
    try:
        copy = copies.whole(name)
    except (CheckpointError, ModelError):
        return False
    return copy.dtype == weights.dtypes[name] and checksum(copy.contiguous()) == expected
