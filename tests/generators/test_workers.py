"""A router is one generator, however many workers it has and whatever becomes of them."""

import asyncio
import random

import numpy as np
import pytest
from generators.workers_play import (
    PROMPTS,
    Holder,
    columns,
    config,
    drawn,
    engine,
    requests,
    router_here,
)
from pydantic import ValidationError

from ratchet.config.resolve import import_object, resolve
from ratchet.config.sections import ModelSizes
from ratchet.errors import (
    DataError,
    NoRoomError,
    RatchetError,
    WeightSyncError,
    WorkerDied,
    WorkerError,
    WorkerRaised,
)
from ratchet.experience.rollout.remote_manager import RemoteRolloutManager
from ratchet.generators.config import EngineConfig
from ratchet.generators.workers.batch_protocol import CompletionBatch
from ratchet.generators.workers.pool import MAX_SAME_PROMPT, GeneratorPool
from ratchet.protocols import Generator
from ratchet.testing.conformance import check_generator
from ratchet.training.workers.generators import RecoveringWeightSync, get_worker_factory
from ratchet.types import Completion, Message, Sampling, StopReason, Task
from ratchet.weight_sync.endpoints import LocalRank, WeightSender
from ratchet.weight_sync.shared_memory import SharedMemoryWeightSync

LONG = Sampling(max_new_tokens=150, seed=1)
TASK = Task("task", (Message("user", "1"),))


def test_it_is_a_generator():
    router, _ = router_here()
    assert isinstance(router, Generator)
    assert router.can_offload
    asyncio.run(check_generator(router, PROMPTS))


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_who_draws_a_completion_does_not_matter(workers):
    router, _ = router_here(workers)
    assert columns(drawn(router, requests(40))) == columns(drawn(engine(), requests(40)))


def test_equal_prompts_go_together_and_others_where_least_is_to_do():
    router, workers = router_here(2)
    drawn(
        router,
        [(prompt, Sampling(max_new_tokens=4, seed=i)) for prompt in PROMPTS for i in range(5)],
    )
    asked = [[tokens for new in worker.asked for tokens in new] for worker in workers]
    assert sorted(asked[0] + asked[1]) == sorted(prompt for prompt in PROMPTS for _ in range(5))
    assert not any(prompt in asked[1] for prompt in asked[0])
    assert [len(own) for own in asked] == [10, 10]
    drawn(router, [([1], Sampling(max_new_tokens=2, seed=i)) for i in range(MAX_SAME_PROMPT + 6)])
    assert [sum(new.count([1]) for new in worker.asked) for worker in workers] in (
        [MAX_SAME_PROMPT, 6],
        [6, MAX_SAME_PROMPT],
    )


@pytest.mark.medium
def test_a_wrong_prompt_costs_nobody_else():
    router, workers = router_here(1, recovery="restart")

    async def play():
        found = await asyncio.gather(
            router.generate([], LONG),
            router.generate([99], LONG),
            router.generate([1], LONG),
            return_exceptions=True,
        )
        assert [type(one) for one in found[:2]] == [DataError, DataError]
        assert len(found[2].tokens) == 150

    asyncio.run(play())
    assert len(workers) == 1


# --- control


def test_abort_ends_what_runs_and_what_waits_with_what_it_has():
    router, workers = router_here(2)

    async def play():
        running = [asyncio.ensure_future(router.generate([i + 1], LONG)) for i in range(4)]
        while not all(worker.component._running for worker in workers):
            await asyncio.sleep(0)
        waiting = asyncio.ensure_future(router.generate([9], LONG))
        await asyncio.sleep(0)
        router.abort()
        after = asyncio.ensure_future(router.generate([1], Sampling(max_new_tokens=3)))
        found = await asyncio.gather(*running, waiting)
        assert {one.stop for one in found} == {StopReason.ABORTED}
        assert not len(found[-1].tokens)
        assert all(len(one.tokens) < 150 for one in found)
        assert (await after).stop is StopReason.LENGTH

    asyncio.run(play())


