"""The engine against transformers, and against itself: whatever else runs, whenever it arrives."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import ConfigError, DataError, ModelError, RequestFailed
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.decoder import Decoder
from ratchet.models.layers.attention import PackedAttention
from ratchet.models.policy import DecoderPolicy
from ratchet.models.weights.hf_weights import canonical_weights
from ratchet.protocols import Shard
from ratchet.testing.conformance import check_generator
from ratchet.types import Sampling, StopReason

GREEDY = Sampling(temperature=0, max_new_tokens=12)
SAMPLED = Sampling(max_new_tokens=40, seed=5)


def prompts_of(count, seed=0, longest=100):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 67, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def mixed_samplings(count, longest=40):
    """Every temperature with every filter, of many lengths."""
    filters = [
        {},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    ]
    return [
        Sampling(
            temperature=(0.0, 0.7, 1.0, 1.4)[i % 4],
            max_new_tokens=1 + (7 * i) % longest,
            seed=i,
            **filters[i % 5],
        )
        for i in range(count)
    ]


def engine(decoder, tokenizer=None, **fields):
    return EmbeddedEngine(EngineConfig(**fields), decoder, tokenizer)


def assert_same(a, b, exactly=True):
    """exactly=False: where the test, instead of the engine's probe, chose how rows are padded."""
    assert a.tokens.tolist() == b.tokens.tolist()
    assert a.versions.tolist() == b.versions.tolist()
    assert a.stop is b.stop
    for ours, theirs in ((a.logprobs, b.logprobs), (a.log_kept_mass, b.log_kept_mass)):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=0 if exactly else 1e-5)


def logits_of(decoder, tokens):
    """[T, V] in one forward, without a cache."""
    attend = PackedAttention([len(tokens)])
    with torch.no_grad():
        return (
            decoder(torch.tensor(tokens), torch.arange(len(tokens)), attend) @ decoder.head_weight.T
        )


@pytest.fixture(params=["by PyTorch", "by compiled kernels"])
def operations(request, kernels):
    kernels(request.param == "by compiled kernels")


async def ticks(n):
    for _ in range(n):
        await asyncio.sleep(0)


# --- against transformers


@pytest.mark.medium
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "qwen3_moe", "mixtral"])
def test_greedy_tokens_are_those_of_transformers(twins, family):
    decoder, model = twins(family)
    prompts = prompts_of(9)
    for prompt, ours in zip(
        prompts, engine(decoder).generate_all(prompts, [GREEDY] * 9), strict=True
    ):
        theirs = model.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[
            0, len(prompt) :
        ]
        assert ours.tokens.tolist() == theirs.tolist()
        assert ours.stop is StopReason.LENGTH


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", "qwen3_moe", "mixtral"])
def test_logprobs_are_those_of_a_transformers_forward_at_the_stop_token_too(twins, family):
    decoder, model = twins(family)
    prompts, samplings = (
        prompts_of(20),
        [replace(s, stop_ids=(3, 4, 5)) for s in mixed_samplings(20)],
    )
    completions = engine(decoder).generate_all(prompts, samplings)
    assert sum(c.stop is StopReason.STOP_TOKEN for c in completions) > 3
    for prompt, sampling, completion in zip(prompts, samplings, completions, strict=True):
        tokens = torch.tensor(prompt + completion.tokens.tolist())
        with torch.no_grad():
            logits = model(tokens[None]).logits[0, len(prompt) - 1 : -1]
        expected = (
            (logits / (sampling.temperature or 1.0))
            .log_softmax(-1)
            .gather(1, tokens[len(prompt) :, None])[:, 0]
        )
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)


# --- against itself


@pytest.mark.usefixtures("operations")
def test_cached_decoding_equals_a_forward_per_token(either):
    prompt = prompts_of(1)[0]
    tokens = list(prompt)
    for _ in range(12):
        tokens.append(int(logits_of(either, tokens)[-1].argmax()))
    assert (
        engine(either).generate_all([prompt], [GREEDY])[0].tokens.tolist() == tokens[len(prompt) :]
    )


