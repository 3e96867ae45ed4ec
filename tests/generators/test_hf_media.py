"""The transformers generator on models that read images: against the learner's own logprobs, alone
and among others."""

import asyncio
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from PIL import Image
from support.transformers_version import NEEDS_TORCHVISION, READS_IMAGES

from ratchet.data.chat.renderer import Renderer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.formats.media import embed
from ratchet.data.packing import pack
from ratchet.data.processor import load_processor
from ratchet.errors import ConfigError
from ratchet.generators.config import HFConfig
from ratchet.generators.hf import HFGenerator
from ratchet.models.load import load_policy
from ratchet.testing.tiny_vlm import TinyVLM, write_tiny_vlm
from ratchet.types import Group, Message, Part, PlacedMedium, Sampling, StopReason, Task, Trajectory

FAMILIES = ["qwen2_5_vl", "qwen3_vl"]
SAMPLING = Sampling(max_new_tokens=12, temperature=0.8)


def picture(seed, width=48, height=32):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return embed(Image.fromarray(pixels))


def asks(*parts):
    return Message(
        "user", tuple(part if isinstance(part, Part) else Part("text", part) for part in parts)
    )


PROMPTS = [
    (asks("hello"),),
    (asks(picture(1), "what?"),),
    (asks("a", picture(2, 64, 64), "and", picture(3, 32, 96), picture(1), "?"),),
    (
        asks(picture(4)),
        Message("assistant", "yes"),
        asks("now", picture(5, 80, 48), "a longer question than before"),
    ),
]


pytestmark = pytest.mark.skipif(not READS_IMAGES, reason=NEEDS_TORCHVISION)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    @cache
    def of(family):
        directory = write_tiny_vlm(
            tmp_path_factory.mktemp(family), TinyVLM(family=family, std=0.15)
        )
        policy = load_policy(str(directory))
        return policy, Renderer(load_tokenizer(directory), processor=load_processor(directory))

    return of


def rendered(renderer, messages):
    tokens = renderer.prompt(messages)
    return tokens, renderer.media(tokens, messages)


def learned(policy, rows):
    """Logprobs of each row's (prompt, new tokens, media) by the learner's forward, packed."""
    lengths = [len(prompt) + len(new) for prompt, new, _ in rows]
    tokens_T = torch.tensor([token for prompt, new, _ in rows for token in (*prompt, *new)])
    positions_T = torch.cat([torch.arange(n) for n in lengths])
    with torch.no_grad():
        hidden_Td = policy.hidden(
            tokens_T, positions_T, lengths, media=[media for *_, media in rows]
        )
        logprobs_TV = (policy.logits(hidden_Td) / SAMPLING.temperature).log_softmax(-1)
    found, start = [], 0
    for (prompt, new, _), length in zip(rows, lengths, strict=True):
        own = torch.arange(start + len(prompt) - 1, start + length - 1)
        found.append(logprobs_TV[own, torch.tensor(new, dtype=torch.int64)].numpy())
        start += length
    return found


async def together(generator, requests):
    return await asyncio.gather(*(generator.generate(*request) for request in requests))


