"""Save, verify and prune checkpoints; a checkpoint is either complete or absent.

A save takes four steps, so that a process killed at any moment leaves no partial checkpoint:

1. It writes the files into `.tmp-<step>-<id>`.
2. It lists every file with its size and SHA-256 in `manifest.json` and flushes files and
directories.
3. It renames the directory to `step-<step>`.
4. It prunes older checkpoints. A checkpoint is renamed to `.del-*` before its files are deleted, so
that a partly deleted checkpoint is never loaded.

Loading walks from the newest checkpoint to the oldest and takes the first that verifies.

Only the process that holds the run directory's lock may save. Reading changes nothing, so other
processes may read at the same time.
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

from ratchet.checkpoint.manifest import (
    Checkpoint,
    is_json_value,
    replace_manifest_meta,
    verify_checkpoint,
    write_manifest,
)
from ratchet.errors import CheckpointError, CheckpointNotFound
from ratchet.observe.write_files import sync
from ratchet.utils import failpoints

logger = logging.getLogger(__name__)

STEP = re.compile(r"step-(\d{8,})")
# Drafts, and checkpoints that are being deleted. Other hidden entries belong to the user.
LEFTOVER = re.compile(r"\.(tmp|del)-\d+-[0-9a-f]+")


class CheckpointStore:
    """The checkpoints under `root`. Nothing is written before the first save.

    Pruning keeps each checkpoint that `keep`, `keep_best` or `keep_every` selects.

    Args:
        keep: Number of newest checkpoints to keep.
        keep_best: Number of checkpoints with the highest `meta["score"]` to keep; those without a
            score are never among them.
        keep_every: Keep every checkpoint whose step is a multiple of this; 0 turns the rule off.

    Attributes:
        protected_steps: Steps that are not pruned for now because another thread reads them.
    """

    def __init__(
        self, root: Path, keep: int = 2, *, keep_best: int = 0, keep_every: int = 0
    ) -> None:
        assert keep >= 1, keep
        self.root = root
        self.keep = keep
        self.keep_best = keep_best
        self.keep_every = keep_every
        self.protected_steps: frozenset[int] = frozenset()
        self._rejected: set[Path] = set()  # checkpoints that did not verify
        self._known_steps: list[int] = []  # steps with a checkpoint after the last `tidy`

    def save(self, step: int, write: Callable[[Path], None], meta: Mapping[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its directory.

        Args:
            step: The step that the checkpoint belongs to.
            write: A function that writes the files into the directory that it is given.
            meta: JSON values, without tuples and integer keys.

        Raises:
            CheckpointError: The checkpoint can't be written (disk full, ...) or was saved before.
                Earlier checkpoints are unchanged.
        """
        assert is_json_value(dict(meta)), f"{meta} would change in a round trip through JSON"
        final = self.root / f"step-{step:08d}"
        draft = self.root / f".tmp-{step}-{uuid.uuid4().hex[:12]}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            if deleted_steps := sorted(set(self._known_steps).difference(self.steps())):
                logger.warning(
                    "checkpoints of steps %s were deleted from %s by another program",
                    deleted_steps,
                    self.root,
                )
            self._remove_drafts()
            self._rename_rejected(final)
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
        except OSError as error:
            raise CheckpointError(
                f"the checkpoint of step {step} can't be written to {self.root}: {error}"
            ) from error
        finally:
            # After the rename the draft no longer exists.
            shutil.rmtree(draft, ignore_errors=True)
        # Prune only now that the new checkpoint is on disk.
        self.tidy()
        return final

    def replace_meta(self, step: int, meta: Mapping[str, Any]) -> None:
        """Replace the metadata of a checkpoint, which stays whole if the process is killed.

        Raises:
            CheckpointError: The checkpoint is absent or can't be written.
        """
        assert is_json_value(dict(meta)), f"{meta} would change in a round trip through JSON"
        final = self.root / f"step-{step:08d}"
        # The draft is beside the checkpoint, not in it: a file that the manifest does not list
        # makes a checkpoint invalid.
        draft = self.root / f".tmp-{step}-{uuid.uuid4().hex[:12]}"
        try:
            draft.mkdir()
            replace_manifest_meta(final, step, meta, draft)
            sync(final)
        except OSError as error:
            raise CheckpointError(f"{final} can't be written: {error}") from error
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def tidy(self) -> None:
        """Prune, and remove the drafts and partly deleted checkpoints of a killed process.

        Only the holder of the lock may call this, and only after `latest`: that call finds the
        damaged checkpoints, which pruning neither counts nor removes. Disk errors are logged, not
        raised.
        """
        try:
            self._remove_drafts()
            self._prune()
            self._known_steps = self.steps()
        except OSError as error:  # the next save tries again
            logger.warning("an old checkpoint in %s can't be deleted: %s", self.root, error)

    def latest(self) -> Checkpoint | None:
        """Return the newest checkpoint that verifies, or None if there is none at all.

        A checkpoint that does not verify is logged and left in place.

        Raises:
            CheckpointError: There are checkpoints and all are damaged. A run must not silently
                restart at step 0.
        """
        self._rejected = set()
        reasons: list[str] = []
        for step, path in self._iter_newest_first():
            try:
                return verify_checkpoint(path, step)
            except CheckpointError as rejection:
                logger.warning("checkpoint rejected: %s", rejection)
                self._rejected.add(path)
                reasons.append(str(rejection))
        damaged = sorted(path.name for path in (*self._rejected, *self.root.glob("rejected-*")))
        if damaged:
            raise CheckpointError(
                f"all checkpoints in {self.root} are damaged ({', '.join(damaged)}). "
                f"{f'The newest: {reasons[0]}. ' if reasons else ''}"
                "Restore one from a backup, or start anew with another --run-dir"
            )
        return None

    def load(self, step: int) -> Checkpoint:
        """Return the checkpoint of `step`.

        Raises:
            CheckpointNotFound: There is no checkpoint of that step.
            CheckpointError: The checkpoint is damaged.
        """
        paths = dict(self._iter_newest_first())
        if step not in paths:
            raise CheckpointNotFound(
                f"no checkpoint of step {step} in {self.root}: it has {sorted(paths) or 'none'}"
            )
        return verify_checkpoint(paths[step], step)

    def best(self, *, first_step: int = 0) -> Checkpoint | None:
        """Return the checkpoint with the highest score, or None if no checkpoint has a score.

        Among equal scores the newest wins.

        Args:
            first_step: Checkpoints of earlier steps are ignored.

        Raises:
            CheckpointError: The checkpoint is damaged.
        """
        complete = [
            verify_checkpoint(path, step, check_hashes=False)
            for step, path in self._iter_newest_first()
            if step >= first_step
        ]
        scored = sort_by_score(complete)
        return self.load(scored[0].step) if scored else None

    def steps(self) -> list[int]:
        """Return the steps that have a checkpoint, verified or not, in increasing order."""
        return sorted(step for step, _ in self._iter_newest_first())

    def _iter_newest_first(self) -> Iterator[tuple[int, Path]]:
        """Yield (step, directory) of each checkpoint, newest first."""
        names = [path.name for path in self.root.iterdir()] if self.root.is_dir() else []
        steps = {int(match[1]): name for name in names if (match := STEP.fullmatch(name))}
        for step in sorted(steps, reverse=True):
            yield step, self.root / steps[step]

    def _remove_drafts(self) -> None:
        """Remove the drafts and partly deleted checkpoints that a killed process left."""
        for path in self.root.glob(".*"):
            if LEFTOVER.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)

    def _rename_rejected(self, final: Path) -> None:
        """Rename rejected checkpoints, so that they block no new checkpoint of the same step.

        `final` is rejected too if it does not verify. Pruning ignores renamed checkpoints.

        Raises:
            CheckpointError: `final` exists and verifies.
        """
        if final.is_symlink() or final.exists():
            try:
                verify_checkpoint(final, _parse_step(final))
            except CheckpointError:
                self._rejected.add(final)
            else:
                raise CheckpointError(f"{final} was saved before: a step has one checkpoint")
        for path in filter(os.path.lexists, self._rejected):
            path.rename(self.root / f"rejected-{_parse_step(path):08d}-{uuid.uuid4().hex[:8]}")
        self._rejected = set()

    def _prune(self) -> None:
        for checkpoint in self.list_surplus():
            removed_path = self.root / f".del-{checkpoint.step}-{uuid.uuid4().hex[:12]}"
            checkpoint.path.rename(removed_path)
            failpoints.point("checkpoint.prune_renamed")
            shutil.rmtree(removed_path)
            failpoints.point("checkpoint.pruned")

    def list_surplus(self) -> list[Checkpoint]:
        """Return the complete checkpoints that no rule keeps."""
        complete = self.list_complete()
        kept_steps = self.select_kept(complete) | self.protected_steps
        return [checkpoint for checkpoint in complete if checkpoint.step not in kept_steps]

    def list_complete(self) -> list[Checkpoint]:
        """Return the complete checkpoints, newest first.

        Only file sizes are compared: the contents were hashed when they were saved or loaded.
        """
        complete: list[Checkpoint] = []
        for step, path in self._iter_newest_first():
            with suppress(CheckpointError):
                if path not in self._rejected:
                    complete.append(verify_checkpoint(path, step, check_hashes=False))
        return complete

    def select_kept(self, complete: Sequence[Checkpoint]) -> set[int]:
        """Return the steps of the checkpoints that the rules keep.

        Args:
            complete: Complete checkpoints, newest first. Among equal scores the newest is kept.
        """
        best = sort_by_score(complete)[: self.keep_best]
        kept_steps = {checkpoint.step for checkpoint in (*complete[: self.keep], *best)}
        return kept_steps | {
            checkpoint.step
            for checkpoint in complete
            if self.keep_every and checkpoint.step % self.keep_every == 0
        }


def sort_by_score(complete: Sequence[Checkpoint]) -> list[Checkpoint]:
    """Return the checkpoints that have a score, the highest score first."""
    scored = [checkpoint for checkpoint in complete if checkpoint.meta.get("score") is not None]
    return sorted(scored, key=lambda checkpoint: -checkpoint.meta["score"])


def _parse_step(path: Path) -> int:
    match = STEP.fullmatch(path.name)
    assert match, path
    return int(match[1])


def _sync_tree(directory: Path) -> None:
    """Flush a directory to disk: files first, then directories from the innermost out.

    In another order, a crash could leave a directory on disk without its files.
    """
    paths = sorted(directory.rglob("*"), key=lambda path: (path.is_dir(), -len(path.parts)))
    for path in (*paths, directory):
        sync(path)
