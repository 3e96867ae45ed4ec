"""Kills a training at every place that has a name and at random times, lets it go on, and compares
it with one left alone.

Embedded runs on a CPU are bit-equal whatever happened to them. So the check is: whatever kills the
process, wherever, the resumed run ends with the same files and the same bits as the run that
nothing disturbed.
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
from ratchet.observe.metrics import OF_THE_MACHINE
from ratchet.observe.sinks import read_jsonl
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.testing.forks import Forks
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

KILLED = -9
# What may differ: it says when, how fast, by which process and after which accidents.
APART = (
    "run.log",
    "trace.json",
    "summary.json",
    "metrics.jsonl",
    "curve.svg",
    "tensorboard",
    "checkpoints",
    ".lock",
)
# Of a run, what takes long to import.
MODULES = (
    "ratchet.testing.kill_and_resume",
    "ratchet.training.from_config",
    "tensorboard.compat.proto.event_pb2",
)


@dataclass(frozen=True)
class Trial:
    """The kills of a training: its first process dies by the first of `kills`, the resumed one by
    the second, and so on.

    A kill is a failpoint as `ratchet.utils.failpoints.arm` reads it ("checkpoint.begin:2:kill"), or
    seconds after the start.
    """

    kills: tuple[str | float, ...]

    @property
    def point(self) -> str:
        """Return the last kill, which is the one under test: its failpoint, or "random"."""
        last = self.kills[-1]
        return last.partition(":")[0] if isinstance(last, str) else "random"


@dataclass(frozen=True)
class TrialVerdict:
    """different: differences to the undisturbed run, in words. missed: True if the last kill never
    came, as the run was over before. starts: processes that it took to the end."""

    trial: Trial
    different: tuple[str, ...]
    missed: bool
    starts: int


@dataclass
class Chaos:
    """A recipe under test. folder: where runs go; the undisturbed one stays as "whole", and of the
    others those that differ."""

    recipe: Path
    folder: Path
    forks: Forks
    passed: list[str] = field(default_factory=list)  # failpoints of the undisturbed run, in order
    passed_resuming: list[str] = field(default_factory=list)
    seconds: float = 0.0  # of the undisturbed run

    @property
    def whole(self) -> Path:
        return self.folder / "whole"

    def record(self, *, resume_after: str) -> None:
        """Plays the run once undisturbed, and once with a kill at `resume_after` and a resumption,
        and notes all failpoints."""
        began = time.monotonic()
        assert self.start(self.whole, "") == 0, self._said()
        self.seconds = time.monotonic() - began
        self.passed = _read_list(self.whole)
        resumed = self.folder / "resumed"
        assert self.start(resumed, resume_after) == KILLED, f"{resume_after} is not passed"
        assert self.start(resumed, "") == 0, self._said()
        self.passed_resuming = _read_list(resumed)
        self._remove(resumed)

    def at_points(self, most: int, *, resume_after: str) -> list[Trial]:
        """A trial for passages of every point, at most so many of each, the first and the last
        among them: in the first process, and for points that only a resumed one passes, in that."""
        trials = [Trial((spec,)) for spec in _specs(self.passed, most)]
        resumed_only = [name for name in self.passed_resuming if name not in set(self.passed)]
        return trials + [Trial((resume_after, spec)) for spec in _specs(resumed_only, most)]

    def at_random(self, n: int, *, seed: int) -> list[Trial]:
        """Each is killed once to three times, any time within what an undisturbed run takes."""
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
            differences(self.whole, run) if status == 0 else [f"status {status}: {self._said()}"]
        )
        if different:
            run.rename(self.folder / f"different-{sum(1 for _ in self.folder.glob('different-*'))}")
        else:
            self._remove(run)
        return TrialVerdict(trial, tuple(different), starts <= len(trial.kills), starts)

    def start(self, run: Path, kill: str | float) -> int:
        """Begins the run, or goes on with it. Returns the status, or minus the signal that ended
        it."""
        spec, after = (kill, None) if isinstance(kill, str) else ("", kill)
        return self.forks.call(
            "ratchet.testing.kill_and_resume:train_here",
            str(self.recipe),
            str(run),
            spec,
            kill_after_s=after,
        )

    def _said(self) -> str:
        return self.forks.log.read_text(encoding="utf-8", errors="replace")[-2000:]

    def _remove(self, run: Path) -> None:
        shutil.rmtree(run)
        _list_path(run).unlink(missing_ok=True)


@contextmanager
def chaos(recipe: Path, folder: Path, *, resume_after: str) -> Iterator[Chaos]:
    """Recorded and ready for trials. resume_after: where the run is killed whose resumption is
    recorded."""
    with Forks(MODULES, log=folder / "output.log") as forks:
        prepared = Chaos(recipe, folder, forks)
        prepared.record(resume_after=resume_after)
        yield prepared


def train_here(recipe: str, run: str, spec: str) -> int:
    """Train in a process of a trial. Without a fault it leaves a list of the failpoints that it
    passed beside the run."""
    path = Path(run)
    failpoints.arm(spec)
    if spec:
        return _train(recipe, path)
    with failpoints.record() as passed:
        status = _train(recipe, path)
    _list_path(path).write_text(json.dumps(passed), encoding="utf-8")
    return status


def _train(recipe: str, path: Path) -> int:
    if RunDirectory(path).used:
        return resume_run(path, command="chaos")
    return start_run(Path(recipe), [], path, command="chaos")


def _list_path(run: Path) -> Path:
    return run.with_name(f"{run.name}.passed.json")


def _read_list(run: Path) -> list[str]:
    return json.loads(_list_path(run).read_text(encoding="utf-8"))


def _specs(passed: Sequence[str], most: int) -> list[str]:
    return [
        f"{name}:{n}:kill" for name, count in Counter(passed).items() for n in spread(count, most)
    ]


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` of 1 ... count, evenly, with both ends."""
    if count <= most:
        return list(range(1, count + 1))
    if most == 1:
        return [count]
    return sorted({1 + round(i * (count - 1) / (most - 1)) for i in range(most)})


