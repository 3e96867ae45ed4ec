"""Check an Environment, built-in or your own: `check_environment(Maze(config))` in a test."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from ratchet.config.from_words import section_from_words
from ratchet.data.codec import from_plain
from ratchet.environments.build import build_environment
from ratchet.environments.workers.protocol import pack
from ratchet.errors import DataError
from ratchet.protocols import Environment, Reward, Step
from ratchet.testing import faulty
from ratchet.testing.faulty import EpisodeScript
from ratchet.testing.harness import BrokenRule, DeadlineCaller, require, run_supervised
from ratchet.testing.rewards import conversation
from ratchet.types import Message, Split, Task
from ratchet.utils.user_parts import add_missing_members

SEEDS = (0, 1)
REQUIRED_METHODS = ("tasks", "reset", "step")
EPISODE_TASKS = 5  # number of tasks of each split for which episodes are run
KEY_ADVICE = (
    "If every task begins with the same message, give each Problem a `key`, such as its secret: "
    "the key then decides the split in place of the prompt"
)
FAULT_TASKS = 2  # number of tasks whose episodes are also run with injected faults
DEADLINE_S = 30.0


def check_environment(
    environment: Environment | str,
    *,
    reward: Reward | None = None,
    full_reward: float = 1.0,
    n: int = 200,
    max_turns: int = 100,
    deadline_s: float = DEADLINE_S,
) -> None:
    """Raise AssertionError with the first rule that the environment breaks.

    Args:
        environment: An environment, or its import path, `my_pkg.my_mod:Maze`.
        reward: If given, each demonstration must earn `full_reward`.
        n: Number of tasks read from each split; episodes are run for a few of them.
        max_turns: Number of empty answers within which an episode must end. A demonstration must
            end its episode too.
        deadline_s: Time within which each call must end.
    """
    instance = (
        build_environment(section_from_words("environment", environment))
        if isinstance(environment, str)
        else environment
    )
    for check in list_environment_checks(
        instance, reward=reward, full_reward=full_reward, n=n, max_turns=max_turns
    ).values():
        run_supervised(check, deadline_s)


def list_environment_checks(
    environment: Environment,
    *,
    reward: Reward | None = None,
    full_reward: float = 1.0,
    n: int = 200,
    max_turns: int = 100,
) -> Mapping[str, Callable[[DeadlineCaller], None]]:
    """Return the checks by name. Each raises AssertionError, and relies on the earlier checks."""
    missing = [name for name in REQUIRED_METHODS if not hasattr(environment, name)]
    if not missing:
        add_missing_members(environment, Environment)
    tasks: list[Task] = []
    scripts: list[EpisodeScript] = []

    def check_tasks(caller: DeadlineCaller) -> None:
        require(not missing, f"{type(environment).__name__} has no {', '.join(missing)}")
        require(isinstance(environment.replayable, bool), "`replayable` must be a bool")
        with caller.mark_running("tasks"):
            train, test = (_check_order(environment, split, n) for split in ("train", "test"))
            _check_seeds(environment, train, test)
            _check_splits(train, test)
        tasks.extend(train[:EPISODE_TASKS] + test[:EPISODE_TASKS])

    def check_serialisation(caller: DeadlineCaller) -> None:
        for task in tasks:
            _check_serialised(task)

    def check_episodes(caller: DeadlineCaller) -> None:
        for task in tasks:
            asyncio.run(_check_episode(caller, environment, task, max_turns))

    def check_demonstrations(caller: DeadlineCaller) -> None:
        for task in tasks:
            asyncio.run(_check_demonstration(caller, environment, task, reward, full_reward))
        scripts.extend(
            EpisodeScript.from_demonstration(environment, task, max_turns)
            for task in tasks[:FAULT_TASKS]
        )

    def bind_scripts(check: Any) -> Callable[[DeadlineCaller], None]:
        return lambda caller: check(caller, environment, scripts)

    return {
        "tasks": check_tasks,
        "serialisable tasks": check_serialisation,
        "episodes and shapes": check_episodes,
        "demonstrations": check_demonstrations,
        "seeded reset": bind_scripts(faulty.check_replay),
        "faults are no rewards": bind_scripts(faulty.check_faults),
        "deadlines": bind_scripts(faulty.check_cancelling),
        "close releases": bind_scripts(faulty.check_release),
    }


def _read_tasks(
    environment: Environment, split: Split, n: int, *, seed: int = SEEDS[0], start: int = 0
) -> list[Task]:
    return list(islice(environment.tasks(split, seed=seed, start=start), n))


def _check_order(environment: Environment, split: Split, n: int) -> list[Task]:
    tasks = _read_tasks(environment, split, n)
    require(
        bool(tasks),
        f"the {split} split has no task. {KEY_ADVICE}",
    )
    for start in sorted({0, 1, len(tasks) // 2, len(tasks) - 1}):
        reread = _read_tasks(environment, split, len(tasks) - start, start=start)
        require(
            reread == tasks[start:],
            f"{split} tasks from start={start} are not the same as when read from 0",
        )
    for task in tasks:
        require(bool(task.messages), f"task '{task.id}' has no messages")
        _check_messages(task.messages, f"task '{task.id}'")
    task_by_id = {task.id: task for task in tasks}
    require(
        all(task_by_id[task.id] == task for task in tasks),
        f"two different {split} tasks share an id",
    )
    require(split == "train" or len(task_by_id) == len(tasks), "a test task comes twice")
    return tasks


def _check_seeds(environment: Environment, train: list[Task], test: list[Task]) -> None:
    other = _read_tasks(environment, "train", len(train), seed=SEEDS[1])
    require(
        len(train) == 1 or other != train,
        "train tasks are the same, in the same order, for two seeds",
    )
    require(
        _read_tasks(environment, "test", len(test), seed=SEEDS[1]) == test,
        "test tasks depend on the training seed",
    )


def _check_splits(train: list[Task], test: list[Task]) -> None:
    require(not {t.id for t in train} & {t.id for t in test}, "a train and a test task share an id")
    # The tasks of a game with a constant first message differ only in their answers.
    problems = [(task.messages, task.answer) for task in train]
    leaked = next((task for task in test if (task.messages, task.answer) in problems), None)
    require(
        leaked is None,
        f"the prompt and answer of '{leaked and leaked.id}' are also in the training split. "
        f"{KEY_ADVICE}",
    )


def _check_serialised(task: Task) -> None:
    """Require that a task survives serialisation, for worker processes and records."""
    try:
        reread = from_plain(pack(task).load_json())
    except DataError as error:
        raise BrokenRule(
            f"task '{task.id}' can't be serialised ({error}): keep plain data in its answer and "
            "meta"
        ) from error
    require(
        reread == task,
        f"task '{task.id}' changes when it is serialised: keep plain data in its answer and meta",
    )


async def _check_episode(
    caller: DeadlineCaller, environment: Environment, task: Task, max_turns: int
) -> None:
    reset = partial(caller, f"reset('{task.id}')", lambda: environment.reset(task))
    first = tuple(await reset())
    require(bool(first), f"reset('{task.id}') gives no message to answer")
    _check_messages(first, f"reset('{task.id}')")
    if environment.replayable:
        require(tuple(await reset()) == first, f"reset('{task.id}') twice gives different messages")
    for _ in range(max_turns):
        if (await _step(caller, environment, task, Message("assistant", ""))).done:
            return
    require(False, f"'{task.id}' did not end within {max_turns} empty answers")


async def _check_demonstration(
    caller: DeadlineCaller,
    environment: Environment,
    task: Task,
    reward: Reward | None,
    full_reward: float,
) -> None:
    try:
        demonstration = environment.demonstration(task)
    except DataError:
        return  # allowed: not every task comes with a solution
    _check_messages(demonstration, f"demonstration('{task.id}')")
    answers = [message for message in demonstration if message.role == "assistant"]
    require(bool(answers), f"demonstration('{task.id}') has no assistant message")
    messages = list(await caller(f"reset('{task.id}')", lambda: environment.reset(task)))
    is_done = False
    for answer in answers:
        require(not is_done, f"demonstration('{task.id}') continues after the episode's end")
        step = await _step(caller, environment, task, answer)
        is_done = step.done
        messages += [answer] if is_done else [answer, *step.messages]
    require(is_done, f"the episode of '{task.id}' does not end with its demonstration")
    if reward is not None:
        (outcome,) = await reward.score([conversation(messages)], task)
        require(
            outcome.reward == full_reward,
            f"demonstration('{task.id}') earns {outcome}, not {full_reward}",
        )


async def _step(
    caller: DeadlineCaller, environment: Environment, task: Task, message: Message
) -> Step:
    where = f"step in '{task.id}'"
    step = await caller(where, lambda: environment.step(message))
    require(isinstance(step, Step), f"{where} gives {type(step).__name__}, not Step")
    require(isinstance(step.done, bool), f"{where}: `done` must be a bool")
    require(
        step.reward is None or math.isfinite(step.reward),
        f"{where}: reward {step.reward} is not finite",
    )
    metric_values = (step.metrics or {}).values()
    require(
        all(isinstance(x, int | float) and math.isfinite(x) for x in metric_values),
        f"{where}: metrics {step.metrics} are not finite",
    )
    require(step.done or bool(step.messages), f"{where} neither ends the episode nor says anything")
    _check_messages(step.messages, where)
    require(all(m.role != "assistant" for m in step.messages), f"{where} speaks for the assistant")
    inline = [message.role == "inline" for message in step.messages]
    require(all(inline) or not any(inline), f"{where} mixes inline text with other messages")
    return step


def _check_messages(messages: Sequence[Message], where: str) -> None:
    require(
        all(isinstance(message, Message) for message in messages),
        f"{where} must give Message objects only",
    )
