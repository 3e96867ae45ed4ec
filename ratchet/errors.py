"""The exceptions that Ratchet raises on purpose.

    RatchetError
    ├── ConfigError          a recipe or an override is wrong; `ratchet train` exits 2
    │   └── SamplingError    a field of `Sampling` has a value that can't be used
    ├── DataError            a row, a file or a prompt is wrong; names file and line
    │   ├── RequestFailed    one completion can't be computed; other requests continue
    │   └── RowTooLong       a row has more tokens than the model's context
    ├── ModelError           a model directory can't be read, or doesn't fit the tokenizer
    ├── MissingColumn        a loss needs a column that no pass fills
    ├── MissingDependency    an optional package is absent; names the extra that installs it
    ├── CheckpointError      a checkpoint is absent, incomplete or damaged
    │   └── CheckpointNotFound  there is no checkpoint of that step
    ├── RunDirectoryError    the run directory can't be used (taken, read-only, other config)
    │   ├── RunNotFound      the path or address given to a command holds no run
    │   ├── RunDirectoryOccupied  the path or address given to a new run holds something else
    │   └── RunDirectoryUnusable  the path is a file, or its directory is not writable
    ├── WeightSyncError      new weights did not reach a generator, which keeps the old ones
    │   └── DeltaRefused     a delta does not apply to the version that the receiver has
    ├── TrainingError        training can't continue (non-finite steps, many failed attempts)
    │   └── ParityError      sampler and learner disagree about the probability of sampled tokens
    └── WorkerError          a process of a distributed run; names its role, rank and host
        ├── WorkerDied       the process ended, or was silent for too long and was killed
        ├── WorkerRaised     its component raised an exception that is only known as text
        ├── CallTimeout      the process did not answer by the deadline
        ├── PortBusy         none of the ports that the process may use is free
        └── VersionMismatch  driver and worker run different versions

A message says what is wrong, where, and the smallest fix; the errors that users meet most end with
the section of docs/by-symptom.md that says more (`link_symptom`). `assert` is kept for our own
bugs.
"""

from __future__ import annotations

from typing import Literal

DISTRIBUTION = "ratchet-rl"  # the name that pip knows


def suggest_install(extra: str = "") -> str:
    """Return the command that installs Ratchet with an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'" if extra else f"pip install {DISTRIBUTION}"


BY_SYMPTOM = "docs/by-symptom.md"  # its path in a checkout, or its address
# The sections of that page which messages link to, by their anchors.
Symptom = Literal[
    "the-reward-is-flat",
    "the-kl-explodes",
    "the-entropy-collapses",
    "the-loss-or-the-gradient-is-not-finite",
    "sampler-and-learner-disagree",
    "out-of-memory",
    "it-hangs",
    "a-worker-process-died",
    "attempts-fail",
    "a-judge-fails",
    "there-is-no-sandbox",
    "no-accelerator-is-found",
    "a-resume-is-refused",
    "a-key-is-unknown",
    "the-disk-is-full",
]


def link_symptom(symptom: Symptom) -> str:
    """Return the last sentence of a message: where the docs treat its symptom."""
    return f"See {BY_SYMPTOM}#{symptom}"


class RatchetError(Exception):
    """The base class of errors for the user; the command line prints them without a traceback."""


class ConfigError(RatchetError):
    pass


class SamplingError(ConfigError):
    """A wrong value of one field of `Sampling`.

    Attributes:
        field: The name of the field.
    """

    def __init__(self, message: str, *, field: str = "") -> None:
        super().__init__(message)
        self.field = field


class DataError(RatchetError):
    pass


class RequestFailed(DataError):
    pass


class RowTooLong(DataError):
    pass


class ModelError(RatchetError):
    pass


class MissingColumn(RatchetError):
    def __init__(self, column: str, *, algorithm: str = "", hint: str = "") -> None:
        where = f" of algorithm '{algorithm}'" if algorithm else ""
        fix = hint or f"add a Pass that produces '{column}' to Algorithm.passes"
        super().__init__(f"column '{column}'{where} was never filled: {fix}")
        self.column = column


class MissingDependency(RatchetError):
    def __init__(self, package: str, *, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the package '{package}': {suggest_install(extra)}")


class CheckpointError(RatchetError):
    pass


class CheckpointNotFound(CheckpointError):
    pass


class RunDirectoryError(RatchetError):
    pass


class RunNotFound(RunDirectoryError):
    pass


class RunDirectoryOccupied(RunDirectoryError):
    pass


class RunDirectoryUnusable(RunDirectoryError):
    pass


class TrainingError(RatchetError):
    pass


class WorkerError(RatchetError):
    pass


class NoRoomError(WorkerError):
    """No machine of the cluster has room for a worker whose machine was lost."""


class WorkerDied(WorkerError):
    """The error for a worker process that ended or was killed.

    Attributes:
        signal: The name of the signal that ended the process ("SIGKILL"), or "".
        tail: The last lines of the process's output.
    """

    def __init__(
        self, message: str, *, role: str, rank: int, host: str, signal: str = "", tail: str = ""
    ) -> None:
        super().__init__(f"{message}\nIts last lines:\n{tail}" if tail else message)
        self.role = role
        self.rank = rank
        self.host = host
        self.signal = signal
        self.tail = tail


class WorkerRaised(WorkerError):
    pass


class CallTimeout(WorkerError):
    pass


class PortBusy(WorkerError):
    pass


class VersionMismatch(WorkerError):
    pass


class ParityError(TrainingError):
    pass


class WeightSyncError(RatchetError):
    """A failed weight sync.

    Attributes:
        tensor: The name of the weight that failed; "" if no weight did or it is unknown.
        rank: The learner rank that failed; None if no rank did or it is unknown.
    """

    def __init__(self, message: str, *, tensor: str = "", rank: int | None = None) -> None:
        super().__init__(message)
        self.tensor, self.rank = tensor, rank


class DeltaRefused(WeightSyncError):
    pass
