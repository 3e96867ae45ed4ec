"""Check an environment under faults, replays and cancellation.

None of them may change a reward or another attempt, or lead to a hang or a leak.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from ratchet.errors import DataError
from ratchet.protocols import Environment, Step
from ratchet.testing.harness import (
    BrokenRule,
    DeadlineCaller,
    break_services,
    count_open_resources,
    kill_processes,
    list_children,
    require,
)
from ratchet.types import Message, Task

# Number of instances that are used and closed after a first one; they must leave nothing open.
INSTANCES = 4


@dataclass(frozen=True)
class EpisodeScript:
    """The answers of an episode, from the task's demonstration; empty answers if it has none."""

    task: Task
    answers: tuple[Message, ...]

    @classmethod
    def from_demonstration(
        cls, environment: Environment, task: Task, max_turns: int
    ) -> EpisodeScript:
        with suppress(DataError):
            answers = tuple(m for m in environment.demonstration(task) if m.role == "assistant")
            if answers:
                return cls(task, answers)
        return cls(task, (Message("assistant", ""),) * max_turns)


Trace = tuple[tuple[Message, ...], list[Step]]  # (messages of `reset`, result of each `step`)


async def record_trace(
    caller: DeadlineCaller, environment: Environment, script: EpisodeScript
) -> Trace:
    name = script.task.id
    first = tuple(await caller(f"reset('{name}')", lambda: environment.reset(script.task)))
    steps: list[Step] = []
    for answer in script.answers:
        steps.append(
            await caller(f"step in '{name}'", lambda answer=answer: environment.step(answer))
        )
        if steps[-1].done:
            break
    return first, steps


async def play_episode(
    caller: DeadlineCaller, environment: Environment, script: EpisodeScript
) -> Trace:
    """Play an episode with a new instance, then close the instance."""
    instance = copy.copy(environment)
    try:
        return await record_trace(caller, instance, script)
    finally:
        await caller("close", instance.close)


def check_replay(
    caller: DeadlineCaller, environment: Environment, scripts: Sequence[EpisodeScript]
) -> None:
    """Check that an episode depends only on its task and its script.

    Episodes played before it or at the same time must not change it.
    """
    if not environment.replayable:
        return

    async def play() -> None:
        traces_alone = [await play_episode(caller, environment, script) for script in scripts]
        repeated_traces = [await record_trace(caller, environment, script) for script in scripts]
        concurrent_traces = await asyncio.gather(
            *(play_episode(caller, environment, script) for script in scripts)
        )
        for script, trace_alone, repeated_trace in zip(
            scripts, traces_alone, repeated_traces, strict=True
        ):
            require(
                repeated_trace == trace_alone,
                f"'{script.task.id}' played again, after others, differs: `reset` must reset all "
                "state",
            )
        for script, trace_alone, trace_concurrent in zip(
            scripts, traces_alone, concurrent_traces, strict=True
        ):
            require(
                trace_concurrent == trace_alone,
                f"'{script.task.id}' played beside others differs: copies share state of an "
                "attempt",
            )
        await caller("close", environment.close)

    tasks_before = copy.deepcopy([script.task for script in scripts])
    asyncio.run(play())
    for script, task in zip(scripts, tasks_before, strict=True):
        require(task == script.task, f"an episode changed its task '{script.task.id}'")


def check_faults(
    caller: DeadlineCaller, environment: Environment, scripts: Sequence[EpisodeScript]
) -> None:
    """Check that an infrastructure fault changes no attempt's reward.

    If services and processes are out of reach or die, the attempt must raise an exception, or end
    as it would without the fault.
    """
    if not environment.replayable:
        return

    async def play(script: EpisodeScript) -> None:
        expected_steps = (await play_episode(caller, environment, script))[1]
        children_before = list_children()
        for fault in ("out of reach", "killed"):
            instance = copy.copy(environment)
            try:
                steps = await _record_steps_under_fault(
                    caller, instance, script, fault, children_before
                )
            except BrokenRule:
                raise
            except Exception:  # allowed: a failed attempt has no reward
                steps = []
            _require_same_steps(script, steps, expected_steps, fault)
            with suppress(Exception):
                await caller("close", instance.close)
        after = (await play_episode(caller, environment, script))[1]
        require(
            after == expected_steps,
            f"'{script.task.id}' is another episode after a fault has passed: restart processes "
            "that died",
        )

    for script in scripts:
        asyncio.run(play(script))


async def _record_steps_under_fault(
    caller: DeadlineCaller,
    environment: Environment,
    script: EpisodeScript,
    fault: str,
    children_before: set[int],
) -> list[Step]:
    if fault == "out of reach":
        with break_services():
            return (await record_trace(caller, environment, script))[1]
    name = script.task.id
    await caller(f"reset('{name}')", lambda: environment.reset(script.task))
    steps: list[Step] = []
    for answer in script.answers:
        kill_processes(list_children() - children_before)
        steps.append(
            await caller(f"step in '{name}'", lambda answer=answer: environment.step(answer))
        )
        if steps[-1].done:
            break
    return steps


def _require_same_steps(
    script: EpisodeScript, steps: Sequence[Step], expected_steps: Sequence[Step], fault: str
) -> None:
    for number, (step, expected) in enumerate(zip(steps, expected_steps, strict=False), 1):
        is_same = (step.reward, step.done) == (expected.reward, expected.done)
        require(
            is_same,
            f"'{script.task.id}': with services and processes {fault}, step {number} gives reward "
            f"{step.reward} and done={step.done}, without the fault {expected.reward} and "
            f"done={expected.done}: an infrastructure fault is not a reward; let it raise",
        )


def check_cancelling(
    caller: DeadlineCaller, environment: Environment, scripts: Sequence[EpisodeScript]
) -> None:
    """Check that a cancelled step ends within the deadline."""

    async def play(script: EpisodeScript) -> None:
        instance = copy.copy(environment)
        await caller(f"reset('{script.task.id}')", lambda: instance.reset(script.task))
        task = asyncio.ensure_future(instance.step(script.answers[0]))
        await asyncio.sleep(0)
        where = f"step in '{script.task.id}'"
        with caller.mark_running(where):
            task.cancel()
            await asyncio.wait({task}, timeout=caller.deadline_s)
        require(task.done(), f"{where} continues after it was cancelled: a deadline must end it")
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        await caller("close", instance.close)

    asyncio.run(play(scripts[0]))


def check_release(
    caller: DeadlineCaller, environment: Environment, scripts: Sequence[EpisodeScript]
) -> None:
    """Check that `close` releases what an instance opens for an attempt.

    Resources that all instances share may stay open.
    """

    async def play() -> None:
        instance = copy.copy(environment)
        await record_trace(caller, instance, scripts[0])
        await caller("close", instance.close)
        # An attempt whose `close` fails is closed again, so a second `close` must work.
        await caller("close, once more,", instance.close)

    asyncio.run(play())
    open_before = count_open_resources()
    for _ in range(INSTANCES):
        asyncio.run(play())
    leaked = {
        name: count - open_before[name]
        for name, count in count_open_resources().items()
        if count - open_before[name] >= INSTANCES
    }
    listed = ", ".join(f"{count} {name}" for name, count in leaked.items())
    require(
        not leaked,
        f"{INSTANCES} instances left {listed} behind: `close` must release what `reset` and `step` "
        "open",
    )
