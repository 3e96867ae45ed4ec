"""A user's plain class gets the members that it lacks, and keeps its own."""

import asyncio
import copy

import pytest

from ratchet.errors import DataError
from ratchet.protocols import Environment
from ratchet.types import Message, Step, Task
from ratchet.utils.user_parts import add_missing_members


class Plain:
    """An environment without a base class, and with only what every environment must have."""

    __slots__ = ("left",)

    def tasks(self, split, *, seed, start=0):
        return iter([Task("a", (Message("user", "1"),))])

    async def reset(self, task):
        self.left = 1
        return task.messages

    async def step(self, message):
        return Step(done=True)


class Teaching(Plain):
    """It has some of the optional members."""

    returns_rewards = False

    def __init__(self):
        self.stop_strings = ("end",)

    def tools(self, task):
        return [{"type": "function"}]

    def comparison(self, task):
        return "a pair"


def test_what_a_plain_class_lacks_has_its_default():
    plain = Plain()
    assert add_missing_members(plain, Environment) is plain
    assert copy.copy(plain).stop_strings == ()
    assert (plain.returns_rewards, plain.replayable, plain.task_count()) == (True, False, None)
    assert not any((plain.has_tools, plain.has_pairs, plain.has_labelled_answers))
    assert plain.tools(None) == ()
    assert asyncio.run(plain.reward_cut_attempt([])) is None
    with pytest.raises(DataError, match=r"environment Plain has no demonstration\(task\)"):
        plain.demonstration(None)


def test_what_a_plain_class_has_stays():
    teaching = add_missing_members(Teaching(), Environment)
    assert (teaching.returns_rewards, teaching.stop_strings) == (False, ("end",))
    assert (teaching.has_tools, teaching.has_pairs, teaching.has_step_labels) == (True, True, False)
    assert teaching.tools(None) == [{"type": "function"}]
    assert teaching.comparison(None) == "a pair"


def test_a_method_that_is_assigned_to_an_instance_counts():
    plain = Plain.__new__(type("Open", (Plain,), {}))
    plain.tools = lambda task: ["its own"]
    assert add_missing_members(plain, Environment).has_tools
