"""Completions that are interrupted and go on; and what their attempts make of them."""

import asyncio

import numpy as np
import pytest

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.experience.async_rollouts.resumable_generator import (
    CURRENT_GROUP,
    ResumableGenerator,
    join_completions,
)
from ratchet.experience.async_rollouts.staleness_scheduler import ScheduledGroup
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.load import init_policy
from ratchet.types import Completion, Sampling, StopReason, Task

SHAPE = DecoderConfig(
    vocab_size=31,
    hidden_size=32,
    n_layers=2,
    n_heads=2,
    n_kv_heads=1,
    head_dim=16,
    intermediate_size=48,
)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def engine():
    return EmbeddedEngine(EngineConfig(), init_policy(SHAPE, seed=0))


def sampling(i):
    return Sampling(seed=i, max_new_tokens=20, top_p=0.9 if i == 1 else 1.0)


async def in_issue(issue, coroutine):
    CURRENT_GROUP.set(issue)
    return await coroutine


@pytest.mark.medium
@pytest.mark.parametrize("after", [0, 1, 7, 18])
def test_an_interrupted_completion_ends_as_if_it_had_not_been(after):
    """After so many steps of the engine; a request whose journal comes from elsewhere does the
    same."""

    async def run(journals, after):
        inner = engine()
        generator = ResumableGenerator(inner)
        issues = [
            ScheduledGroup(i, 0, f"g/{i}", Task("t", ()), journal=journal)
            for i, journal in enumerate(journals)
        ]
        asked = [
            asyncio.create_task(in_issue(issue, generator.generate(PROMPTS[i], sampling(i))))
            for i, issue in enumerate(issues)
        ]
        steps = 0
        step = inner.core.step

        def counted():
            nonlocal steps
            steps += 1
            step()

        inner.core.step = counted
        while steps < after:
            await asyncio.sleep(0)
        await generator.interrupt_requests(lambda: len(PROMPTS))
        kept = [dict(issue.journal) for issue in issues]
        generator.resume_requests()
        return kept, await asyncio.gather(*asked)

    whole = engine().generate_all(PROMPTS, [sampling(i) for i in range(3)])
    kept, found = asyncio.run(run([{}, {}, {}], after))
    assert (
        all(0 < len(journal[i].tokens) < 20 for i, journal in enumerate(kept))
        if after
        else kept == [{}, {}, {}]
    )
    _, resumed = asyncio.run(run(kept, 0))
    for own in (found, resumed):
        for a, b in zip(whole, own, strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
            assert a.stop == b.stop
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)
            np.testing.assert_allclose(a.log_kept_mass, b.log_kept_mass, atol=1e-5)


def test_tokens_keep_the_version_that_drew_them():
    async def run():
        inner = engine()
        generator = ResumableGenerator(inner)
        issue = ScheduledGroup(0, 0, "g/0", Task("t", ()))
        asked = asyncio.create_task(in_issue(issue, generator.generate([1, 2], sampling(0))))
        for _ in range(6):
            await asyncio.sleep(0)
        await generator.interrupt_requests(lambda: 1)
        first = len(issue.journal[0].tokens)
        await inner.commit(5)
        generator.resume_requests()
        return first, await asked

    first, found = asyncio.run(run())
    assert 0 < first < 20
    assert found.versions.tolist() == [0] * first + [5] * (20 - first)


def test_an_abort_by_somebody_else_ends_the_request():
    async def run():
        inner = engine()
        generator = ResumableGenerator(inner)
        asked = asyncio.create_task(
            in_issue(
                ScheduledGroup(0, 0, "g/0", Task("t", ())), generator.generate([1], sampling(0))
            )
        )
        for _ in range(6):
            await asyncio.sleep(0)
        generator.abort()
        return await asked

    assert asyncio.run(run()).stop is StopReason.ABORTED


def test_requests_of_no_group_are_interrupted_too():
    """Those of an agent, or of an environment that can't be played again: two may have one seed."""

    async def run():
        inner = engine()
        generator = ResumableGenerator(inner)
        asked = [
            asyncio.create_task(generator.generate(prompt, sampling(0))) for prompt in PROMPTS[:2]
        ]
        for _ in range(6):
            await asyncio.sleep(0)
        await generator.interrupt_running()
        assert not inner.core.busy
        late = asyncio.create_task(generator.generate(PROMPTS[2], sampling(0)))
        generator.resume_requests()
        await generator.interrupt_running()  # before those that were resumed have gone on
        for _ in range(50):
            await asyncio.sleep(0)
        assert not inner.core.busy
        assert not any(task.done() for task in (*asked, late))
        await inner.commit(5)
        generator.resume_requests()
        return await asyncio.gather(*asked, late)

    found = asyncio.run(run())
    whole = engine().generate_all(PROMPTS, [sampling(0)] * 3)
    assert [a.tokens.tolist() for a in found] == [a.tokens.tolist() for a in whole]
    assert set(found[0].versions) == set(found[1].versions) == {0, 5}
    assert set(found[2].versions) == {5}


def test_routes_are_those_of_the_first_forward():
    def piece(tokens, routes):
        n = len(tokens)
        zeros = np.zeros(n, np.float32)
        shape = np.asarray(routes, np.int16)[:, None, None]
        return Completion(
            np.asarray(tokens), zeros, zeros, np.zeros(n, np.int32), StopReason.LENGTH, shape
        )

    whole = join_completions(piece([5, 6], [1, 2, 3, -1]), piece([7], [9, 9, 9, 4, -1]))
    assert whole.tokens.tolist() == [5, 6, 7]
    assert whole.routes[:, 0, 0].tolist() == [1, 2, 3, 4, -1]
