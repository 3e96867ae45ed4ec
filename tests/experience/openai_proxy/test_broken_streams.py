"""500 clients at once break off while they are answered, on our engine: nothing of them stays."""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import httpx
import pytest
from experience.openai_proxy.dialects import HI, raw_client
from experience.openai_proxy.talk import TEMPLATE
from support.rotation import todays

from ratchet.config.model_shape.presets import get_preset
from ratchet.data.chat.builtin_tokenizers import byte_tokenizer
from ratchet.experience.openai_proxy.session import AgentSession
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.models.load import init_policy
from ratchet.training.stage import Policy

pytestmark = [pytest.mark.needs("fastapi"), pytest.mark.needs("openai"), pytest.mark.slow]

COMPLETIONS = "/v1/completions"  # it answers once all is sampled: these clients leave before
BODIES: dict[str, dict[str, Any]] = {
    **{path: {**body, "stream": True} for path, body in HI.items()},
    "/v1/messages": {**HI["/v1/messages"], "max_tokens": 999, "stream": True},
    COMPLETIONS: {"prompt": "hi", "max_tokens": 999},
}
LIMITS = {"/v1/responses": "max_output_tokens"}
CLIENTS = 500
# A request that is kept takes more; cancelled timers and the like vary by a third of it.
MAX_BYTES_PER_CLIENT = 1024
SERVER_PACKAGES = ("ratchet", "fastapi", "starlette", "uvicorn")


class Footprint(NamedTuple):
    """Counts of what the server, the engine and the attempt hold."""

    running: int
    waiting: int
    requests: int
    answers: int
    tasks: int
    descriptors: int


@pytest.fixture(scope="module")
def policy() -> Policy:
    tokenizer = byte_tokenizer()
    sizes = {"n_layers": 1, "hidden_size": 32, "max_positions": 1024}
    shape = get_preset("tiny", vocab_size=tokenizer.vocab_size, **sizes)
    return Policy.create(init_policy(shape, seed=0), tokenizer, template=TEMPLATE)


@pytest.fixture(autouse=True)
def traced_memory() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def measure(engine: EmbeddedEngine, session: AgentSession) -> Footprint:
    return Footprint(
        len(engine.core.running),
        len(engine.core.waiting),
        len(session._running),
        len(session.strands),
        len(asyncio.all_tasks()),
        len(os.listdir("/proc/self/fd")),
    )


def measure_memory() -> tuple[int, int]:
    """Return (live objects of the server's classes, bytes in use) after a garbage collection."""
    gc.collect()
    packages = [str(type(item).__module__).partition(".")[0] for item in gc.get_objects()]
    n_objects = sum(package in SERVER_PACKAGES for package in packages)
    return n_objects, tracemalloc.get_traced_memory()[0]


async def break_off(raw: httpx.AsyncClient, path: str, is_sampling: asyncio.Event) -> None:
    """Ask, and leave once the engine samples."""
    if path == COMPLETIONS:
        asking = asyncio.ensure_future(raw.post(path, json=BODIES[path]))
        await is_sampling.wait()
        asking.cancel()
        await asyncio.wait({asking})
        return
    async with raw.stream("POST", path, json=BODIES[path]) as answer:
        async for _ in answer.aiter_lines():
            await is_sampling.wait()
            return


@pytest.mark.fault("S15")
@pytest.mark.parametrize("path", todays([*BODIES], 2))
def test_500_clients_that_break_off_leave_nothing(policy: Policy, path: str) -> None:
    engine = policy.generator
    assert isinstance(engine, EmbeddedEngine)

    async def play_round(session: AgentSession, raw: httpx.AsyncClient) -> tuple[int, int]:
        """Return the memory in use once nothing of the clients is left."""
        before = measure(engine, session)
        is_sampling = asyncio.Event()
        limits = httpx.Limits(max_connections=None)
        async with (
            httpx.AsyncClient(
                base_url=raw.base_url, headers=raw.headers, timeout=60, limits=limits
            ) as crowd,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(CLIENTS):
                group.create_task(break_off(crowd, path, is_sampling))
            # Some are in the engine, the others on their way to it.
            while len(engine.core.running) + len(engine.core.waiting) < CLIENTS // 10:
                await asyncio.sleep(0.001)
            is_sampling.set()
        # It may be less: the server closes the idle connection of `raw`.
        while any(map(operator.gt, measure(engine, session), before)):
            await asyncio.sleep(0.001)
        return measure_memory()

    async def scene() -> list[tuple[int, int]]:
        options = {"max_context": 1024, "max_new_tokens": 999, "max_turns": 10**6}
        async with raw_client(engine, renderer=policy.renderer, **options) as (session, raw):
            # No token ends an answer: it would go on to the end of the context.
            session.sampling = replace(session.sampling, stop_ids=())
            body = {**BODIES[path], "stream": False, LIMITS.get(path, "max_tokens"): 4}
            assert (await raw.post(path, json=body)).status_code == 200  # starts the engine
            memory = [await play_round(session, raw) for _ in range(2)]
            assert (await raw.post(path, json=body)).status_code == 200
            return memory

    (objects, memory), (later_objects, later_memory) = asyncio.run(asyncio.wait_for(scene(), 120))
    assert later_objects <= objects
    assert later_memory - memory < CLIENTS * MAX_BYTES_PER_CLIENT
