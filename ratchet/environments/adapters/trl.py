"""Adapter for environment classes of TRL 1.16, as in `GRPOTrainer(environment_factory=...)`.

The public methods of such a class are the policy's tools, `reset(**row)` begins an attempt, and
`get_reward()` judges it. The adapter calls the methods as `GRPOTrainer` does: in a thread, unless
they are async.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, SerializeAsAny, field_validator

from ratchet.config.base import Section
from ratchet.config.resolve import Slot
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.environments.tool_use.base import Tools, ToolUnavailable, build_tools, make_tool_schema
from ratchet.environments.tool_use.function_tool import describe_function
from ratchet.errors import ConfigError, DataError, RatchetError
from ratchet.protocols import Environment, Step
from ratchet.rewards.deadline import Deadline
from ratchet.rewards.integrations.base import encode_messages, read_columns, read_number
from ratchet.rewards.integrations.trl import call_trl_reward, make_column_arguments
from ratchet.rewards.user_threads import call_user_function
from ratchet.types import Message, Part, Split, Task, ToolCall
from ratchet.utils.user_code import get_qualified_name
from ratchet.utils.user_imports import import_object

# Public methods of a class that are not tools.
NON_TOOL_METHODS = ("reset", "get_reward")


class TRLEnvironmentConfig(EnvironmentConfig):
    """An environment class of TRL: its public methods are tools, `reset(**row)` begins an attempt.

    `get_reward()` judges an attempt, also one that was cut off. The functions of `reward_funcs` get
    the instance as `environments`. Functions that need no instance belong in `rewards`.
    """

    builds: ClassVar[str] = "ratchet.environments.adapters.trl:TRLEnvironment"
    data_kinds: ClassVar[frozenset[str]] = frozenset({"rollouts"})

    factory: str | dict[str, str]
    """The class, or a function that returns an instance: my_pkg.module:Name, or path/file.py:Name.
    A mapping names one for each value of the rows' column `environment`."""
    problems: Annotated[SerializeAsAny[Section] | None, Slot("problems", is_optional=True)] = None
    """Single-turn environment that provides the rows passed to `reset`; null: there are no rows,
    and `reset` returns the prompt."""
    tools: Tools = ()
    """Further tools, besides the methods."""
    reward_funcs: tuple[str, ...] = ()
    """Reward functions of TRL that read `environments`."""
    max_calling_turns: int | None = Field(None, gt=0)
    """Maximum number of turns with calls (TRL's max_tool_calling_iterations); the attempt ends with
    the next call. Null: no limit."""
    timeout_s: float = Field(30.0, gt=0)
    """Wall time of one call, in seconds."""
    test_tasks: int = Field(100, ge=1)
    """Number of test tasks if problems is null."""
    replayable: bool = True
    """True if the same row and the same messages give the same episode."""

    @field_validator("factory")
    @classmethod
    def _check_factory(cls, factory: str | dict[str, str]) -> str | dict[str, str]:
        if not factory:
            raise ValueError("names no class")
        for path in factory.values() if isinstance(factory, dict) else (factory,):
            _import_callable(path)
        return factory

    @field_validator("reward_funcs")
    @classmethod
    def _check_reward_funcs(cls, functions: tuple[str, ...]) -> tuple[str, ...]:
        for path in functions:
            _import_callable(path)
        names = [path.rpartition(":")[2] for path in functions]
        if len(set(names)) < len(names):
            raise ValueError(
                f"has {', '.join(names)}: metrics are named by function, so rename one of two "
                "functions with the same name"
            )
        return functions

    @property
    def returns_rewards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True if `reward_funcs` is set, or if a class may have `get_reward`.

        A factory function counts, because the class of its instances is unknown.
        """
        paths = self.factory.values() if isinstance(self.factory, dict) else (self.factory,)
        classes = [import_object(path) for path in paths]
        return bool(self.reward_funcs) or any(
            hasattr(target, "get_reward") or not inspect.isclass(target) for target in classes
        )


class TRLEnvironment(Environment):
    """An environment that plays attempts with instances of a TRL class.

    A copy creates instances of its own and resets them for each attempt.
    """

    def __init__(self, config: TRLEnvironmentConfig) -> None:
        """Create an instance of each class to read its tools.

        Raises ConfigError if a class has no `reset`, or a method can't be a tool.
        """
        self.config, self.replayable = config, config.replayable
        factory = config.factory
        paths = factory if isinstance(factory, dict) else {"": factory}
        self.factories = {name: import_object(path) for name, path in paths.items()}
        self.problems = None if config.problems is None else build_environment(config.problems)
        self.reward_funcs = {
            path.rpartition(":")[2]: import_object(path) for path in config.reward_funcs
        }
        self._further_tools = {tool.name: tool for tool in build_tools(config.tools)}
        self._instances = {name: factory() for name, factory in self.factories.items()}
        further_schemas = [
            make_tool_schema(tool.name, tool.description, tool.parameters)
            for tool in self._further_tools.values()
        ]
        self._schemas = {
            name: (*further_schemas, *_describe_methods(instance))
            for name, instance in self._instances.items()
        }

    def __copy__(self) -> Self:
        copy = type(self).__new__(type(self))
        vars(copy).update({**vars(self), "_instances": {}})
        return copy

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        if self.problems is not None:
            return self.problems.tasks(split, seed=seed, start=start)
        end = self.config.test_tasks if split == "test" else None
        indices = itertools.count(start) if end is None else iter(range(start, end))
        return (
            Task(f"trl/{split}/{i}", (Message("user", ""),), environment="trl", tag="trl")
            for i in indices
        )

    def task_count(self) -> int | None:
        return None if self.problems is None else self.problems.task_count()

    def demonstration(self, task: Task) -> Sequence[Message]:
        raise DataError("TRL's environments have no demonstrations: train with rollouts")

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._schemas[self._get_factory_name(task)]

    async def reset(self, task: Task) -> Sequence[Message]:
        """Reset the instance with the row's columns, and return the prompt.

        The text that the instance's `reset` returns is appended to the last message.
        """
        name = self._get_factory_name(task)
        if name not in self._instances:
            self._instances[name] = await self._call(self.factories[name])
        self._instance = self._instances[name]
        self._task = task
        self._n_calling_turns = 0
        row = read_columns(task)
        row.setdefault("prompt", encode_messages(task.messages))
        if isinstance(self.config.factory, dict):
            row.pop("environment", None)  # it only chooses the class
        observation = await self._call(self._instance.reset, **row)
        self._prompt = [*task.messages]
        if observation is not None:
            if not isinstance(observation, str):
                raise DataError(
                    f"{type(self._instance).__name__}.reset returned {observation!r:.200}, it must "
                    "return text or None"
                )
            self._prompt[-1] = _append_text(self._prompt[-1], observation)
        self._messages = list(self._prompt)
        return tuple(self._prompt)

    async def step(self, message: Message) -> Step:
        """Run the calls of a message, or judge the attempt if it has none."""
        self._messages.append(message)
        limit = self.config.max_calling_turns
        if not message.tool_calls or (limit is not None and self._n_calling_turns >= limit):
            reward, metrics = await self._judge()
            return Step(reward=reward, done=True, metrics=metrics)
        self._n_calling_turns += 1
        answers, n_errors = [], 0
        for call in message.tool_calls:
            text, is_error = await self._run_tool(call)
            answers.append(Message("tool", text, tool_call_id=call.id))
            n_errors += is_error
        self._messages += answers
        return Step(
            messages=tuple(answers), metrics={"tool_calls": len(answers), "tool_errors": n_errors}
        )

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        """Return the reward of an attempt that a limit of tokens or turns cut off."""
        self._messages = list(messages)
        reward, _ = await self._judge()
        return reward

    async def close(self) -> None:
        # Like TRL, call no method of the instances: a public `close` would be a tool.
        self._instances = {}

    def _get_factory_name(self, task: Task) -> str:
        """Return the key of the task's class in `factories`. Raises DataError if it is unknown."""
        if not isinstance(self.config.factory, dict):
            return ""
        name = task.meta.get("environment")
        if name not in self.factories:
            raise DataError(
                f"{task.where}: environment={name!r} is not in environment.factory, which has "
                f"{', '.join(self.factories)}"
            )
        return str(name)

    async def _run_tool(self, call: ToolCall) -> tuple[str, bool]:
        """Return the answer to a call as TRL writes it, and True if the answer is an error."""
        try:
            tool = self._further_tools.get(call.name)
            function = self._find_method(call.name) if tool is None else tool.call
            return str(await self._call(function, **call.arguments)), False
        except RatchetError:
            raise
        # A tool is user code and may raise any exception. The policy reads the exception's text and
        # may continue.
        except Exception as error:
            return str({"error": str(error)}), True

    def _find_method(self, name: str) -> Callable[..., Any]:
        if name not in _list_tool_names(self._instance):
            raise ValueError(f"Tool {name} not found.")
        return getattr(self._instance, name)

    async def _judge(self) -> tuple[float | None, dict[str, float]]:
        """Return the sum of `get_reward` and the reward functions, and the values by name.

        The sum is None if none of them returns a value.
        """
        values: dict[str, float] = {}
        instance = self._instance
        if hasattr(instance, "get_reward"):
            value = await self._call(instance.get_reward)
            if value is not None:
                values[type(instance).__name__] = read_number(value, instance.get_reward)
        for name, function in self.reward_funcs.items():
            arguments = {
                "prompts": [encode_messages(self._prompt)],
                "completions": [encode_messages(self._messages)[len(self._prompt) :]],
                "environments": [instance],
                **make_column_arguments(self._task, 1),
            }
            (value,) = await call_trl_reward(function, arguments)
            if value is not None:
                values[name] = read_number(value, function)
        return (sum(values.values()) if values else None), values

    async def _call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """Call user code, in a thread unless it is async.

        Raises ToolUnavailable after `timeout_s`: the call may still change the instance, so the
        attempt can't continue with it.
        """
        limit = Deadline(self.config.timeout_s)
        try:
            async with limit:
                return await call_user_function(function, **arguments)
        except TimeoutError:
            if not limit.expired():
                raise
            name = get_qualified_name(function) or repr(function)
            raise ToolUnavailable(
                f"{name} gave no answer within environment.timeout_s={self.config.timeout_s:g}"
            ) from None


def _append_text(message: Message, text: str) -> Message:
    if isinstance(message.content, str):
        return replace(message, content=message.content + text)
    return replace(message, content=(*message.content, Part("text", text)))


def _import_callable(path: str) -> Any:
    """Import a class or function. Raises ValueError if there is none at the path."""
    try:
        target = import_object(path)
    except ConfigError as error:
        raise ValueError(str(error)) from error
    if not callable(target):
        raise ValueError(f"'{path}' is neither a class nor a function")
    return target


def _list_tool_names(instance: Any) -> list[str]:
    """Return the names of the methods that are tools, in TRL's order: by name."""
    members = inspect.getmembers(type(instance), predicate=inspect.isfunction)
    return [
        name for name, _ in members if name not in NON_TOOL_METHODS and not name.startswith("_")
    ]


def _describe_methods(instance: Any) -> list[dict[str, Any]]:
    # The class is user code, which may lack `reset`.
    if not callable(getattr(instance, "reset", None)):
        raise ConfigError(
            f"{type(instance).__name__} is not an environment of TRL: it has no method `reset`"
        )
    return [describe_function(getattr(instance, name)) for name in _list_tool_names(instance)]
