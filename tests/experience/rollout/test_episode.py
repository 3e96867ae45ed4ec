import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

from ratchet.data.render_thread import MAX_LOOP_CHARS
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.protocols import Step
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator, TextOnlyMixin
from ratchet.types import (
    READ_FROM,
    Cancelled,
    Completion,
    Failed,
    Message,
    Owner,
    Sampling,
    StopReason,
    Task,
    Truncated,
)

EOS = 99
SAMPLING = Sampling(max_new_tokens=4, stop_ids=(EOS,))


class Digits(TextOnlyMixin):
    """A renderer over single digits: a message is its digits; an observation is its digits between
    two 50s."""

    def prompt(self, messages, tools=None):
        return [int(c) for m in messages for c in m.text]

    def keeps_turn(self, sampled, messages, *, history, reply, tools=None):
        return True

    def extend(self, sampled, messages, *, history, tools=None):
        return [50, *(int(c) for m in messages for c in m.text), 50]

    def parse(self, tokens, stop):
        return Message("assistant", "".join(str(t) for t in tokens if t != EOS))


def play(generator, environment, *, task=None, sampling=None, max_context=64, max_turns=8):
    player = EpisodePlayer(generator, Digits(), max_context=max_context, max_turns=max_turns)
    task = task or Task("t", (Message("user", "12"),), answer="2")
    sampling = sampling or Sampling(max_new_tokens=4, stop_ids=(EOS,), seed=7, temperature=0.5)
    (trajectory,) = asyncio.run(player.play(task, environment, sampling, attempt=3))
    return trajectory


def test_one_turn_keeps_every_tokens_origin():
    trajectory = play(FakeGenerator(lambda tokens, sampling: [2, EOS]), FakeEnvironment())
    assert trajectory.tokens.tolist() == [1, 2, 2, EOS]
    assert trajectory.owner.tolist() == [Owner.PROMPT] * 2 + [Owner.POLICY] * 2
    # the stop token is the policy's, and trains
    assert trajectory.trainable.tolist() == [False, False, True, True]
    assert trajectory.rollout_logprobs.tolist() == [0.0, 0.0, -1.0, -1.0]
    assert trajectory.versions.tolist() == [-1, -1, 0, 0]
    assert [m.text for m in trajectory.messages] == ["12", "2"]
    assert (trajectory.attempt, trajectory.temperature, trajectory.outcome) == (3, 0.5, None)
    assert [(t.start, t.end, t.terminated) for t in trajectory.turns] == [(2, 4, True)]


def test_the_next_prompt_extends_the_sampled_prefix_exactly():
    seen = []

    def answer(tokens, sampling):
        seen.append((list(tokens), sampling.seed))
        return [len(seen), EOS]

    def script(task, message):
        return Step((Message("user", "7"),), reward=0.5, done=message.text == "3")

    trajectory = play(FakeGenerator(answer), FakeEnvironment(script))
    assert trajectory.tokens.tolist() == [1, 2, 1, EOS, 50, 7, 50, 2, EOS, 50, 7, 50, 3, EOS]
    assert trajectory.owner.tolist() == [0, 0, 1, 1, 2, 2, 2, 1, 1, 2, 2, 2, 1, 1]
    assert trajectory.trainable.sum() == 6
    assert [tokens for tokens, _ in seen] == [trajectory.tokens[:n].tolist() for n in (2, 7, 12)]
    assert len({seed for _, seed in seen}) == 3, "each turn draws with its own seed"
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.5, 0.5]
    assert [turn.terminated for turn in trajectory.turns] == [False, False, True]


