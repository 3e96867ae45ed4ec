"""Write each step's groups and the learner's columns as Parquet files that any Arrow tool reads.

A thread beside training does the work. Where this process trains on its processors, the tables are
built between steps and only written in the thread: two threads that run Python code slow each other
down by more. Files are named by their steps, hold nothing that depends on the clock, and end at
every checkpoint. So a run that was killed and resumed has the same bytes as one that was not.
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
from ratchet.observe.records.reader import INDEX, RecordFile, StepFacts, file_digest, read_index
from ratchet.observe.records.schema import LEARNED, SCHEMA
from ratchet.observe.records.table import build_table
from ratchet.observe.sinks import SINK_ERRORS
from ratchet.observe.write_files import open_unshared, replace_text, sync
from ratchet.protocols import Fingerprinted
from ratchet.types import Group
from ratchet.utils import failpoints

log = logging.getLogger(__name__)

# Of a file: the fewer files, the sooner a record is open; tokens and bytes of media lie in memory
# meanwhile.
MOST_STEPS, MOST_TOKENS, MOST_MEDIA = 32, 2**22, 2**28
# of a disk, or of what an environment measures
FAULTS = (*SINK_ERRORS, DataError, TypeError, ArithmeticError)
BEHIND = 2  # steps that the thread may lie behind training, which then waits
FLOATS = [name for name, kind in LEARNED.items() if name != "trained"] + [
    "rollout_logprobs",
    "log_kept_mass",
]
WORDS = [name for name in SCHEMA.names if name not in FLOATS]
FORMAT: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": WORDS,
    "write_statistics": ["step"],
}


class Recorder:
    """The writer of a run's record. A disk that fails ends the record with one warning, and never
    the run.

    keep_through: the step that the run continues after; later records are removed. seed: of the
    choice of groups, where not all are kept. beside: True if tables are also built in the thread.
    """

    def __init__(
        self,
        config: RecordConfig,
        directory: Path,
        *,
        seed: int,
        keep_through: int = 0,
        beside: bool = True,
    ) -> None:
        self.config, self.directory, self.seed, self.beside = config, directory, seed, beside
        self.files: list[RecordFile] = []
        self._tables: list[pa.Table] = []  # of the file in progress, as are the next three
        self._facts: list[StepFacts] = []
        self._media: dict[str, bytes] = {}
        self._tokens = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="recorder")
        self._running: deque[Future[None]] = deque()
        self._on = config.every > 0
        if directory.exists() or self._on:
            self._guarded(lambda: self._take_up(keep_through))

    def add(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        weights: Callable[[Batch], Tensor],
        roles: Mapping[str, Any],
    ) -> None:
        """Record one step.

        Args:
            step: As in metrics.jsonl.
            batch: With all its columns.
            weights: Returns the weight of each token in the policy's loss, [T].
            roles: The learners, as they are after the step.
        """
        if not self._on or step % self.config.every:
            return
        # Now, and not in the thread: the next step changes them.
        prints = {
            name: role.fingerprint()
            for name, role in roles.items()
            if isinstance(role, Fingerprinted)
        }
        self._do(lambda: self._take(step, stage, groups, batch, weights, prints))

    def flush(self) -> None:
        """Return when all that was added is on disk. Called before a checkpoint, so that a resumed
        run finds a whole record."""
        failpoints.point("record.flush")
        if self._on:
            self._do(self._end_file)
            self._wait(0)

    def close(self) -> None:
        self.flush()
        self._thread.shutdown()

    # --- training's side

    def _do(self, job: Callable[[], None]) -> None:
        """Run a job that is mostly Python code."""
        self._submit(job) if self.beside else self._guarded(job)

    def _submit(self, job: Callable[[], None]) -> None:
        self._running.append(self._thread.submit(job))
        self._wait(BEHIND)

    def _wait(self, left: int) -> None:
        while len(self._running) > left or (self._running and self._running[0].done()):
            self._guarded(self._running.popleft().result)

    def _guarded(self, job: Callable[[], Any]) -> None:
        try:
            job()
        except FAULTS as error:
            if self._on:
                log.warning("steps are no longer recorded in %s: %s", self.directory, error)
            self._on = False

    # --- the thread's side, where there is one

    def _take(
        self,
        step: int,
        stage: str,
        groups: Sequence[Group],
        batch: Batch,
        weights: Callable[[Batch], Tensor],
        prints: Mapping[str, str],
    ) -> None:
        chosen = self._choose(step, len(groups))
        table = build_table(step, stage, groups, batch, weights(batch).numpy(), chosen=chosen)
        self._tables.append(table)
        self._media |= collect_sources(groups, chosen)
        self._facts.append(
            StepFacts(step, stage, table.num_rows, len(chosen), len(groups), dict(prints))
        )
        self._tokens += sum(len(row) for at in chosen for row in groups[at].trajectories)
        if (
            len(self._tables) >= MOST_STEPS
            or self._tokens >= MOST_TOKENS
            or sum(map(len, self._media.values())) >= MOST_MEDIA
        ):
            self._end_file()

    def _choose(self, step: int, drawn: int) -> Sequence[int]:
        """Return the groups to keep, a function of seed and step, so that a replayed step keeps the
        same."""
        limit = self.config.groups
        if limit is None or limit >= drawn:
            return range(drawn)
        return sorted(random.Random(f"{self.seed}/{step}").sample(range(drawn), limit))

    def _end_file(self) -> None:
        if self._tables:
            write = partial(
                self._write, pa.concat_tables(self._tables), tuple(self._facts), self._media
            )
            self._tables, self._facts, self._media, self._tokens = [], [], {}, 0
            write() if self.beside else self._submit(write)

    def _write(
        self, table: pa.Table, facts: tuple[StepFacts, ...], media_by_name: Mapping[str, bytes]
    ) -> None:
        """Write the tables as one file of one row group, after the file of their media."""
        path = self.directory / f"{facts[0].step:08d}-{facts[-1].step:08d}.parquet"
        media: tuple[int, str] = (0, "")
        if media_by_name:
            (self.directory / MEDIA).mkdir(exist_ok=True)
            media = _written(
                self.directory / MEDIA / path.name, lambda draft: write_media(draft, media_by_name)
            )
        size, digest = _written(path, lambda draft: _write_table(draft, table))
        self.files.append(RecordFile(path.name, size, digest, facts, *media))
        self._append(self.files[-1])
        self._prune()

    def _append(self, file: RecordFile) -> None:
        descriptor = open_unshared(self.directory / INDEX, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        try:
            os.write(descriptor, file.line().encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _prune(self) -> None:
        """Remove the oldest files of a record that exceeds its limit; the newest always stays."""
        limit_bytes = self.config.max_gib * 2**30
        doomed = []
        while (
            len(self.files) > 1
            and sum(file.size + file.media_size for file in self.files) > limit_bytes
        ):
            doomed.append(self.files.pop(0))
        if doomed:
            self._write_index()
            for file in doomed:
                (self.directory / file.name).unlink(missing_ok=True)
                (self.directory / MEDIA / file.name).unlink(missing_ok=True)

    def _write_index(self) -> None:
        replace_text(self.directory / INDEX, "".join(file.line() for file in self.files))

    def _take_up(self, keep_through: int) -> None:
        """Continue after a step: remove later files and files that no line of the index names."""
        self.directory.mkdir(parents=True, exist_ok=True)
        # Files end where checkpoints are, so none has steps on both sides.
        self.files = [
            file for file in read_index(self.directory) if file.steps[-1].step <= keep_through
        ]
        self._write_index()
        _clear(self.directory, {file.name for file in self.files})
        if (self.directory / MEDIA).is_dir():
            _clear(self.directory / MEDIA, {file.name for file in self.files if file.media_size})


def _written(path: Path, write: Callable[[Path], None]) -> tuple[int, str]:
    """Write a draft that takes its name when complete. Return its size and SHA-256."""
    draft = path.with_name(f".{path.name}.partial")
    write(draft)
    sync(draft)
    draft.rename(path)
    return path.stat().st_size, file_digest(path)


def _write_table(path: Path, table: pa.Table) -> None:
    with pq.ParquetWriter(path, SCHEMA, **FORMAT) as writer:
        writer.write_table(table, row_group_size=max(table.num_rows, 1))


def _clear(directory: Path, known: Set[str]) -> None:
    """Remove files that no line of the index names."""
    for path in directory.iterdir():
        if path.name not in known and path.suffix in (".parquet", ".partial"):
            path.unlink()
