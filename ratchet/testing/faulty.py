"""Check an environment under faults, replays and cancellation.

None of them may lead to a reward, a hang, a leak, or a change of another attempt.
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
    Calls,
    broken_services,
    count_open_resources,
    kill,
    list_children,
    require,
)
from ratchet.types import Message, Task

INSTANCES = 4  # number of instances, after a first one, that must leave nothing open


@dataclass(frozen=True)
class Said:
    """The script of an episode: the answers of the task's demonstration, else empty answers."""

    task: Task
    answers: tuple[Message, ...]

    @classmethod
    def of(cls, environment: Environment, task: Task, max_turns: int) -> Said:
        with suppress(DataError):
            answers = tuple(m for m in environment.demonstration(task) if m.role == "assistant")
            if answers:
                return cls(task, answers)
        return cls(task, (Message("assistant", ""),) * max_turns)


Trace = tuple[tuple[Message, ...], list[Step]]  # (messages of `reset`, result of each `step`)


async def trace(calls: Calls, environment: Environment, said: Said) -> Trace:
    name = said.task.id
    first = tuple(await calls(f"reset('{name}')", lambda: environment.reset(said.task)))
    steps: list[Step] = []
    for answer in said.answers:
        steps.append(
            await calls(f"step in '{name}'", lambda answer=answer: environment.step(answer))
        )
        if steps[-1].done:
            break
    return first, steps


async def played(calls: Calls, environment: Environment, said: Said) -> Trace:
    """Play an episode with a new instance, then close the instance."""
    instance = copy.copy(environment)
    try:
        return await trace(calls, instance, said)
    finally:
        await calls("close", instance.close)


def check_replay(calls: Calls, environment: Environment, script: Sequence[Said]) -> None:
    """Check that an episode depends only on its task and its script.

    Episodes played before it or at the same time must not change it.
    """
    if not environment.replayable:
        return

    async def play() -> None:
        alone = [await played(calls, environment, line) for line in script]
        again = [await trace(calls, environment, line) for line in script]
        concurrent = await asyncio.gather(*(played(calls, environment, line) for line in script))
        for line, trace_alone, trace_again in zip(script, alone, again, strict=True):
            require(
                trace_again == trace_alone,
                f"'{line.task.id}' played again, after others, differs: `reset` must reset all "
                "state",
            )
        for line, trace_alone, trace_concurrent in zip(script, alone, concurrent, strict=True):
            require(
                trace_concurrent == trace_alone,
                f"'{line.task.id}' played beside others differs: copies share state of an attempt",
            )
        await calls("close", environment.close)

    tasks_before = copy.deepcopy([line.task for line in script])
    asyncio.run(play())
    for line, task in zip(script, tasks_before, strict=True):
        require(task == line.task, f"an episode changed its task '{line.task.id}'")


def check_faults(calls: Calls, environment: Environment, script: Sequence[Said]) -> None:
    """Check that no attempt gets another reward because of an infrastructure fault.

    If services and processes are out of reach or die, the attempt must raise an exception, or end
    as it would have without the fault.
    """
    if not environment.replayable:
        return

    async def play(said: Said) -> None:
        clean = (await played(calls, environment, said))[1]
        before_children = list_children()
        for fault in ("out of reach", "killed"):
            instance = copy.copy(environment)
            try:
                trace = await _under(calls, instance, said, fault, before_children)
            except BrokenRule:
                raise
            except Exception:  # allowed: a failed attempt has no reward
                trace = []
            _compare(said, trace, clean, fault)
            with suppress(Exception):
                await calls("close", instance.close)
        after = (await played(calls, environment, said))[1]
        require(
            after == clean,
            f"'{said.task.id}' is another episode after a fault has passed: restart processes that "
            "died",
        )

    for said in script:
        asyncio.run(play(said))


async def _under(
    calls: Calls, environment: Environment, said: Said, fault: str, mine: set[int]
) -> list[Step]:
    if fault == "out of reach":
        with broken_services():
            return (await trace(calls, environment, said))[1]
    name = said.task.id
    await calls(f"reset('{name}')", lambda: environment.reset(said.task))
    steps: list[Step] = []
    for answer in said.answers:
        kill(list_children() - mine)
        steps.append(
            await calls(f"step in '{name}'", lambda answer=answer: environment.step(answer))
        )
        if steps[-1].done:
            break
    return steps


def _compare(said: Said, found: Sequence[Step], clean: Sequence[Step], fault: str) -> None:
    for number, (step, right) in enumerate(zip(found, clean, strict=False), 1):
        same = (step.reward, step.done) == (right.reward, right.done)
        require(
            same,
            f"'{said.task.id}': with services and processes {fault}, step {number} gives reward "
            f"{step.reward} and "
            f"done={step.done}, else {right.reward} and {right.done}: an infrastructure fault is "
            "no reward; let it raise",
        )


def check_cancelling(calls: Calls, environment: Environment, script: Sequence[Said]) -> None:
    """Check that a cancelled step ends within the deadline."""

    async def play(said: Said) -> None:
        instance = copy.copy(environment)
        await calls(f"reset('{said.task.id}')", lambda: instance.reset(said.task))
        task = asyncio.ensure_future(instance.step(said.answers[0]))
        await asyncio.sleep(0)
        where = f"step in '{said.task.id}'"
        with calls.of(where):
            task.cancel()
            await asyncio.wait({task}, timeout=calls.deadline_s)
        require(task.done(), f"{where} goes on after it was cancelled: a deadline must end it")
        if not task.cancelled():
            task.exception()  # retrieved, so that asyncio does not log it
        await calls("close", instance.close)

    asyncio.run(play(script[0]))


def check_release(calls: Calls, environment: Environment, script: Sequence[Said]) -> None:
    """Check that `close` releases what an instance opens for an attempt.

    What all instances share may stay open.
    """

    async def play() -> None:
        instance = copy.copy(environment)
        await trace(calls, instance, script[0])
        await calls("close", instance.close)
        # An attempt whose `close` fails is closed again, so a second `close` must work.
        await calls("close, once more,", instance.close)

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
