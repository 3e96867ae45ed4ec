"""Plan how a batch is cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratchet.batch import ROUTES, Batch, Level
from ratchet.models.layers.prefix_tree import Index, compute_path_keys, count_shared_prefix
from ratchet.protocols import LossTerm

# Limits for "auto". On a CPU larger micro-batches take more memory and gain nothing.
MAX_TOKENS = 2304
MAX_TOKENS_GPU = 16384
# Rows of a group stay together if that saves at least this share of their tokens.
MIN_SAVED_SHARE = 0.1


class RowFamily(NamedTuple):
    """Rows that stay together in a micro-batch.

    tokens: number of tokens that the model computes for them.
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


def select_weighted_rows(batch: Batch, terms: Sequence[LossTerm]) -> list[int]:
    """Return the sequences that have a weight in any term.

    The others add nothing to losses, gradients or metrics.
    """
    has_weight_S = torch.zeros(batch.n_sequences, dtype=torch.bool)
    for term in terms:
        level, values, *_ = batch.weights[term.name]
        active = values != 0
        if level == "token":
            active = batch.sequence_sum(active.double()) > 0
        has_weight_S |= active[batch.group_S] if level == "group" else active
    return has_weight_S.nonzero()[:, 0].tolist()


def plan_microbatches(
    batch: Batch,
    *,
    max_tokens: int,
    unit: Level = "sequence",
    shares: bool = False,
    workers: int = 1,
) -> list[list[int]]:
    """Return the rows of each micro-batch; every row appears exactly once.

    max_tokens: limit of a micro-batch; a single unit may be longer.
    unit: "group" never splits a group.
    shares: True if the model computes a shared prefix of rows once. Attempts at a prompt then stay
      together, and their prompt counts once.
    workers: number of micro-batches that are computed at the same time. With more than one, micro-
      batches have about the same size, and their number is a multiple of it.

    Rows of similar length go together, because they share an attention call.
    """
    lengths = batch.lengths_S.tolist()
    rows_G: list[list[int]] = [[] for _ in range(batch.n_groups)]
    for row, group in enumerate(batch.group_S.tolist()):
        rows_G[group].append(row)
    families: list[RowFamily] = []
    if not shares:
        units = rows_G if unit == "group" else [[row] for row in range(len(lengths))]
        families = [_family(rows, lengths, 0) for rows in units]
    else:
        keys = compute_path_keys(batch.tokens_T, batch.token_columns.get(ROUTES))
        tokens = np.split(keys, np.cumsum(lengths)[:-1]) if lengths else []
        for rows in rows_G:
            families += _families(
                rows, lengths, tokens, whole=unit == "group", max_tokens=max_tokens
            )
    families.sort(key=lambda family: family.longest)
    plan: list[list[int]] = []
    remaining = sum(family.tokens for family in families)
    # A lower bound on the number of micro-batches: families can't be split.
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


def _family(rows: list[int], lengths: Sequence[int], common: int) -> RowFamily:
    """Return the family of rows that share a prefix of `common` tokens."""
    sizes = [lengths[row] for row in rows]
    return RowFamily(rows, sum(sizes) - common * (len(rows) - 1), max(sizes))


def _families(
    rows: list[int],
    lengths: Sequence[int],
    tokens: Sequence[Index],
    *,
    whole: bool,
    max_tokens: int,
) -> Iterator[RowFamily]:
    """Yield the families of one group's rows.

    Rows with a long shared prefix stay together, in as many families as `max_tokens` demands;
    others get a family each. whole: yield all rows as one family.
    """
    common = count_shared_prefix([tokens[row] for row in rows])
    if common * (len(rows) - 1) < MIN_SAVED_SHARE * sum(lengths[row] for row in rows):
        common = 0
    if whole:
        yield _family(rows, lengths, common)
        return
    piece: list[int] = []
    for row in sorted(rows, key=lambda row: lengths[row]):
        if piece and (not common or _family([*piece, row], lengths, common).tokens > max_tokens):
            yield _family(piece, lengths, common)
            piece = []
        piece.append(row)
    yield _family(piece, lengths, common)