@pytest.mark.medium
@pytest.mark.usefixtures("operations")
def test_cached_decoding_stays_right_over_many_tiles_and_grown_slots():
    """900 tokens pass several capacities of the cache, and several tiles of the attention."""
    shape = DecoderConfig(67, 64, 2, 4, 2, 32, 96, max_positions=1024, init_std=0.2)
    decoder = Decoder(shape).init_weights(1)
    (completion,) = engine(decoder).generate_all([[7, 8]], [Sampling(max_new_tokens=900, seed=1)])
    tokens = [7, 8, *completion.tokens.tolist()]
    expected = (
        logits_of(decoder, tokens)
        .log_softmax(-1)[1:-1]
        .gather(1, torch.tensor(tokens[2:])[:, None])[:, 0]
    )
    np.testing.assert_allclose(completion.logprobs, expected, atol=2e-5)


@pytest.mark.usefixtures("operations")
def test_a_result_does_not_depend_on_the_batch(either):
    """Bit for bit: among 50 others of all lengths and settings, with any number of slots, and
    alone (every fifth)."""
    prompts, samplings = prompts_of(51), mixed_samplings(51)
    prompts[20:25] = [prompts[20]] * 5  # computed once
    together = engine(either, max_running=1024).generate_all(prompts, samplings)
    for i in range(0, 51, 5):
        assert_same(engine(either).generate_all([prompts[i]], [samplings[i]])[0], together[i])
    for max_running in (3, 17):
        in_turn = engine(either, max_running=max_running).generate_all(prompts, samplings)
        for a, b in zip(in_turn, together, strict=True):
            assert_same(a, b)


@pytest.mark.medium
@pytest.mark.usefixtures("operations")
def test_a_result_does_not_depend_on_who_arrives_when(either):
    prompts, samplings = prompts_of(51, seed=1), mixed_samplings(51)
    alone = engine(either).generate_all(prompts[:1], [replace(samplings[1], max_new_tokens=40)])[0]

    async def arrive(generator, i):
        await ticks((13 * i) % 29)
        return await generator.generate(prompts[i], samplings[i])

    async def run():
        generator = engine(either, max_running=20, prefill_tokens=100)
        others = [asyncio.create_task(arrive(generator, i)) for i in range(1, 51)]
        await ticks(10)
        mine = await generator.generate(prompts[0], replace(samplings[1], max_new_tokens=40))
        return mine, await asyncio.gather(*others)

    mine, others = asyncio.run(run())
    assert_same(mine, alone)
    assert [len(c.tokens) for c in others] == [s.max_new_tokens for s in samplings[1:]]
    for a, b in zip(others, asyncio.run(run())[1], strict=True):
        assert_same(a, b)


def test_the_same_request_twice_gives_the_same_and_another_seed_does_not(decoder):
    generator = engine(decoder)
    first, second, other = generator.generate_all(
        [[1, 2, 3]] * 3, [SAMPLED, SAMPLED, replace(SAMPLED, seed=6)]
    )
    assert_same(first, second)
    assert_same(first, generator.generate_all([[1, 2, 3]], [SAMPLED])[0])
    assert first.tokens.tolist() != other.tokens.tolist()


def test_kept_mass_is_zero_in_the_log_where_nothing_is_cut_and_exact_where_something_is(decoder):
    samplings = [SAMPLED, replace(SAMPLED, top_k=3), replace(SAMPLED, temperature=0.5, top_k=3)]
    plain, cut, cold = engine(decoder).generate_all([[1, 2, 3]] * 3, samplings)
    assert not plain.log_kept_mass.any()
    for completion, temperature in ((cut, 1.0), (cold, 0.5)):
        logits = logits_of(decoder, [1, 2, 3, *completion.tokens.tolist()])[2:-1]
        expected = (logits / temperature).softmax(-1).topk(3).values.sum(-1).log()
        np.testing.assert_allclose(completion.log_kept_mass, expected, atol=1e-5)