class Waiting(Digits):
    """A renderer that returns only after the event loop has run something else."""

    release = None

    def prompt(self, messages, tools=None):
        return self.wait_for(super().prompt(messages, tools))

    def extend(self, sampled, messages, *, history, tools=None):
        return self.wait_for(super().extend(sampled, messages, history=history, tools=tools))

    def encode_raw(self, sampled, messages, allow_special=False):
        return self.wait_for([int(c) for m in messages for c in m.text])

    def wait_for(self, tokens):
        self.release = threading.Event()
        assert self.release.wait(10), "rendering blocks the event loop"
        return tokens

    def parse_continued(self, sampled, tokens, stop):
        return self.parse(tokens, stop)


@pytest.mark.parametrize("kind", ["chat", "raw", "inline"])
def test_long_texts_are_rendered_beside_the_event_loop(kind):
    role = "inline" if kind == "inline" else "user"

    def script(task, message):
        return Step((Message(role, "7" * MAX_LOOP_CHARS + "7"),), done="3" in message.text)

    async def play_beside_another():
        environment = FakeEnvironment(script)
        environment.raw_observations = kind == "raw"
        generator = FakeGenerator(lambda tokens, sampling: [2 + (len(tokens) > 40000), EOS])
        renderer = Waiting()
        player = EpisodePlayer(generator, renderer, max_context=10**6)
        task = Task("t", (Message("user", "1" * MAX_LOOP_CHARS + "2"),))
        playing = asyncio.ensure_future(player.play(task, environment, SAMPLING, attempt=0))
        while not playing.done():
            if renderer.release:
                renderer.release.set()
            await asyncio.sleep(0)
        return playing.result()

    (trajectory,) = asyncio.run(play_beside_another())
    assert trajectory.outcome is None
    n = MAX_LOOP_CHARS + 1
    markers = [50] if kind == "chat" else []
    expected = [*[1] * (n - 1), 2, 2, EOS, *markers, *[7] * n, *markers, 3, EOS]
    assert trajectory.tokens.tolist() == expected


def test_a_token_budget_truncates_and_never_acts():
    def never(task, message):
        raise AssertionError("a cut-off message must not reach the environment")

    trajectory = play(FakeGenerator(lambda tokens, sampling: [1] * 9), FakeEnvironment(never))
    assert trajectory.outcome == Truncated()
    assert trajectory.completion_length == 4
    assert not trajectory.turns[0].terminated


def test_turn_and_context_budgets_truncate():
    on = FakeEnvironment(lambda task, message: Step((Message("user", "7"),)))
    generator = FakeGenerator(lambda tokens, sampling: [1, EOS])
    assert play(generator, on, max_turns=2).outcome == Truncated()
    trajectory = play(generator, on, max_context=9)  # 2 + 2 + 3 + 2 = 9, then no room
    assert trajectory.outcome == Truncated()
    assert len(trajectory) == 12
    assert generator.requests[-1][1].max_new_tokens == 2  # the last turn was cut to the room left


class Paying(FakeEnvironment):
    """An environment that rewards attempts that were cut off."""

    def __init__(self, reward, script=None):
        super().__init__(script)
        self.reward, self.told = reward, []

    async def reward_cut_attempt(self, messages):
        self.told.append([message.text for message in messages])
        return self.reward


def test_an_environment_may_reward_what_was_cut_off():
    on = Paying(0.25, lambda task, message: Step((Message("user", "7"),), reward=0.5))
    trajectory = play(FakeGenerator(lambda tokens, sampling: [1, EOS]), on, max_turns=2)
    assert [turn.reward for turn in trajectory.turns] == [0.5, 0.75]
    cut = play(FakeGenerator(lambda tokens, sampling: [1] * 9), on)
    assert (cut.outcome, [turn.reward for turn in cut.turns]) == (Truncated(), [0.25])
    assert on.told == [["12", "1", "7", "1", "7"], ["12", "1111"]]
    assert [t.reward for t in play(FakeGenerator(lambda t, s: [1] * 9), Paying(None)).turns] == [
        None
    ]
    failed = play(FakeGenerator(lambda tokens, sampling: [1] * 9), Paying(float("nan"))).outcome
    assert "reward_cut_attempt returned nan" in failed.detail


