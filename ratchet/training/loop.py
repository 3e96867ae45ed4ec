"""The only training loop: every algorithm runs through it, local or distributed, async or not."""

from __future__ import annotations

from ratchet.algorithms.scoring import fill_columns
from ratchet.data.packing import pack
from ratchet.training.run import StageRun


async def train(run: StageRun) -> None:
    """Train one stage: each step samples, scores, updates and syncs the weights."""
    algo, roles, state = run.algorithm, run.roles, run.state
    for step in run.steps():  # continues after the last checkpoint
        with run.phase("sample"):
            groups = await run.batcher.next(step)  # rollouts | rows | pairs, by group
        batch = pack(groups)
        with run.phase("score"):
            await run.check_parity(step, batch)  # sampler's against learner's logprobs
            batch = await fill_columns(batch, algo, roles)
        batch = algo.advantage(batch, state)
        run.measure("batch", batch.metrics)
        with run.phase("update"):
            for mini in algo.split(batch):
                weighed = algo.weigh(mini, state)
                for role in algo.roles_to_update(state):
                    run.measure(role, await roles[role].update(weighed, algo.losses[role]))
        algo.observe(state, run.mean_metrics)
        with run.phase("sync"):
            await run.sync(version=step + 1)  # learner -> generator
        await run.after(step, groups, batch)  # acknowledge, record, log, evaluate, save
