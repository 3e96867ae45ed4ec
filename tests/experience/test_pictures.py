"""Media on their way into trajectories: of attempts over several turns, of given rows, and of what
goes wrong."""

import asyncio
from itertools import islice

import numpy as np
import pytest
from pictures import asked, picture, renderer

from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.experience.rollout.episode import EpisodePlayer, PromptCache
from ratchet.experience.sources.offline import (
    LabelledSource,
    PairSource,
    SteppedSource,
    SupervisedSource,
    TextRenderer,
)
from ratchet.experience.sources.tasks import TaskStream
from ratchet.protocols import Step
from ratchet.testing.fakes import FakeEnvironment, FakeGenerator
from ratchet.types import Comparison, Failed, LabelledAnswer, Message, Owner, Part, Sampling, Task

BAD = Part("image", "data:image/png;base64,AAAA")
PAD = "<|image_pad|>"


def ends(text):
    made = renderer().tokenizer
    return [*made.encode(text), made.token_id("<|im_end|>")]


def play(generator, environment, messages, prompt_cache=None):
    player = EpisodePlayer(generator, renderer(), max_context=512, max_turns=4)
    sampling = Sampling(max_new_tokens=8, stop_ids=renderer().stop_ids)
    return asyncio.run(
        player.play(
            Task("t", tuple(messages)), environment, sampling, attempt=0, prompt_cache=prompt_cache
        )
    )


def at(trajectory):
    return [
        (trajectory.tokens[one.start : one.start + one.medium.span].tolist(), one.medium.key)
        for one in trajectory.media
    ]


def test_each_turn_s_pictures_lie_where_their_tokens_are():
    first, second = [asked(picture(1), "?")], [asked("now", picture(2, 48), picture(1))]
    generator = FakeGenerator(lambda tokens, sampling: ends("up"))
    environment = FakeEnvironment(
        lambda task, message: Step(tuple(second), done=len(generator.requests) == 3)
    )
    (trajectory,) = play(generator, environment, first)
    assert trajectory.outcome is None
    assert [len(media) for media in generator.media] == [1, 3, 5]
    assert trajectory.media == generator.media[-1]
    said = Message("assistant", "up")
    whole = [*first, said, *second, said, *second]
    assert trajectory.tokens.tolist() == [*renderer().prompt(whole), *ends("up")]
    assert trajectory.media == renderer().media(trajectory.tokens, whole)
    pad = renderer().tokenizer.token_id(PAD)
    assert [tokens for tokens, _ in at(trajectory)] == [[pad] * n for n in (4, 6, 4, 6, 4)]
    keys = [key for _, key in at(trajectory)]
    assert keys == [keys[0], keys[1], keys[0], keys[1], keys[0]]
    assert len({id(one.medium) for one in trajectory.media}) == 2
    owners = {trajectory.owner[one.start] for one in trajectory.media}
    assert owners == {Owner.PROMPT, Owner.ENVIRONMENT}
    assert not any(
        trajectory.trainable[one.start : one.start + one.medium.span].any()
        for one in trajectory.media
    )


def test_a_group_renders_its_pictures_once_and_text_alone_asks_as_ever(monkeypatch):
    made, count = renderer(), []
    media = type(made).media
    monkeypatch.setattr(
        type(made), "media", lambda self, *given: count.append(1) or media(self, *given)
    )
    generator, prompt_cache = FakeGenerator(lambda tokens, sampling: ends("a")), PromptCache()
    rows = [
        play(generator, FakeEnvironment(), [asked(picture(1))], prompt_cache)[0] for _ in range(3)
    ]
    assert len(count) == 1
    assert len({id(row.media[0].medium) for row in rows}) == 1
    play(generator, FakeEnvironment(), [Message("user", "text")])
    assert generator.media[-1] == ()


