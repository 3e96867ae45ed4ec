"""Split a batch into rows to play, and join the played rows into a batch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.environment import EnvironmentInterface, post_process
from ratchet.experience.nemo_rl.metrics import measure_samples
from ratchet.experience.nemo_rl.specs import DatumSpec

Environments = Mapping[str, EnvironmentInterface[Any]]


def split_rows(batch: BatchedDataDict[DatumSpec]) -> list[dict[str, Any]]:
    """Return the rows of a batch. Raises DataError if a column that each row needs is missing."""
    for column in ("message_log", "task_name"):
        if column not in batch:
            raise DataError(
                f"the batch has no column '{column}': make the batch by `collate` from DatumSpecs"
            )
    return [{name: column[row] for name, column in batch.items()} for row in range(batch.size)]


def make_batch(
    input_batch: BatchedDataDict[DatumSpec],
    results: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    task_to_env: Environments,
) -> tuple[BatchedDataDict[DatumSpec], dict[str, Any]]:
    """Return the played rows as a batch, in the order of `input_batch`, and all metrics.

    The environments post-process the batch. Failed rows get a loss multiplier of 0.

    Args:
        input_batch: The batch that was played. Its other columns are kept.
        results: The final state and the metrics of each row, as `RowPlayer.play` returns them.
        task_to_env: The environment of each `task_name`.
    """
    states = [state for state, _ in results]
    samples = [sample for _, sample in results]
    batch = BatchedDataDict[DatumSpec](dict(input_batch))
    for name in ("message_log", "extra_env_info", "stop_strings", "failed"):
        batch[name] = [state[name] for state in states]
    batch["total_reward"] = torch.tensor(
        [sample["total_reward"] for sample in samples], dtype=torch.float32
    )
    batch["truncated"] = torch.tensor([sample["truncated"] for sample in samples], dtype=torch.bool)
    failed = torch.tensor([sample["failed"] for sample in samples], dtype=torch.bool)
    multiplier = batch.get("loss_multiplier", torch.ones(len(results)))
    batch["loss_multiplier"] = torch.as_tensor(multiplier).masked_fill(failed, 0.0)
    # A part of the reward is NaN for a failed row without it, and 0 for other rows without it.
    for part in dict.fromkeys(name for sample in samples for name in sample["reward_parts"]):
        values = [
            float(state[part]) if part in state else math.nan if sample["failed"] else 0.0
            for state, sample in results
        ]
        batch[part] = torch.tensor(values, dtype=torch.float32)
    batch, environment_metrics = post_process(batch, task_to_env)
    return batch, measure_samples(samples) | environment_metrics
