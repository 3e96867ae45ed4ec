"""The Arrow table of a step: its groups and the learner's columns, one row for each trajectory.

Suffixes of shapes: T = tokens and S = sequences of the batch, R = rows of the table, N = tokens of
these rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ratchet.batch import ROUTES, Batch
from ratchet.observe.records.arrays import make_array, read_array
from ratchet.observe.records.json_text import format_json
from ratchet.observe.records.media import hash_content, shorten_value
from ratchet.observe.records.schema import (
    LEARNED,
    MESSAGE,
    NUMBER_BY_NAME,
    PART,
    PLACED,
    SAMPLED,
    SCALARS,
    SCHEMA,
    TOOL_CALL,
    TURN,
)
from ratchet.types import (
    POLICY,
    Cancelled,
    Failed,
    Group,
    Message,
    Outcome,
    Part,
    Scored,
    ToolCall,
    Trajectory,
    Truncated,
    Unjudged,
)
from ratchet.utils.terminal_text import escape_surrogates

OUTCOMES: Mapping[type, str] = {
    Scored: "scored",
    Truncated: "truncated",
    Unjudged: "unjudged",
    Failed: "failed",
    Cancelled: "cancelled",
}


class TrajectoryRow(NamedTuple):
    """A trajectory of the table."""

    group_index: int
    group: Group
    number: int  # index in the group
    trajectory: Trajectory
    batch_index: int | None  # index in the batch; None if it is not in the batch


def build_table(
    step: int,
    stage: str,
    groups: Sequence[Group],
    batch: Batch,
    weights_T: NDArray[np.float64],
    *,
    group_indices: Sequence[int] | None = None,
) -> pa.Table:
    """Build the table of one step.

    Args:
        batch: The batch that was packed from the groups, with its columns.
        weights_T: The weight of each token in the policy's loss.
        group_indices: Indices of the groups to keep, in order; None: all.
    """
    rows = _list_rows(groups, group_indices)
    token_columns = _build_sampled_columns(rows, batch) | _build_learned_columns(
        rows, batch, weights_T
    )
    columns = (
        _build_scalars(step, stage, rows, token_columns) | _build_details(rows) | token_columns
    )
    return pa.Table.from_arrays([columns[name] for name in SCHEMA.names], schema=SCHEMA)


def _list_rows(groups: Sequence[Group], group_indices: Sequence[int] | None) -> list[TrajectoryRow]:
    kept_indices = range(len(groups)) if group_indices is None else frozenset(group_indices)
    rows, next_batch_index = list[TrajectoryRow](), 0
    for index, group in enumerate(groups):
        for number, trajectory in enumerate(group.trajectories):
            # The batch holds the usable trajectories only, in this order.
            batch_index = next_batch_index if trajectory.is_usable else None
            if index in kept_indices:
                rows.append(TrajectoryRow(index, group, number, trajectory, batch_index))
            next_batch_index += trajectory.is_usable
    return rows


# --- the learner's columns


def _build_learned_columns(
    rows: Sequence[TrajectoryRow], batch: Batch, weights_T: NDArray[np.float64]
) -> dict[str, pa.Array]:
    """Return the columns of LEARNED: for each row, the list of its tokens' values in the batch.

    A row that is not in the batch is null, and so is a column that the batch lacks.
    """
    available = [
        name
        for name in LEARNED
        if name in batch.token_columns and batch.token_columns[name].dim() == 1
    ]
    columns_T = {name: batch.token_columns[name].detach().cpu().numpy() for name in available}
    columns_T |= {"trained": batch.trainable_T.cpu().numpy(), "weights": weights_T}
    batch_indices = [row.batch_index for row in rows if row.batch_index is not None]
    lengths_S = batch.lengths_S.cpu().numpy()
    starts_S = batch.starts_S.cpu().numpy()
    token_indices_N = (
        None
        if len(batch_indices) == batch.n_sequences
        else _list_token_indices(batch_indices, starts_S, lengths_S)
    )
    lengths_R = np.asarray(
        [0 if row.batch_index is None else lengths_S[row.batch_index] for row in rows], np.int32
    )
    absent_R = np.asarray([row.batch_index is None for row in rows], np.bool_)
    token_columns = {}
    for name, kind in LEARNED.items():
        column_T = columns_T.get(name)
        if column_T is None:
            token_columns[name] = pa.nulls(len(rows), kind)
            continue
        column_N = column_T if token_indices_N is None else column_T[token_indices_N]
        token_columns[name] = _build_lists(lengths_R, column_N, kind, absent_R)
    return token_columns


def _list_token_indices(
    batch_indices: Sequence[int], starts_S: NDArray[Any], lengths_S: NDArray[Any]
) -> NDArray[np.int64]:
    """Return the indices, in the batch, of the tokens of the sequences at `batch_indices`."""
    parts = [
        np.arange(starts_S[index], starts_S[index] + lengths_S[index]) for index in batch_indices
    ]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _build_lists(
    lengths_R: NDArray[np.int32],
    values_N: NDArray[Any],
    kind: pa.DataType,
    null_R: NDArray[np.bool_],
) -> pa.Array:
    """Return one list for each row from the concatenated values of all rows."""
    offsets = np.zeros(len(lengths_R) + 1, np.int32)
    np.cumsum(lengths_R, out=offsets[1:])
    # float64 becomes float32: these values are for reading, and a replay recomputes exact ones.
    values = make_array(values_N, kind.value_type)
    return _join_lists(offsets, values, kind, null_R)


def _join_lists(
    offsets: NDArray[np.int32], values: pa.Array, kind: pa.DataType, null_R: NDArray[np.bool_]
) -> pa.Array:
    """Return one list for each row, from the concatenated entries of all rows.

    offsets: [R + 1], start of each row's entries in `values`, and the end of the last row's.
    """
    return pa.ListArray.from_arrays(
        make_array(offsets, pa.int32()), values, type=kind, mask=make_array(null_R, pa.bool_())
    )


def _get_row_N(column: pa.Array) -> NDArray[np.int64]:
    """Return, for each value of a list column, the index of its row."""
    return np.repeat(np.arange(len(column)), np.diff(read_array(column.offsets)))


def _get_values_N(column: pa.Array) -> NDArray[Any]:
    return read_array(column.values)


def _sum_rows(column: pa.Array, mask_N: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return the sum of each row's values, float64 [R]; null for a null row.

    mask_N: only values where it is True are summed; None: all.
    """
    if column.null_count == len(column):
        return pa.nulls(len(column), pa.float64())
    values_N = _get_values_N(column).astype(np.float64)
    if mask_N is not None:
        values_N = np.where(mask_N, values_N, 0.0)
    sums_R = np.bincount(_get_row_N(column), weights=values_N, minlength=len(column))
    return make_array(sums_R, pa.float64(), _get_nulls_R(column))