def test_an_answer_is_cut_by_tokens_and_not_by_turns():
    """Every one of these attempts but the last was truncated; only the first lost the end of its
    answer."""
    on = FakeEnvironment(lambda task, message: Step((Message("user", "7"),)))
    whole = FakeGenerator(lambda tokens, sampling: [1, EOS])
    by_tokens = play(FakeGenerator(lambda tokens, sampling: [1] * 9), on)
    by_turns, by_room = play(whole, on, max_turns=2), play(whole, on, max_context=9)
    ended = play(whole, FakeEnvironment())
    rows = (by_tokens, by_turns, by_room, ended)
    assert [row.truncated for row in rows] == [True, True, True, False]
    assert [row.is_cut_short for row in rows] == [True, False, False, False]
    assert [[turn.cut for turn in row.turns] for row in rows] == [
        [True],
        [False] * 2,
        [False] * 2,
        [False],
    ]


@pytest.mark.fault("D5")
def test_a_prompt_longer_than_the_context_is_a_named_failure():
    trajectory = play(FakeGenerator(lambda tokens, sampling: [1]), FakeEnvironment(), max_context=2)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.kind == "prompt_too_long"
    assert "the prompt has 2 tokens, the context 2" in trajectory.outcome.detail


@pytest.mark.fault("R5")
def test_zero_new_tokens():
    trajectory = play(FakeGenerator(lambda tokens, sampling: []), FakeEnvironment())
    assert trajectory.outcome == Truncated()
    assert trajectory.completion_length == 0


@pytest.mark.parametrize("where", ["reset", "step"])
@pytest.mark.fault("R1")
def test_a_broken_environment_costs_only_its_attempt(where):
    environment = FakeEnvironment()

    async def boom(*arguments):
        raise ValueError("the maze is on fire")

    setattr(environment, where, boom)
    trajectory = play(FakeGenerator(lambda tokens, sampling: [2, EOS]), environment)
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.kind == "environment"
    assert trajectory.outcome.detail.startswith("task t:\nTraceback")
    assert "the maze is on fire" in trajectory.outcome.detail
    assert not trajectory.is_usable
    assert len(trajectory) >= 1


def test_text_that_can_not_be_rendered_is_named():
    class Strict(Digits):
        def prompt(self, messages, tools=None):
            return self.check(messages, super().prompt(messages))

        def extend(self, sampled, messages, *, history, tools=None):
            return self.check(messages, [])

        def check(self, messages, tokens):
            if any("7" in message.text for message in messages):
                raise DataError("'7' has no token")
            return tokens

    def fail(text, environment):
        player = EpisodePlayer(
            FakeGenerator(lambda tokens, sampling: [2, EOS]), Strict(), max_context=64
        )
        task = Task("t", (Message("user", text),), meta={READ_FROM: "qa.csv, line 3"})
        sampling = Sampling(max_new_tokens=4, stop_ids=(EOS,))
        (row,) = asyncio.run(player.play(task, environment, sampling, attempt=0))
        return row.outcome

    class Replies(FakeEnvironment):
        async def step(self, message):
            return Step((Message("user", "77"),))

    assert fail("17", FakeEnvironment()) == Failed(
        "data", "task t (qa.csv, line 3), the prompt:\n'7' has no token"
    )
    assert fail("1", Replies()) == Failed(
        "data", "task t (qa.csv, line 3), the reply of Replies to turn 1:\n'7' has no token"
    )


def test_an_abort_cancels_the_attempt():
    class Aborting(FakeGenerator):
        async def generate(self, tokens, sampling, media=()):
            completion = await super().generate(tokens, sampling, media)
            return Completion(
                completion.tokens,
                completion.logprobs,
                completion.log_kept_mass,
                completion.versions,
                StopReason.ABORTED,
            )

    trajectory = play(Aborting(lambda tokens, sampling: [2]), FakeEnvironment())
    assert trajectory.outcome == Cancelled("aborted")
    assert not trajectory.is_usable


