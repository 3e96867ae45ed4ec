"""Routers over workers in this process, which die when a test says so, and over real processes."""

import asyncio

from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.errors import WorkerDied
from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.generators.workers.config import GeneratorWorkersConfig
from ratchet.generators.workers.pool import GeneratorPool
from ratchet.generators.workers.worker import GeneratorRank
from ratchet.models.load import init_policy
from ratchet.types import Sampling
from ratchet.weight_sync.endpoints import WeightReceiver

SHAPE = DecoderConfig(67, 32, 1, 2, 2, 16, 48, max_positions=160, init_std=0.2)
ENGINE = EngineConfig(kv_cache_gib=0.01)
PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


def engine(seed=0):
    return EmbeddedEngine(ENGINE, init_policy(SHAPE, seed=seed))


def config(workers=2, **keys):
    return GeneratorWorkersConfig(worker=ENGINE, workers=workers, **keys)


def requests(count, *, new=20):
    """Each with a seed of its own; some prompts come several times."""
    return [
        (PROMPTS[i % len(PROMPTS)], Sampling(max_new_tokens=1 + (7 * i) % new, seed=i))
        for i in range(count)
    ]


def drawn(generator, asked):
    async def all_of():
        return await asyncio.gather(*(generator.generate(*request) for request in asked))

    return asyncio.run(all_of())


def columns(completions):
    return [
        (c.tokens.tolist(), c.logprobs.tolist(), c.versions.tolist(), c.stop) for c in completions
    ]


class Holder:
    """A learner of fixed weights."""

    def __init__(self, seed):
        self.generator = engine(seed)

    def weights(self):
        return self.generator.weights()


class Here:
    """Implements what a router calls of `RewardWorkers`, in this process. exchanges: after so many
    it is dead; None: it lives.

    asked: the prompts of each exchange.
    """

    def __init__(self, rank, *, exchanges=None, generator=None):
        self.rank, self.left, self.asked, self.died, self.closed = rank, exchanges, [], False, False
        self.component = GeneratorRank(generator or engine(), WeightReceiver)

    def within(self, timeout_s):
        return self

    async def call(self, method, /, *arguments):
        if method == "exchange":
            self.asked.append([tokens.tolist() for _, tokens, *_ in arguments[0].unpack()])
            if self.left == 0:
                await asyncio.sleep(0)
                raise self.death()
            if self.left is not None:
                self.left -= 1
        elif self.left == 0:
            raise self.death()
        found = getattr(self.component, method)(*arguments)
        return [await found if asyncio.iscoroutine(found) else found]

    def call_now(self, method):
        return [getattr(self.component, method)()]

    def death(self):
        self.died = True
        return WorkerDied(
            f"generator rank {self.rank} died", role="generator", rank=self.rank, host="here"
        )

    def close(self):
        self.closed = True


def router_here(workers=2, *, exchanges=(), **keys):
    """exchanges: after how many each worker dies, in the order in which they start. Gives the
    workers too."""
    made = GeneratorPool(config(workers, **keys))
    lives = [*exchanges, *[None] * 9]
    started = [Here(rank, exchanges=lives.pop(0)) for rank in range(workers)]
    made.start(lambda rank: started[rank])

    def again(rank):
        started.append(Here(rank, exchanges=lives.pop(0)))
        return started[-1]

    made._start_worker = again
    return made, started
