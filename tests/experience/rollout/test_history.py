"""Step-wise episodes: each turn is a row with its own prompt, made of a window of history."""

import asyncio
from typing import Any

import pytest
from experience.rollout.test_episode import EOS, Digits

from ratchet.data.chat.builtin_tokenizers import BUILTIN_TEMPLATES, character_tokenizer
from ratchet.data.chat.renderer import Renderer
from ratchet.errors import DataError
from ratchet.evals.message_player import MessagePlayer, Reply
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.experience.sources.offline import SupervisedSource, TextRenderer
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Step
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator
from ratchet.types import Failed, Message, Owner, Sampling, Task, Truncated

TASK = Task("t", (Message("user", "12"),))


def count(task, message):
    """Answer 3 to 6 with 7, and end after that."""
    return Step((Message("user", "7"),), reward=0.5, done=message.text == "6")


def play(environment, *, window, max_context=64):
    generator = FakeGenerator(lambda tokens, sampling: [2 + len(generator.requests), EOS])
    player = EpisodePlayer(generator, Digits(), max_context=max_context, history_window=window)
    sampling = Sampling(max_new_tokens=4, stop_ids=(EOS,), seed=7)
    rows = asyncio.run(player.play(TASK, environment, sampling, attempt=3))
    assert [tokens for tokens, _ in generator.requests] == [
        row.tokens[: row.turns[0].start].tolist() for row in rows
    ]
    return rows


@pytest.mark.parametrize(
    ("window", "prompts"),
    [
        (1, [[1, 2], [1, 2, 3, 7], [1, 2, 4, 7], [1, 2, 5, 7]]),
        (2, [[1, 2], [1, 2, 3, 7], [1, 2, 3, 7, 4, 7], [1, 2, 4, 7, 5, 7]]),
    ],
)
def test_each_turn_is_a_row_whose_prompt_has_the_last_turns(window, prompts):
    rows = play(FakeEnvironment(count), window=window)
    assert [row.tokens.tolist() for row in rows] == [
        [*prompt, 3 + turn, EOS] for turn, prompt in enumerate(prompts)
    ]
    for row, prompt in zip(rows, prompts, strict=True):
        assert row.owner.tolist() == [Owner.PROMPT] * len(prompt) + [Owner.POLICY] * 2
        assert row.trainable.tolist() == [False] * len(prompt) + [True] * 2
        assert row.rollout_logprobs.tolist() == [0.0] * len(prompt) + [-1.0] * 2
        assert [(turn.start, turn.reward) for turn in row.turns] == [(len(prompt), 0.5)]
    assert {row.attempt for row in rows} == {3}
    assert [row.turns[0].terminated for row in rows] == [False, False, False, True]
    assert [message.text for message in rows[-1].messages] == ["12", *"374757", "6"]
    assert {row.metrics["forks"] for row in rows} == {3}


def test_the_window_bounds_the_context_and_not_the_attempt():
    (_, *rest) = play(FakeEnvironment(count), window=1, max_context=6)
    assert rest[-1].outcome is None, "all four turns fit, one at a time"
    assert play(FakeEnvironment(count), window=2, max_context=6)[-1].outcome == Truncated()


class Summing(FakeEnvironment):
    """It shows the sum of what was said in the window."""

    def observe(self, task, first, turns):
        total = sum(int(turn[0].text) for turn in turns)
        return [*first, Message("user", str(total))]


def test_an_environment_rewrites_what_the_policy_sees():
    rows = play(Summing(count), window=2)
    assert [row.tokens[:-2].tolist() for row in rows] == [
        [1, 2],
        [1, 2, 3],
        [1, 2, 7],
        [1, 2, 9],
    ]


def test_a_prompt_that_can_t_be_answered_fails_the_attempt():
    class Broken(FakeEnvironment):
        def observe(self, task, first, turns):
            return turns[0][:1]

    class Raw(FakeEnvironment):
        raw_observations = True

    for environment, kind, words in (
        (Broken(count), "environment", "Broken.observe returned a prompt"),
        (Raw(count), "data", "remove rollouts.history_window"),
    ):
        outcome = play(environment, window=1)[-1].outcome
        assert isinstance(outcome, Failed)
        assert outcome.kind == kind
        assert words in outcome.detail


def test_a_player_of_messages_shows_the_same_prompts():
    class Recording(MessagePlayer):
        max_turns, timeout_s, history_window = 8, None, 2

        async def answer(self, state, sampling, turn_index, stop_strings):
            seen.append("".join(message.text for message in state.prompt))
            return Reply(Message("assistant", str(3 + turn_index)))

    for environment in (FakeEnvironment(count), Summing(count)):
        seen: list[str] = []
        asyncio.run(Recording().play(TASK, environment, Sampling(), attempt=0))
        rows = play(environment, window=2)
        assert seen == ["".join(map(str, row.tokens[:-2].tolist())) for row in rows]


class Taught(FakeEnvironment):
    """It has one task, with the answers of a demonstration at even places of `texts`."""

    texts = "3747576"
    roles: tuple[Any, Any] = ("assistant", "user")

    def tasks(self, split, *, seed, start=0):
        return iter([TASK])

    def demonstration(self, task):
        return [Message(self.roles[i % 2], text) for i, text in enumerate(self.texts)]


DIGITS = Renderer(character_tokenizer("01234567", template=BUILTIN_TEMPLATES["turns"]))


def render_demonstration(environment, train):
    source = SupervisedSource(
        TaskStream(environment, seed=0),
        "rows",
        TextRenderer(DIGITS, max_context=64),
        train=train,
        history_window=2,
    )
    ((group),) = asyncio.run(source.make([("g", TASK)], 0))
    return list(group.trajectories)


@pytest.mark.parametrize("texts", ["", "37"])
def test_a_demonstration_without_an_answer_at_its_end_is_refused(texts):
    environment = Taught(count)
    environment.texts = texts
    with pytest.raises(DataError, match=r"^task t: a supervised conversation ends with"):
        render_demonstration(environment, "last")


def test_messages_before_the_first_answer_are_in_every_prompt():
    environment = Taught(count)
    environment.texts, environment.roles = "03747576", ("user", "assistant")
    rows = render_demonstration(environment, "all")
    texts = [DIGITS.tokenizer.decode(row.tokens.tolist()) for row in rows]
    assert texts == ["1203", "120374", "12037475", "12047576"]


@pytest.mark.parametrize("train", ["all", "last", "text"])
def test_demonstrations_are_rows_with_the_prompts_of_rollouts(train):
    """The rows of supervised training have the tokens that the same answers have in rollouts."""

    tokenizer, environment = DIGITS.tokenizer, Taught(count)
    end = DIGITS.stop_ids[0]
    generator = FakeGenerator(
        lambda tokens, sampling: [*tokenizer.encode(str(2 + len(generator.requests))), end]
    )
    player = EpisodePlayer(generator, DIGITS, max_context=64, history_window=2)
    sampling = Sampling(max_new_tokens=4, stop_ids=DIGITS.stop_ids)
    rollout = asyncio.run(player.play(TASK, environment, sampling, attempt=0))
    rows = render_demonstration(environment, train)
    expected = rollout[-1:] if train == "last" else rollout
    assert [row.tokens.tolist() for row in rows] == [row.tokens.tolist() for row in expected]
    if train != "text":
        assert [row.trainable.tolist() for row in rows] == [
            row.trainable.tolist() for row in expected
        ]
    else:
        assert all(row.trainable[1:].all() for row in rows)
