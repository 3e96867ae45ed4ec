"""The progress of a stage, which checkpoints keep, and requests to stop the stage."""

from __future__ import annotations

import logging
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ratchet.algorithms.base import AlgoState

log = logging.getLogger("ratchet.train")


class StopRequest:
    """A request to end the loop after the current step and save.

    It comes from a signal handler, a sentinel or a time limit. `status` is the exit status of the
    process. None means that no stop is requested.
    """

    def __init__(self) -> None:
        self.status: int | None = None


class SignalStopRequest(StopRequest):
    """A stop request made by a signal: the loop finishes its step and saves.

    Attributes:
        is_forwarded: True if torchrun forwards signals. A second signal is then ignored (see
            `handle_stop_signals`).
    """

    def __init__(self, *, is_forwarded: bool) -> None:
        super().__init__()
        self.is_forwarded = is_forwarded

    def request(self, number: signal.Signals) -> None:
        self.status = 128 + number
        hint = "" if self.is_forwarded else "; Ctrl-C or SIGTERM to stop at once"
        log.warning("%s: finishing this step, then saving%s", number.name, hint)


@dataclass
class Progress:
    """The progress of a stage so far, interruptions included. It is saved in checkpoints."""

    seconds: float = 0.0  # training alone: evaluation and saving are not counted
    trained_tokens: float = 0.0
    generated_tokens: float = 0.0
    # Tokens of all rows of the steps' groups, prompts included, also of rows without a loss.
    computed_tokens: float = 0.0
    silent_steps: int = 0  # steps without a gradient: all advantages were 0
    accuracy_before: float | None = None  # before the first step
    accuracy: float | None = None  # the latest
    # True if `accuracy` can be shown as a percentage: all rewards of evaluations were in [0, 1].
    is_share: bool = True
    loss_before: float | None = None  # on held-out tasks, before the first step
    loss: float | None = None  # on held-out tasks, the latest
    best: float | None = None  # best value of the early-stopping metric
    fruitless: int = 0  # evaluations in a row without an improvement
    ended: bool = False  # stopped early, or by `limit_s`
    # Metrics of the latest step, if a stop request skipped the evaluation due after that step.
    unevaluated: dict[str, float | None] | None = None


@dataclass(frozen=True)
class StagePosition:
    """The position from which a stage continues: its start, or a checkpoint."""

    step: int  # number of finished steps of the whole run
    progress: Progress = field(default_factory=Progress)
    state: AlgoState = field(default_factory=AlgoState)

    @classmethod
    def from_meta(cls, step: int, meta: Mapping[str, Any]) -> StagePosition:
        """Return the position of a checkpoint after `step`, whose metadata are `meta`."""
        return cls(step, Progress(**meta["progress"]), AlgoState(**meta["state"]))
