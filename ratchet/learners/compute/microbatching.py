"""Plan how a batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratchet.batch import ROUTES, Batch, Level
from ratchet.models.layers.prefix_tree import Index, compute_path_keys, count_shared_prefix
from ratchet.protocols import LossTerm

# Token limits of a micro-batch for "auto". On a CPU larger micro-batches take more memory and are
# no faster.
MAX_TOKENS = 2304
MAX_TOKENS_GPU = 16384
# Rows of a group stay together if that saves at least this share of their tokens.
MIN_SAVED_SHARE = 0.1


class RowFamily(NamedTuple):
    """Rows that stay together in a micro-batch, such as attempts with a shared prompt.

    tokens: number of tokens that the model computes for these rows.
    longest: tokens of the longest row.
    """

    rows: list[int]
    tokens: int
    longest: int


def resolve_micro_batch_tokens(limit: int | str, device: str) -> int:
    """Return the token limit of a micro-batch; "auto" depends on the kind of device."""
    if limit == "auto":
        return MAX_TOKENS if device == "cpu" else MAX_TOKENS_GPU
    return int(limit)


def mask_weighted_rows(batch: Batch, terms: Sequence[LossTerm]) -> torch.Tensor:
    """Return which sequences have a loss weight other than 0 in any term, bool [S]."""
    has_weight_S = torch.zeros(batch.n_sequences, dtype=torch.bool, device=batch.starts_S.device)
    for term in terms:
        level, values, *_ = batch.weights[term.name]
        is_nonzero = values != 0
        if level == "token":
            is_nonzero = batch.sequence_sum(is_nonzero.double()) > 0
        has_weight_S |= is_nonzero[batch.group_S] if level == "group" else is_nonzero
    return has_weight_S


def select_weighted_rows(batch: Batch, terms: Sequence[LossTerm]) -> list[int]:
    """Return the indices of the sequences with a loss weight other than 0 in any term.

    The other sequences add nothing to losses, gradients or metrics.
    """
    return mask_weighted_rows(batch, terms).nonzero()[:, 0].tolist()


def plan_microbatches(
    batch: Batch,
    *,
    max_tokens: int,
    unit: Level = "sequence",
    shares_prefixes: bool = False,
    workers: int = 1,
) -> list[list[int]]:
    """Return the rows of each micro-batch; every row appears exactly once.

    Rows of similar length go together, because they share an attention call.

    max_tokens: token limit of a micro-batch. A micro-batch of one unit may exceed it.
    unit: the unit that is never split, a "sequence" or a "group".
    shares_prefixes: True if the model computes a shared prefix of rows once. Attempts at a prompt
      then stay together, and their prompt counts once.
    workers: number of micro-batches that are computed at the same time. If it is above 1, micro-
      batches have about the same size, and their number is a multiple of it if the sizes of the
      rows allow that.
    """
    lengths = batch.lengths_S.tolist()
    rows_G: list[list[int]] = [[] for _ in range(batch.n_groups)]
    for row, group in enumerate(batch.group_S.tolist()):
        rows_G[group].append(row)
    families: list[RowFamily] = []
    if not shares_prefixes:
        units = rows_G if unit == "group" else [[row] for row in range(len(lengths))]
        families = [_make_family(rows, lengths, 0) for rows in units]
    else:
        keys = compute_path_keys(batch.tokens_T, batch.token_columns.get(ROUTES))
        keys_by_row = np.split(keys, np.cumsum(lengths)[:-1]) if lengths else []
        for rows in rows_G:
            families += _divide_group(
                rows, lengths, keys_by_row, keep_whole=unit == "group", max_tokens=max_tokens
            )
    families.sort(key=lambda family: family.longest)
    plan: list[list[int]] = []
    remaining = sum(family.tokens for family in families)
    # A lower bound on the number of micro-batches, as if families could be split.
    min_count = -(-remaining // (max_tokens * workers)) * workers
    used_tokens = 0
    target_tokens = 0.0
    for family in families:
        if (
            plan
            and used_tokens + family.tokens <= max_tokens
            and (workers == 1 or used_tokens + family.tokens / 2 <= target_tokens)
        ):
            plan[-1].extend(family.rows)
            used_tokens += family.tokens
        else:
            target_tokens = remaining / max(min_count - len(plan), 1)
            plan.append(list(family.rows))
            used_tokens = family.tokens
        remaining -= family.tokens
    return plan


def _make_family(rows: list[int], lengths: Sequence[int], shared: int) -> RowFamily:
    """Return the family of rows that share a prefix of `shared` tokens."""
    sizes = [lengths[row] for row in rows]
    return RowFamily(rows, sum(sizes) - shared * (len(rows) - 1), max(sizes))


def _divide_group(
    rows: list[int],
    lengths: Sequence[int],
    keys_by_row: Sequence[Index],
    *,
    keep_whole: bool,
    max_tokens: int,
) -> Iterator[RowFamily]:
    """Yield the families of one group's rows.

    Rows with a long shared prefix stay together, in as few families as `max_tokens` allows. Without
    such a prefix each row is a family. keep_whole: yield all rows as one family in any case.
    """
    shared = count_shared_prefix([keys_by_row[row] for row in rows])
    if shared * (len(rows) - 1) < MIN_SAVED_SHARE * sum(lengths[row] for row in rows):
        shared = 0
    if keep_whole:
        yield _make_family(rows, lengths, shared)
        return
    members: list[int] = []
    for row in sorted(rows, key=lambda row: lengths[row]):
        if members and (
            not shared or _make_family([*members, row], lengths, shared).tokens > max_tokens
        ):
            yield _make_family(members, lengths, shared)
            members = []
        members.append(row)
    yield _make_family(members, lengths, shared)
