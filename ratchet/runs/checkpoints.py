"""Checkpoints that are either whole or not there, whatever kills the process, and that are checked
before they are used.

A save writes into `.tmp-<step>-<id>`, lists every file with its size and SHA-256 in
`manifest.json`, flushes files and directories, renames to `step-<step>`, and only then prunes older
ones (renamed to `.del-*` first, so that a half-deleted one is never taken for a checkpoint).
Loading walks from the newest to the oldest and takes the first that verifies.

Only the holder of the run directory's lock may save; reading changes nothing, so others may read
meanwhile.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ratchet.checkpoint.manifest import Checkpoint, survives_json, verify, write_manifest
from ratchet.errors import CheckpointError
from ratchet.observe.write_files import sync
from ratchet.utils import failpoints

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{8,})")


class CheckpointStore:
    """The checkpoints under `root`. Nothing is touched before the first save.

    These stay: the newest `keep`, the `keep_best` whose `meta["score"]` is highest (a number;
    without one it is none of them), and those whose step is a multiple of `keep_every` (0: none).
    held: steps that stay for now, as somebody reads them.
    """

    def __init__(
        self, root: Path, keep: int = 2, *, keep_best: int = 0, keep_every: int = 0
    ) -> None:
        assert keep >= 1, keep
        self.root = root
        self.keep, self.keep_best, self.keep_every = keep, keep_best, keep_every
        self.held: frozenset[int] = frozenset()
        self._rejected: set[Path] = set()
        self._present: list[int] = []  # steps that had a checkpoint after the last `tidy`

    def save(self, step: int, write: Callable[[Path], None], meta: Mapping[str, Any]) -> Path:
        """Makes the checkpoint of `step` from the files that `write` puts into the directory it is
        given.

        meta: JSON values (no tuples, no integer keys). Raises CheckpointError when it can't be
        written (disk full, ...) or was saved before; the earlier checkpoints are then as they were.
        """
        assert survives_json(dict(meta)), f"{meta} would come back from JSON as something else"
        final = self.root / f"step-{step:08d}"
        draft = self.root / f".tmp-{step}-{uuid.uuid4().hex[:12]}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if lost := sorted(set(self._present).difference(self.steps())):
                logger.warning(
                    "checkpoints of steps %s were deleted from %s by another program",
                    lost,
                    self.root,
                )
            self._sweep()
            self._set_rejected_aside(final)
            draft.mkdir()
            failpoints.point("checkpoint.begin")
            write(draft)
            failpoints.point("checkpoint.after_write")
            write_manifest(draft, step, meta)
            failpoints.point("checkpoint.after_manifest")
            _sync_tree(draft)
            failpoints.point("checkpoint.after_sync")
            draft.rename(final)
            failpoints.point("checkpoint.after_rename")
            sync(self.root)
            failpoints.point("checkpoint.published")
        # safetensors reports a full disk as its own error
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self.root}: {error}"
            ) from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)  # gone already once it has its final name
        self.tidy()  # the new checkpoint is safe, whatever becomes of the old ones
        return final

    def tidy(self) -> None:
        """Removes what a process that was killed while it saved left behind: drafts, what was half
        deleted, and what it had not yet pruned. For the holder of the lock, after `latest`, whose
        rejections stay. A disk that fails is only logged."""
        try:
            self._sweep()
            self._prune()
            self._present = self.steps()
        except OSError as error:  # the next save tries again
            logger.warning("an old checkpoint in %s can't be deleted: %s", self.root, error)

    def latest(self) -> Checkpoint | None:
        """The newest one that verifies; None where there is none at all. What doesn't verify is
        logged, and left alone.

        Raises CheckpointError when there are checkpoints and all are damaged: a run never silently
        starts again at 0.
        """
        self._rejected = set()
        for step, path in self._newest_first():
            try:
                return verify(path, step)
            except CheckpointError as rejection:
                logger.warning("checkpoint rejected: %s", rejection)
                self._rejected.add(path)
        damaged = sorted(path.name for path in (*self._rejected, *self.root.glob("rejected-*")))
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self.root} are damaged ({', '.join(damaged)}; the log has "
                "each reason): "
                "restore one from a backup, or start anew with another --run-dir"
            )
        return None

    def load(self, step: int) -> Checkpoint:
        """The checkpoint of `step`. Raises CheckpointError where it is absent or damaged."""
        found = dict(self._newest_first())
        if step not in found:
            raise CheckpointError(
                f"no checkpoint of step {step} in {self.root}: it has {sorted(found) or 'none'}"
            )
        return verify(found[step], step)

    def best(self, *, first: int = 0) -> Checkpoint | None:
        """That with the highest score among those of step `first` and later; of equal ones the
        newest; None where none has a score. Raises CheckpointError where it is damaged."""
        whole = [
            verify(path, step, contents=False)
            for step, path in self._newest_first()
            if step >= first
        ]
        found = best_first(whole)
        return self.load(found[0].step) if found else None

    def steps(self) -> list[int]:
        """The steps that have a checkpoint, verified or not, in increasing order."""
        return sorted(step for step, _ in self._newest_first())

    def _newest_first(self) -> Iterator[tuple[int, Path]]:
        names = [path.name for path in self.root.iterdir()] if self.root.is_dir() else []
        steps = {int(match[1]): name for name in names if (match := STEP.fullmatch(name))}
        for step in sorted(steps, reverse=True):
            yield step, self.root / steps[step]

    def _sweep(self) -> None:
        """Removes what an earlier process, killed while it saved or pruned, left behind."""
        for path in (*self.root.glob(".tmp-*"), *self.root.glob(".del-*")):
            shutil.rmtree(path)

    def _set_rejected_aside(self, final: Path) -> None:
        """Renames what didn't verify, so that it is neither pruned nor in the way of a new
        checkpoint of its step."""
        if final.is_symlink() or final.exists():
            try:
                verify(final, _step_of(final))
            except CheckpointError:
                self._rejected.add(final)
            else:
                raise CheckpointError(f"{final} was saved before: a step has one checkpoint")
        for path in filter(os.path.lexists, self._rejected):
            path.rename(self.root / f"rejected-{_step_of(path):08d}-{uuid.uuid4().hex[:8]}")
        self._rejected = set()

    def _prune(self) -> None:
        for checkpoint in self.surplus():
            doomed = self.root / f".del-{checkpoint.step}-{uuid.uuid4().hex[:12]}"
            checkpoint.path.rename(doomed)
            failpoints.point("checkpoint.prune_renamed")
            shutil.rmtree(doomed)
            failpoints.point("checkpoint.pruned")

    def surplus(self) -> list[Checkpoint]:
        """Whole ones that need not stay."""
        whole = self.whole()
        kept = self.kept(whole) | self.held
        return [checkpoint for checkpoint in whole if checkpoint.step not in kept]

    def whole(self) -> list[Checkpoint]:
        """The newest first. It was hashed before, so sizes are enough here."""
        whole: list[Checkpoint] = []
        for step, path in self._newest_first():
            with suppress(CheckpointError):
                if path not in self._rejected:
                    whole.append(verify(path, step, contents=False))
        return whole

    def kept(self, whole: Sequence[Checkpoint]) -> set[int]:
        """Steps of those that stay; of equal scores the newer one's. whole: the newest first."""
        best = best_first(whole)[: self.keep_best]
        kept = {checkpoint.step for checkpoint in (*whole[: self.keep], *best)}
        return kept | {
            checkpoint.step
            for checkpoint in whole
            if self.keep_every and checkpoint.step % self.keep_every == 0
        }


def best_first(whole: Sequence[Checkpoint]) -> list[Checkpoint]:
    scored = [checkpoint for checkpoint in whole if checkpoint.meta.get("score") is not None]
    return sorted(scored, key=lambda checkpoint: -checkpoint.meta["score"])


def _step_of(path: Path) -> int:
    match = STEP.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _sync_tree(directory: Path) -> None:
    """Files first, then directories from the innermost out: a rename may reach the disk before what
    it names otherwise."""
    paths = sorted(directory.rglob("*"), key=lambda path: (path.is_dir(), -len(path.parts)))
    for path in (*paths, directory):
        sync(path)
