"""A request that can't be computed costs itself alone, in every generator and with every kind of
poison."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from generators.workers_play import router_here

from ratchet.errors import ConfigError, DataError, ModelError, RequestFailed
from ratchet.experience.rollout.episode import EpisodePlayer
from ratchet.generators.config import EngineConfig, HFConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.generators.hf import HFGenerator
from ratchet.models.decoder import Decoder
from ratchet.testing.fakes import FakeEnvironment
from ratchet.types import Failed, Medium, Message, PlacedMedium, Sampling, Task

HONEST = 200
CURSED = 66  # a token that the tokenizer can't decode
RNG = np.random.default_rng(3)
PROMPTS = [RNG.integers(0, CURSED, RNG.integers(1, 30)).tolist() for _ in range(HONEST)]
FILTERS = [
    {},
    {"top_p": 0.9},
    {"top_k": 5},
    {"min_p": 0.05},
    {"stop": ("7,8,",)},
    {"stop_ids": (CURSED, 9)},
]
SAMPLINGS = [
    Sampling(
        temperature=(0.0, 0.7, 1.0)[i % 3],
        max_new_tokens=1 + (7 * i) % 24,
        seed=i,
        **FILTERS[i % 6],
    )
    for i in range(HONEST)
]


class Numbers:
    """Token i reads "i,"; one can't be decoded together with many others."""

    def decode(self, ids):
        if CURSED in ids and len(ids) > 6:
            raise KeyError(CURSED)
        return "".join(f"{i}," for i in ids)


def slipped(**values):
    """A sampling past its own check."""
    sampling = Sampling(max_new_tokens=20, seed=1)
    for name, value in values.items():
        object.__setattr__(sampling, name, value)
    return sampling


PICTURE = PlacedMedium(0, Medium("key", "image", 1, {}, b""))
PLAIN = Sampling(max_new_tokens=9)
# By name: prompt, sampling, media, and the error; None where the request may also be answered.
POISON = {
    "logits that overflow": ([1, 2], slipped(temperature=1e-40), (), RequestFailed),
    "logits that overflow, filtered": (
        [1, 2],
        slipped(temperature=1e-40, top_p=0.5),
        (),
        RequestFailed,
    ),
    "a temperature of nan": ([5], slipped(temperature=float("nan")), (), RequestFailed),
    "a temperature of -inf": ([5], slipped(temperature=float("-inf")), (), None),
    "a top_p of nan": ([5], slipped(top_p=float("nan")), (), None),
    "a top_k of 2**70": ([5, 6], slipped(top_k=2**70), (), RequestFailed),
    "a seed that is not a number": ([5, 7], slipped(seed="x"), (), RequestFailed),
    "a stop id of 2**70": ([5, 8], slipped(stop_ids=(2**70,)), (), RequestFailed),
    "a stop id that is not a number": ([5, 9], slipped(stop_ids=("x",)), (), RequestFailed),
    "text that can't be decoded": (
        [1, CURSED],
        replace(PLAIN, stop=("z",), drawn=1, max_new_tokens=20),
        (),
        RequestFailed,
    ),
    "no prompt": ([], PLAIN, (), DataError),
    "a prompt that is too long": ([1] * 161, PLAIN, (), DataError),
    "an unknown token": ([67], PLAIN, (), DataError),
    "a negative token": ([-1], PLAIN, (), DataError),
    "a huge token": ([2**70], PLAIN, (), DataError),
    "tokens that are text": (["a"], PLAIN, (), DataError),
    "an unknown adapter": ([1], replace(PLAIN, adapter="x"), (), ConfigError),
    "a picture": ([1], PLAIN, (PICTURE,), ConfigError),
    "more drawn than there is": ([1], replace(PLAIN, drawn=5), (), DataError),
    "no count of tokens": ([1], slipped(max_new_tokens=None), (), TypeError),
}
CASES = [(name, *case) for name, case in POISON.items()] * 3