@pytest.mark.parametrize(
    ("messages", "said", "words"),
    [
        (
            [asked(BAD)],
            "a",
            "message 0: data:image/png;base64,...: is not an image of a supported format",
        ),
        ([asked(picture(1))], PAD, f"the policy wrote {PAD}"),
    ],
)
def test_what_is_wrong_with_media_fails_the_attempt(messages, said, words):
    ids = renderer().tokenizer
    script = (
        [*ids.encode("x"), ids.token_id(PAD), ids.token_id("<|im_end|>")]
        if said == PAD
        else ends(said)
    )
    (trajectory,) = play(
        FakeGenerator(lambda tokens, sampling: script), FakeEnvironment(), messages
    )
    assert isinstance(trajectory.outcome, Failed)
    assert trajectory.outcome.kind == "data"
    assert words in trajectory.outcome.detail


def test_an_observation_that_can_t_be_read_fails_the_attempt():
    environment = FakeEnvironment(lambda task, message: Step((asked(BAD),)))
    (trajectory,) = play(
        FakeGenerator(lambda tokens, sampling: ends("a")), environment, [asked(picture(1))]
    )
    assert trajectory.outcome == Failed("data", trajectory.outcome.detail)
    assert len(trajectory.media) == 1


class Given(FakeEnvironment):
    shown = picture(1)

    def tasks(self, split, *, seed, start=0):
        return (Task(f"t{i}", (asked(self.shown, f"{i}?"),), answer=i) for i in range(start, 10**6))

    def demonstration(self, task):
        return (Message("assistant", "a"), asked(picture(2, 48)), Message("assistant", "b"))

    def comparison(self, task):
        return Comparison((Message("assistant", "a"),), (Message("assistant", "bb"),))

    def labelled_answer(self, task):
        return LabelledAnswer((Message("assistant", "a"),), 1.0)

    def steps(self, task):
        return [("a", 1.0), ("b", 0.0)]


@pytest.mark.parametrize(
    ("kind", "rows", "media"),
    [("rows", 1, 2), ("pairs", 2, 1), ("labelled", 1, 1), ("steps", 1, 1)],
)
def test_given_rows_carry_their_pictures(kind, rows, media):
    stream, writer = TaskStream(Given(), seed=0), TextRenderer(renderer(), max_context=256)
    source = {
        "rows": lambda: SupervisedSource(stream, "r", writer, train="all"),
        "pairs": lambda: PairSource(stream, "r", writer),
        "labelled": lambda: LabelledSource(stream, "r", writer, uses_mismatched_pairs=False),
        "steps": lambda: SteppedSource(stream, "r", writer),
    }[kind]()
    jobs = [(f"g{i}", task) for i, task in enumerate(islice(Given().tasks("train", seed=0), 2))]
    groups = asyncio.run(source.make(jobs, 0))
    batch = pack(groups)
    assert [len(placed) for placed in batch.media_S] == [media] * rows * 2
    assert len({id(one.medium) for placed in batch.media_S for one in placed}) == media
    pad = renderer().tokenizer.token_id(PAD)
    assert int((batch.tokens_T == pad).sum()) == sum(
        one.medium.span for placed in batch.media_S for one in placed
    )
    taken = batch.take([1])
    assert [one.start for one in taken.media_S[0]] == [one.start for one in batch.media_S[1]]
    assert np.all([taken.tokens_T[one.start] == pad for one in taken.media_S[0]])


def test_a_row_whose_picture_is_broken_is_named():
    broken = Given()
    broken.shown = BAD
    task = Task("t", (asked(BAD),), meta={"read from": "rows.jsonl, row 3"})
    writer = TextRenderer(renderer(), max_context=256)
    for made in (
        lambda: writer.row(task, (Message("assistant", "a"),)),
        lambda: writer.row_from_steps(task, [("a", 1.0)]),
    ):
        with pytest.raises(
            DataError,
            match=r"rows\.jsonl, row 3: message 0: data:image/png;base64,\.\.\.: is not an image of a supported format",
        ):
            made()