class Forgetful(Digits):
    """A chat template that drops what was said, once others answer it."""

    def keeps_turn(self, sampled, messages, *, history, reply, tools=None):
        return False


def test_a_history_that_can_not_go_on_forks_into_a_trajectory_of_its_own():
    generator = FakeGenerator(lambda tokens, sampling: [3 + len(generator.requests), EOS])
    script = lambda task, message: Step(  # noqa: E731
        (Message("user", "7"),),
        reward=0.5,
        done=message.text == "6",
        state_key=message.text,
        metrics={"moves": 2},
    )
    player = EpisodePlayer(generator, Forgetful(), max_context=64)
    task = Task("t", (Message("user", "12"),))
    sampling = Sampling(max_new_tokens=4, stop_ids=(EOS,), seed=7)
    rows = asyncio.run(player.play(task, FakeEnvironment(script), sampling, attempt=3))
    assert [t.tokens.tolist() for t in rows] == [
        [1, 2, 4, EOS],
        [1, 2, 4, 7, 5, EOS],
        [1, 2, 4, 7, 5, 7, 6, EOS],
    ]
    # earlier turns are prompt now
    assert [t.owner.tolist() for t in rows] == [[0] * n + [1] * 2 for n in (2, 4, 6)]
    assert [t.attempt for t in rows] == [3, 3, 3]
    assert [[(turn.reward, turn.state_key, turn.terminated) for turn in t.turns] for t in rows] == [
        [(0.5, "4", False)],
        [(0.5, "5", False)],
        [(0.5, "6", True)],
    ]
    assert [len(t.messages) for t in rows] == [2, 4, 6]
    assert all(
        t.metrics == {"turns": 3, "turn_limit": 0, "retries": 0, "forks": 2, "moves": 6}
        for t in rows
    )


def test_a_forked_prompt_beyond_the_context_leaves_no_empty_trajectory():
    player = EpisodePlayer(
        FakeGenerator(lambda tokens, sampling: [1, EOS]), Forgetful(), max_context=5
    )
    script = lambda task, message: Step((Message("user", "77777"),))  # noqa: E731
    task = Task("t", (Message("user", "12"),))
    rows = asyncio.run(
        player.play(
            task, FakeEnvironment(script), Sampling(max_new_tokens=2, stop_ids=(EOS,)), attempt=0
        )
    )
    assert [t.tokens.tolist() for t in rows] == [[1, 2, 1, EOS]]
    assert rows[0].outcome == Truncated()
    assert rows[0].metrics["forks"] == 0


def test_a_tokens_route_is_that_of_the_first_forward_that_computed_it():
    """What a turn wrote was drawn from its own forward; its last token and the environment's, from
    that of the next prompt."""

    class Routed(FakeGenerator):
        """Every token of turn n goes to expert n, but the last, which nothing has computed."""

        turn = -1

        async def generate(self, tokens, sampling, media=()):
            completion = await super().generate(tokens, sampling, media)
            self.turn += 1
            routes = np.full((len(tokens) + len(completion.tokens), 2, 1), self.turn, np.int16)
            routes[-1] = -1
            return replace(completion, routes=routes)

    class Again(FakeEnvironment):
        said = 0

        async def step(self, message):
            self.said += 1
            return Step(messages=(Message("user", "7"),), done=self.said == 2)

    trajectory = play(Routed(lambda tokens, sampling: [2, EOS]), Again())
    assert trajectory.tokens.tolist() == [1, 2, 2, EOS, 50, 7, 50, 2, EOS]
    assert trajectory.routes.dtype == np.int16
    assert trajectory.routes[:, :, 0].tolist() == [[n, n] for n in (0, 0, 0, 1, 1, 1, 1, 1, -1)]
    assert play(FakeGenerator(lambda tokens, sampling: [2, EOS]), FakeEnvironment()).routes is None