@pytest.mark.medium
def test_equal_prompts_that_wait_together_are_computed_once(either):
    generator = engine(either)
    group = [replace(SAMPLED, seed=i) for i in range(8)]
    completions = generator.generate_all([[1, 2, 3, 4, 5]] * 8 + [[9, 9]], [*group, SAMPLED])
    assert generator.core.runner.prefilled_tokens == 5 + 2
    # a prompt's forward gives the first token
    assert generator.core.runner.decoded_tokens == 9 * (SAMPLED.max_new_tokens - 1)
    for sampling, completion in zip(group, completions, strict=False):
        assert_same(completion, engine(either).generate_all([[1, 2, 3, 4, 5]], [sampling])[0])


def test_callers_of_the_same_moment_share_a_prompt(decoder):
    async def run():
        generator = engine(decoder)
        await asyncio.gather(
            *(generator.generate([1, 2, 3], replace(SAMPLED, seed=i)) for i in range(8))
        )
        return generator.core.runner.prefilled_tokens

    assert asyncio.run(run()) == 3


def test_ended_requests_leave_and_waiting_ones_enter_at_once(decoder):
    """2 slots: 1 + 10 tokens in one, 6 + 5 in the other, so 10 decode steps after the prompts; none
    runs half empty."""
    generator = engine(decoder, max_running=2)
    lengths = [1, 6, 10, 5]
    generator.generate_all(prompts_of(4), [replace(SAMPLED, max_new_tokens=n) for n in lengths])
    assert generator.core.runner.decoded_tokens == sum(lengths) - 4


@pytest.mark.medium
def test_a_padding_multiple_of_one_changes_rounding_only(either):
    prompts, samplings = prompts_of(12), mixed_samplings(12)
    padded = engine(either).generate_all(prompts, samplings)
    for a, b in zip(
        padded, engine(either, row_multiple=1).generate_all(prompts, samplings), strict=True
    ):
        assert a.tokens.tolist() == b.tokens.tolist()
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


# --- ends


def test_a_stop_id_is_the_last_token_and_belongs_to_the_completion(decoder):
    whole = engine(decoder).generate_all([[1, 2]], [SAMPLED])[0]
    stop = int(whole.tokens[7])
    first = whole.tokens.tolist().index(stop)
    cut = engine(decoder).generate_all([[1, 2]], [replace(SAMPLED, stop_ids=(999, stop))])[0]
    assert cut.stop is StopReason.STOP_TOKEN
    assert cut.tokens.tolist() == whole.tokens[: first + 1].tolist()
    np.testing.assert_array_equal(cut.logprobs, whole.logprobs[: first + 1])


class Numbers:
    """Token i reads "i,"."""

    def decode(self, ids):
        return "".join(f"{i}," for i in ids)


def test_a_stop_string_may_span_tokens_which_all_belong_to_the_completion(decoder):
    whole = engine(decoder).generate_all([[1, 2]], [SAMPLED])[0].tokens.tolist()
    text = f"{whole[9]},{whole[10]},"[:-1]
    others = prompts_of(5)
    samplings = [replace(SAMPLED, stop=("nothing", text)), *[SAMPLED] * 5]
    cut = engine(decoder, Numbers()).generate_all([[1, 2], *others], samplings)[0]
    assert cut.stop is StopReason.STOP_STRING
    assert cut.tokens.tolist() == whole[:11]


def test_a_stop_id_outdoes_a_string_and_a_string_outdoes_the_limit(decoder):
    whole = engine(decoder).generate_all([[1, 2]], [SAMPLED])[0].tokens.tolist()
    string = replace(SAMPLED, stop=(f",{whole[5]},",), max_new_tokens=6)
    assert [
        c.stop
        for c in engine(decoder, Numbers()).generate_all(
            [[1, 2]] * 2, [string, replace(string, stop=())]
        )
    ] == [
        StopReason.STOP_STRING,
        StopReason.LENGTH,
    ]
    both = replace(string, stop_ids=(whole[5],), stop=(f",{whole[5]},",))
    expected = whole.index(whole[5]) + 1
    (completion,) = engine(decoder, Numbers()).generate_all([[1, 2]], [both])
    assert (completion.stop, len(completion.tokens)) == (StopReason.STOP_TOKEN, expected)


