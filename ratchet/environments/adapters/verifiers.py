"""Adapter for environments of the package verifiers (its v1 interface).

In verifiers a taskset provides tasks, `Env.run(task, agents)` plays a task with agents, and the
task's own functions score the trace. The policy plays one of the agents, whose place is called a
seat. Whenever `run` requests a turn of that agent, `run` waits for Ratchet's message. A task that
has tools, or hooks that need a runtime, is played by `RolloutSeat`. A task that needs a container
is refused; play it through Ratchet's OpenAI-compatible proxy.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.adapters.verifiers_rollout import (
    PROXY_HINT,
    RolloutSeat,
    needs_rollout,
)
from ratchet.environments.single_turn import Rows, is_held_out
from ratchet.errors import ConfigError, DataError, suggest_install
from ratchet.protocols import Step
from ratchet.types import Message, Role, Split, Task
from ratchet.utils.user_code import run_guarded

if TYPE_CHECKING:
    import verifiers.v1 as vf


class VerifiersConfig(EnvironmentConfig):
    """An environment of the package verifiers (its v1 interface), by the id of its taskset."""

    builds: ClassVar[str] = "ratchet.environments.adapters.verifiers:VerifiersEnvironment"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    taskset: str = Field(min_length=1)
    """Id of the taskset: the name of a package that exports it, or of a built-in taskset."""
    options: dict[str, Any] = Field({})
    """Further keys of the taskset's own config."""
    env: dict[str, Any] = Field({})
    """Keys of verifiers' environment config. Without the key id, the taskset's own environment is
    used."""
    seat: str | None = None
    """Name of the agent that the policy plays; null: the only agent."""
    tasks: int | None = Field(None, ge=2)
    """Number of tasks to use; null: all. An endless taskset needs a number."""
    max_turns: int = Field(64, ge=1)
    """Replies of the policy after which the episode is stopped."""
    replayable: bool = True
    """True if the same replies give the same episode."""


