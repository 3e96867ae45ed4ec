"""Play the rows of a batch in lockstep, so that generators and environments get whole batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.experience.nemo_rl.attempt import RowBarrier, step_each
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import get_environment
from ratchet.experience.nemo_rl.generation import (
    PromptRequest,
    UnbatchedGenerator,
    complete_batch,
    is_synchronous_batch_generator,
    takes_batches,
)
from ratchet.experience.nemo_rl.played_batch import Environments, make_batch, split_rows
from ratchet.experience.nemo_rl.row import RowPlayer
from ratchet.experience.nemo_rl.specs import DatumSpec
from ratchet.types import Completion, PlacedMedium, Sampling


async def play_in_lockstep(
    player: RowPlayer,
    input_batch: BatchedDataDict[DatumSpec],
    task_to_env: Environments,
    pad_id: int,
) -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
    """Play all rows in lockstep, and return the played batch and its metrics.

    Args:
        player: Plays each row.
        input_batch: The rows.
        task_to_env: The environment of each `task_name`.
        pad_id: The token that pads batches of prompts.
    """
    rows = split_rows(input_batch)
    barrier = RowBarrier[Any](len(rows))
    names = dict.fromkeys(row["task_name"] for row in rows)
    environments = {name: get_environment(task_to_env, name) for name in names}
    step_functions = {name: partial(step_each, environments[name]) for name in names}
    complete_rows = partial(complete_batch, player.policy_generation, pad_id=pad_id)

    async def play(i: int, row: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        generator = player.policy_generation
        if is_synchronous_batch_generator(generator):
            generator = _LockstepGenerator(barrier, i, complete_rows)
        elif takes_batches(generator):
            generator = UnbatchedGenerator(generator, pad_id=pad_id)
        step_batch = step_functions[row["task_name"]]

        def step_row(log: Any, metadata: Any) -> Any:
            return barrier.submit(i, step_batch, (log, metadata))

        try:
            return await player.play(
                i,
                row,
                generator,
                environments[row["task_name"]],
                step_row,
            )
        finally:
            barrier.leave()

    results = await asyncio.gather(*(play(i, row) for i, row in enumerate(rows)))
    return make_batch(input_batch, results, task_to_env)


@dataclass(frozen=True)
class _LockstepGenerator:
    """The generator of one row, whose requests are batched with those of the other rows."""

    barrier: RowBarrier[Any]
    row: int
    complete_rows: Any

    async def generate(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sampling: Sampling,
        media: Sequence[PlacedMedium] = (),
    ) -> Completion:
        request = PromptRequest(tokens, sampling, media)
        return await self.barrier.submit(self.row, self.complete_rows, request)
