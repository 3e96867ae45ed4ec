"""Pack groups of trajectories of different lengths into one `Batch`, without padding.

T = tokens, S = sequences, G = groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ratchet.allowed_tokens import AllowedTokens
from ratchet.batch import ALLOWED, MALFORMED_CALLS, MALFORMED_THINKING, ROUTES, Batch
from ratchet.errors import DataError
from ratchet.types import Group, Trajectory


def pack(groups: Sequence[Group]) -> Batch:
    """Concatenate all trajectories in order, except failed and cancelled ones.

    Groups without a remaining trajectory are left out. Raises DataError for a trajectory that has
    no tokens, or whose first token is trainable: no token precedes it, so none predicts it.
    """
    kept_groups = [(group, [t for t in group.trajectories if t.is_usable]) for group in groups]
    kept_groups = [(group, trajectories) for group, trajectories in kept_groups if trajectories]
    rows = [(g, t) for g, (_, trajectories) in enumerate(kept_groups) for t in trajectories]
    for g, trajectory in rows:
        _check_trajectory(trajectory, kept_groups[g][0].id)
    tags = tuple(dict.fromkeys(group.task.tag for group, _ in kept_groups))
    trajectories = [t for _, t in rows]
    lengths = np.asarray([len(t) for t in trajectories], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    turn_columns = _TurnColumns(rows, starts.tolist(), int(lengths.sum()))
    purposes, rewards = [t.use for t in trajectories], [t.reward for t in trajectories]
    train_S, baseline_S, reference_S = (
        _make_column([use == name for use in purposes], np.bool_)
        for name in ("train", "baseline", "reference")
    )
    trainable_T = _make_token_column(trajectories, lambda t: t.trainable, np.bool_)
    lengths_S = torch.from_numpy(lengths)
    allowed = AllowedTokens.concatenate([(t.allowed, len(t)) for t in trajectories])
    return Batch(
        tokens_T=_make_token_column(trajectories, lambda t: t.tokens, np.int64),
        positions_T=torch.from_numpy(np.arange(turn_columns.n_tokens) - np.repeat(starts, lengths)),
        turn_T=torch.from_numpy(turn_columns.make_turn_indices()),
        turn_rewards_T=torch.from_numpy(turn_columns.make_turn_rewards()),
        state_T=torch.from_numpy(turn_columns.make_state_numbers()),
        trainable_T=trainable_T & train_S.repeat_interleave(lengths_S),
        predicted_T=trainable_T & ~baseline_S.repeat_interleave(lengths_S),
        rollout_logprobs_T=_make_token_column(
            trajectories, lambda t: t.rollout_logprobs, np.float32
        ),
        log_kept_mass_T=_make_token_column(trajectories, _get_log_kept_mass, np.float32),
        versions_T=_make_token_column(trajectories, lambda t: t.versions, np.int32),
        lengths_S=lengths_S,
        group_S=_make_column([g for g, _ in rows], np.int64),
        attempt_S=_make_column([t.attempt for t in trajectories], np.int64),
        train_S=train_S,
        baseline_S=baseline_S,
        reference_S=reference_S,
        scored_S=_make_column([reward is not None for reward in rewards], np.bool_),
        truncated_S=_make_column([t.truncated for t in trajectories], np.bool_),
        cut_S=_make_column(_find_cut_off_rows(rows), np.bool_),
        rewards_S=_make_column(
            [math.nan if reward is None else reward for reward in rewards], np.float64
        ),
        temperature_S=_make_column([t.temperature for t in trajectories], np.float64),
        tag_S=_make_column([tags.index(kept_groups[g][0].task.tag) for g, _ in rows], np.int64),
        group_ids=tuple(group.id for group, _ in kept_groups),
        tags=tags,
        media_S=tuple(t.media for t in trajectories) if any(t.media for t in trajectories) else (),
        token_columns=_make_route_column(trajectories)
        | turn_columns.make_malformed_turns()
        | ({} if allowed is None else {ALLOWED: torch.from_numpy(allowed.index)}),
        sequence_columns=_make_reward_part_columns(trajectories),
        masks_MB=None if allowed is None else torch.from_numpy(allowed.masks.copy()),
    )


def _make_token_column(
    trajectories: Sequence[Trajectory], column: Callable[[Trajectory], np.ndarray], dtype: type
) -> Tensor:
    parts = [column(t) for t in trajectories]
    return _make_column(np.concatenate(parts) if parts else [], dtype)


def _make_column(values: Sequence[float] | np.ndarray, dtype: type) -> Tensor:
    return torch.from_numpy(np.asarray(values, dtype=dtype))


def _find_cut_off_rows(rows: Sequence[tuple[int, Trajectory]]) -> list[bool]:
    """Return True for each row of an attempt whose last answer was cut off by a token limit.

    Only the last row of an attempt holds this answer, but all its rows share the reward.
    """
    has_cut_answer = {(g, t.attempt, t.use): t.truncated and t.is_cut_short for g, t in rows}
    return [has_cut_answer[g, t.attempt, t.use] for g, t in rows]


def _check_trajectory(trajectory: Trajectory, group_id: str) -> None:
    if len(trajectory) == 0:
        raise DataError(
            f"group {group_id}: a trajectory without tokens; give every task a non-empty prompt"
        )
    if trajectory.trainable[0]:
        raise DataError(
            f"group {group_id}: the first token trains, but nothing precedes it; start the prompt "
            "with a BOS or a user turn"
        )


@dataclass(frozen=True)
class _TurnColumns:
    """A builder of token columns [T] that have values only at the tokens of turns."""

    rows: Sequence[tuple[int, Trajectory]]  # (group index, trajectory)
    starts: Sequence[int]  # index of each row's first token
    n_tokens: int  # T

    def make_turn_indices(self) -> np.ndarray:
        """Return the index of the turn of each token [T], -1 elsewhere."""
        index_T = np.full(self.n_tokens, -1, dtype=np.int32)
        for start, (_, trajectory) in zip(self.starts, self.rows, strict=True):
            for number, turn in enumerate(trajectory.turns):
                index_T[start + turn.start : start + turn.end] = number
        return index_T

    def make_turn_rewards(self) -> np.ndarray:
        """Return the reward of each turn at its last token [T], NaN elsewhere."""
        rewards_T = np.full(self.n_tokens, np.nan)
        for start, (_, trajectory) in zip(self.starts, self.rows, strict=True):
            for turn in trajectory.turns:
                if turn.reward is not None and turn.end > turn.start:
                    rewards_T[start + turn.end - 1] = turn.reward
        return rewards_T

    def make_state_numbers(self) -> np.ndarray:
        """Return a number for the (group, state key) pair of each token [T], -1 elsewhere."""
        state_numbers: dict[tuple[int, str], int] = {}
        state_T = np.full(self.n_tokens, -1, dtype=np.int64)
        for start, (group, trajectory) in zip(self.starts, self.rows, strict=True):
            for turn in trajectory.turns:
                if turn.state_key:
                    number = state_numbers.setdefault((group, turn.state_key), len(state_numbers))
                    state_T[start + turn.start : start + turn.end] = number
        return state_T

    def make_malformed_turns(self) -> dict[str, Tensor]:
        """Return the columns of malformed turns [T]; none if no turn is malformed."""
        spans: dict[str, list[slice]] = {}
        for row_start, (_, trajectory) in zip(self.starts, self.rows, strict=True):
            for turn in trajectory.turns:
                span = slice(row_start + turn.start, row_start + turn.end)
                if turn.malformed_call:
                    spans.setdefault(MALFORMED_CALLS, []).append(span)
                if turn.malformed_thinking:
                    spans.setdefault(MALFORMED_THINKING, []).append(span)
        columns: dict[str, Tensor] = {}
        for name, spans_of_name in spans.items():
            columns[name] = torch.zeros(self.n_tokens, dtype=torch.bool)
            for span in spans_of_name:
                columns[name][span] = True
        return columns


def _get_log_kept_mass(trajectory: Trajectory) -> np.ndarray:
    return (
        np.zeros(len(trajectory), np.float32)
        if trajectory.log_kept_mass is None
        else trajectory.log_kept_mass
    )


def _make_route_column(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return the column of routes [T, ...]; {} if no trajectory has routes.

    Trajectories without routes have -1.
    """
    shape = next((t.routes.shape[1:] for t in trajectories if t.routes is not None), None)
    if shape is None:
        return {}
    parts = [
        np.full((len(t), *shape), -1, np.int16) if t.routes is None else t.routes
        for t in trajectories
    ]
    return {ROUTES: torch.from_numpy(np.concatenate(parts))}


def _make_reward_part_columns(trajectories: Sequence[Trajectory]) -> dict[str, Tensor]:
    """Return each part of the rewards as a column "reward/<name>" [S]: NaN in rows without it."""
    names = dict.fromkeys(name for t in trajectories for name in t.reward_parts)
    return {
        f"reward/{name}": torch.tensor(
            [t.reward_parts.get(name, float("nan")) for t in trajectories], dtype=torch.float64
        )
        for name in names
    }
