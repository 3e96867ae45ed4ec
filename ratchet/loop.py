"""The only training loop. Every algorithm, embedded or distributed, synchronous or not, runs through it."""

from __future__ import annotations

from collections.abc import Mapping

from ratchet.algorithms.base import Algorithm
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.interfaces import Learner
from ratchet.run import Run


async def train(run: Run) -> None:
    algo, roles, state = run.algorithm, run.roles, run.state
    for step in run.steps():  # continues after the last checkpoint
        with run.phase("sample"):
            groups = await run.batcher.next(step)  # rollouts | rows | pairs, by group
        batch = pack(groups)
        with run.phase("score"):
            batch = await fill(batch, algo, roles)
        batch = algo.advantage(batch, state)
        with run.phase("update"):
            for mini in algo.split(batch):
                weighed = algo.weigh(mini)
                for role, terms in algo.losses.items():
                    run.measure(role, await roles[role].update(weighed, terms))
        state.observe(run.measured)
        with run.phase("sync"):
            await run.link.push(version=step + 1)  # learner -> generator
        await run.after(step, groups)  # acknowledge, log, evaluate, save


async def fill(batch: Batch, algo: Algorithm, roles: Mapping[str, Learner]) -> Batch:
    """Runs the passes that this algorithm needs, in order; each adds its column."""
    for item in algo.needed_passes():
        columns = await roles[item.role].score(batch, [item.wanted])
        add = batch.fill_tokens if item.level == "token" else batch.fill_sequences
        batch = add(**{item.produces: columns[item.wanted]})
    return batch
