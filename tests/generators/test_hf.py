"""The transformers generator against the engine on equal weights, and on what only it does."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from ratchet.errors import ModelError
from ratchet.generators.config import EngineConfig, HFConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.generators.hf import HFGenerator
from ratchet.models.transformers.policy import TransformersPolicy
from ratchet.testing.conformance import check_generator
from ratchet.types import Sampling, StopReason


class Numbers:
    """Token i reads "i,"."""

    def decode(self, ids):
        return "".join(f"{i}," for i in ids)


def requests(count):
    rng = np.random.default_rng(2)
    prompts = [rng.integers(0, 67, rng.integers(1, 30)).tolist() for _ in range(count)]
    filters = [{}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.05}]
    samplings = [
        Sampling(
            temperature=(0.0, 0.8, 1.0)[i % 3],
            max_new_tokens=1 + (5 * i) % 23,
            seed=i,
            stop_ids=(3, 4),
            **filters[i % 4],
        )
        for i in range(count)
    ]
    samplings[7] = replace(samplings[7], stop=("6,",))
    return prompts, samplings


@pytest.mark.medium
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_equal_seeds_give_equal_tokens_in_both_generators(twins, family):
    decoder, model = twins(family)
    prompts, samplings = requests(24)
    ours = EmbeddedEngine(EngineConfig(), decoder, Numbers()).generate_all(prompts, samplings)
    theirs = HFGenerator(HFConfig(max_running=10), model, Numbers()).generate_all(
        prompts, samplings
    )
    for a, b in zip(ours, theirs, strict=True):
        assert a.tokens.tolist() == b.tokens.tolist()
        assert a.stop is b.stop
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
        np.testing.assert_allclose(a.log_kept_mass, b.log_kept_mass, atol=2e-5)
    assert {c.stop for c in ours} >= {StopReason.STOP_TOKEN, StopReason.LENGTH}


@pytest.mark.medium
def test_it_is_a_generator_around_a_model_and_around_a_policy(twins):
    _, model = twins("qwen3")
    for wrapped in (model, TransformersPolicy(model)):
        asyncio.run(check_generator(HFGenerator(HFConfig(), wrapped), [[1, 2, 3], [4] * 30]))


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_commit_in_the_middle_is_seen_with_or_without_the_old_keys(twins, keep_kv):
    _, model = twins("qwen3")
    weight, bigger = model.model.norm.weight, 1.5
    sampling = Sampling(max_new_tokens=20, seed=1)

    async def run():
        generator = HFGenerator(HFConfig(keep_kv=keep_kv), model)
        task = asyncio.create_task(generator.generate([1, 2], sampling))
        for _ in range(8):
            await asyncio.sleep(0)
        with torch.no_grad():
            weight.mul_(bigger)
        await generator.commit(3)
        had_cache = generator.core._cache is not None
        return await task, had_cache

    completion, had_cache = asyncio.run(run())
    try:
        old = int((completion.versions == 0).sum())
        assert had_cache == keep_kv
        assert 0 < old < 20
        assert completion.versions.tolist() == [0] * old + [3] * (20 - old)
        tokens = torch.tensor([1, 2, *completion.tokens.tolist()])
        with torch.no_grad():
            logprobs = (
                model(tokens[None])
                .logits[0, 1:-1]
                .log_softmax(-1)
                .gather(1, tokens[2:, None])[:, 0]
            )
        # the norm is behind every key
        np.testing.assert_allclose(completion.logprobs[old:], logprobs[old:], atol=1e-5)
    finally:
        with torch.no_grad():
            weight.div_(bigger)


def test_abort_and_cancel(twins):
    _, model = twins("qwen3")
    sampling = Sampling(max_new_tokens=30, seed=1)

    async def run():
        generator = HFGenerator(HFConfig(max_running=2), model)
        tasks = [
            asyncio.create_task(generator.generate([1 + i, 2], replace(sampling, seed=i)))
            for i in range(3)
        ]
        for _ in range(8):
            await asyncio.sleep(0)
        tasks[0].cancel()
        for _ in range(4):
            await asyncio.sleep(0)
        assert len(generator.core.rows) == 1
        generator.abort()
        return await asyncio.gather(*tasks, return_exceptions=True)

    cancelled, partial, waiting = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert partial.stop is waiting.stop is StopReason.ABORTED
    whole = HFGenerator(HFConfig(), model).generate_all([[2, 2]], [replace(sampling, seed=1)])[0]
    assert 0 < len(partial.tokens) < 30
    assert partial.tokens.tolist() == whole.tokens[: len(partial.tokens)].tolist()
    assert len(waiting.tokens) == 0


def test_a_model_in_training_mode_is_asked_without_dropout_and_left_in_it(twins):
    _, model = twins("llama")
    expected = HFGenerator(HFConfig(), model).generate_all([[1, 2]], [Sampling(max_new_tokens=8)])[
        0
    ]
    model.train()
    again = HFGenerator(HFConfig(), model).generate_all([[1, 2]], [Sampling(max_new_tokens=8)])[0]
    assert model.training
    model.eval()
    np.testing.assert_array_equal(again.logprobs, expected.logprobs)


def test_logits_that_are_not_finite_reach_the_caller(twins):
    _, model = twins("llama")
    weight = model.model.norm.weight.detach()
    saved = weight.clone()
    weight.fill_(float("nan"))
    with pytest.raises(ModelError, match="aren't finite"):
        HFGenerator(HFConfig(), model).generate_all([[1, 2]], [Sampling(max_new_tokens=8)])
    weight.copy_(saved)


@pytest.mark.parametrize("breaks", ["prefill", "rows that leave"])
def test_an_error_anywhere_in_a_step_reaches_every_caller(twins, monkeypatch, breaks):
    """When rows leave, one of those that run has just ended, and one waits."""
    _, model = twins("llama")
    generator = HFGenerator(HFConfig(max_running=2), model)
    model.train()

    def broken(*args, **kwargs):
        raise RuntimeError("out of memory")

    if breaks == "prefill":
        monkeypatch.setattr(generator.core, "_prefill", broken)
    else:
        monkeypatch.setattr(DynamicCache, "batch_select_indices", broken)

    async def run():
        samplings = [Sampling(max_new_tokens=tokens) for tokens in (3, 9, 9)]
        tasks = [
            asyncio.create_task(generator.generate([1, 2], sampling)) for sampling in samplings
        ]
        for _ in range(20):
            await asyncio.sleep(0)
        assert all(task.done() for task in tasks), [task.done() for task in tasks]
        return await asyncio.gather(*tasks, return_exceptions=True)

    try:
        assert [type(result) for result in asyncio.run(run())] == [RuntimeError] * 3
        assert not generator.core.busy
        assert model.training
    finally:
        model.eval()


def test_the_built_in_decoder_is_sent_to_the_engine(decoder):
    with pytest.raises(ModelError, match="kind to engine"):
        HFGenerator(HFConfig(), decoder)
