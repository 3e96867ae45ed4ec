"""What lives in the processes of these tests, and what they are compared with."""

import os
import signal

import torch
from learners.spread_cases import SHAPE, made

from ratchet.generators.config import EngineConfig
from ratchet.generators.engine.engine import EmbeddedEngine
from ratchet.learners.config import DTensorConfig
from ratchet.learners.distributed.mesh import Mesh
from ratchet.learners.distributed.topology import Topology
from ratchet.models.load import init_policy
from ratchet.protocols import Shard
from ratchet.weight_sync.endpoints import WeightReceiver

ENGINE = EngineConfig(kv_cache_gib=0.01, row_multiple=1)


class SpreadRank:
    """A rank of a learner that is spread over gloo ranks."""

    def __init__(self, rank, world, topology, shape):
        self.rank, self.world = rank, world
        self.learner = made(
            Mesh(Topology(**topology), "cpu"), shape, torch.float32, DTensorConfig()
        )

    def apply_to_weights(self, operation):
        return operation(self.learner.weights(), self.rank)

    def change(self, factor):
        with torch.no_grad():
            for item in self.learner.param_shards:
                item.local.mul_(factor)

    def blocks(self):
        return [(b.name, b.shape, b.offsets, b.tensor.clone()) for b in self.learner.weights()]


class RowsRank:
    """A rank that has some rows of each of `n` matrices, and may kill itself, or raise, when so
    many have been sent."""

    def __init__(self, rank, world, n=4, rows=6, columns=5):
        self.rank, self.world, self.die_at, self.raise_at = rank, world, None, None
        self.wholes = matrices(0, n, rows, columns)

    def weights(self):
        for index, (name, whole) in enumerate(self.wholes.items()):
            if index == self.die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if index == self.raise_at:
                raise RuntimeError("out of memory")
            size = len(whole) // self.world
            yield Shard(
                name,
                tuple(whole.shape),
                (size * self.rank, 0),
                whole[size * self.rank : size * (self.rank + 1)],
            )

    def apply_to_weights(self, operation):
        return operation(self.weights(), self.rank)

    def die(self, rank, at):
        self.die_at = at if rank == self.rank else None

    def fail(self, rank, at):
        self.raise_at = at if rank == self.rank else None

    def touch(self):
        """Change one number of the first matrix, which lies on rank 0."""
        self.wholes["w0"][0, 0] += 1

    def become(self, seed):
        self.wholes = matrices(seed, len(self.wholes), *next(iter(self.wholes.values())).shape)


def matrices(seed, n, rows, columns):
    rng = torch.Generator().manual_seed(seed)
    return {f"w{i}": torch.randn(rows, columns, generator=rng) for i in range(n)}


class Kept:
    """Of `Generator` what a link calls: takes weights of any name, at the commit."""

    adopted = shares_weights = False

    def __init__(self):
        self.version, self.held, self.staged, self.refuses = 0, {}, [], None

    async def prepare(self, manifest):
        if self.refuses is not None:
            raise self.refuses
        self.staged = []

    async def receive(self, shards):
        self.staged = list(shards)

    async def commit(self, version):
        for shard in self.staged:
            whole = self.held.setdefault(
                shard.name, torch.zeros(shard.shape, dtype=shard.tensor.dtype)
            )
            whole[
                tuple(
                    slice(o, o + n) for o, n in zip(shard.offsets, shard.tensor.shape, strict=True)
                )
            ] = shard.tensor
        self.version, self.staged = version, []

    async def rollback(self):
        self.staged = []

    def weights(self):
        for name, whole in self.held.items():
            yield Shard(name, tuple(whole.shape), (0,) * whole.dim(), whole)


class KeptIntake(WeightReceiver):
    """A receiver in a process of its own."""

    def __init__(self, rank, world):
        super().__init__(Kept(), rank)

    def held(self):
        return self.generator.version, self.generator.held


def engine(shape=SHAPE, dtype=torch.float32, seed=11):
    """A generator with weights of its own."""
    return EmbeddedEngine(ENGINE, init_policy(shape, seed=seed, dtype=dtype))