async def play(generator, poison):
    """The honest answers; poison is mixed in evenly, and the honest requests are under way when it
    comes."""
    loop = asyncio.get_running_loop()
    honest, poisoned = [], []
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, SAMPLINGS, strict=True)):
        honest.append(loop.create_task(generator.generate(prompt, sampling)))
        if poison and 10 * len(poisoned) < 3 * (i - 20):
            name, prompt, sampling, media, kind = poison[len(poisoned)]
            poisoned.append(
                (name, kind, loop.create_task(generator.generate(prompt, sampling, media)))
            )
            if len(poisoned) % 7 == 0:
                leaving = loop.create_task(generator.generate([3], slipped(temperature=1e-40)))
                loop.call_later(0, leaving.cancel)
        if i % 5 == 0:
            await asyncio.sleep(0)
    for name, kind, task in poisoned:
        (error,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(error, kind) if kind else True, (name, error)
    return await asyncio.gather(*honest, return_exceptions=True), len(poisoned)


def columns(answers):
    """Every bit of them; a few honest ones draw what can't be decoded, and fail whatever else is
    there."""
    kept = ("tokens", "logprobs", "log_kept_mass", "versions")
    failed = [answer for answer in answers if isinstance(answer, Exception)]
    assert len(failed) < 10
    return [
        repr(answer)
        if answer in failed
        else (str(answer.stop), *(getattr(answer, name).tobytes() for name in kept))
        for answer in answers
    ]


@pytest.mark.medium
@pytest.mark.fault("R16")
@pytest.mark.parametrize("operations", ["by PyTorch", "by compiled kernels"])
def test_poison_of_all_kinds_changes_no_honest_bit(either, kernels, operations):
    kernels(operations == "by compiled kernels")
    config = EngineConfig(max_running=24, prefill_tokens=300)
    alone, _ = asyncio.run(play(EmbeddedEngine(config, either, Numbers()), ()))
    among, count = asyncio.run(play(EmbeddedEngine(config, either, Numbers()), CASES))
    assert count >= 53
    assert columns(among) == columns(alone)


@pytest.fixture
def untied(either):
    """With a head of its own: then a broken embedding concerns only what reads it."""
    return Decoder(replace(either.config, tied=False)).init_weights(0)


def with_nan_at(decoder, token):
    with torch.no_grad():
        decoder.embed_tokens.weight[token] = float("nan")
    return decoder


OTHERS = 8


def others(generator):
    """Honest requests that go on for a while, so that some row is finite."""
    samplings = [Sampling(max_new_tokens=60, seed=i, stop_ids=(CURSED,)) for i in range(OTHERS)]
    return [generator.generate([1, 2], sampling) for sampling in samplings]


HONEST_FEW = [Sampling(max_new_tokens=30, seed=i, stop_ids=(CURSED,)) for i in range(12)]
CURSED_PROMPT = [CURSED] * 40


@pytest.mark.medium
@pytest.mark.fault("R16")
@pytest.mark.parametrize("leaves", ["at its end", "cancelled", "aborted with all"])
def test_keys_that_are_not_finite_leave_with_their_request(untied, leaves):
    """By PyTorch attention reads a slot beyond its request's end with weight 0, and 0 * NaN is
    NaN."""
    prompts = [[1, 2, i] for i in range(12)]
    whole = columns(EmbeddedEngine(EngineConfig(), untied).generate_all(prompts, HONEST_FEW))
    generator = EmbeddedEngine(EngineConfig(), with_nan_at(untied, CURSED))

    async def spoil():
        long = [
            generator.generate(CURSED_PROMPT, Sampling(max_new_tokens=9, seed=i)) for i in range(12)
        ]
        tasks = list(map(asyncio.ensure_future, [*others(generator), *long]))
        for _ in range(5):
            await asyncio.sleep(0)
        if leaves == "cancelled":
            for task in tasks[OTHERS:]:
                task.cancel()
        elif leaves == "aborted with all":
            generator.abort()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        kind = asyncio.CancelledError if leaves == "cancelled" else RequestFailed
        assert [type(error) for error in answers[OTHERS:]] == [kind] * 12
        assert all(np.isfinite(honest.logprobs).all() for honest in answers[:OTHERS])
        return await asyncio.gather(
            *(generator.generate(*request) for request in zip(prompts, HONEST_FEW, strict=True))
        )

    assert columns(asyncio.run(spoil())) == whole


def test_an_error_says_what_is_broken(untied):
    """Among others, one reads a broken weight; with finite weights, all overflow; with broken ones,
    none can be served."""

    async def ask(generator, *prompts):
        sampling = Sampling(max_new_tokens=5)
        return await asyncio.gather(
            *(generator.generate(p, sampling) for p in prompts), return_exceptions=True
        )

    generator = EmbeddedEngine(EngineConfig(max_running=2), with_nan_at(untied, CURSED))
    _, error = asyncio.run(ask(generator, [1], [CURSED]))
    assert isinstance(error, RequestFailed)
    assert (
        "new token 0 on (prompt of 1 tokens, weights version 0): the request reads the weight "
        "'embed_tokens.weight'" in str(error)
    )

    with_nan_at(untied, CURSED).embed_tokens.weight.detach()[CURSED] = 0
    untied.norm.weight.detach().fill_(3e38)
    errors = asyncio.run(ask(generator, [1], [2], [3]))
    assert [type(error) for error in errors] == [RequestFailed] * 3
    assert all(
        "weights are finite, but overflow on this request. Leave this prompt out." in str(error)
        for error in errors
    )

    untied.norm.weight.detach().fill_(float("nan"))
    for version, cause in (
        (0, "the weight 'norm.weight' in the model's files"),
        (3, "an update has broken the weights"),
    ):
        asyncio.run(generator.commit(version))
        errors = asyncio.run(ask(generator, [1], [2], [3]))
        assert [type(error) for error in errors] == [ModelError] * 3
        assert all(cause in str(error) for error in errors)


@pytest.mark.medium
@pytest.mark.fault("R16")
def test_poison_changes_no_token_of_transformers_generator(twins, monkeypatch):
    """Batches of 8, in whose padding the poison takes part: bits may differ, tokens not."""
    _, model = twins("qwen3")
    prefill = HFGenerator(HFConfig(), model).core.__class__._prefill

    def fragile(core):
        if any(row.tokens[:2] == [13, 13] for row in core.rows):
            raise ValueError("a picture of no size")
        return prefill(core)

    monkeypatch.setattr(HFGenerator(HFConfig(), model).core.__class__, "_prefill", fragile)
    samplings = [replace(sampling, stop=()) for sampling in SAMPLINGS[:40]]
    undecodable = replace(PLAIN, stop=("z",), drawn=1)
    bad = [slipped(temperature=1e-40), slipped(top_k=2**70), slipped(seed="x")]
    poison = [
        ([13, 13], PLAIN),
        ([1, CURSED], undecodable),
        *(([1], sampling) for sampling in bad),
    ] * 2

    async def ask(generator, poison):
        tasks = []
        for i, request in enumerate(zip(PROMPTS, samplings, strict=False)):
            tasks.append(asyncio.ensure_future(generator.generate(*request)))
            if i % 3 == 0 and i // 3 < len(poison):
                tasks.append(asyncio.ensure_future(generator.generate(*poison[i // 3])))
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, Exception)]
        assert [type(error) for error in errors] == [RequestFailed] * len(poison), errors
        return [answer for answer in answers if not isinstance(answer, Exception)]

    alone, among = (
        asyncio.run(ask(HFGenerator(HFConfig(max_running=8), model, Numbers()), p))
        for p in ((), poison)
    )
    assert [a.tokens.tolist() for a in among] == [a.tokens.tolist() for a in alone]
    for a, b in zip(among, alone, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)


def test_a_failed_request_costs_no_worker():
    router, workers = router_here(1)
    object.__setattr__(workers[0].component.generator.validator, "tokenizer", Numbers())
    undecodable = [1, CURSED], replace(PLAIN, stop=("z",), drawn=1)

    async def ask():
        asked = [([1], PLAIN), undecodable, ([2], PLAIN)]
        return await asyncio.gather(
            *(router.generate(*request) for request in asked), return_exceptions=True
        )

    first, error, second = asyncio.run(ask())
    assert type(error) is RequestFailed
    assert np.isfinite([*first.logprobs, *second.logprobs]).all()
    assert len(workers) == 1
    assert router.n_restarts == 0


@pytest.mark.fault("R16")
def test_an_attempt_that_cannot_be_computed_fails_without_reward(untied):
    generator = EmbeddedEngine(EngineConfig(), with_nan_at(untied, CURSED))

    class Tokens:
        """A renderer of prompts that are the token in the task's message."""

        stop_ids = ()

        def prompt(self, messages, tools=None):
            return [int(messages[0].text)]

        def media(self, tokens, messages):
            return ()

        def find_media_token(self, sampled):
            return None

        def parse(self, tokens, stop):
            return Message("assistant", "0")

    async def attempt():
        task = Task("t", (Message("user", str(CURSED)),), answer="0")
        player = EpisodePlayer(generator, Tokens(), max_context=64)  # pyright: ignore[reportArgumentType]
        play = player.play(task, FakeEnvironment(), Sampling(max_new_tokens=5), attempt=0)
        answers = await asyncio.gather(play, *others(generator))
        return answers[0][-1]

    broken = asyncio.run(attempt())
    assert isinstance(broken.outcome, Failed)
    assert broken.outcome.kind == "data"
    assert "aren't finite from its new token 0 on" in broken.outcome.detail
    assert broken.reward is None
    assert not broken.is_usable
