"""Write each step's groups and the learner's columns as Parquet files that any Arrow tool reads.

A background thread does the work. If this process trains on the CPU, the thread only writes files,
and the tables are built between steps, because two threads that run Python code would slow each
other down. Files are named by their steps, hold nothing that depends on the clock, and end at every
checkpoint. So a run that was killed and resumed writes the same bytes as an uninterrupted run.
"""

from __future__ import annotations

import logging
import os
import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor

from ratchet.batch import Batch
from ratchet.config.schema import RecordConfig
from ratchet.errors import DataError
from ratchet.observe.records.media import MEDIA, collect_sources, write_media
from ratchet.observe.records.reader import (
    INDEX,
    RECORD_NAME,
    RecordFile,
    StepFacts,
    hash_file,
    read_index,
)
from ratchet.observe.records.schema import LEARNED, SCHEMA
from ratchet.observe.records.table import build_table
from ratchet.observe.sinks import SINK_ERRORS
from ratchet.observe.write_files import open_unshared, replace_text, sync
from ratchet.types import Group
from ratchet.utils import failpoints
from ratchet.utils.summarize import summarize_names

log = logging.getLogger(__name__)

# Limits of one file: steps, tokens, bytes of media. Fewer files make a record faster to open, but
# tokens and media stay in memory until their file is written.
MAX_STEPS, MAX_TOKENS, MAX_MEDIA_BYTES = 32, 2**22, 2**28
# Errors of a disk, or of values that an environment measured: they end the record, not the run.
RECORD_ERRORS = (*SINK_ERRORS, DataError, TypeError, ArithmeticError)
MAX_NAMED = 4  # files that a warning lists
MAX_PENDING_JOBS = 2  # training waits while the thread has more unfinished jobs than this
FLOAT_COLUMNS = [name for name, kind in LEARNED.items() if name != "trained"] + [
    "rollout_logprobs",
    "log_kept_mass",
]
DICTIONARY_COLUMNS = [name for name in SCHEMA.names if name not in FLOAT_COLUMNS]
FORMAT: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": DICTIONARY_COLUMNS,
    "write_statistics": ["step"],
}