def requests_of(renderer):
    asked = [rendered(renderer, messages) for messages in PROMPTS]
    return [
        (tokens, replace(SAMPLING, seed=i, max_new_tokens=5 + 3 * i), media)
        for i, (tokens, media) in enumerate([*asked, asked[1]])
    ]


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sampled_has_the_learners_logprobs_whoever_is_in_the_batch(world, family):
    policy, renderer = world(family)
    requests = requests_of(renderer)
    assert [len(media) for *_, media in requests] == [0, 1, 3, 2, 1]
    done = asyncio.run(together(HFGenerator(HFConfig(), policy), requests))
    rows = [
        (tokens, one.tokens.tolist(), media)
        for (tokens, _, media), one in zip(requests, done, strict=True)
    ]
    for one, expected in zip(done, learned(policy, rows), strict=True):
        np.testing.assert_allclose(one.logprobs, expected, atol=1e-5)
    alone = [
        asyncio.run(together(HFGenerator(HFConfig(), policy), [request]))[0] for request in requests
    ]
    narrow = asyncio.run(together(HFGenerator(HFConfig(max_running=2), policy), requests))
    for one, single, pair in zip(done, alone, narrow, strict=True):
        assert one.tokens.tolist() == single.tokens.tolist() == pair.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, single.logprobs, atol=1e-5)
    # It sees them: the same tokens under another image are others.
    tokens, sampling, ((start, _),) = requests[1]
    other = rendered(renderer, (asks(picture(9), "what?"),))[1][0].medium
    (changed,) = asyncio.run(
        together(
            HFGenerator(HFConfig(), policy), [(tokens, sampling, (PlacedMedium(start, other),))]
        )
    )
    assert (
        abs(float(changed.logprobs[0]) - float(alone[1].logprobs[0])) > 1e-3
        or changed.tokens[0] != alone[1].tokens[0]
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_an_image_in_the_environments_answer_extends_the_prompt(world, family):
    policy, renderer = world(family)
    first = (asks(picture(1), "look"),)
    tokens, media = rendered(renderer, first)
    generator = HFGenerator(HFConfig(), policy)
    (said,) = asyncio.run(together(generator, [(tokens, SAMPLING, media)]))
    answer = (asks("then", picture(6, 64, 32), "go on"),)
    sampled = [*said.tokens.tolist()]
    added = renderer.extend(sampled, answer, history=first)
    more = [
        one._replace(start=one.start + len(tokens) + len(sampled))
        for one in renderer.media(added, answer)
    ]
    longer, both = [*tokens, *sampled, *added], (*media, *more)
    (second,) = asyncio.run(together(generator, [(longer, SAMPLING, both)]))
    (expected,) = learned(policy, [(longer, second.tokens.tolist(), both)])
    np.testing.assert_allclose(second.logprobs, expected, atol=1e-5)
    whole = Trajectory.supervised(
        [*longer, *second.tokens.tolist()], [False] * (len(longer) + len(second.tokens)), media=both
    )
    assert pack([Group("g", Task("t", ()), (whole,))]).media_S == (both,)


@pytest.mark.medium
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_commit_the_images_are_computed_anew(world, family):
    policy, renderer = world(family)
    norm = policy.language.norm.weight
    tower = policy.tower_parameters()[0][1]

    async def run():
        generator = HFGenerator(HFConfig(), policy)
        asked = [
            asyncio.create_task(generator.generate(*request))
            for request in requests_of(renderer)[1:4]
        ]
        while not generator.core.rows or len(generator.core.rows[0].logprobs) < 4:
            await asyncio.sleep(0)
        with torch.no_grad():
            norm.mul_(1.3)
            tower.mul_(1.5)
        await generator.commit(3)
        return await asyncio.gather(*asked)

    try:
        done = asyncio.run(run())
        rows = [
            (t, one.tokens.tolist(), m)
            for (t, _, m), one in zip(requests_of(renderer)[1:4], done, strict=True)
        ]
        for one, expected in zip(done, learned(policy, rows), strict=True):
            new = one.versions == 3
            assert 0 < new.sum() < len(new)
            np.testing.assert_allclose(one.logprobs[new], expected[new], atol=1e-5)
    finally:
        with torch.no_grad():
            norm.div_(1.3)
            tower.div_(1.5)


def test_who_was_interrupted_goes_on_as_if_not(world):
    policy, renderer = world("qwen2_5_vl")
    tokens, sampling, media = requests_of(renderer)[2]

    async def run():
        generator = HFGenerator(HFConfig(), policy)
        asked = asyncio.create_task(generator.generate(tokens, sampling, media))
        while not generator.core.rows or len(generator.core.rows[0].logprobs) < 4:
            await asyncio.sleep(0)
        generator.abort()
        half = await asked
        left = replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens - len(half.tokens),
            drawn=len(half.tokens),
        )
        return half, await generator.generate([*tokens, *half.tokens.tolist()], left, media)

    half, rest = asyncio.run(run())
    (whole,) = asyncio.run(together(HFGenerator(HFConfig(), policy), [(tokens, sampling, media)]))
    assert half.stop is StopReason.ABORTED
    assert [*half.tokens.tolist(), *rest.tokens.tolist()] == whole.tokens.tolist()
    np.testing.assert_allclose([*half.logprobs, *rest.logprobs], whole.logprobs, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_placeholder_that_was_written_is_no_image(world, family):
    """Neither while it is drawn, nor when the cache is computed anew: its embedding is its own."""
    policy, renderer = world(family)
    tokens, _, media = requests_of(renderer)[2]
    (pad,) = (
        token for token, kind in renderer.processor.kind_by_placeholder.items() if kind == "image"
    )
    generator = HFGenerator(HFConfig(), policy)
    core = generator.core
    with torch.no_grad():
        out, mask, position = policy.prefill([tokens], [media])
        core._mask_NL, core._cache, core._next_positions_N = mask, out.past_key_values, position
        core._mask_NL = torch.cat([mask, mask.new_ones(1, 1)], 1)
        stepped = core._run(torch.tensor([[pad]]), position[:, None]).logits[0, -1]
        anew, _, after = policy.prefill([[*tokens, pad]], [media])
    assert after.item() == position.item() + 1
    np.testing.assert_allclose(anew.logits[0, -1], stepped, atol=1e-4)
    assert not policy.model.get_input_embeddings()._forward_pre_hooks


def test_a_model_of_text_alone_refuses_them(twins, world):
    _, renderer = world("qwen2_5_vl")
    _, model = twins("qwen3")
    tokens, media = rendered(renderer, PROMPTS[1])
    with pytest.raises(ConfigError, match="reads only text"):
        asyncio.run(HFGenerator(HFConfig(), model).generate([1] * len(tokens), SAMPLING, media))
