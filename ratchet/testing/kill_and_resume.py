"""Kill a run at every failpoint and at random times, resume it, and compare the results.

Embedded runs on a CPU are deterministic. So wherever the process is killed, the resumed run must
end with the same files, bit by bit, as an undisturbed run.
"""

from __future__ import annotations

import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ratchet.checkpoint.manifest import MANIFEST
from ratchet.observe.metrics import MACHINE_PREFIXES
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.testing.forks import Forks
from ratchet.testing.harness import BrokenRule, require
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

KILLED = -9
# Files that are not compared by bit, because they depend on times, processes or interruptions.
NOT_COMPARED = (
    "run.log",
    "trace.json",
    "summary.json",
    "metrics.jsonl",
    "curve.svg",
    "tensorboard",
    "checkpoints",
    ".lock",
)
# Modules of a run that take long to import; processes are forked with them loaded.
MODULES = (
    "ratchet.testing.kill_and_resume",
    "ratchet.training.from_config",
    "tensorboard.compat.proto.event_pb2",
)


@dataclass(frozen=True)
class Trial:
    """A plan of kills: the first ends the first process, the second the resumed one, and so on.

    A kill is a failpoint spec of `ratchet.utils.failpoints.arm` ("checkpoint.begin:2:kill"), or a
    number of seconds after the start.
    """

    kills: tuple[str | float, ...]

    @property
    def point(self) -> str:
        """Return the failpoint of the last kill, the one under test, or "random"."""
        last = self.kills[-1]
        return last.partition(":")[0] if isinstance(last, str) else "random"


@dataclass(frozen=True)
class TrialVerdict:
    """The result of a trial."""

    trial: Trial
    different: tuple[str, ...]  # differences from the undisturbed run, in words
    missed: bool  # True if the run ended before the last kill
    starts: int  # number of processes started


@dataclass
class Chaos:
    """A recipe under test."""

    recipe: Path
    # The directory of the runs. The undisturbed one stays in "whole"; others stay if they differ.
    folder: Path
    forks: Forks
    passed: list[str] = field(default_factory=list)  # failpoints of the undisturbed run, in order
    passed_resuming: list[str] = field(default_factory=list)  # failpoints of a resumed run
    seconds: float = 0.0  # duration of the undisturbed run

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def record(self, *, resume_after: str) -> None:
        """Record the failpoints of an undisturbed run, and of one resumed after a kill.

        Args:
            resume_after: The failpoint spec of the kill.
        """
        start = time.monotonic()
        require(self.start(self.whole, "") == 0, self._read_output)
        self.seconds = time.monotonic() - start
        self.passed = _read_failpoints(self.whole)
        resumed = self.folder / "resumed"
        require(self.start(resumed, resume_after) == KILLED, f"{resume_after} is not passed")
        require(self.start(resumed, "") == 0, self._read_output)
        self.passed_resuming = _read_failpoints(resumed)
        self._remove(resumed)

    def at_points(self, most: int, *, resume_after: str) -> list[Trial]:
        """Return trials that kill at up to `most` passages of every failpoint.

        The first and the last passage are among them if `most` is at least 2. A failpoint
        that only a resumed process passes gets two kills: one at `resume_after`, then one at it.
        """
        trials = [Trial((spec,)) for spec in _list_kill_specs(self.passed, most)]
        resumed_only = [name for name in self.passed_resuming if name not in set(self.passed)]
        return trials + [
            Trial((resume_after, spec)) for spec in _list_kill_specs(resumed_only, most)
        ]

    def at_random(self, n: int, *, seed: int) -> list[Trial]:
        """Return `n` trials of one to three kills at random times.

        Each time lies within the duration of the undisturbed run.
        """
        rng = random.Random(seed)
        return [
            Trial(tuple(rng.uniform(0, self.seconds) for _ in range(rng.randint(1, 3))))
            for _ in range(n)
        ]

    def verdicts(self, trials: Iterable[Trial]) -> Iterator[TrialVerdict]:
        return map(self.play, trials)

    def play(self, trial: Trial) -> TrialVerdict:
        run = self.folder / "run"
        status, starts = KILLED, 0
        for starts, kill in enumerate((*trial.kills, ""), start=1):  # noqa: B007
            status = self.start(run, kill)
            if status != KILLED:
                break
        different = (
            differences(self.whole, run)
            if status == 0
            else [f"status {status}: {self._read_output()}"]
        )
        if different:
            run.rename(self.folder / f"different-{sum(1 for _ in self.folder.glob('different-*'))}")
        else:
            self._remove(run)
        return TrialVerdict(trial, tuple(different), starts <= len(trial.kills), starts)

    def start(self, run: Path, kill: str | float) -> int:
        """Start or resume the run. Return its exit status, or minus the signal that ended it."""
        spec, kill_after_s = (kill, None) if isinstance(kill, str) else ("", kill)
        return self.forks.call(
            "ratchet.testing.kill_and_resume:train_here",
            str(self.recipe),
            str(run),
            spec,
            kill_after_s=kill_after_s,
        )

    def _read_output(self) -> str:
        return self.forks.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def _remove(self, run: Path) -> None:
        shutil.rmtree(run)
        _get_failpoints_path(run).unlink(missing_ok=True)