def test_the_context_ends_a_completion(decoder):
    generator = engine(decoder, max_context=20)
    long, exact, full, none = generator.generate_all(
        [[1] * 15, [1] * 15, [1] * 20, [1] * 3],
        [SAMPLED, replace(SAMPLED, max_new_tokens=5), SAMPLED, replace(SAMPLED, max_new_tokens=0)],
    )
    assert (len(long.tokens), long.stop) == (5, StopReason.CONTEXT)
    assert (len(exact.tokens), exact.stop) == (5, StopReason.LENGTH)
    assert (len(full.tokens), full.stop) == (0, StopReason.CONTEXT)
    assert (len(none.tokens), none.stop) == (0, StopReason.LENGTH)
    assert generator.max_context == 20
    assert engine(decoder, max_context=10**6).max_context == 160


def test_wrong_requests_are_refused_and_leave_nothing_behind(decoder):
    generator = engine(decoder, max_context=20)
    refused = [
        ([], SAMPLED, DataError, "the prompt is empty"),
        ([1] * 21, SAMPLED, DataError, "21 tokens doesn't fit a context of 20"),
        ([1, 67], SAMPLED, DataError, "token 67 .* vocabulary of 67"),
        ([1, -1], SAMPLED, DataError, "token -1"),
        ([1], replace(SAMPLED, drawn=1), DataError, "drawn=1 leaves no prompt"),
        (["1"], SAMPLED, DataError, "not a sequence of token ids"),
        ([1.5], SAMPLED, DataError, "not a sequence of token ids"),
        ([2**70], SAMPLED, DataError, "not a sequence of token ids"),
        ([[1, 2]], SAMPLED, DataError, r"shape \[1, 2\]"),
        ([[1], [1, 2]], SAMPLED, DataError, "not a sequence of token ids"),
        ([1], replace(SAMPLED, stop=("x",)), ConfigError, "no tokenizer"),
    ]
    for prompt, sampling, kind, message in refused:
        with pytest.raises(kind, match=message):
            generator.generate_all([[1, 2], prompt], [SAMPLED, sampling])
        with pytest.raises(kind, match=message):
            asyncio.run(generator.generate(prompt, sampling))
        assert not generator.core.busy


@pytest.mark.medium
def test_a_bounded_cache_limits_how_many_run_and_refuses_what_never_fits(decoder):
    per_token = 2 * 2 * 2 * 32 * 4  # k and v, layers, KV heads, head_dim, float32
    prompts, samplings = prompts_of(40), mixed_samplings(40)
    expected = engine(decoder).generate_all(prompts, samplings)
    # 32 slots of 128 tokens, or 16 of 256
    small = engine(decoder, row_multiple=16, kv_cache_gib=32 * 128 * per_token / 2**30)
    for a, b in zip(small.generate_all(prompts, samplings), expected, strict=True):
        assert_same(a, b, exactly=False)
    cache = small.core.runner.cache
    assert cache.n_slots * cache.capacity <= 32 * 128
    # takes the shape of the first requests away
    small.generate_all([[1]], [replace(SAMPLED, max_new_tokens=150)])
    assert cache.capacity == 256
    tiny = engine(decoder, row_multiple=16, kv_cache_gib=16 * 64 * per_token / 2**30)
    with pytest.raises(
        ConfigError,
        match=r"up to 150 tokens doesn't fit .* holds 64: raise generator\.kv_cache_gib",
    ):
        tiny.generate_all([[1]], [replace(SAMPLED, max_new_tokens=149)])


# --- control


def test_abort_returns_what_there_is(decoder):
    async def run():
        generator = engine(decoder, max_running=2)
        tasks = [asyncio.create_task(generator.generate(p, SAMPLED)) for p in prompts_of(3)]
        await ticks(8)
        generator.abort()
        return generator, await asyncio.gather(*tasks)

    generator, (first, second, waiting) = asyncio.run(run())
    whole = engine(decoder).generate_all(prompts_of(3)[:1], [SAMPLED])[0]
    assert 0 < len(first.tokens) < 40
    assert first.tokens.tolist() == whole.tokens[: len(first.tokens)].tolist()
    assert {first.stop, second.stop, waiting.stop} == {StopReason.ABORTED}
    assert len(waiting.tokens) == 0
    assert not generator.core.busy
    assert_same(generator.generate_all(prompts_of(3)[:1], [SAMPLED])[0], whole)