def _get_nulls_R(column: pa.Array) -> NDArray[np.bool_]:
    return read_array(column.is_null())


def _divide(sums: pa.Array, counts: pa.Array) -> pa.Array:
    """Return sums / counts; null where the sum or the count is null, or the count is 0."""
    sums_R = np.where(_get_nulls_R(sums), 0.0, read_array(sums))
    counts_R = np.where(_get_nulls_R(counts), 0.0, read_array(counts))
    empty_R = _get_nulls_R(sums) | (counts_R == 0)
    return make_array(sums_R / np.where(empty_R, 1.0, counts_R), pa.float64(), empty_R)


# --- the rollout's columns


def _build_scalars(
    step: int, stage: str, rows: Sequence[TrajectoryRow], token_columns: Mapping[str, pa.Array]
) -> dict[str, pa.Array]:
    """Return the columns of SCALARS and of `_build_group_columns`.

    Token counts, sums and means are computed from `token_columns`.
    """
    trajectories = [row.trajectory for row in rows]
    outcomes = [t.outcome for t in trajectories]
    trained = _sum_rows(token_columns["trained"])
    advantages = _sum_rows(token_columns["advantages"], _get_values_N(token_columns["trained"]))
    logprobs_R = read_array(_sum_rows(token_columns["rollout_logprobs"]))
    is_policy_N = _get_values_N(token_columns["owner"]) == POLICY
    row_N = _get_row_N(token_columns["owner"])
    oldest, newest = _find_versions(token_columns["versions"])
    column_values: dict[str, list[Any] | pa.Array] = {
        "step": [step] * len(rows),
        "stage": [stage] * len(rows),
        "group_index": [row.group_index for row in rows],
        "row": [row.number for row in rows],
        "attempt": [t.attempt for t in trajectories],
        "use": [t.use for t in trajectories],
        "outcome": [None if outcome is None else OUTCOMES[type(outcome)] for outcome in outcomes],
        "truncated": [t.truncated for t in trajectories],
        "failure": [_get_failure(outcome) for outcome in outcomes],
        "reward": [None if outcome is None else outcome.reward for outcome in outcomes],
        "advantage": _divide(advantages, trained),
        "weight": _sum_rows(token_columns["weights"]),
        "temperature": [t.temperature for t in trajectories],
        "length": make_array(np.diff(read_array(token_columns["tokens"].offsets)), pa.int32()),
        "generated_tokens": make_array(
            np.bincount(row_N[is_policy_N], minlength=len(rows)), pa.int64()
        ),
        "trained_tokens": trained,
        "policy_turns": [len(t.turns) for t in trajectories],
        "oldest_version": oldest,
        "newest_version": newest,
        "rollout_logprob": make_array(logprobs_R, pa.float64(), _get_nulls_R(newest)),
    }
    return {
        name: _build_array(column, SCALARS[name]) for name, column in column_values.items()
    } | _build_group_columns(rows)


