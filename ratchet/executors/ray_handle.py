"""A worker in a Ray actor, as the driver sees it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ratchet.errors import WorkerError
from ratchet.executors.placement import ResourceBundle
from ratchet.executors.ray_actor import (
    ACTOR,
    box_parcel,
    kill_process,
    read_log_tail,
    unbox_parcel,
)
from ratchet.executors.worker_handle import WorkerHandle, WorkerName
from ratchet.executors.worker_main import BEAT_S
from ratchet.processes.frames import FrameKind, Parcel

# Longest wait, in seconds, until a node returns the log of its dead actor. A busy node needs
# seconds to start the reader.
LOG_S = 20.0


class RayWorkerHandle(WorkerHandle):
    """The handle of a worker in a Ray actor.

    The placement group reserves its resources, so the actor itself requests only its node. Results
    are handled in a separate thread, because most calls of Ray would deadlock in Ray's own callback
    thread.
    """

    def __init__(
        self,
        name: WorkerName,
        bundle: ResourceBundle,
        silence_s: float,
        interpreter: str | None = None,
    ) -> None:
        super().__init__(name, silence_s)
        self._jobs: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        threading.Thread(
            target=self._run_jobs, name=f"{name.role}-{name.rank}", daemon=True
        ).start()
        self._node_strategy = NodeAffinitySchedulingStrategy(bundle.node, soft=False)
        runtime_env: dict[str, Any] = {"env_vars": dict(bundle.environment)}
        if interpreter is not None:
            runtime_env["py_executable"] = interpreter
        self._actor = ACTOR.options(
            scheduling_strategy=self._node_strategy, runtime_env=runtime_env
        ).remote()
        self._logs = ""
        self._is_beat_pending = True  # a heartbeat, or the greeting, has been requested
        self._since_beat_s = 0.0  # time since the last heartbeat was requested
        self._when_done(self._actor.greet.remote(), self._handle_greeting)

    def check(self, passed_s: float) -> None:
        super().check(passed_s)
        self._since_beat_s += passed_s
        if not self._is_beat_pending and self._since_beat_s >= BEAT_S:
            self._is_beat_pending = True
            self._since_beat_s = 0.0
            self._when_done(self._actor.beat.remote(), self._handle_beat)

    def prepare_shared(self, request: Parcel) -> Any:
        return ray.put(box_parcel(request))

    def close(self) -> None:
        self.is_closing = True
        self._when_done(self._actor.close.remote(), lambda _: self._finish_close())

    def kill(self) -> None:
        self._jobs.put(self._kill)
        self._jobs.put(None)

    def read_log_tail(self) -> str:
        if not self._logs:
            return ""
        try:
            return ray.get(
                read_log_tail.options(scheduling_strategy=self._node_strategy).remote(self._logs),
                timeout=LOG_S,
            )
        except RayError:  # the node is gone too
            return ""

    def _send(self, number: int, request: Any) -> None:
        box = box_parcel(request) if isinstance(request, Parcel) else request
        self._when_done(
            self._actor.answer.remote(box),
            lambda answer: self._complete(number, (FrameKind(answer[0]), unbox_parcel(answer[1]))),
        )

    def _when_done(self, reference: Any, then: Callable[[Any], object]) -> None:
        """Call `then` with the actor's result, in the handle's thread."""

        def handle_result(future: Future[Any]) -> None:
            error = future.exception()
            if error is None:
                self._reset_silence()
                then(future.result())
            elif not isinstance(error, RayActorError):
                self.give_up(WorkerError(f"{self.name} can't be called: {error}"))
            elif not self.gone.done():
                self._end(
                    None
                    if self.is_closing
                    else self.make_death_error(f"died ({_describe_cause(error)})")
                )
                self.kill()

        reference.future().add_done_callback(
            lambda future: self._jobs.put(partial(handle_result, future))
        )

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

    def _kill(self) -> None:
        """Kill the actor, and its process by a task on its node: a stopped process ignores Ray."""
        if not ray.is_initialized():
            return
        ray.kill(self._actor)
        if self.pid is not None:
            kill_process.options(scheduling_strategy=self._node_strategy).remote(self.pid)

    def _handle_greeting(self, greeting: Mapping[str, Any]) -> None:
        self._logs = greeting["log"]
        self._is_beat_pending = False
        try:
            self._check_greeting(greeting)
        except WorkerError as error:
            self.give_up(error)

    def _handle_beat(self, _: Any) -> None:
        self._is_beat_pending = False

    def _finish_close(self) -> None:
        self._end(None)
        self.kill()


def _describe_cause(error: BaseException) -> str:
    """Return the part of Ray's message that says why an actor ended, without Ray's advice."""
    text = str(error)
    if "in its creation task" in text:  # the last line of the traceback
        return text.strip().splitlines()[-1]
    detail = text.partition("Worker exit detail: ")[2] or text.splitlines()[0]
    return (
        detail.partition(" Some common causes")[0]
        .partition(" There are some potential")[0]
        .strip()
        .rstrip(".")
    )
