"""Padded tensors of upstream's tests as packed batches, and back.

B = rows, L = padded length, T = B * L tokens: padding stays, as tokens that do not train.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgoState
from ratchet.batch import Batch
from ratchet.config.resolve import build, resolve
from ratchet.data.packing import pack
from ratchet.protocols import Outputs
from ratchet.testing.builders import make_group, make_trajectory
from ratchet.types import Group, Scored, Unjudged


def pack_padded(
    mask_BL: Tensor,
    *,
    rewards_B: Tensor | None = None,
    groups: Sequence[Any] | None = None,
    parts: Mapping[str, Tensor] | None = None,
    columns: Mapping[str, Tensor] | None = None,
) -> Batch:
    """Return a batch of the rows. The first token of a row is a prompt: nothing predicts it.

    Args:
        mask_BL: 1 on tokens that train.
        rewards_B: The reward of each row.
        groups: The name of each row's group; rows of a group lie together. None: one group.
        parts: Named parts of the rewards, [B] each.
        columns: Columns of tokens, [B, L] each.
    """
    n_rows, length = mask_BL.shape
    names = [str(name) for name in (groups if groups is not None else [0] * n_rows)]
    rows_by_group: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows_by_group.setdefault(name, []).append(row)
    order = [row for rows in rows_by_group.values() for row in rows]
    assert order == list(range(n_rows)), "rows of a group lie together"
    packed_groups: list[Group] = []
    for name, rows in rows_by_group.items():
        trajectories = []
        for attempt, row in enumerate(rows):
            outcome: Any = Unjudged()
            if rewards_B is not None or parts is not None:
                row_parts = {key: float(values[row]) for key, values in (parts or {}).items()}
                total = sum(row_parts.values()) if rewards_B is None else float(rewards_B[row])
                outcome = Scored(total, row_parts)
            trajectory = make_trajectory([1], [1] * (length - 1), outcome=outcome, attempt=attempt)
            trajectories.append(trajectory)
        packed_groups.append(make_group(name, trajectories))
    batch = pack(packed_groups)
    mask_T = mask_BL.bool().flatten()
    batch = replace(batch, trainable_T=mask_T, predicted_T=mask_T)
    filled = {name: column.flatten() for name, column in (columns or {}).items()}
    if "rollout_logprobs" in filled:
        batch = replace(batch, rollout_logprobs_T=filled.pop("rollout_logprobs").float())
    return batch.fill_tokens(**filled)


def make_outputs(batch: Batch, **tensors: Tensor | None) -> Outputs:
    """Return the outputs of a learner from padded tensors."""
    flat = {name: None if x is None else x.reshape(-1, *x.shape[2:]) for name, x in tensors.items()}
    return Outputs(sequence_sum=batch.sequence_sum, **flat)


def build_algorithm(section: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm of a recipe's section."""
    return build(resolve("algorithm", dict(section)))


def compute_loss(
    algorithm: Algorithm, batch: Batch, out: Outputs, role: str = "policy"
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the sum of a role's terms over the batch, and their metrics."""
    weighted = algorithm.weigh(batch, AlgoState())
    total: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    for term in algorithm.losses[role]:
        if any(getattr(out, name) is None for name in term.needs):
            continue  # the entropy is only measured
        loss, means = term(out, weighted)
        total = loss if total is None else total + loss
        metrics |= means
    assert total is not None
    return total, metrics


def compute_advantages(section: Mapping[str, Any], batch: Batch) -> Batch:
    """Return the batch with the advantages of a recipe's algorithm."""
    return build_algorithm(section).advantage(batch, AlgoState())


def to_padded(column_T: Tensor, mask_BL: Tensor) -> Tensor:
    """Return a column of tokens in the padded form, in float32, 0 outside of the mask."""
    padded = column_T.reshape(mask_BL.shape).float()
    return torch.where(mask_BL.bool(), padded, torch.zeros_like(padded))


def to_group_names(prompt_ids: Any) -> list[str]:
    """Return a name for each row's prompt."""
    return [str(np.asarray(row).tolist()) for row in prompt_ids]
