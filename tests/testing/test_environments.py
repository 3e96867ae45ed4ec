"""The conformance check of environments must catch each way of breaking the contract."""

import asyncio
import contextlib
import os
import random
import subprocess
import time
from dataclasses import replace
from itertools import count, islice
from typing import ClassVar

import pytest

from ratchet.environments.single_turn import Problem, Procedural
from ratchet.errors import DataError
from ratchet.protocols import Step
from ratchet.rewards.answers.exact_match import ExactMatch, ExactMatchConfig
from ratchet.testing import check_environment
from ratchet.types import Message

exact = ExactMatch(ExactMatchConfig())


class Good(Procedural):
    name = "good"

    def sample(self, rng: random.Random) -> Problem:
        n = rng.randrange(10**6)
        return Problem(f"{n}=", str(n))


class Guessing(Good):
    """Several turns, whose demonstration is played against it."""

    def demonstration(self, task):
        return (
            Message("assistant", "0"),
            Message("user", "higher"),
            Message("assistant", task.answer),
        )

    async def reset(self, task):
        self.task = task
        self.turns = 0
        return task.messages

    async def step(self, message):
        self.turns += 1
        done = message.text == self.task.answer or self.turns == 4
        return Step(() if done else (Message("user", "higher"),), done=done)


class ForgetsStart(Good):
    def tasks(self, split, *, seed, start=0):
        return super().tasks(split, seed=seed)


class OneId(Good):
    def tasks(self, split, *, seed, start=0):
        return (replace(t, id="one") for t in super().tasks(split, seed=seed, start=start))


class IgnoresSeed(Good):
    def tasks(self, split, *, seed, start=0):
        return super().tasks(split, seed=0, start=start)


class SeededTest(Good):
    def tasks(self, split, *, seed, start=0):
        tasks = super().tasks("train", seed=seed, start=start)
        return (replace(t, id=f"{split}/{start + i}") for i, t in enumerate(tasks))


class Leaky(Good):
    def tasks(self, split, *, seed, start=0):
        if split == "train":
            return super().tasks(split, seed=seed, start=start)
        first = super().tasks("train", seed=0)
        return islice(
            (replace(t, id=f"test/{i}") for i, t in enumerate(islice(first, 50))), start, None
        )


class RepeatsTest(Good):
    def tasks(self, split, *, seed, start=0):
        tasks = super().tasks(split, seed=seed, start=start)
        if split == "train":
            return tasks
        (task,) = islice(super().tasks(split, seed=seed), 1)
        return (task for _ in count())


class EmptyTest(Good):
    def tasks(self, split, *, seed, start=0):
        return super().tasks(split, seed=seed, start=start) if split == "train" else iter(())


class Moody(Good):
    def __init__(self):
        self.calls = 0

    async def reset(self, task):
        self.calls += 1
        return (Message("user", str(self.calls)),)


class Endless(Good):
    async def step(self, message):
        return Step((Message("user", "again"),))


class Mute(Good):
    async def step(self, message):
        return Step()


class Untyped(Good):
    async def step(self, message):
        return {"done": True}


class Infinite(Good):
    async def step(self, message):
        return Step(reward=float("nan"), done=True)


class SpeaksForThePolicy(Good):
    async def step(self, message):
        return Step((Message("assistant", "me too"),), done=True)


class ClosesOnce(Good):
    closed = False

    async def close(self):
        if self.closed:
            raise RuntimeError("closed twice")
        self.closed = True


class Wrong(Good):
    def demonstration(self, task):
        return (Message("assistant", "0"),)


class Texts(Good):
    def demonstration(self, task):
        return (task.answer,)


class Overtalks(Good):
    def demonstration(self, task):
        return (Message("assistant", task.answer), Message("assistant", task.answer))


@pytest.mark.parametrize(
    ("broken", "error"),
    [
        (ForgetsStart, "train tasks from start=1 are not the same"),
        (OneId, "two different train tasks share an id"),
        (IgnoresSeed, "train tasks are the same, in the same order, for two seeds"),
        (SeededTest, "test tasks depend on the training seed"),
        (Leaky, "the prompt and answer of 'test/0' are also in the training split"),
        (RepeatsTest, "a test task comes twice"),
        (EmptyTest, "the test split has no task"),
        (Moody, "reset.*twice gives different messages"),
        (Endless, "did not end within 100 empty answers"),
        (Mute, "neither ends the episode nor says anything"),
        (Untyped, "gives dict, not Step"),
        (Infinite, "reward nan is not finite"),
        (SpeaksForThePolicy, "speaks for the assistant"),
        (Wrong, r"demonstration.*earns Scored\(reward=0.0"),
        (Texts, "must give Message objects only"),
        (Overtalks, "continues after the episode's end"),
        (object, "object has no tasks, reset, step"),
    ],
)
def test_a_broken_environment_is_caught(broken, error):
    with pytest.raises(AssertionError, match=error):
        check_environment(broken(), reward=exact, n=30)


