"""A worker as the router sees it: what it has been asked, and what it still has to be told."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ratchet.generators.request import PromptKey, prompt_key
from ratchet.generators.workers.batch_protocol import Asked
from ratchet.protocols import Workers
from ratchet.types import Completion, Placed, Sampling, StopReason


@dataclass(eq=False)
class Wanted:
    """A completion that somebody waits for."""

    number: int
    tokens: NDArray[np.int64]
    sampling: Sampling
    future: asyncio.Future[Completion]
    media: tuple[Placed, ...] = ()
    aborted: bool = False
    key: PromptKey = field(init=False)

    def __post_init__(self) -> None:
        self.key = prompt_key(self.tokens, self.media)

    @property
    def cost(self) -> int:
        """Tokens, at most."""
        return len(self.tokens) + self.sampling.max_new_tokens

    def deliver(self, answer: Completion | BaseException) -> None:
        """Once: who was cancelled has gone."""
        if self.future.done():
            return
        if isinstance(answer, BaseException):
            self.future.set_exception(answer)
        else:
            self.future.set_result(answer)

    def end(self) -> None:
        """Aborted, without a token."""
        none = np.zeros(0, dtype=np.float32)
        nothing = np.zeros(0, dtype=np.int64)
        self.deliver(
            Completion(nothing, none, none.copy(), np.zeros(0, dtype=np.int32), StopReason.ABORTED)
        )


@dataclass(eq=False)
class Station:
    """rank: among the workers. group: its process; None: it was lost. current: whether it has the
    router's version of the weights, so that it may serve."""

    rank: int
    group: Workers | None = None
    current: bool = False
    remains: Workers | None = None  # the process that was lost
    waiting: dict[int, Wanted] = field(default_factory=dict)  # by number; not yet sent
    sent: dict[int, Wanted] = field(default_factory=dict)
    cancelled: list[int] = field(default_factory=list)
    aborting: bool = False
    load: int = 0  # tokens of what is waiting or sent, at most
    prompts: Counter[PromptKey] = field(default_factory=Counter)
    pump: asyncio.Task[None] | None = None

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.sent or self.cancelled)

    def add(self, wanted: Wanted) -> None:
        self.waiting[wanted.number] = wanted
        self.load += wanted.cost
        self.prompts[wanted.key] += 1

    def outgoing(self) -> tuple[Asked, list[int], bool]:
        """What is sent next: requests, the numbers of cancelled ones, and whether to abort those of
        before."""
        asked = Asked.of(
            {
                n: (each.tokens, each.key, each.sampling, each.media)
                for n, each in self.waiting.items()
            }
        )
        told = (asked, self.cancelled, self.aborting)
        self.sent.update(self.waiting)
        self.waiting, self.cancelled, self.aborting = {}, [], False
        return told

    def answered(self, number: int) -> Wanted | None:
        """None for one that was cancelled meanwhile."""
        wanted = self.sent.pop(number, None)
        if wanted is not None:
            self._forget(wanted)
        return wanted

    def cancel(self, wanted: Wanted) -> bool:
        """Whether it was here."""
        if self.sent.pop(wanted.number, None) is not None:
            self.cancelled.append(wanted.number)
        elif self.waiting.pop(wanted.number, None) is None:
            return False
        self._forget(wanted)
        return True

    def abort(self) -> None:
        for wanted in self.waiting.values():
            self._forget(wanted)
            wanted.end()
        self.waiting = {}
        for wanted in self.sent.values():
            wanted.aborted = True
        self.aborting = bool(self.sent)

    def lose(self) -> list[Wanted]:
        """The process is no more to be trusted. Gives what it had not answered."""
        left = [*self.sent.values(), *self.waiting.values()]
        self.remains, self.group, self.current = self.group, None, False
        self.waiting, self.sent, self.cancelled, self.aborting = {}, {}, [], False
        self.load, self.pump = 0, None
        self.prompts.clear()
        return left

    def _forget(self, wanted: Wanted) -> None:
        self.load -= wanted.cost
        self.prompts[wanted.key] -= 1
        if not self.prompts[wanted.key]:
            del self.prompts[wanted.key]
