"""Several schedulers in threads give what one gives, and lose nobody."""

import asyncio
from dataclasses import replace

import pytest
from generators.engine.test_engine import SAMPLED, assert_same, engine, mixed_samplings, prompts_of, ticks

from ratchet.errors import ConfigError, ModelError
from ratchet.generators.engine.team import SLACK, STRIDE
from ratchet.testing.conformance import check_generator
from ratchet.types import StopReason


@pytest.mark.parametrize("workers", [2, 3])
def test_a_request_gives_the_same_whoever_has_it(decoder, workers):
    prompts, samplings = prompts_of(40), mixed_samplings(40)
    expected = engine(decoder).generate_all(prompts, samplings)
    team = engine(decoder, workers=workers, max_running=16)
    for a, b in zip(team.generate_all(prompts, samplings), expected, strict=True):
        assert_same(a, b)
    assert team.core.decoded_tokens == sum(len(completion.tokens) - 1 for completion in expected if len(completion.tokens))
    assert not team.core.busy


def test_it_is_a_generator(decoder):
    asyncio.run(check_generator(engine(decoder, workers=2), prompts_of(3)))


def test_equal_prompts_stay_together_until_the_others_have_too_little_to_do(decoder):
    generator = engine(decoder, workers=2)

    def loads():
        return [len(scheduler.waiting) for scheduler in generator.core.schedulers]

    def ask(prompt, times):
        for _ in range(times):
            generator.core.add(generator._request(prompt, SAMPLED, lambda _: None, lambda _: None))

    ask([1, 2], 10)
    assert loads() == [10, 0]
    ask([3], 10)
    assert loads() == [10, 10]
    ask([4], SLACK + 4)
    assert sum(loads()) == 24 + SLACK
    assert abs(loads()[0] - loads()[1]) <= SLACK
    assert generator.core.busy


def test_abort_returns_what_there_is(decoder):
    async def run():
        generator = engine(decoder, max_running=2, workers=2)
        tasks = [asyncio.create_task(generator.generate(p, SAMPLED)) for p in prompts_of(4)]
        await ticks(4)
        generator.abort()
        return generator, await asyncio.gather(*tasks)

    generator, completions = asyncio.run(run())
    assert {completion.stop for completion in completions} == {StopReason.ABORTED}
    assert sorted(len(completion.tokens) > 0 for completion in completions) == [False, False, True, True]
    assert not generator.core.busy


def test_a_cancelled_caller_is_forgotten_and_the_others_are_served(decoder):
    async def run():
        generator = engine(decoder, max_running=2, workers=2)
        tasks = [asyncio.create_task(generator.generate(p, SAMPLED)) for p in prompts_of(4)]
        await ticks(4)
        tasks[0].cancel()
        tasks[3].cancel()
        return await asyncio.gather(*tasks, return_exceptions=True)

    results = asyncio.run(run())
    assert [type(r).__name__ for r in results] == ["CancelledError", "Completion", "Completion", "CancelledError"]
    for prompt, completion in zip(prompts_of(4)[1:3], results[1:3], strict=True):
        assert_same(completion, engine(decoder).generate_all([prompt], [SAMPLED])[0])


def test_who_ended_before_another_scheduler_broke_has_its_result(decoder, monkeypatch):
    generator = engine(decoder, workers=2)
    first, second = generator.core.schedulers

    def broken():
        raise ModelError("broken")

    monkeypatch.setattr(second, "step", broken)
    short, long = replace(SAMPLED, max_new_tokens=STRIDE), replace(SAMPLED, max_new_tokens=30)

    async def run():
        asked = [generator.generate([1, 2], short), generator.generate([3], long)]
        return await asyncio.gather(*asked, return_exceptions=True)

    done, failed = asyncio.run(run())
    assert_same(done, engine(decoder).generate_all([[1, 2]], [short])[0])
    assert isinstance(failed, ModelError)
    assert not generator.core.busy
    assert not first.busy
    assert not second.busy


def test_each_has_its_part_of_the_memory(decoder):
    per_token = 2 * 2 * 2 * 32 * 4  # k and v, layers, KV heads, head_dim, float32
    gib = 2 * 16 * 64 * per_token / 2**30
    assert engine(decoder, row_multiple=16, kv_cache_gib=gib).core.longest == 128
    with pytest.raises(ConfigError, match="holds 64"):
        engine(decoder, row_multiple=16, kv_cache_gib=gib, workers=2).generate_all(
            [[1]], [replace(SAMPLED, max_new_tokens=100)]
        )
