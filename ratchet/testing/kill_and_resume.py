"""Kill a run at every failpoint and at random times, resume it, and compare the results.

Runs within one process on a CPU are deterministic. So wherever the process is killed, the resumed
run must end with the same files, bit by bit, as an uninterrupted run.
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
from ratchet.observe.sinks import has_tensorboard, read_jsonl
from ratchet.runs.checkpoints import CheckpointStore
from ratchet.runs.run_dir import RunDirectory
from ratchet.testing.forks import ForkCaller
from ratchet.testing.harness import BrokenRule, require
from ratchet.training.start import resume_run, start_run
from ratchet.utils import failpoints

KILLED_STATUS = -9
# Files that are not compared by bit, because they depend on times, processes or interruptions.
NOT_COMPARED_NAMES = (
    "run.log",
    "trace.json",
    "summary.json",
    "metrics.jsonl",
    "tensorboard",
    "checkpoints",
    ".lock",
)
# Modules of a run that take long to import; processes are forked with them loaded. A run imports
# the kinds of its recipe by name: those of the quick-start take a third of a short run's time.
PRELOADED_MODULES = (
    "ratchet.testing.kill_and_resume",
    "ratchet.training.stage_from_config",
    "ratchet.algorithms.config.named_policy_gradients",
    "ratchet.algorithms.config.sft",
    "ratchet.algorithms.losses.policy",
    "ratchet.algorithms.policy_gradient",
    "ratchet.algorithms.sft",
    "ratchet.data.chat.builtin_tokenizers",
    "ratchet.environments.toy.sorting",
    "ratchet.executors.local",
    "ratchet.generators.async_engine",
    "ratchet.generators.config",
    "ratchet.generators.engine.engine",
    "ratchet.generators.vllm",
    "ratchet.learners.local",
    "ratchet.learners.optim.adamw",
    "ratchet.rewards.answers.exact_match",
    *(("tensorboard.summary.writer.record_writer",) if has_tensorboard() else ()),
)


@dataclass(frozen=True)
class Trial:
    """A plan of kills. The first ends the first process, the second the resumed process, and so on.

    A kill is a failpoint spec of `ratchet.utils.failpoints.arm` ("checkpoint.begin:2:kill"), or a
    number of seconds after the start.
    """

    kills: tuple[str | float, ...]

    @property
    def point(self) -> str:
        """Return the failpoint of the last kill, which is under test, or "random"."""
        last = self.kills[-1]
        return last.partition(":")[0] if isinstance(last, str) else "random"


@dataclass(frozen=True)
class TrialVerdict:
    """The result of a trial."""

    trial: Trial
    differences: tuple[str, ...]  # differences from the uninterrupted run, in words
    has_missed: bool  # True if the run ended before the last kill
    n_starts: int  # number of processes started


@dataclass
class ChaosTest:
    """A recipe whose runs are killed and resumed."""

    recipe: Path
    # The directory of the runs. The uninterrupted run stays in "whole". Other runs stay if they
    # differ from it.
    folder: Path
    forks: ForkCaller
    # Failpoints that the uninterrupted run passed, in order.
    failpoints: list[str] = field(default_factory=list)
    # Failpoints that a resumed run passed, in order.
    resumed_failpoints: list[str] = field(default_factory=list)
    duration_s: float = 0.0  # duration of the uninterrupted run

    @property
    def reference_run(self) -> Path:
        return self.folder / "whole"

    def record(self, *, resume_after: str) -> None:
        """Record the failpoints of an uninterrupted run, and of a run resumed after a kill.

        Args:
            resume_after: The failpoint spec of the kill.
        """
        start = time.monotonic()
        require(self.start(self.reference_run, "") == 0, self._read_output)
        self.duration_s = time.monotonic() - start
        self.failpoints = _read_failpoints(self.reference_run)
        resumed = self.folder / "resumed"
        require(self.start(resumed, resume_after) == KILLED_STATUS, f"{resume_after} is not passed")
        require(self.start(resumed, "") == 0, self._read_output)
        self.resumed_failpoints = _read_failpoints(resumed)
        self._remove(resumed)

    def list_failpoint_trials(self, max_count: int, *, resume_after: str) -> list[Trial]:
        """Return trials that kill at up to `max_count` passages of every failpoint.

        The first and the last passage are among them if `max_count` is at least 2. A failpoint
        that only a resumed process passes gets two kills: at `resume_after`, then at the failpoint.
        """
        trials = [Trial((spec,)) for spec in _list_kill_specs(self.failpoints, max_count)]
        resumed_only = [
            name for name in self.resumed_failpoints if name not in set(self.failpoints)
        ]
        return trials + [
            Trial((resume_after, spec)) for spec in _list_kill_specs(resumed_only, max_count)
        ]

    def draw_random_trials(self, n: int, *, seed: int) -> list[Trial]:
        """Return `n` trials of one to three kills at random times.

        Each time lies within the duration of the uninterrupted run.
        """
        rng = random.Random(seed)
        return [
            Trial(tuple(rng.uniform(0, self.duration_s) for _ in range(rng.randint(1, 3))))
            for _ in range(n)
        ]

    def run_trials(self, trials: Iterable[Trial]) -> Iterator[TrialVerdict]:
        return map(self.run_trial, trials)

    def run_trial(self, trial: Trial) -> TrialVerdict:
        run = self.folder / "run"
        status, n_starts = KILLED_STATUS, 0
        for n_starts, kill in enumerate((*trial.kills, ""), start=1):  # noqa: B007
            status = self.start(run, kill)
            if status != KILLED_STATUS:
                break
        differences = (
            list_differences(self.reference_run, run)
            if status == 0
            else [f"status {status}: {self._read_output()}"]
        )
        if differences:
            run.rename(self.folder / f"different-{sum(1 for _ in self.folder.glob('different-*'))}")
        else:
            self._remove(run)
        return TrialVerdict(trial, tuple(differences), n_starts <= len(trial.kills), n_starts)

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
def chaos(recipe: Path, folder: Path, *, resume_after: str) -> Iterator[ChaosTest]:
    """Yield a recorded `ChaosTest` that is ready for trials.

    Args:
        resume_after: See `ChaosTest.record`.
    """
    with ForkCaller(PRELOADED_MODULES, log=folder / "output.log") as forks:
        chaos_test = ChaosTest(recipe, folder, forks)
        chaos_test.record(resume_after=resume_after)
        yield chaos_test


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
    if RunDirectory(path).is_used:
        return resume_run(path, command="chaos")
    return start_run(Path(recipe), [], path, command="chaos")


def _get_failpoints_path(run: Path) -> Path:
    return run.with_name(f"{run.name}.passed.json")


def _read_failpoints(run: Path) -> list[str]:
    return json.loads(_get_failpoints_path(run).read_text(encoding="utf-8"))


def _list_kill_specs(passed: Sequence[str], max_count: int) -> list[str]:
    return [
        f"{name}:{n}:kill"
        for name, count in Counter(passed).items()
        for n in choose_evenly_spread(count, max_count)
    ]


def choose_evenly_spread(count: int, max_count: int) -> list[int]:
    """Return at most `max_count` evenly spread numbers of 1 ... count, with both ends.

    If `max_count` is 1, the number is `count`.
    """
    if count <= max_count:
        return list(range(1, count + 1))
    if max_count == 1:
        return [count]
    return sorted({1 + round(i * (count - 1) / (max_count - 1)) for i in range(max_count)})


def list_differences(a: Path, b: Path) -> list[str]:
    """Return the differences of two finished runs of a recipe, in words.

    Files, weights and learner states are compared by bit. Metrics and summaries are compared
    without their times. The last checkpoints must have the same step, state, sentinels and
    progress.
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

    They are the files outside NOT_COMPARED_NAMES, and the files of checkpoints except manifests.
    """
    names = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {
        name
        for name in names
        if name.split("/")[0] not in NOT_COMPARED_NAMES
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
