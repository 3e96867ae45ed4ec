"""Read the group that an Atropos environment returns, and find its sequences in the record.

Ratchet trains on the tokens that it recorded. From the environment it takes the scores, and the
masks, which may leave tokens of the policy out. All errors are DataErrors with the smallest fix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import DataError
from ratchet.experience.openai_proxy.strands import AgentStrand
from ratchet.types import Owner, is_finite_number

MASKED = -100
# Fields of a group by which the environment would train in its own way.
UNSUPPORTED_FIELDS = ("advantages", "distill_token_ids", "distill_logprobs")


@dataclass(frozen=True)
class ScoredSequence:
    """A sequence of an environment's group. `mask` is MASKED where it must not train."""

    tokens: Sequence[int]
    mask: Sequence[int]
    score: Any


def read_group(result: Any, n_sequences: int) -> list[ScoredSequence]:
    """Return the sequences of what `collect_trajectories` returned."""
    if not isinstance(result, tuple) or len(result) != 2:
        raise DataError(f"it returned {result!r:.80}. Return (a ScoredDataGroup, [])")
    group, backlog = result
    if backlog:
        raise DataError(
            f"it returned {len(backlog)} items for its backlog, which are not played. Play an item "
            "to its end in collect_trajectories"
        )
    if isinstance(group, list) and len(group) == 1:
        group = group[0]
    if group is None:
        raise DataError(
            "it dropped the group (None), as many environments do if all scores are equal. Return "
            "the group: equal scores have no effect in training"
        )
    if not isinstance(group, Mapping):
        raise DataError(f"it returned {group!r:.80}. Return one ScoredDataGroup for an item")
    for name in UNSUPPORTED_FIELDS:
        if any(group.get(name) or ()):
            raise DataError(f"its group has {name}, which are not supported. Return scores alone")
    overrides = [group.get("group_overrides") or {}, *(group.get("overrides") or ())]
    # The group's size is checked anyway.
    if names := {name for values in overrides for name in values or ()} - {"group_size"}:
        raise DataError(f"its group overrides {sorted(names)}, which has no effect. Leave it out")
    columns = [group.get(name, ()) for name in ("tokens", "masks", "scores")]
    if unordered := [column for column in columns if isinstance(column, Mapping | Set)]:
        raise DataError(f"its group has {unordered[0]!r:.80}. Return lists in one order")
    counts = [len(column) for column in columns]
    if counts != [n_sequences] * 3:
        raise DataError(
            f"its group has {counts[0]} tokens, {counts[1]} masks and {counts[2]} scores. Return "
            f"config.group_size={n_sequences} of each"
        )
    return [ScoredSequence(*sequence) for sequence in zip(*columns, strict=True)]


def take_strand(
    sequence: ScoredSequence, strands: list[AgentStrand], decode: Callable[[list[int]], str]
) -> AgentStrand:
    """Remove and return the recorded strand whose tokens a sequence has.

    One of the two may go on with special tokens and spaces, such as the end of a turn.

    Args:
        decode: Returns the text of tokens without special tokens.
    """
    if not is_finite_number(sequence.score):
        raise DataError(f"its score is {sequence.score!r:.80}. Return a finite number")
    tokens = np.asarray(sequence.tokens, np.int64)
    rests: dict[int, int] = {}  # index of a strand: number of tokens that only one of both has
    for index, strand in enumerate(strands):
        recorded = strand.record.tokens()
        n = min(len(tokens), len(recorded))
        rest = [*tokens[n:].tolist(), *recorded[n:].tolist()]
        if np.array_equal(tokens[:n], recorded[:n]) and not decode(rest).strip():
            rests[index] = len(rest)
    if not rests:
        raise DataError(
            "its tokens are not those that the policy read and wrote. Take tokens and masks from "
            "managed_server().get_state(), which has the policy's own"
        )
    return strands.pop(min(rests, key=lambda index: rests[index]))


def select_trainable(sequence: ScoredSequence, owner: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Return the policy's tokens that the mask trains.

    Args:
        owner: [L], the writers of the recorded tokens.
    """
    mask = np.asarray(sequence.mask, np.int64)
    if len(mask) != len(sequence.tokens):
        raise DataError(f"its mask has {len(mask)} entries. Return one for each token")
    trainable = np.zeros(len(owner), np.bool_)
    n = min(len(mask), len(owner))
    trainable[:n] = mask[:n] != MASKED
    if (trainable & (owner != Owner.POLICY)).any():
        raise DataError(f"its mask trains tokens of others than the policy. Set them to {MASKED}")
    if not trainable.any():
        raise DataError("its mask trains no token of the policy. Leave the sequence's mask open")
    return trainable
