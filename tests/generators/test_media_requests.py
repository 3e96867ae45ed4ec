"""Media on their way to whoever generates: told apart, sent once, and refused where nobody reads
them."""

import asyncio
import pickle

import numpy as np
import pytest
from generators.workers_play import Here, columns, config, engine

from ratchet.errors import ConfigError, DataError
from ratchet.experience.async_rollouts.resumable_generator import CURRENT_GROUP, ResumableGenerator
from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup
from ratchet.experience.nemo_rl.generation import UnbatchedGenerator, WithSampling
from ratchet.generators.request import RequestValidator, make_prompt_key
from ratchet.generators.workers.batch_protocol import RequestBatch
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.testing.fakes import FakeGenerator
from ratchet.training.colocation import AcceleratorLock, ColocatedGenerator
from ratchet.types import Completion, Medium, PlacedMedium, Sampling, StopReason, Task

SAMPLING = Sampling(max_new_tokens=3)
TOKENS = [5, 7, 7, 6]


def image(key, span=2, size=8):
    return Medium(
        key,
        "image",
        span,
        {"pixel_values": np.full((size, 3), ord(key[-1]), np.float32)},
        key.encode(),
    )


CAT, DOG = image("cat"), image("dog")


def test_equal_tokens_with_other_images_are_another_prompt():
    tokens = np.array(TOKENS)
    keys = [
        make_prompt_key(tokens, media)
        for media in ([], [PlacedMedium(1, CAT)], [PlacedMedium(1, DOG)], [PlacedMedium(0, CAT)])
    ]
    assert len(set(keys)) == 4
    assert make_prompt_key(tokens, [PlacedMedium(1, image("cat"))]) == keys[1]
    entrance = RequestValidator(20, 10, None, reads_media=True)
    admitted = [
        entrance.admit(TOKENS, SAMPLING, print, print, [PlacedMedium(1, each)])
        for each in (CAT, DOG, image("cat"))
    ]
    assert admitted[0].key == admitted[2].key != admitted[1].key


@pytest.mark.parametrize(
    "media",
    [
        [PlacedMedium(3, CAT)],
        [PlacedMedium(-1, CAT)],
        [PlacedMedium(2, CAT), PlacedMedium(0, DOG)],
        [PlacedMedium(0, CAT), PlacedMedium(1, DOG)],
    ],
)
def test_media_lie_in_their_prompt_in_order(media):
    with pytest.raises(DataError, match=r"a medium \(image\) is at tokens .* Pass media in order"):
        RequestValidator(20, 10, None, reads_media=True).admit(
            TOKENS, SAMPLING, print, print, media
        )


def test_who_reads_text_alone_refuses_them():
    with pytest.raises(
        ConfigError,
        match=r"1 media .* this generator reads only text: set generator.kind to hf or vllm",
    ):
        asyncio.run(engine().generate(TOKENS, SAMPLING, [PlacedMedium(1, CAT)]))
    with pytest.raises(ConfigError, match="the batch generator NoneType does not read"):
        asyncio.run(
            UnbatchedGenerator(None, pad_id=0).generate(TOKENS, SAMPLING, [PlacedMedium(1, CAT)])
        )


def test_requests_travel_with_each_image_once_and_without_any_as_before():
    tokens = np.array(TOKENS)
    own = {
        1: [PlacedMedium(0, CAT), PlacedMedium(2, DOG)],
        2: [PlacedMedium(0, CAT), PlacedMedium(2, DOG)],
        3: [PlacedMedium(1, image("cat"))],
        4: [],
    }
    asked = RequestBatch.from_requests(
        {n: (tokens, make_prompt_key(tokens, media), SAMPLING, media) for n, media in own.items()}
    )
    assert [medium.key for medium in asked.media] == ["cat", "dog"]
    assert (len(asked.prompts), asked.prompt_indices) == (12, [0, 0, 1, 2])
    there = pickle.loads(pickle.dumps(asked, protocol=5)).unpack()
    assert [number for number, *_ in there] == [1, 2, 3, 4]
    for number, prompt, sampling, media in there:
        assert (prompt.tolist(), sampling) == (TOKENS, SAMPLING)
        assert [(start, medium.key, medium.source) for start, medium in media] == [
            (start, medium.key, medium.source) for start, medium in own[number]
        ]
        for (_, got), (_, sent) in zip(media, own[number], strict=True):
            np.testing.assert_array_equal(got.inputs["pixel_values"], sent.inputs["pixel_values"])
    text = RequestBatch.from_requests({1: (tokens, make_prompt_key(tokens, []), SAMPLING, ())})
    assert (text.media, text.media_positions) == ([], ())


def test_a_router_brings_them_to_its_workers_and_sends_equal_prompts_together():
    router, seen = (
        GeneratorPool(config(2)),
        [FakeGenerator(lambda tokens, sampling: [1] * 3) for _ in range(2)],
    )
    workers = [Here(rank, generator=each) for rank, each in enumerate(seen)]
    router.start(lambda rank: workers[rank])

    async def play():
        prompts = [[PlacedMedium(1, CAT)], [PlacedMedium(1, DOG)]] * 3
        return await asyncio.gather(
            *(router.generate(TOKENS, SAMPLING, media) for media in prompts)
        )

    assert [tokens for tokens, *_ in columns(asyncio.run(play()))] == [[1, 1, 1]] * 6
    keys = [{placed.medium.key for media in each.media for placed in media} for each in seen]
    assert keys == [{"cat"}, {"dog"}]  # equal tokens would all have gone to one of them


def test_wrappers_pass_them_on():
    inner = FakeGenerator(lambda tokens, sampling: [1])
    media = (PlacedMedium(1, CAT),)
    for wrapped in (
        ColocatedGenerator(inner, AcceleratorLock({"generator": []})),
        ResumableGenerator(inner),
        WithSampling(inner, SAMPLING),
    ):
        asyncio.run(wrapped.generate(TOKENS, SAMPLING, media))
    assert inner.media == [media] * 3


def test_what_goes_on_after_an_interruption_has_the_images_again():
    inner = FakeGenerator(lambda tokens, sampling: [3])
    half = Completion(
        *(np.array(each) for each in ([1, 2], [-1.0, -1.0], [0.0, 0.0], [0, 0])), StopReason.ABORTED
    )
    issue = ScheduledGroup(0, 0, "g/0", Task("t", ()), journal={SAMPLING.seed: half})

    async def play():
        CURRENT_GROUP.set(issue)
        return await ResumableGenerator(inner).generate(TOKENS, SAMPLING, (PlacedMedium(1, CAT),))

    assert asyncio.run(play()).tokens.tolist() == [1, 2, 3]
    assert inner.requests[0][0] == [*TOKENS, 1, 2]
    assert inner.media == [(PlacedMedium(1, CAT),)]