@pytest.mark.medium
def test_a_cancelled_request_leaves_its_worker():
    router, (worker,) = router_here(1)

    async def play():
        running = [asyncio.ensure_future(router.generate([i + 1], LONG)) for i in range(3)]
        while not worker.component._running:
            await asyncio.sleep(0)
        running[0].cancel()
        found = await asyncio.gather(*running, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert [len(one.tokens) for one in found[1:]] == [150, 150]

    asyncio.run(play())
    assert not worker.component._running
    assert not worker.component.generator.core.busy
    assert router.queues[0].load == 0
    assert not router.queues[0].request_count_by_prompt


@pytest.mark.medium
def test_pause_holds_all_of_them():
    router, _ = router_here(2)

    async def play():
        await router.pause()
        running = [asyncio.ensure_future(router.generate([i + 1], LONG)) for i in range(4)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in running)
        await router.resume()
        await asyncio.gather(*running)

    asyncio.run(play())


# --- deaths


@pytest.mark.medium
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.fault("P1", "R11")
def test_deaths_lose_no_request_and_answer_none_twice(seed):
    """Each answer is the one that was asked for: a future that is set twice raises."""
    rng = random.Random(seed)
    exchanges = [rng.randrange(4) for _ in range(4)]
    router, workers = router_here(
        rng.choice([1, 2, 3]), exchanges=exchanges, recovery="restart", max_restarts=4
    )
    assert columns(drawn(router, requests(30))) == columns(drawn(engine(), requests(30)))
    asyncio.run(router.close())
    assert router.n_restarts == sum(worker.died for worker in workers)
    assert all(worker.closed for worker in workers)


def test_a_lost_worker_that_nobody_replaced_is_closed_with_the_others():
    """The last request may be answered by another worker before the recovery has begun."""
    router, workers = router_here(2, recovery="restart", max_restarts=1)
    router.mark_lost(router.queues[0], workers[0], workers[0].death())
    asyncio.run(router.close())
    assert [worker.closed for worker in workers] == [True, True]


def test_the_first_death_ends_it_without_recovery():
    router, workers = router_here(2, exchanges=(1,))
    with pytest.raises(WorkerDied, match="generator rank 0 died"):
        drawn(router, [([1], LONG), ([2], LONG)])
    with pytest.raises(WorkerDied, match="generator rank 0 died"):
        drawn(router, requests(1))
    assert len(workers) == 2


@pytest.mark.parametrize(
    "error", [DataError("its tokens can't be read"), asyncio.CancelledError()], ids=repr
)
def test_workers_that_play_are_given_up_together(error):
    """One raises, or nobody waits any more, while the other is busy for ever: what it is asked next
    is refused at once."""
    router, workers = router_here(2)
    busy = asyncio.Event()

    async def raises(*share):
        await busy.wait()
        raise error

    async def never_ends(*share):
        busy.set()
        await asyncio.Event().wait()

    async def play():
        for worker, plays in zip(workers, (raises, never_ends), strict=True):
            worker.component.begin, worker.component.play = no_answer, plays
        elsewhere = RemoteRolloutManager(router, ())
        with pytest.raises(type(error)):
            await elsewhere.groups([("a", TASK), ("b", TASK)], Sampling(), attempts=1)
        assert elsewhere.n_playing == 0
        for queue in router.queues:
            with pytest.raises(RatchetError):
                await router.call_worker(queue, "host")
        await elsewhere.close()

    async def no_answer():
        """The stage begins."""

    asyncio.run(play())


@pytest.mark.fault("P16")
def test_so_many_restarts_and_no_more(caplog):
    router, workers = router_here(1, exchanges=(0,) * 9, recovery="restart", max_restarts=2)
    told = []
    router.on_restart = lambda: told.append(router.n_restarts)
    with pytest.raises(WorkerDied):
        drawn(router, requests(3))
    assert (len(workers), told) == (3, [1, 2])
    assert (
        "generator restart 2 of at most 2, 3 requests are drawn again: generator rank 0 died"
        in caplog.text
    )


def test_what_was_aborted_before_a_death_is_not_drawn_again():
    router, (worker,) = router_here(1, recovery="restart")

    async def play():
        running = asyncio.ensure_future(router.generate([1], LONG))
        while not worker.component._running:
            await asyncio.sleep(0)
        worker.left = 0
        router.abort()
        assert (await running).stop is StopReason.ABORTED

    asyncio.run(play())


def test_a_generator_that_breaks_is_a_worker_that_died():
    router, (worker, *_) = router_here(1, recovery="restart")

    def broken():
        raise RuntimeError("out of memory")

    worker.component.generator.core.step = broken
    assert columns(drawn(router, requests(5))) == columns(drawn(engine(), requests(5)))
    assert router.n_restarts == 1
    router, (worker,) = router_here(1)
    worker.component.generator.core.step = broken
    with pytest.raises(WorkerRaised, match="RuntimeError: out of memory"):
        drawn(router, requests(5))


# --- weights


def linked(router, learner):
    """A link to all workers, and the way to bring up those that come later."""
    outlet = LocalRank(WeightSender(learner))

    async def push_to_some(receivers, version):
        link = SharedMemoryWeightSync(outlet, receivers)
        await link.push(version)
        await link.close()

    router.push_to_some = push_to_some
    return RecoveringWeightSync(SharedMemoryWeightSync(outlet, router.receivers), router)


def test_pushes_reach_every_worker_and_can_be_audited():
    router, workers = router_here(3)
    learner = Holder(5)

    async def play():
        link = linked(router, learner)
        await link.push(4)
        assert await link.audit() == []
        for tensor in workers[1].component.generator.weights():
            tensor.tensor.add_(1)
            break
        assert len(await link.audit()) == 1
        await link.close()

    asyncio.run(play())
    assert router.version == 4
    assert [worker.component.generator.version for worker in workers] == [4, 4, 4]


@pytest.mark.medium
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.fault("M8")
def test_a_replacement_serves_with_the_pushed_weights_alone(workers):
    router, started = router_here(workers, recovery="restart")
    learner = Holder(5)
    wanted = engine(5)
    asyncio.run(wanted.commit(7))

    async def play():
        link = linked(router, learner)
        await link.push(7)
        started[0].left = 1  # dies after the next exchange, if that does not end all
        found = await asyncio.gather(
            *(router.generate(*request) for request in requests(20, new=100))
        )
        await link.push(8)
        await link.close()
        return found

    found = asyncio.run(play())
    assert router.n_restarts == 1
    assert columns(found) == columns(drawn(wanted, requests(20, new=100)))
    assert all(own.component.generator.version == 8 for own in started if own.left is None)


@pytest.mark.medium
def test_a_worker_that_finds_no_room_is_absent_until_a_weight_sync_finds_some(caplog):
    """The others draw the same tokens; the run ends only when nobody is left."""
    router, started = router_here(2, recovery="restart", max_restarts=3)
    learner, wanted, start_again = Holder(5), engine(5), router._start_worker
    asyncio.run(wanted.commit(4))

    def no_room(rank):
        raise NoRoomError(f"no other node has room for rank {rank}")

    async def play():
        link = linked(router, learner)
        await link.push(3)
        router._start_worker = no_room
        started[1].left = 0
        await asyncio.gather(*(router.generate(*request) for request in requests(12)))
        for version in (3, 4):
            await link.push(version)
            assert await link.audit() is None
        found = await asyncio.gather(*(router.generate(*request) for request in requests(12)))
        router._start_worker = start_again
        await link.push(5)
        assert await link.audit() == []
        await link.close()
        return found

    assert columns(asyncio.run(play())) == columns(drawn(wanted, requests(12)))
    assert [queue.is_current for queue in router.queues] == [True, True]
    assert [worker.component.generator.version for worker in (started[0], started[2])] == [5, 5]
    assert router.n_restarts == 1
    assert caplog.text.count("goes on with 1 of 2 workers") == 1
    router._start_worker = no_room
    started[0].left = started[2].left = 0
    with pytest.raises(WorkerError, match="no other node has room for rank"):
        drawn(router, requests(12))


@pytest.mark.parametrize("method", ["prepare", "verify_and_stage", "commit"])
@pytest.mark.fault("P20")
def test_a_death_in_a_push(method):
    """It begins again with the replacement; without recovery the run ends with the death itself."""
    learner, wanted = Holder(5), engine(5)
    asyncio.run(wanted.commit(3))

    def dies_in(worker):
        link = worker.component.call_receiver

        async def dying(place, name, *arguments):
            if name == method:
                raise worker.death()
            return await link(place, name, *arguments)

        worker.component.call_receiver = dying

    router, started = router_here(2, recovery="restart")
    dies_in(started[1])
    asyncio.run(linked(router, learner).push(3))
    assert (router.n_restarts, len(started), router.version) == (1, 3, 3)
    assert columns(drawn(router, requests(12))) == columns(drawn(wanted, requests(12)))
    router, started = router_here(2)
    dies_in(started[1])
    with pytest.raises(WorkerDied, match="generator rank 1 died"):
        asyncio.run(linked(router, learner).push(3))


def test_a_learner_that_breaks_a_push_is_not_the_workers_fault():
    router, _ = router_here(2, recovery="restart")

    class Broken:
        def weights(self):
            raise RuntimeError("no weights")

    with pytest.raises(WeightSyncError, match="no weights"):
        asyncio.run(linked(router, Broken()).push(3))
    assert router.n_restarts == 0


def test_weights_that_nobody_can_push_again_end_it():
    router, started = router_here(1, recovery="restart")

    async def play():
        await router.commit(2)
        started[0].left = 0
        await router.generate([1], LONG)

    with pytest.raises(WeightSyncError, match="version 2 can"):
        asyncio.run(play())


# --- its section


def test_the_section():
    made = resolve(
        "generator",
        {
            "kind": "workers",
            "worker": {
                "kind": "vllm",
                "tensor_parallel": 2,
                "arguments": {"spec_method": "ngram"},
            },
            "workers": 3,
        },
    )
    assert (made.accelerators, made.reports_kept_mass, made.workers) == (2, False, 3)
    sizes = ModelSizes(n_heads=3, n_kv_heads=1, head_dim=64, n_layers=1, n_experts=0)
    assert made.explain_misfit(sizes, on_cpu=True).startswith("tensor_parallel=2")
    assert config().reports_kept_mass
    assert config().explain_misfit(sizes, on_cpu=True) is None
    assert isinstance(made.worker, type(resolve("generator", {"kind": "vllm"})))
    assert GeneratorPool(made, None, None).max_restarts == 0
    assert GeneratorPool(config(recovery="restart", max_restarts=5)).max_restarts == 5
    assert (
        EngineConfig()
        == resolve("generator", {"kind": "workers", "worker": {"kind": "engine"}}).worker
    )


@pytest.mark.parametrize("worker_runs", ["completions", "groups"])
def test_the_rank_factory_exists(worker_runs):
    assert callable(import_object(get_worker_factory(config(worker_runs=worker_runs))))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"worker": {"kind": "workers", "worker": {"kind": "engine"}}}, "'workers' is unknown"),
        ({"worker": {"kind": "engine"}, "workers": 0}, "greater than or equal to 1"),
        ({"worker": {"kind": "engine"}, "max_restarts": 2}, "set recovery=restart, or remove"),
    ],
)
def test_nonsense_is_refused(keys, said):
    with pytest.raises(ValidationError, match=said):
        resolve("generator", {"kind": "workers", **keys})


def test_routes_travel_with_their_completions():
    routes = np.arange(12, dtype=np.int16).reshape(3, 2, 2)
    none = np.zeros(2, dtype=np.float32)
    made = [
        Completion(np.arange(2), none, none, np.ones(2, np.int32), StopReason.LENGTH, own)
        for own in (routes, None)
    ]
    found = dict(CompletionBatch.from_completions(dict(enumerate(made)), {}).unpack())
    assert np.array_equal(found[0].routes, routes)
    assert found[1].routes is None