class Recorder:
    """The writer of a run's record.

    If the disk fails, the record ends with one warning and the run continues.

    Args:
        seed: Seed of the choice of groups, if not all are kept.
        keep_through: The step that the run continues after; later records are removed.
        in_background: True if the thread also builds the tables.
    """

    def __init__(
        self,
        config: RecordConfig,
        directory: Path,
        *,
        seed: int,
        keep_through: int = 0,
        in_background: bool = True,
    ) -> None:
        self.config = config
        self.directory = directory
        self.seed = seed
        self.in_background = in_background
        self.files: list[RecordFile] = []
        self._index_bytes = 0  # size of the index as it was last written
        # The content of the next file.
        self._tables: list[pa.Table] = []
        self._facts: list[StepFacts] = []
        self._media: dict[str, bytes] = {}
        self._n_tokens = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._pending_jobs: deque[Future[None]] = deque()
        self._is_enabled = config.every > 0
        if directory.exists() or self._is_enabled:
            self._run_guarded(lambda: self._resume(keep_through))

    def add(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        compute_weights: Callable[[Batch], Tensor],
        roles: Mapping[str, Any],
    ) -> None:
        """Record one step.

        Args:
            step: The step's number in metrics.jsonl.
            batch: The step's batch with all its columns.
            compute_weights: Returns the weight of each token in the policy's loss, [T].
            roles: The learners, as they are after the step.
        """
        if not self._is_enabled or step % self.config.every:
            return
        # Computed here and not in the thread, because the next step changes the learners.
        fingerprints = {
            name: fingerprint
            for name, role in roles.items()
            if (fingerprint := role.fingerprint()) is not None
        }
        self._run(lambda: self._add_step(step, stage, groups, batch, compute_weights, fingerprints))

    def flush(self) -> None:
        """Block until all added steps are on disk.

        Called before a checkpoint, so that a resumed run finds a complete record.
        """
        failpoints.point("record.flush")
        if self._is_enabled:
            self._run(self._end_file)
            self._wait(0)

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    # --- in the training thread

    def _run(self, job: Callable[[], None]) -> None:
        """Run a job that is mostly Python code, in the thread if `in_background`, else now."""
        self._submit(job) if self.in_background else self._run_guarded(job)

    def _submit(self, job: Callable[[], None]) -> None:
        self._pending_jobs.append(self._thread.submit(job))
        self._wait(MAX_PENDING_JOBS)

    def _wait(self, max_pending: int) -> None:
        while len(self._pending_jobs) > max_pending or (
            self._pending_jobs and self._pending_jobs[0].done()
        ):
            self._run_guarded(self._pending_jobs.popleft().result)

    def _run_guarded(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except RECORD_ERRORS as error:
            if self._is_enabled:
                log.warning("steps are no longer recorded in %s: %s", self.directory, error)
            self._is_enabled = False

    # --- in the recorder's thread; without `in_background` only `_write` runs there

    def _add_step(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        compute_weights: Callable[[Batch], Tensor],
        fingerprints: Mapping[str, str],
    ) -> None:
        """Add a step's table to the next file. End the file if it has reached a limit."""
        group_indices = self._choose_groups(step, len(groups))
        table = build_table(
            step, stage, groups, batch, compute_weights(batch).numpy(), group_indices=group_indices
        )
        self._tables.append(table)
        self._media |= collect_sources(groups, group_indices)
        self._facts.append(
            StepFacts(
                step, stage, table.num_rows, len(group_indices), len(groups), dict(fingerprints)
            )
        )
        self._n_tokens += sum(
            len(row) for index in group_indices for row in groups[index].trajectories
        )
        if (
            len(self._tables) >= MAX_STEPS
            or self._n_tokens >= MAX_TOKENS
            or sum(map(len, self._media.values())) >= MAX_MEDIA_BYTES
        ):
            self._end_file()

    def _choose_groups(self, step: int, n_groups: int) -> Sequence[int]:
        """Return the indices of the groups to keep.

        They depend on seed and step alone, so a replayed step keeps the same groups.
        """
        limit = self.config.groups
        if limit is None or limit >= n_groups:
            return range(n_groups)
        return sorted(random.Random(f"{self.seed}/{step}").sample(range(n_groups), limit))

    def _end_file(self) -> None:
        if self._tables:
            write = partial(
                self._write, pa.concat_tables(self._tables), tuple(self._facts), self._media
            )
            self._tables = []
            self._facts = []
            self._media = {}
            self._n_tokens = 0
            write() if self.in_background else self._submit(write)

    def _write(
        self, table: pa.Table, facts: tuple[StepFacts, ...], media_by_name: Mapping[str, bytes]
    ) -> None:
        """Write a table as one file of one row group, after the file of its media."""
        path = self.directory / f"{facts[0].step:08d}-{facts[-1].step:08d}.parquet"
        media_size_and_hash: tuple[int, str] = (0, "")
        if media_by_name:
            (self.directory / MEDIA).mkdir(exist_ok=True)
            media_size_and_hash = _write_atomically(
                self.directory / MEDIA / path.name, lambda draft: write_media(draft, media_by_name)
            )
        size, digest = _write_atomically(path, lambda draft: _write_table(draft, table))
        self.files.append(RecordFile(path.name, size, digest, facts, *media_size_and_hash))
        self._append_to_index(self.files[-1])
        self._prune()

    def _append_to_index(self, file: RecordFile) -> None:
        """Append the line of a file; write the index again if another program changed its size."""
        path, line = self.directory / INDEX, file.line().encode()
        descriptor = open_unshared(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            is_whole = os.fstat(descriptor).st_size == self._index_bytes
            if is_whole:
                os.write(descriptor, line)
                os.fsync(descriptor)
                self._index_bytes += len(line)
        finally:
            os.close(descriptor)
        if not is_whole:
            self._write_index()
            log.warning("%s was changed or deleted by another program: it is written again", path)

    @property
    def _limit_bytes(self) -> float:
        return self.config.max_gib * 2**30

    def _prune(self) -> None:
        """Remove the oldest files of a record above `max_gib`; the newest file always stays."""
        removed_files = []
        while (
            len(self.files) > 1
            and sum(file.size + file.media_size for file in self.files) > self._limit_bytes
        ):
            removed_files.append(self.files.pop(0))
        if removed_files:
            self._write_index()
            for file in removed_files:
                (self.directory / file.name).unlink(missing_ok=True)
                (self.directory / MEDIA / file.name).unlink(missing_ok=True)

    def _write_index(self) -> None:
        text = "".join(file.line() for file in self.files)
        replace_text(self.directory / INDEX, text)
        self._index_bytes = len(text.encode())

    def _resume(self, keep_through: int) -> None:
        """Continue after step `keep_through`: remove later files, and those of a killed process."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # Files end at checkpoints, so no file has steps from both sides of a checkpoint.
        self.files = [
            file for file in read_index(self.directory) if file.steps[-1].step <= keep_through
        ]
        self._write_index()
        # A killed process leaves files of later steps, or earlier ones that it was pruning. All
        # other files that the index lacks were in lines that another program removed.
        total_bytes = sum(path.stat().st_size for path in self.directory.rglob("*.parquet"))
        was_pruning = self.files and total_bytes > self._limit_bytes
        first_step = self.files[0].steps[0].step if was_pruning else 0
        lost_steps = range(first_step, keep_through + 1)
        unlisted = _remove_unknown(self.directory, {file.name for file in self.files}, lost_steps)
        if unlisted:
            log.warning(
                "%s has lost its lines of %s: these files stay, but can't be shown or replayed. "
                "Restore %s from a backup",
                self.directory / INDEX,
                summarize_names(unlisted, MAX_NAMED),
                INDEX,
            )
        if (self.directory / MEDIA).is_dir():
            media_names = {file.name for file in self.files if file.media_size}
            _remove_unknown(self.directory / MEDIA, media_names, lost_steps)


def _write_atomically(path: Path, write: Callable[[Path], None]) -> tuple[int, str]:
    """Write a file as a draft, rename it when complete, and return its size and SHA-256."""
    draft = path.with_name(f".{path.name}.partial")
    write(draft)
    sync(draft)
    draft.rename(path)
    return path.stat().st_size, hash_file(path)


def _write_table(path: Path, table: pa.Table) -> None:
    with pq.ParquetWriter(path, SCHEMA, **FORMAT) as writer:
        writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _remove_unknown(directory: Path, known_names: Set[str], lost_steps: range) -> list[str]:
    """Remove record files and drafts whose names are not in `known_names`.

    Other files belong to the user, who may keep a table of their own beside the record. Files whose
    last step is in `lost_steps` stay too, except drafts.

    Returns:
        The names of these, sorted.
    """
    lost_names = []
    for path in directory.iterdir():
        # A draft is named `.NAME.partial`.
        name = path.name.removeprefix(".").removesuffix(".partial")
        if path.name in known_names or not RECORD_NAME.fullmatch(name):
            continue
        if path.name == name and int(Path(name).stem.rpartition("-")[2]) in lost_steps:
            lost_names.append(name)
        else:
            path.unlink()
    return sorted(lost_names)