@pytest.mark.medium
def test_a_paused_generator_stands_still_and_goes_on_where_it_was(decoder):
    async def run():
        generator = engine(decoder)
        early = asyncio.create_task(generator.generate([1, 2], SAMPLED))
        await ticks(8)
        await generator.pause()
        late = asyncio.create_task(generator.generate([3], SAMPLED))
        done = generator.core.runner.decoded_tokens
        await ticks(30)
        assert generator.core.runner.decoded_tokens == done
        assert not early.done()
        await generator.resume()
        return generator, await asyncio.gather(early, late)

    generator, completions = asyncio.run(run())
    for completion, prompt in zip(completions, ([1, 2], [3]), strict=True):
        assert_same(completion, engine(decoder).generate_all([prompt], [SAMPLED])[0])
    assert generator.core.runner.prefilled_tokens == 3  # nothing was computed anew


async def across_an_update(generator, prompt, change):
    """A completion during which the weights change; its first part must have begun and not
    ended."""
    task = asyncio.create_task(generator.generate(prompt, SAMPLED))
    await ticks(10)
    with torch.no_grad():
        change()
    await generator.commit(7)
    return await task


def nudge(decoder):
    def change():
        for parameter in decoder.parameters():
            parameter.mul_(1.05)

    return change


@pytest.mark.parametrize("keep_kv", [False, True])
def test_a_request_that_spans_a_commit_carries_both_versions(decoder, keep_kv):
    generator = engine(decoder, keep_kv=keep_kv)
    before = engine(decoder).generate_all([[1, 2, 3]], [SAMPLED])[0]
    completion = asyncio.run(across_an_update(generator, [1, 2, 3], nudge(decoder)))
    old = int((completion.versions == 0).sum())
    assert 0 < old < 40
    assert completion.versions.tolist() == [0] * old + [7] * (40 - old)
    np.testing.assert_array_equal(completion.logprobs[:old], before.logprobs[:old])
    tokens = [1, 2, 3, *completion.tokens.tolist()]
    under_new = (
        logits_of(decoder, tokens)
        .log_softmax(-1)[2:-1]
        .gather(1, torch.tensor(tokens[3:])[:, None])[:, 0]
        .numpy()
    )
    error = np.abs(completion.logprobs - under_new)[old:].max()
    assert error > 1e-3 if keep_kv else error < 1e-5
    assert generator.core.runner.prefilled_tokens == (3 if keep_kv else 3 + 3 + old - 1)
    assert generator.version == 7


def test_the_next_token_comes_from_weights_changed_in_place_without_a_copy(decoder):
    generator = engine(decoder)
    generator.generate_all([[1, 2, 3]], [GREEDY])
    with torch.no_grad():
        decoder.embed_tokens.weight.copy_(decoder.embed_tokens.weight.flip(0))
    assert_same(
        generator.generate_all([[1, 2, 3]], [GREEDY])[0],
        engine(decoder).generate_all([[1, 2, 3]], [GREEDY])[0],
    )