@contextmanager
def chaos(recipe: Path, folder: Path, *, resume_after: str) -> Iterator[Chaos]:
    """Yield a recorded `Chaos` that is ready for trials.

    Args:
        resume_after: See `Chaos.record`.
    """
    with Forks(MODULES, log=folder / "output.log") as forks:
        prepared = Chaos(recipe, folder, forks)
        prepared.record(resume_after=resume_after)
        yield prepared


def train_here(recipe: str, run: str, spec: str) -> int:
    """Train in a process of a trial.

    If `spec` is empty, write the list of passed failpoints to a file beside the run.
    """
    path = Path(run)
    failpoints.arm(spec)
    if spec:
        return _train(recipe, path)
    with failpoints.record() as passed:
        status = _train(recipe, path)
    _get_failpoints_path(path).write_text(json.dumps(passed), encoding="utf-8")
    return status


def _train(recipe: str, path: Path) -> int:
    if RunDirectory(path).used:
        return resume_run(path, command="chaos")
    return start_run(Path(recipe), [], path, command="chaos")


def _get_failpoints_path(run: Path) -> Path:
    return run.with_name(f"{run.name}.passed.json")


def _read_failpoints(run: Path) -> list[str]:
    return json.loads(_get_failpoints_path(run).read_text(encoding="utf-8"))


def _list_kill_specs(passed: Sequence[str], most: int) -> list[str]:
    return [
        f"{name}:{n}:kill" for name, count in Counter(passed).items() for n in spread(count, most)
    ]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` evenly spread numbers of 1 ... count, with both ends.

    If `most` is 1, it is the last.
    """
    if count <= most:
        return list(range(1, count + 1))
    if most == 1:
        return [count]
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def differences(a: Path, b: Path) -> list[str]:
    """Return the differences of two finished runs of a recipe, in words.

    Files, weights and learner states are compared by bit, metrics and summaries without times, and
    the last checkpoints by step, state, sentinels and progress.
    """
    unequal = [
        f"only one has {name}" for name in sorted(_list_compared_files(a) ^ _list_compared_files(b))
    ]
    unequal += [
        f"{name} differs"
        for name in sorted(_list_compared_files(a) & _list_compared_files(b))
        if (a / name).read_bytes() != (b / name).read_bytes()
    ]
    unequal += [
        f"metrics of step {row[0]} differ"
        for row in _list_unequal(_read_metrics(a), _read_metrics(b))
    ]
    unequal += [
        f"the summary differs: {row}" for row in _list_unequal(_read_summary(a), _read_summary(b))
    ]
    return unequal + [
        f"the last checkpoint differs: {row}"
        for row in _list_unequal(_read_last_position(a), _read_last_position(b))
    ]


def _list_compared_files(run: Path) -> set[str]:
    """Return the names of the files that are compared by bit.

    They are the files outside NOT_COMPARED, and the files of checkpoints except manifests.
    """
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {
        name
        for name in names
        if name.split("/")[0] not in NOT_COMPARED
        or ("checkpoints/" in name and not name.endswith(MANIFEST))
    }


def _read_metrics(run: Path) -> list[Any]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [
        (
            row["step"],
            {name: value for name, value in row.items() if not name.startswith(MACHINE_PREFIXES)},
        )
        for row in rows
    ]


def _read_summary(run: Path) -> list[Any]:
    stages = json.loads((run / "summary.json").read_text(encoding="utf-8"))["stages"]
    return [
        {name: value for name, value in stage.items() if name not in ("seconds", "tokens_per_s")}
        for stage in stages
    ]


def _read_last_position(run: Path) -> list[Any]:
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    if checkpoint is None:
        raise BrokenRule(f"{run} has no checkpoint")
    progress = {
        name: value for name, value in checkpoint.meta["progress"].items() if name != "seconds"
    }
    return [checkpoint.step, checkpoint.meta["state"], checkpoint.meta["sentinels"], progress]


def _list_unequal(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    return [x for x, _ in pairs] + list(a[len(b) :]) + list(b[len(a) :])