def _build_group_columns(rows: Sequence[TrajectoryRow]) -> dict[str, pa.Array]:
    """Return the columns whose value is the same in all rows of a group."""
    groups = {row.group_index: row.group for row in rows}
    # Each value is converted once for each group, and then repeated for the group's rows.
    position_by_group_index = {group_index: position for position, group_index in enumerate(groups)}
    positions = [position_by_group_index[row.group_index] for row in rows]
    row_positions = make_array(positions, pa.int32())
    tasks = [group.task for group in groups.values()]
    column_values: dict[str, list[Any]] = {
        "group": [group.id for group in groups.values()],
        "task": [task.id for task in tasks],
        "environment": [task.environment for task in tasks],
        "tag": [task.tag for task in tasks],
        "task_seed": [task.seed for task in tasks],
        "uses": [group.n_uses for group in groups.values()],
        "answer": [None if task.answer is None else format_json(task.answer) for task in tasks],
        "task_meta": [format_json(dict(task.meta)) if task.meta else None for task in tasks],
    }
    return {
        name: _build_array(column, SCHEMA.field(name).type).take(row_positions)
        for name, column in column_values.items()
    }


def _find_versions(column: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Return the oldest and newest weight version of each row; null if no token was sampled."""
    versions_N, row_N = _get_values_N(column), _get_row_N(column)
    known_N = versions_N >= 0
    versions_N, row_N = versions_N[known_N], row_N[known_N]
    starts = np.flatnonzero(np.diff(row_N, prepend=-1))  # index of the first token of each row
    oldest_R, newest_R = np.zeros((2, len(column)), np.int32)
    null_R = np.ones(len(column), np.bool_)
    if len(starts):
        sampled_rows = row_N[starts]
        oldest_R[sampled_rows] = np.minimum.reduceat(versions_N, starts)
        newest_R[sampled_rows] = np.maximum.reduceat(versions_N, starts)
        null_R[sampled_rows] = False
    return make_array(oldest_R, pa.int32(), null_R), make_array(newest_R, pa.int32(), null_R)


def _get_failure(outcome: Outcome | None) -> str | None:
    if isinstance(outcome, Failed):
        return outcome.kind
    return outcome.reason if isinstance(outcome, Cancelled) else None


def _build_sampled_columns(rows: Sequence[TrajectoryRow], batch: Batch) -> dict[str, pa.Array]:
    """Return the columns of SAMPLED: for each row, the list of its tokens' values from sampling."""
    trajectories = [row.trajectory for row in rows]
    lengths_R = np.asarray([len(t) for t in trajectories], np.int32)
    null_R = np.zeros(len(trajectories), np.bool_)
    columns_N = {
        name: _concatenate(getattr(t, name) for t in trajectories)
        for name in ("owner", "trainable")
    }
    # A batch of exactly these rows already holds these columns concatenated.
    is_whole_batch = len(rows) == batch.n_sequences and all(
        row.batch_index is not None for row in rows
    )
    for name in ("tokens", "rollout_logprobs", "versions"):
        columns_N[name] = (
            getattr(batch, f"{name}_T").cpu().numpy()
            if is_whole_batch
            else _concatenate(getattr(t, name) for t in trajectories)
        )
    sampled_columns = {
        name: _build_lists(lengths_R, column_N, SAMPLED[name], null_R)
        for name, column_N in columns_N.items()
    }
    has_kept_mass = bool(batch.log_kept_mass_T.any())
    has_routes = ROUTES in batch.token_columns
    routes = [t.routes if has_routes else None for t in trajectories]
    allowed = [t.allowed for t in trajectories]
    nullable: dict[str, list[NDArray[Any] | None]] = {
        "log_kept_mass": [t.log_kept_mass if has_kept_mass else None for t in trajectories],
        "routes": [route if route is None else route.reshape(-1) for route in routes],
        "routes_shape": [r if r is None else np.asarray(r.shape, np.int32) for r in routes],
        "allowed": [tokens if tokens is None else tokens.index for tokens in allowed],
        "allowed_masks": [t if t is None else t.masks.reshape(-1) for t in allowed],
    }
    return sampled_columns | {
        name: _build_nullable_lists(column, SAMPLED[name]) for name, column in nullable.items()
    }


def _concatenate(parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    lists = list(parts)
    return np.concatenate(lists) if lists else np.zeros(0)


def _build_nullable_lists(columns: Sequence[NDArray[Any] | None], kind: pa.DataType) -> pa.Array:
    """Return a list column in which some or all lists are null."""
    present = [column for column in columns if column is not None]
    if not present:
        return pa.nulls(len(columns), kind)
    lengths_R = np.asarray([0 if column is None else len(column) for column in columns], np.int32)
    return _build_lists(
        lengths_R,
        np.concatenate(present),
        kind,
        np.asarray([column is None for column in columns], np.bool_),
    )


# --- messages and details


def _build_details(rows: Sequence[TrajectoryRow]) -> dict[str, pa.Array]:
    """Return the columns of DETAILS, without those that `_build_group_columns` returns."""
    trajectories = [row.trajectory for row in rows]
    return {
        "reward_parts": _build_maps([t.reward_parts for t in trajectories]),
        "metrics": _build_maps([t.metrics for t in trajectories]),
        "turns": _build_turns(trajectories),
        "failure_detail": _build_array(
            [t.outcome.detail if isinstance(t.outcome, Failed) else None for t in trajectories],
            pa.string(),
        ),
        "prompt": _build_messages(
            [row.group.task.messages if row.number == 0 else None for row in rows]
        ),
        "messages": _build_messages([t.messages for t in trajectories]),
        "media": _build_media(trajectories),
        "extras": _build_array([_get_extras(t) for t in trajectories], pa.string()),
    }


def _get_extras(t: Trajectory) -> str | None:
    return format_json(dict(t.extras)) if t.extras else None


def _build_media(trajectories: Sequence[Trajectory]) -> pa.Array:
    """Return the media column; `name` is the name of the source in the record's `media/`."""
    placed = [placed for t in trajectories for placed in t.media]
    return _build_structs(
        [len(t.media) for t in trajectories],
        PLACED,
        start=[start for start, _ in placed],
        span=[medium.span for _, medium in placed],
        kind=[medium.kind for _, medium in placed],
        key=[medium.key for _, medium in placed],
        name=[hash_content(medium.source) for _, medium in placed],
    )


def _build_maps(numbers: Sequence[Mapping[str, float]]) -> pa.Array:
    lengths = np.asarray([len(mapping) for mapping in numbers], np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    keys = [key for mapping in numbers for key in mapping]
    values = [value for mapping in numbers for value in mapping.values()]
    return pa.MapArray.from_arrays(
        make_array(offsets, pa.int32()),
        _build_array(keys, pa.string()),
        make_array(values, pa.float64()),
        type=NUMBER_BY_NAME,
    )


def _build_turns(trajectories: Sequence[Trajectory]) -> pa.Array:
    turns = [turn for t in trajectories for turn in t.turns]
    return _build_structs(
        [len(t.turns) for t in trajectories],
        TURN,
        start=[turn.start for turn in turns],
        end=[turn.end for turn in turns],
        reward=[turn.reward for turn in turns],
        state_key=[turn.state_key for turn in turns],
        terminated=[turn.terminated for turn in turns],
        cut=[turn.cut for turn in turns],
        malformed_call=[turn.malformed_call for turn in turns],
        malformed_thinking=[turn.malformed_thinking for turn in turns],
    )


def _build_messages(conversations: Sequence[Sequence[Message] | None]) -> pa.Array:
    messages = [message for conversation in conversations for message in conversation or ()]
    return _build_structs(
        [None if conversation is None else len(conversation) for conversation in conversations],
        MESSAGE,
        role=[m.role for m in messages],
        content=[m.content if isinstance(m.content, str) else None for m in messages],
        parts=_build_parts([None if isinstance(m.content, str) else m.content for m in messages]),
        tool_calls=_build_tool_calls([m.tool_calls or None for m in messages]),
        tool_call_id=[m.tool_call_id for m in messages],
    )


def _build_parts(contents: Sequence[Sequence[Part] | None]) -> pa.Array:
    parts = [part for content in contents for part in content or ()]
    return _build_structs(
        [None if content is None else len(content) for content in contents],
        PART,
        type=[part.type for part in parts],
        value=[shorten_value(part) for part in parts],
    )


def _build_tool_calls(turns: Sequence[Sequence[ToolCall] | None]) -> pa.Array:
    calls = [call for turn in turns for call in turn or ()]
    return _build_structs(
        [None if turn is None else len(turn) for turn in turns],
        TOOL_CALL,
        id=[call.id for call in calls],
        name=[call.name for call in calls],
        arguments=[format_json(dict(call.arguments)) for call in calls],
    )


def _build_structs(
    lengths: Sequence[int | None], kind: pa.StructType, /, **columns: Any
) -> pa.Array:
    """Return one list of structs per row, from the concatenated fields of all structs.

    lengths: length of each row's list; None gives null.
    """
    null_R = np.asarray([n is None for n in lengths], np.bool_)
    if null_R.all():
        return pa.nulls(len(lengths), pa.list_(kind))
    arrays = [_build_array(column, kind.field(name).type) for name, column in columns.items()]
    entries = pa.StructArray.from_arrays(arrays, fields=[kind.field(name) for name in columns])
    offsets = np.concatenate([[0], np.cumsum([n or 0 for n in lengths])]).astype(np.int32)
    return _join_lists(offsets, entries, pa.list_(kind), null_R)


def _build_array(values: Any, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.Array):
        return values.cast(kind)
    try:
        return make_array(values, kind)
    except UnicodeEncodeError:  # half of a surrogate pair, which a model may write
        return make_array([text and escape_surrogates(text) for text in values], kind)