def test_sent_weights_wait_for_the_commit_and_vanish_with_a_rollback(decoder):
    source = {name: weight.clone() * 1.1 for name, weight in canonical_weights(decoder)}
    shards = [
        Shard(name, tuple(weight.shape), (0,) * weight.dim(), weight[: len(weight) // 2])
        for name, weight in source.items()
    ] + [
        Shard(
            name,
            tuple(weight.shape),
            (len(weight) // 2, *[0] * (weight.dim() - 1)),
            weight[len(weight) // 2 :],
        )
        for name, weight in source.items()
    ]

    async def run():
        generator = engine(decoder)
        old = await generator.generate([1, 2, 3], GREEDY)
        await generator.prepare({})
        await generator.receive(iter(shards))
        assert_same(await generator.generate([1, 2, 3], GREEDY), old)
        await generator.rollback()
        await generator.commit(1)
        rolled = await generator.generate([1, 2, 3], GREEDY)
        np.testing.assert_array_equal(rolled.logprobs, old.logprobs)
        await generator.receive(iter(shards))
        await generator.commit(2)
        return await generator.generate([1, 2, 3], GREEDY)

    completion = asyncio.run(run())
    for name, weight in canonical_weights(decoder):
        torch.testing.assert_close(weight, source[name], rtol=0, atol=0)
    assert set(completion.versions.tolist()) == {2}


def test_a_learners_own_tensors_are_not_copied_and_strange_weights_are_refused(decoder):
    generator = engine(decoder)
    own = [Shard(name, tuple(w.shape), (0,) * w.dim(), w) for name, w in canonical_weights(decoder)]
    asyncio.run(generator.receive(iter(own)))
    assert not generator._staging.pieces
    with pytest.raises(ModelError, match="none of that name"):
        asyncio.run(generator.receive(iter([Shard("other", (1,), (0,), torch.ones(1))])))
    name, weight = next(canonical_weights(decoder))
    with pytest.raises(ModelError, match="shape"):
        asyncio.run(generator.receive(iter([Shard(name, (1,), (0,), weight)])))


@pytest.mark.medium
def test_a_cancelled_caller_frees_its_slot(decoder):
    async def run():
        generator = engine(decoder, max_running=2)
        tasks = [asyncio.create_task(generator.generate(p, SAMPLED)) for p in prompts_of(4)]
        await ticks(8)
        assert len(generator.core.running) == 2
        tasks[0].cancel()
        tasks[3].cancel()
        await ticks(4)
        assert [r.prompt.tolist() for r in generator.core.running] == prompts_of(4)[1:3]
        results = await asyncio.gather(*tasks, return_exceptions=True)
        return [type(r).__name__ for r in results], results[1:3]

    names, completions = asyncio.run(run())
    assert names == ["CancelledError", "Completion", "Completion", "CancelledError"]
    for prompt, completion in zip(prompts_of(4)[1:3], completions, strict=True):
        assert_same(completion, engine(decoder).generate_all([prompt], [SAMPLED])[0])


@pytest.mark.medium
def test_prompts_of_others_hold_up_neither_the_event_loop_nor_a_running_request(
    decoder, monkeypatch
):
    generator = engine(decoder, prefill_tokens=1)  # each prompt has a forward of its own
    runner = generator.core.runner
    events = []

    def record(name, event):
        call = getattr(runner, name)
        monkeypatch.setattr(runner, name, lambda *args: (events.append(event), call(*args))[1])

    async def run():
        running = asyncio.create_task(generator.generate([1, 2], SAMPLED))
        await ticks(8)
        record("prefill", "P")
        record("begin_decode", "d")
        one_token = replace(SAMPLED, max_new_tokens=1)
        others = [
            asyncio.create_task(generator.generate(prompt, one_token)) for prompt in prompts_of(40)
        ]
        while not all(task.done() for task in others):
            events.append(" ")
            await asyncio.sleep(0)
        return await running

    completion = asyncio.run(run())
    forwards = "".join(events)
    assert forwards.count("P") == 40
    assert "PP" not in forwards
    assert max(map(len, forwards.replace(" ", "").split("d"))) == 8
    assert_same(completion, engine(decoder).generate_all([[1, 2]], [SAMPLED])[0])


@pytest.mark.medium
def test_an_error_in_a_step_reaches_every_caller_and_the_generator_recovers(decoder):
    generator = engine(decoder, max_running=2)
    good = generator.generate_all([[1, 2]], [SAMPLED])[0]
    weight = decoder.norm.weight.detach()
    saved = weight.clone()

    async def run():
        return await asyncio.gather(
            *(generator.generate(p, SAMPLED) for p in prompts_of(4)), return_exceptions=True
        )

    weight.fill_(float("nan"))
    results = asyncio.run(run())
    assert all(
        isinstance(r, ModelError) and "aren't finite (weights version 0)" in str(r) for r in results
    )
    with pytest.raises(ModelError, match="aren't finite"):
        generator.generate_all([[1, 2]], [SAMPLED])
    assert not generator.core.busy
    weight.copy_(saved)
    assert_same(generator.generate_all([[1, 2]], [SAMPLED])[0], good)


@pytest.mark.medium
def test_an_error_in_an_admission_costs_those_that_enter(decoder, monkeypatch):
    """The first runs, two enter when it happens, and the last waits for a slot, then enters too."""
    generator = engine(decoder, max_running=3)
    prefill = generator.core.runner.prefill

    async def run():
        tasks = [asyncio.create_task(generator.generate([1, 2], SAMPLED))]
        await ticks(8)
        assert len(generator.core.running) == 1
        monkeypatch.setattr(generator.core.runner, "prefill", lambda *args: 1 / 0)
        tasks += [asyncio.create_task(generator.generate(p, SAMPLED)) for p in prompts_of(3)]
        await ticks(8)
        assert [task.done() for task in tasks] == [False, True, True, True]
        return await asyncio.gather(*tasks, return_exceptions=True)

    ran, *broken = asyncio.run(run())
    assert [(type(error), type(error.__cause__)) for error in broken] == [
        (RequestFailed, ZeroDivisionError)
    ] * 3
    assert_same(ran, engine(decoder).generate_all([[1, 2]], [SAMPLED])[0])
    assert not generator.core.busy
    # nothing else was computed, so the model may be at fault
    with pytest.raises(ZeroDivisionError):
        generator.generate_all([[1, 2]], [SAMPLED])
    monkeypatch.setattr(generator.core.runner, "prefill", prefill)
    assert_same(generator.generate_all([[1, 2]], [SAMPLED])[0], ran)


def test_an_abort_that_fails_loses_nobody(decoder):
    generator = engine(decoder, max_running=1)

    async def run():
        tasks = [asyncio.create_task(generator.generate(p, SAMPLED)) for p in prompts_of(2)]
        await ticks(8)
        decoder.norm.weight.detach().fill_(float("nan"))
        await ticks(2)
        generator.abort()
        await ticks(3)
        assert all(task.done() for task in tasks)
        return await asyncio.gather(*tasks, return_exceptions=True)

    assert [type(result) for result in asyncio.run(run())] == [ModelError] * 2


@pytest.mark.medium
def test_it_serves_several_event_loops_one_after_the_other(decoder):
    generator = engine(decoder)

    async def leave_early():
        lost = asyncio.create_task(generator.generate([4, 5], SAMPLED))
        await ticks(5)
        assert not lost.done()

    expected = asyncio.run(generator.generate([1, 2], SAMPLED))
    asyncio.run(leave_early())
    assert not generator.core.busy
    assert_same(asyncio.run(generator.generate([1, 2], SAMPLED)), expected)


def test_it_is_a_generator_around_a_policy_too(decoder):
    generator = engine(DecoderPolicy(decoder))
    asyncio.run(check_generator(generator, prompts_of(3)))
    with pytest.raises(ModelError, match="kind to hf"):
        engine(torch.nn.Linear(2, 2))


def test_no_gradient_and_no_inference_tensor_reaches_the_learner(decoder):
    engine(decoder).generate_all([[1, 2]], [SAMPLED])
    hidden = decoder(torch.tensor([1, 2]), torch.arange(2), PackedAttention([2]))
    hidden.sum().backward()
    assert all(
        p.grad is not None for name, p in decoder.named_parameters() if "lm_head" not in name
    )


def test_narrow_weights_run_and_agree_with_their_own_forward(decoder):
    """bfloat16 attention goes through the fused kernel; the head is float32, as the learner
    computes it."""
    decoder = decoder.to(torch.bfloat16)
    (completion,) = engine(decoder).generate_all([[1, 2, 3]], [SAMPLED])
    tokens = [1, 2, 3, *completion.tokens.tolist()]
    with torch.no_grad():
        hidden = decoder(
            torch.tensor(tokens), torch.arange(len(tokens)), PackedAttention([len(tokens)])
        )
        logprobs = (hidden.float() @ decoder.head_weight.float().T).log_softmax(-1)
    expected = logprobs[2:-1].gather(1, torch.tensor(tokens[3:])[:, None])[:, 0]
    assert float(np.abs(completion.logprobs - expected.numpy()).mean()) < 0.15
