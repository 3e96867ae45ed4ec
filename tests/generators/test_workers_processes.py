"""Generators in real processes, which are killed or stopped at any point: of generating, and of a
push by each kind of link."""

import asyncio
import os
import random
import signal

import pytest
from generators.workers_play import PROMPTS, SHAPE, Holder, columns, config, drawn, engine, requests

from ratchet.config.resolve import resolve
from ratchet.data.chat.builtin_tokenizers import character_tokenizer
from ratchet.errors import WorkerDied
from ratchet.executors.config import LocalClusterConfig
from ratchet.executors.local import PRELOAD, LocalExecutor
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.models.model_source import ModelSource
from ratchet.observe.metrics import MetricsManager
from ratchet.testing.conformance import check_generator
from ratchet.training.workers.generators import (
    get_generator_resources,
    make_recovering_weight_sync,
    start_generators,
)
from ratchet.types import Sampling, StopReason
from ratchet.weight_sync.factory import SyncEndpoints

ORIGIN = ModelSource(shape=SHAPE, seed=0)
LINKS = [
    pytest.param({"kind": "shared_memory"}, id="shared_memory"),
    # some wait for the dead to come
    pytest.param({"kind": "collective"}, id="collective", marks=pytest.mark.slow),
    pytest.param({"kind": "files"}, id="files"),
    pytest.param({"kind": "delta", "dtype": None}, id="delta"),
    pytest.param(
        {"kind": "delta", "dtype": None, "through": "shared_memory"}, id="delta-shared_memory"
    ),
]


@pytest.fixture(scope="module")
def executor():
    preload = (*PRELOAD, "ratchet.training.workers.generators", "ratchet.generators.engine.engine")
    made = LocalExecutor(LocalClusterConfig(silence_s=5), threads=2, device="cpu", preload=preload)
    yield made
    made.close()


@pytest.fixture
def start(executor):
    made = []

    def start(workers=2, **keys):
        section = config(workers, **keys)
        router = GeneratorPool(section)
        executor.plan(get_generator_resources(section, on_cpu=True))
        start_generators(router, section, executor, ORIGIN, character_tokenizer("abc"))
        made.append(router)
        return router

    yield start
    for router in made:
        asyncio.run(router.close())


def pid(router, rank):
    return router.queues[rank].process.members[0].pid


def linked(router, learner, recipe, directory):
    between = SyncEndpoints(learner, router, directory=directory)
    return make_recovering_weight_sync(resolve("weight_sync", recipe), between, MetricsManager())


@pytest.mark.slow
def test_it_is_the_generator_that_the_driver_would_have(start):
    router = start(2)
    assert router.hosts == {os.uname().nodename}
    assert columns(drawn(router, requests(40))) == columns(drawn(engine(), requests(40)))
    asyncio.run(check_generator(router, PROMPTS))
    shown = {shard.name: shard.tensor for shard in router.weights()}
    assert all(shown[shard.name].equal(shard.tensor) for shard in engine().weights())
    found = drawn(
        router,
        [([1], Sampling(max_new_tokens=150, stop=("a", "b", "c"), seed=seed)) for seed in range(8)],
    )
    assert StopReason.STOP_STRING in {one.stop for one in found}  # the tokenizer went along


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.fault("P5")
def test_a_death_ends_it_with_its_name(start, how):
    router = start(2)

    async def play():
        asked = [
            asyncio.ensure_future(router.generate(*request)) for request in requests(200, new=150)
        ]
        await asyncio.sleep(random.Random(how).random() * 0.2)
        os.kill(pid(router, 1), how)
        await asyncio.gather(*asked)

    with pytest.raises(WorkerDied, match="generator rank 1 of 2 on") as caught:
        asyncio.run(play())
    assert (caught.value.role, caught.value.rank, caught.value.host) == (
        "generator",
        1,
        os.uname().nodename,
    )
    with pytest.raises(WorkerDied, match="generator rank 1 of 2 on"):
        drawn(router, requests(1))


@pytest.mark.parametrize(
    ("how", "workers", "seed"),
    [(9, 2, 0), (9, 1, 1), (9, 2, 2), (signal.SIGSTOP, 2, 3)],
)
@pytest.mark.slow
@pytest.mark.fault("P5", "M8")
def test_a_replacement_goes_on_where_the_dead_one_was(start, tmp_path, how, workers, seed):
    """With the weights of the last push, and nothing answered twice or not at all."""
    router = start(workers, recovery="restart")
    rng, wanted = random.Random(seed), engine(5)
    asyncio.run(wanted.commit(2))

    async def play():
        link = linked(router, Holder(5), {}, tmp_path)
        await link.push(2)
        asked = [
            asyncio.ensure_future(router.generate(*request)) for request in requests(60, new=150)
        ]
        await asyncio.sleep(rng.random() * 0.2)
        os.kill(pid(router, rng.randrange(workers)), how)
        found = await asyncio.gather(*asked)
        await link.push(3)
        await link.close()
        return found

    assert columns(asyncio.run(play())) == columns(drawn(wanted, requests(60, new=150)))
    assert router.n_restarts == 1


@pytest.mark.slow
@pytest.mark.parametrize("recipe", LINKS)
@pytest.mark.fault("P20")
def test_deaths_around_pushes(start, tmp_path, recipe):
    """Before, in and after one: each ends with the weights on every worker."""
    router = start(2, recovery="restart", max_restarts=9)
    rng = random.Random(str(recipe))

    async def play():
        version = 0
        for seed, delay in enumerate([0.0, 0.001, 0.003, None]):
            learner = Holder(seed + 1)
            link = linked(router, learner, recipe, tmp_path)
            for _ in range(2):
                version += 1
                pushing = asyncio.ensure_future(link.push(version))
                if delay is not None:
                    await asyncio.sleep(delay)
                    os.kill(pid(router, rng.randrange(2)), signal.SIGKILL)
                await pushing
                wanted = engine(seed + 1)
                await wanted.commit(version)
                asked = requests(8)
                found = await asyncio.gather(*(router.generate(*request) for request in asked))
                assert columns(found) == columns(
                    [await wanted.generate(*request) for request in asked]
                )
                assert await link.audit() == []
                delay = None
            await link.close()

    asyncio.run(play())
    assert router.n_restarts == 3