class Secret(Guessing):
    """A game whose first message is always the same."""

    keyed = True

    def sample(self, rng):
        secret = str(rng.randrange(10**6))
        return Problem("start", secret, key=secret if self.keyed else "")


class SecretWithoutKey(Secret):
    keyed = False


def test_a_constant_first_message_needs_a_key():
    check_environment(Secret(), reward=exact, n=30)
    with pytest.raises(AssertionError, match=r"test split has no task.*give each Problem a `key`"):
        check_environment(SecretWithoutKey(), reward=exact, n=30)


def test_closing_twice_must_work():
    with pytest.raises(RuntimeError, match="closed twice"):
        check_environment(ClosesOnce(), n=10)


@pytest.mark.medium
def test_good_environments_pass():
    check_environment(Good(), reward=exact)
    check_environment(Guessing(), reward=exact)

    class NoSolutions(Good):
        def demonstration(self, task):
            raise DataError("nobody knows")

    check_environment(NoSolutions(), reward=exact, n=10)


# --- faults that are put under an environment


class Remembers(Good):
    """Goes on from what it played before."""

    turns = 0

    async def step(self, message):
        self.turns += 1
        return Step(reward=float(self.turns), done=True)


class Shares(Guessing):
    """What belongs to an attempt lies in an object that all copies share."""

    def __init__(self):
        self.state = {}

    async def reset(self, task):
        self.state["answer"] = task.answer
        return task.messages

    async def step(self, message):
        await asyncio.sleep(0)
        right = message.text == self.state["answer"]
        return Step(
            () if right or not message.text else (Message("user", "higher"),),
            done=right or not message.text,
        )


class Excuses(Good):
    """Makes a reward of its service's failure."""

    async def step(self, message):
        try:
            subprocess.run(["true"], check=True)
        except OSError:
            return Step(reward=0.0, done=True)
        return Step(reward=1.0, done=True)


class Mortal(Good):
    """Its helper process dies, and it takes that for an answer."""

    async def reset(self, task):
        await self.close()
        self.helper = subprocess.Popen(["sleep", "600"])
        return task.messages

    async def step(self, message):
        await asyncio.sleep(0.05)
        return Step(reward=float(self.helper.poll() is None), done=True)

    async def close(self):
        if helper := self.__dict__.pop("helper", None):
            helper.kill()
            helper.wait()


class Raises(Mortal):
    async def step(self, message):
        step = await super().step(message)
        if step.reward == 0:
            raise RuntimeError("the helper died")
        return step


class Leaks(Good):
    kept: ClassVar[list] = []

    async def reset(self, task):
        self.kept.append(open(os.devnull))  # noqa: SIM115
        return task.messages


class Hangs(Good):
    async def step(self, message):
        await asyncio.Event().wait()


class Blocks(Good):
    async def step(self, message):
        time.sleep(1)
        return Step(done=True)


class Stubborn(Good):
    async def step(self, message):
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)


class Unpicklable(Good):
    def tasks(self, split, *, seed, start=0):
        return (
            replace(t, meta={"check": check}) for t in super().tasks(split, seed=seed, start=start)
        )


check = lambda text: True  # noqa: E731


@pytest.mark.medium
@pytest.mark.parametrize(
    ("broken", "deadline_s", "error"),
    [
        (Remembers, 30, "played again, after others, differs: `reset` must reset all state"),
        (Shares, 30, "played beside others differs: copies share state of an attempt"),
        (
            Excuses,
            30,
            r"out of reach, step 1 gives reward 0.0.*without the fault 1.0 .*: an infrastructure fault is not a "
            r"reward; let it raise",
        ),
        (Mortal, 30, "killed, step 1 gives reward 0.0.*without the fault 1.0"),
        (Leaks, 30, "4 instances left 4 files behind: `close` must release"),
        (Hangs, 0.1, "step in 'good/train/.*' gave nothing within 0.1 s: bound what it waits for"),
        (Blocks, 0.1, "still runs 0.2 s after it began: it blocks the event loop"),
        (Stubborn, 0.1, "still runs 0.2 s after it began"),
        (Unpicklable, 30, "can't be serialised"),
    ],
)
def test_faults_hangs_and_leaks_are_caught(broken, deadline_s, error):
    with pytest.raises(AssertionError, match=error):
        check_environment(broken(), n=10, deadline_s=deadline_s)


@pytest.mark.slow
def test_one_whose_helper_may_die_passes_where_it_raises():
    check_environment(Raises(), n=10)


def test_an_environment_is_named_by_its_path():
    check_environment("ratchet.environments.toy.arithmetic:ArithmeticConfig", n=10)
    with pytest.raises(AssertionError, match="gives dict, not Step"):
        check_environment(f"{__name__}:Untyped", n=10)