class VerifiersEnvironment(Rows):
    """An environment that plays the tasks of a taskset.

    Raises ConfigError if the taskset can't be loaded or played.
    """

    name = "verifiers"

    def __init__(self, config: VerifiersConfig) -> None:
        self.config, self.replayable = config, config.replayable
        self.inner = _load(config)
        self.seat = _choose_seat(self.inner, config.seat)
        agent = getattr(self.inner.config, self.seat)
        _check_agent(agent, self.seat)
        self.max_turns = min(config.max_turns, agent.max_turns or config.max_turns)
        self.inner_tasks: dict[str, vf.Task] = {}
        self._rows: dict[Split, list[Task]] = {"train": [], "test": []}
        self._has_tools = False
        self._needs_rollout = False
        self._read_tasks()
        self._tools: Sequence[Mapping[str, Any]] = ()
        self._episode: asyncio.Task[vf.Episode] | None = None

    def _read_tasks(self) -> None:
        taskset = (
            self.inner.taskset
            if self.config.tasks is None
            else self.inner.taskset.take(self.config.tasks)
        )
        if taskset.toolsets(taskset.config):
            raise ConfigError(
                f"environment.taskset {self.config.taskset} shares tool servers among its tasks, "
                "which this adapter does not offer: give the task class its own toolsets"
            )
        if not taskset.bounded:
            raise ConfigError(
                f"environment.taskset {self.config.taskset} is endless: set environment.tasks to a "
                "number"
            )
        tasks = list(taskset)
        prompts = [_read_prompt(task) for task in tasks]
        has_repeats = len(set(prompts)) < len(prompts)
        for index, (task, prompt) in enumerate(zip(tasks, prompts, strict=True)):
            _check_needs(task)
            self._has_tools |= bool(type(task).toolsets(task.config))
            self._needs_rollout |= needs_rollout(task)
            # If prompts repeat, or all are empty, only their hashes tell the tasks apart.
            text = task.hash if has_repeats else "\n".join(message.text for message in prompt)
            split = "test" if is_held_out(text) else "train"
            converted_task = Task(
                id=f"{self.config.taskset}/{index}",
                messages=prompt or (Message("user", f"{self.config.taskset}, task {index}"),),
                environment=self.name,
                tag=self.config.taskset,
            )
            self.inner_tasks[converted_task.id] = task
            self._rows[split].append(converted_task)
        self._read_ids = {id(task) for task in tasks}

    def is_made_in_play(self, task: vf.Task) -> bool:
        """True if a task is not one of the taskset, whose needs were read at the start."""
        return id(task) not in self._read_ids

    def rows(self, split: Split) -> Sequence[Task]:
        return self._rows[split]

    @property
    def has_tools(self) -> bool:
        """True if a task has tool servers."""
        return self._has_tools

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._tools

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError(f"taskset {self.config.taskset} has no solutions: train with rollouts")

    async def reset(self, task: Task) -> Sequence[Message]:
        await self.close()
        self._turns = 0
        self._tools = ()
        self._requests = asyncio.Queue[Sequence[Message]]()
        self._replies = asyncio.Queue[Message | None]()
        self._episode = asyncio.create_task(
            run_guarded(partial(self._play, self.inner_tasks[task.id]))
        )
        request = await self._next_request()
        if request is None:
            raise DataError(
                f"{task.id}: its environment ended without a turn of seat '{self.seat}'"
            )
        return request

    async def step(self, message: Message) -> Step:
        self._turns += 1
        await self._replies.put(message)
        request = await self._next_request()
        if request is not None and self._turns >= self.max_turns:
            # No reply stops the episode, so that no further request follows.
            await self._replies.put(None)
            request = await self._next_request()
        if request is not None:
            return Step(messages=tuple(request), reward=0.0)
        assert self._episode is not None
        (trace,) = self._episode.result().traces
        reward_parts = {
            name: part.value for name, part in trace.rewards.items() if part is not None
        }
        metrics = {name: value for name, value in trace.metrics.items() if value is not None}
        return Step(reward=trace.reward, done=True, metrics={**metrics, **reward_parts})

    async def close(self) -> None:
        episode, self._episode = self._episode, None
        if episode is not None:
            episode.cancel()
            if not episode.done():  # it ends its tool servers
                await asyncio.wait({episode})

    async def _next_request(self) -> Sequence[Message] | None:
        """Return the next messages for the policy; None once the episode is over.

        Exceptions of the environment propagate.
        """
        assert self._episode is not None
        request = asyncio.ensure_future(self._requests.get())
        await asyncio.wait({request, self._episode}, return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result()
        request.cancel()
        self._episode.result()
        return None

    async def request_turn(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> Message | None:
        """Pass messages to the policy. Return its reply, or None if the episode must stop."""
        self._tools = tools
        await self._requests.put(messages)
        return await self._replies.get()

    async def _play(self, task: vf.Task) -> vf.Episode:
        """Run the environment on a task, and return the episode with the policy's only trace."""
        from verifiers.v1 import EnvInfo, Episode, TraceTask

        trace_task = TraceTask(
            type=type(task).__name__, data=task.data, key=task.key, hash=task.hash
        )
        episode = Episode(env=EnvInfo(id=self.inner.config.env_id), task=trace_task)
        agents: Any = _Seats(self, episode)
        await self.inner.setup(agents)
        await self.inner.run(task, agents)
        await self.inner.finalize(task, episode)
        if len(episode.traces) != 1:
            raise DataError(
                f"the episode holds {len(episode.traces)} conversations of the policy, and only "
                "one can be trained on"
            )
        # verifiers records failures of a rollout on its trace, with the rewards at 0.
        if error := episode.traces[0].last_error:
            raise DataError(f"the rollout failed: {error.type}: {error.message}")
        return episode

    def make_seat(self, episode: vf.Episode) -> _Seat | RolloutSeat:
        """Return the agent that the policy plays in an episode."""
        if not self._needs_rollout:
            return _Seat(self, episode)
        config = getattr(self.inner.config, self.seat)
        return RolloutSeat(config, episode, self.request_turn, self.max_turns)


class _Seats:
    """A replacement of `vf.Agents` that has only the agent of the policy."""

    def __init__(self, environment: VerifiersEnvironment, episode: vf.Episode) -> None:
        self._policy = environment.make_seat(episode)
        self._name = environment.seat

    def __getattr__(self, name: str) -> _Seat | RolloutSeat:
        if name != self._name:
            raise DataError(
                f"seat '{name}' needs another agent, which this adapter can't play: {PROXY_HINT}"
            )
        return self._policy


class _Seat:
    """A replacement of `vf.Agent` that the policy plays."""

    trainable = True

    def __init__(self, environment: VerifiersEnvironment, episode: vf.Episode) -> None:
        self.environment, self.episode = environment, episode

    async def run(self, task: vf.Task) -> vf.Trace:
        async with self.interaction(task) as conversation:
            await conversation.turn()
        return conversation.trace

    @asynccontextmanager
    async def interaction(self, task: vf.Task) -> AsyncIterator[_Conversation]:
        if self.environment.is_made_in_play(task) and needs_rollout(task):
            raise DataError(
                f"the environment plays a {type(task).__name__} with tools or a runtime, which the "
                f"tasks of its taskset lack: {PROXY_HINT}"
            )
        conversation = _Conversation(self.environment, task)
        self.episode.traces.append(conversation.trace)
        if len(self.episode.traces) > 1:
            raise DataError(
                "the environment requests a second conversation of the policy in one episode, and "
                "only one can be trained on"
            )
        yield conversation
        if conversation.trace.stop_condition is None:
            conversation.trace.stop("user_closed")
        await task.score(conversation.trace)


class _Conversation:
    """A replacement of `vf.Interaction` with the policy's replies. It records the same trace."""

    def __init__(self, environment: VerifiersEnvironment, task: vf.Task) -> None:
        from verifiers.v1 import AgentInfo, TraceTask
        from verifiers.v1.state import state_cls

        from ratchet.environments.adapters.verifiers_harness import PolicyTrace

        self.environment, self.task = environment, task
        self.trace: Any = PolicyTrace(
            task=TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
            state=state_cls(type(task))(),
            agent=AgentInfo(config=getattr(environment.inner.config, environment.seat)),
        )
        self.messages: list[vf.Message] = []
        # True after a terminated segment. As in `vf.Interaction`, another turn is then an error.
        self.is_over = False

    async def turn(self, message: str | Sequence[Any] | None = None) -> vf.Segment:
        from verifiers.v1 import AssistantMessage, Response, Segment
        from verifiers.v1.graph import prepare_turn

        if self.is_over:
            raise RuntimeError("the exchange is over (the run ended); read interaction.trace")
        if self.trace.stop_condition is not None:
            self.is_over = True
            return Segment(messages=[], terminated=True)
        new_messages = _list_prompt_messages(self.task) if not self.messages else []
        new_messages += _parse_messages(message)
        self.messages += new_messages
        answer = await self.environment.request_turn(tuple(map(_convert_message, new_messages)))
        if answer is None:
            self.trace.stop("max_turns")
            self.is_over = True
            return Segment(messages=[], terminated=True)
        reply = AssistantMessage(content=answer.text)
        response = Response(id="", created=0, model="policy", message=reply, finish_reason="stop")
        prepare_turn(self.trace, list(self.messages)).commit(response)
        self.messages.append(reply)
        await self._apply_stop_hooks()
        return Segment(messages=[reply])

    async def _apply_stop_hooks(self) -> None:
        """Stop the trace if one of the task's `@vf.stop` functions returns true."""
        from verifiers.v1 import Trace
        from verifiers.v1.session import call_hook

        for hook in self.task.hooks("stop"):
            if await call_hook(hook, {Trace: self.trace}):
                self.trace.stop(hook.__name__)
                return


def _load(config: VerifiersConfig) -> vf.Env:
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(
            f"environment.kind 'verifiers' can't import the package ({error}): "
            f"{suggest_install('verifiers')}"
        ) from error
    taskset = {**config.options, "id": config.taskset}
    try:
        config_type = vf.env_config_type(config.taskset, config.env.get("id", ""))
        inner = vf.load_environment(config_type.model_validate({**config.env, "taskset": taskset}))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"environment.taskset {config.taskset}: {error}") from error
    if type(inner).start is not vf.Env.start or type(inner).stop is not vf.Env.stop:
        raise ConfigError(
            f"environment.taskset {config.taskset}: {type(inner).__name__} has `start` or `stop`, "
            f"which this adapter does not call: {PROXY_HINT}"
        )
    return inner


def _choose_seat(inner: vf.Env, configured: str | None) -> str:
    """Return the name of the policy's agent: the configured one, or the only one."""
    from verifiers.v1.configs.agent import agent_config_fields

    seats = list(agent_config_fields(inner.config))
    if configured is None and len(seats) == 1:
        return seats[0]
    if configured not in seats:
        raise ConfigError(
            f"environment.seat={configured or 'null'}: the policy plays one agent; set seat to one "
            f"of {', '.join(seats)}"
        )
    return configured


def _check_agent(agent: vf.AgentConfig, seat: str) -> None:
    """Raise ConfigError for a limit on tokens, which this adapter does not count."""
    for name in ("max_input_tokens", "max_output_tokens", "max_total_tokens"):
        if getattr(agent, name) is not None:
            raise ConfigError(
                f"environment.env.{seat}.{name}={getattr(agent, name)} can't be held, because "
                "environments don't see tokens. Set it to null, and sampling.max_new_tokens for "
                "the length of a reply."
            )


def _check_needs(task: vf.Task) -> None:
    """Raise ConfigError for a task that needs a container or skills."""
    task_type = type(task)
    needs = {
        "a container": task_type.NEEDS_CONTAINER or task.data.image is not None,
        "skills": bool(task.data.skills),
    }
    if any(needs.values()):
        missing = next(name for name, is_needed in needs.items() if is_needed)
        raise ConfigError(
            f"environment.taskset: {task_type.__name__} needs {missing}, which this adapter does "
            f"not offer: {PROXY_HINT}"
        )


def _list_prompt_messages(task: vf.Task) -> list[vf.Message]:
    from verifiers.v1 import SystemMessage, UserMessage

    system, prompt = task.data.system_prompt, task.data.prompt
    opening: list[vf.Message] = [] if system is None else [SystemMessage(content=system)]
    return [*opening, *([UserMessage(content=prompt)] if isinstance(prompt, str) else prompt or [])]


def _read_prompt(task: vf.Task) -> tuple[Message, ...]:
    return tuple(map(_convert_message, _list_prompt_messages(task)))


def _parse_messages(message: str | Sequence[Any] | None) -> list[vf.Message]:
    from verifiers.v1 import UserMessage
    from verifiers.v1.dialects import parse_message

    if message is None:
        return []
    if isinstance(message, str):
        return [UserMessage(content=message)]
    return [parse_message(item) if isinstance(item, dict) else item for item in message]


def _convert_message(message: vf.Message) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        content = "\n".join(_get_text(part) for part in content)
    role: Role = message.role
    return Message(
        role, content, tool_call_id=message.tool_call_id if message.role == "tool" else None
    )


def _get_text(part: Any) -> str:
    if part.type != "text":
        raise DataError(
            f"a message holds a part of type {part.type}, and this adapter supports only text"
        )
    return part.text