def differences(a: Path, b: Path) -> list[str]:
    """Return the differences of two finished runs of a recipe: files, weights and learner state by
    bit, metrics and summary but for times, what the checkpoints say of the data."""
    unequal = [f"only one has {name}" for name in sorted(_files(a) ^ _files(b))]
    unequal += [
        f"{name} differs"
        for name in sorted(_files(a) & _files(b))
        if (a / name).read_bytes() != (b / name).read_bytes()
    ]
    unequal += [f"metrics of step {row[0]} differ" for row in _unequal(_metrics(a), _metrics(b))]
    unequal += [f"the summary differs: {row}" for row in _unequal(_summary(a), _summary(b))]
    return unequal + [
        f"the last checkpoint differs: {row}"
        for row in _unequal(_last_position(a), _last_position(b))
    ]


def _files(run: Path) -> set[str]:
    """Return the files that are compared as they are: all but what lies in APART, and the files of
    checkpoints but for the manifests."""
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {
        name
        for name in names
        if name.split("/")[0] not in APART
        or ("checkpoints/" in name and not name.endswith(MANIFEST))
    }


def _metrics(run: Path) -> list[Any]:
    rows = read_jsonl(run / "metrics.jsonl")
    return [
        (
            row["step"],
            {name: value for name, value in row.items() if not name.startswith(OF_THE_MACHINE)},
        )
        for row in rows
    ]


def _summary(run: Path) -> list[Any]:
    stages = json.loads((run / "summary.json").read_text(encoding="utf-8"))["stages"]
    return [
        {name: value for name, value in stage.items() if name not in ("seconds", "tokens_per_s")}
        for stage in stages
    ]


def _last_position(run: Path) -> list[Any]:
    checkpoint = CheckpointStore(run / "checkpoints").latest()
    assert checkpoint is not None, f"{run} has no checkpoint"
    progress = {
        name: value for name, value in checkpoint.meta["progress"].items() if name != "seconds"
    }
    return [checkpoint.step, checkpoint.meta["state"], checkpoint.meta["sentinels"], progress]


def _unequal(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
    pairs = [(x, y) for x, y in zip(a, b, strict=False) if x != y]
    return [x for x, _ in pairs] + list(a[len(b) :]) + list(b[len(a) :])
