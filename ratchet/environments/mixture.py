"""An environment that mixes others. Weights determine how their tasks are interleaved."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Annotated, Any, ClassVar

from pydantic import Field

from ratchet.config.resolve import Slot
from ratchet.config.schema import AnyEnvironment
from ratchet.config.sections import EnvironmentConfig
from ratchet.environments.build import build_environment
from ratchet.errors import DataError
from ratchet.protocols import (
    Environment,
    Step,
)
from ratchet.types import (
    TEMPLATE_VARIABLES,
    Comparison,
    Group,
    LabelledAnswer,
    Message,
    Split,
    Task,
)
from ratchet.utils.user_code import await_method


class MixtureConfig(EnvironmentConfig):
    """A mixture of environments. Each has a weight, and a tag by which its rewards are chosen."""

    builds: ClassVar[str] = "ratchet.environments.mixture:mixture"

    parts: Annotated[tuple[AnyEnvironment, ...], Slot("part", is_list=True)] = Field(min_length=1)
    """Environments with their weights. Two of the same kind need different tags."""

    def check_keys(self) -> None:
        tags = [get_part_tag(part) for part in self.parts]
        repeated = next((tag for tag in tags if tags.count(tag) > 1), None)
        if repeated is not None:
            raise ValueError(
                f"two parts have the tag '{repeated}': set another tag for one, such as "
                f"{repeated}_2"
            )

    @property
    def default_reward(self) -> str | Mapping[str, Any]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The default rewards of the parts, by tag; "" if no part has one."""
        default_rewards = {get_part_tag(part): part.default_reward for part in self.parts}
        if not any(default_rewards.values()):
            return ""
        return {
            "kind": "by_tag",
            "domains": {
                tag: [{"kind": kind}] if kind else [] for tag, kind in default_rewards.items()
            },
        }

    @property
    def data_kinds(self) -> frozenset[str]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The kinds of training data that every part offers."""
        return frozenset.intersection(*(frozenset(part.data_kinds) for part in self.parts))

    @property
    def returns_rewards(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return all(part.returns_rewards for part in self.parts)


def get_part_tag(part: Any) -> str:
    """Return the tag of a part, by default its kind.

    The slot of the parts adds the keys `tag` and `weight` to their sections.
    """
    return part.tag or part.kind_name.rpartition(":")[2]


def mixture(config: MixtureConfig) -> Mixture:
    """Build the environment."""
    return Mixture(config, {get_part_tag(part): build_environment(part) for part in config.parts})


class Mixture(Environment):
    """An environment whose tasks come from several environments, its parts.

    A task gets its part's tag, and an id that begins with the tag. The weights alone determine the
    part of each position, so a resumed run continues at the right task of every part.
    """

    def __init__(self, config: MixtureConfig, parts: Mapping[str, Environment]) -> None:
        self.config = config
        self._parts = parts
        sections: tuple[Any, ...] = config.parts
        self._template_variables = {
            get_part_tag(section): section.chat_template_kwargs for section in sections
        }
        self._weights = [Fraction(str(section.weight)) for section in sections]
        self._copies: dict[str, Environment] = {}  # copies of parts that play attempts, by tag
        self._current_part: Environment | None = None
        self.replayable = all(part.replayable for part in self._parts.values())

    def __copy__(self) -> Mixture:
        """Return a copy with its own copies of the parts, which keep the state of an attempt."""
        mixture_copy = object.__new__(type(self))
        vars(mixture_copy).update({**vars(self), "_copies": {}, "_current_part": None})
        return mixture_copy

    def tasks(self, split: Split, *, seed: int, start: int = 0) -> Iterator[Task]:
        if split == "test":
            return itertools.islice(self._iter_test_tasks(seed), start, None)
        return self._iter_train_tasks(seed, start)

    def task_count(self) -> int | None:
        """Return the number of training tasks of all parts together, whatever their weights."""
        counts = [part.task_count() for part in self._parts.values()]
        known_counts = [count for count in counts if count is not None]
        return sum(known_counts) if len(known_counts) == len(counts) else None

    def _iter_train_tasks(self, seed: int, start: int) -> Iterator[Task]:
        streams: dict[int, Iterator[Task]] = {}
        tags = list(self._parts)
        for position in itertools.count(start):
            part_index, task_index = locate_task(position, self._weights)
            if part_index not in streams:
                streams[part_index] = self._parts[tags[part_index]].tasks(
                    "train", seed=seed, start=task_index
                )
            task = next(streams[part_index], None)
            if task is None:
                raise DataError(
                    f"part '{tags[part_index]}' of the mixture ran out of training tasks: a part "
                    "must repeat its data"
                )
            yield self._add_tag(tags[part_index], task)

    def _iter_test_tasks(self, seed: int) -> Iterator[Task]:
        """Yield test tasks by the same weights until every part has run out.

        A part that has run out is skipped.
        """
        streams = dict(enumerate(part.tasks("test", seed=seed) for part in self._parts.values()))
        tags = list(self._parts)
        for position in itertools.count():
            part_index, _ = locate_task(position, self._weights)
            task = next(streams[part_index], None) if part_index in streams else None
            if task is not None:
                yield self._add_tag(tags[part_index], task)
                continue
            streams.pop(part_index, None)
            if not streams:
                return

    def _add_tag(self, tag: str, task: Task) -> Task:
        meta = dict(task.meta)
        if variables := self._template_variables[tag]:
            # A row's own variables (`chat_template_columns`) override the variables of its part.
            meta[TEMPLATE_VARIABLES] = {**variables, **meta.get(TEMPLATE_VARIABLES, {})}
        return replace(task, id=f"{tag}:{task.id}", tag=tag, meta=meta)

    def _find_part(self, task: Task) -> Environment:
        if task.tag not in self._parts:
            raise DataError(
                f"task '{task.id}' has the tag '{task.tag}', and the mixture's parts are "
                f"{', '.join(self._parts)}"
            )
        return self._parts[task.tag]

    # --- one attempt

    async def reset(self, task: Task) -> Sequence[Message]:
        part = self._find_part(task)
        self._current_part = self._copies.setdefault(task.tag, copy.copy(part))
        return await await_method(self._current_part.reset(task), self._current_part, "reset")

    async def step(self, message: Message) -> Step:
        assert self._current_part is not None, "step before reset"
        return await await_method(self._current_part.step(message), self._current_part, "step")

    def observe(
        self, task: Task, first: Sequence[Message], turns: Sequence[Sequence[Message]]
    ) -> Sequence[Message]:
        return self._find_part(task).observe(task, first, turns)

    async def reward_cut_attempt(self, messages: Sequence[Message]) -> float | None:
        assert self._current_part is not None, "no attempt before reset"
        return await self._current_part.reward_cut_attempt(messages)

    async def close(self) -> None:
        copies, self._copies = self._copies, {}
        for part in copies.values():
            await part.close()

    @property
    def stop_strings(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return () if self._current_part is None else self._current_part.stop_strings

    @property
    def raw_observations(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._current_part is not None and self._current_part.raw_observations

    @property
    def has_tools(self) -> bool:
        """True if a part has tools: a known format of tool calls is required only then."""
        return any(part.has_tools for part in self._parts.values())

    def tools(self, task: Task) -> Sequence[Mapping[str, Any]]:
        return self._copies.get(task.tag, self._find_part(task)).tools(task)

    def post_process(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return the groups, each as its part returns it."""
        processed: dict[str, Group] = {}
        for tag, part in self._parts.items():
            part_groups = [group for group in groups if group.task.tag == tag]
            if part_groups:
                processed |= {group.id: group for group in part.post_process(part_groups)}
        return [processed.get(group.id, group) for group in groups]

    def measure(self, groups: Sequence[Group]) -> Mapping[str, float]:
        """Return the metrics of the parts, and the number of prompts of each part.

        Because of filters and curricula, the numbers may not be proportional to the weights.
        """
        metrics: dict[str, float] = {}
        for tag, part in self._parts.items():
            part_groups = [group for group in groups if group.task.tag == tag]
            metrics[f"prompts/{tag}"] = float(len(part_groups))
            metrics |= part.measure(part_groups)
        return metrics

    # --- answers from data

    def drops_too_long_rows(self, task: Task) -> bool:
        return self._find_part(task).drops_too_long_rows(task)

    def demonstration(self, task: Task) -> Sequence[Message]:
        return self._find_part(task).demonstration(task)

    def comparison(self, task: Task) -> Comparison:
        part = self._find_part(task)
        if not part.has_pairs:
            raise DataError(f"part '{task.tag}' of the mixture has no pairs to compare")
        return part.comparison(task)

    def labelled_answer(self, task: Task) -> LabelledAnswer:
        part = self._find_part(task)
        if not part.has_labelled_answers:
            raise DataError(f"part '{task.tag}' of the mixture has no labelled answers")
        return part.labelled_answer(task)

    def steps(self, task: Task) -> Sequence[tuple[str, float]]:
        part = self._find_part(task)
        if not part.has_step_labels:
            raise DataError(f"part '{task.tag}' of the mixture has no answers in labelled steps")
        return part.steps(task)


def locate_task(position: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Return the part that serves a position, and the index of the task in that part.

    The first part takes the positions at which ceil(position x its share of the weights) grows. The
    other positions are renumbered and divided among the other parts in the same way. So after any
    number of positions, the i-th part (from 1) is off its exact share by less than i tasks, and a
    position is computed without counting from the start.
    """
    remaining_weight = sum(weights, Fraction(0))
    for part, weight in enumerate(weights):
        share = weight / remaining_weight
        n_earlier = math.ceil(position * share)  # this part's tasks before the position
        if math.ceil((position + 1) * share) > n_earlier:
            return part, n_earlier
        position -= n_earlier
        remaining_weight -= weight
    raise AssertionError("the last part takes all remaining positions")
