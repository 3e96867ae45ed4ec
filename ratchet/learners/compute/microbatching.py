"""The plan that cuts a batch into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ratchet.batch import ROUTES, Batch, Level
from ratchet.models.layers.prefix_tree import Index, path_keys, shared_beginning
from ratchet.protocols import LossTerm

# "auto": larger ones gain nothing on a CPU, and take more memory
MOST_TOKENS, MOST_TOKENS_GPU = 2304, 16384
WORTH = 0.1  # rows of a group stay together where that saves at least this part of their tokens


class Family(NamedTuple):
    """Rows that stay together; tokens: how many the model computes for them."""

    rows: list[int]
    tokens: int
    longest: int


def most_tokens(limit: int | str, device: str) -> int:
    """Of a micro-batch, where the configuration may leave it to the kind of device."""
    if limit == "auto":
        return MOST_TOKENS if device == "cpu" else MOST_TOKENS_GPU
    return int(limit)


def weighing_rows(batch: Batch, terms: Sequence[LossTerm]) -> list[int]:
    """The sequences that weigh anything in any term: the others add nothing to losses, gradients or
    metrics."""
    counts_S = torch.zeros(batch.n_sequences, dtype=torch.bool)
    for term in terms:
        level, values, *_ = batch.weights[term.name]
        active = values != 0
        if level == "token":
            active = batch.sequence_sum(active.double()) > 0
        counts_S |= active[batch.group_S] if level == "group" else active
    return counts_S.nonzero()[:, 0].tolist()


def plan_microbatches(
    batch: Batch, *, max_tokens: int, unit: Level = "sequence", shares: bool = False, hands: int = 1
) -> list[list[int]]:
    """Rows of each micro-batch: at most `max_tokens` tokens (or a single unit that is longer), rows
    of similar length together, since attention works per length; `unit="group"` never splits a
    group. Every row appears exactly once.

    shares: the model computes a beginning that rows have in common once. Then attempts at a prompt
    go together, and their prompt counts once. hands: how many micro-batches are computed at a time;
    with more than one, they are made of about one size, and their number a multiple of it.
    """
    lengths = batch.lengths_S.tolist()
    rows_G: list[list[int]] = [[] for _ in range(batch.n_groups)]
    for row, group in enumerate(batch.group_S.tolist()):
        rows_G[group].append(row)
    families: list[Family] = []
    if not shares:
        units = rows_G if unit == "group" else [[row] for row in range(len(lengths))]
        families = [_family(rows, lengths, 0) for rows in units]
    else:
        keys = path_keys(batch.tokens_T, batch.token_columns.get(ROUTES))
        tokens = np.split(keys, np.cumsum(lengths)[:-1]) if lengths else []
        for rows in rows_G:
            families += _families(
                rows, lengths, tokens, whole=unit == "group", max_tokens=max_tokens
            )
    families.sort(key=lambda family: family.longest)
    plan: list[list[int]] = []
    left = sum(family.tokens for family in families)
    # micro-batches, if families were as fine as sand
    count = -(-left // (max_tokens * hands)) * hands
    used, aim = 0, 0.0
    for family in families:
        if (
            plan
            and used + family.tokens <= max_tokens
            and (hands == 1 or used + family.tokens / 2 <= aim)
        ):
            plan[-1].extend(family.rows)
            used += family.tokens
        else:
            aim = left / max(count - len(plan), 1)
            plan.append(list(family.rows))
            used = family.tokens
        left -= family.tokens
    return plan


def _family(rows: list[int], lengths: Sequence[int], common: int) -> Family:
    sizes = [lengths[row] for row in rows]
    return Family(rows, sum(sizes) - common * (len(rows) - 1), max(sizes))


def _families(
    rows: list[int],
    lengths: Sequence[int],
    tokens: Sequence[Index],
    *,
    whole: bool,
    max_tokens: int,
) -> Iterator[Family]:
    """The rows of one group: together, in as many pieces as their size asks for; or each alone
    where little is shared."""
    common = shared_beginning([tokens[row] for row in rows])
    if common * (len(rows) - 1) < WORTH * sum(lengths[row] for row in rows):
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
