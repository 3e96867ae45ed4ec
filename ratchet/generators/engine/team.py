"""Several schedulers in threads of their own, each with a part of the requests and of the KV cache, over the same weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from ratchet.crew import Crew
from ratchet.generators.engine.scheduler import Scheduler
from ratchet.generators.requests import Request
from ratchet.types import Completion

STRIDE = 4  # steps of a scheduler between two meetings, unless a request ends
SLACK = 16  # requests that a scheduler may have more than another, for the sake of a prompt that they share


class Team:
    """Implements `Core`. A request gives the same whichever scheduler has it, and whatever the others do."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self.schedulers = schedulers
        self._crew = Crew(len(schedulers))
        self._ended: list[list[Callable[[], None]]] = [[] for _ in schedulers]  # deliveries to make, by scheduler
        self._places: dict[Request, int] = {}

    @property
    def version(self) -> int:
        return self.schedulers[0].version

    @property
    def prefilled_tokens(self) -> int:
        return sum(scheduler.prefilled_tokens for scheduler in self.schedulers)

    @property
    def decoded_tokens(self) -> int:
        return sum(scheduler.decoded_tokens for scheduler in self.schedulers)

    @property
    def busy(self) -> bool:
        return bool(self._places)

    def add(self, request: Request) -> None:
        """To whoever has least to do, or waits to begin with the same prompt. Raises ConfigError as a scheduler does."""
        loads = [len(scheduler.running) + len(scheduler.waiting) for scheduler in self.schedulers]
        least = min(loads)
        alike = [i for i, s in enumerate(self.schedulers) if s.waiting and s.waiting[-1].key == request.key]
        place = min((i for i in alike if loads[i] < least + SLACK), key=loads.__getitem__, default=loads.index(least))
        deliver = request.deliver
        request.deliver = lambda completion: self._ended[place].append(partial(self._deliver, request, deliver, completion))
        self.schedulers[place].add(request)
        self._places[request] = place

    def cancel(self, request: Request) -> None:
        place = self._places.pop(request, None)
        if place is not None:
            self.schedulers[place].cancel(request)

    def abort(self) -> None:
        for scheduler in self.schedulers:
            scheduler.abort()
        self._hand_out()

    def step(self) -> None:
        busy = [place for place, scheduler in enumerate(self.schedulers) if scheduler.busy]
        try:
            self._crew.run([partial(self._some_steps, place) for place in busy])
        finally:
            self._hand_out()

    def commit(self, version: int, *, keep_kv: bool) -> None:
        for scheduler in self.schedulers:
            scheduler.commit(version, keep_kv=keep_kv)

    def reset(self) -> list[Request]:
        self._places.clear()
        return [request for scheduler in self.schedulers for request in scheduler.reset()]

    def _some_steps(self, place: int) -> None:
        scheduler, ended = self.schedulers[place], self._ended[place]
        for _ in range(STRIDE):
            scheduler.step()
            if ended or not scheduler.busy:
                return

    def _deliver(self, request: Request, deliver: Callable[[Completion], None], completion: Completion) -> None:
        self._places.pop(request, None)
        deliver(completion)

    def _hand_out(self) -> None:
        """In the thread of those who wait, and in the same order whoever was faster."""
        for ended in self._ended:
            while ended:
                ended.pop(0)()
