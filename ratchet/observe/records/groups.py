"""Rebuild the groups that a step's batch was packed from, from the rows of a record."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ratchet.allowed_tokens import AllowedTokens
from ratchet.observe.records.media import find_source, restore_value
from ratchet.types import (
    Cancelled,
    Failed,
    Group,
    Medium,
    Message,
    Outcome,
    Part,
    PlacedMedium,
    Scored,
    Task,
    ToolCall,
    Trajectory,
    Truncated,
    Turn,
    Unjudged,
)

DTYPES: Mapping[str, type] = {
    "tokens": np.int64,
    "owner": np.int8,
    "trainable": np.bool_,
    "rollout_logprobs": np.float32,
    "versions": np.int32,
    "log_kept_mass": np.float32,
    "routes": np.int16,
    "allowed": np.int32,
    "allowed_masks": np.uint8,
}


def read_groups(table: pa.Table, sources: Mapping[str, bytes] | None = None) -> list[Group]:
    """Return the groups of one step, equal bit for bit to those that the batch was packed from.

    Two things differ. `Medium.inputs` are empty, since the processor computes them again. Values
    stored as JSON (answer, `meta`, tool arguments, `extras`) come back with JSON's types.

    Args:
        sources: the bytes of each medium by name, in their original encoding (`Record.media`);
            None: the rows have no media.

    Raises DataError for a missing medium.
    """
    sources = sources or {}
    media_by_key: dict[str, Medium] = {}  # so that equal media are one object
    token_lists = {
        name: _split_token_lists(table.column(name), dtype) for name, dtype in DTYPES.items()
    }
    all_fields = table.drop_columns(list(DTYPES)).to_pylist()
    for fields in all_fields:
        fields["prompt"], fields["messages"] = (
            _build_messages(fields[name] or (), sources) for name in ("prompt", "messages")
        )
        fields["media"] = _build_media(fields["media"] or (), sources, media_by_key)
    trajectory_rows = [
        (fields, _build_trajectory(fields, {name: lists[i] for name, lists in token_lists.items()}))
        for i, fields in enumerate(all_fields)
    ]
    groups = []
    for _, group_rows in itertools.groupby(trajectory_rows, key=lambda row: row[0]["group_index"]):
        trajectories = list(group_rows)
        first_fields = trajectories[0][0]  # only the first row of a group has the prompt
        groups.append(
            Group(
                first_fields["group"],
                _build_task(first_fields),
                tuple(trajectory for _, trajectory in trajectories),
                first_fields["uses"],
            )
        )
    return groups


def _split_token_lists(column: pa.ChunkedArray, dtype: type) -> list[NDArray[Any] | None]:
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # it has no rows
        return []
    flat = lists.values.to_numpy(zero_copy_only=False).astype(dtype)
    spans = itertools.pairwise(lists.offsets.to_pylist())
    return [
        None if is_null else flat[low:high]
        for is_null, (low, high) in zip(lists.is_null().to_pylist(), spans, strict=True)
    ]


def _build_trajectory(fields: Mapping[str, Any], columns: dict[str, Any]) -> Trajectory:
    if columns["routes"] is not None:
        columns["routes"] = columns["routes"].reshape(fields["routes_shape"])
    masks = columns.pop("allowed_masks")
    if masks is not None:
        index = columns["allowed"]
        # Each mask is the mask of some token.
        columns["allowed"] = AllowedTokens(index, masks.reshape(int(index.max()) + 1, -1))
    return Trajectory(
        **columns,
        attempt=fields["attempt"],
        use=fields["use"],
        temperature=fields["temperature"],
        turns=tuple(Turn(**turn) for turn in fields["turns"]),
        messages=fields["messages"],
        media=fields["media"],
        outcome=_build_outcome(fields),
        metrics=dict(fields["metrics"]),
        extras=json.loads(fields["extras"]) if fields["extras"] else {},
    )


def _build_media(
    entries: Sequence[Mapping[str, Any]],
    sources: Mapping[str, bytes],
    media_by_key: dict[str, Medium],
) -> tuple[PlacedMedium, ...]:
    for entry in entries:
        if entry["key"] not in media_by_key:
            media_by_key[entry["key"]] = Medium(
                entry["key"], entry["kind"], entry["span"], {}, find_source(entry["name"], sources)
            )
    return tuple(PlacedMedium(entry["start"], media_by_key[entry["key"]]) for entry in entries)


def _build_outcome(fields: Mapping[str, Any]) -> Outcome | None:
    kind = fields["outcome"]
    if kind is None:
        return None
    if kind == "scored":
        return Scored(fields["reward"], dict(fields["reward_parts"]))
    if kind == "truncated":
        return Truncated(fields["reward"], dict(fields["reward_parts"]))
    if kind == "unjudged":
        return Unjudged(fields["truncated"])
    return (
        Failed(fields["failure"], fields["failure_detail"])
        if kind == "failed"
        else Cancelled(fields["failure"])
    )


def _build_task(fields: Mapping[str, Any]) -> Task:
    return Task(
        id=fields["task"],
        messages=fields["prompt"],
        answer=None if fields["answer"] is None else json.loads(fields["answer"]),
        environment=fields["environment"],
        seed=fields["task_seed"],
        tag=fields["tag"],
        meta=json.loads(fields["task_meta"]) if fields["task_meta"] else {},
    )


def _build_messages(messages: Any, sources: Mapping[str, bytes]) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=message["role"],
            content=_build_parts(message["parts"], sources)
            if message["content"] is None
            else message["content"],
            tool_calls=tuple(
                ToolCall(call["id"], call["name"], json.loads(call["arguments"]))
                for call in message["tool_calls"] or ()
            ),
            tool_call_id=message["tool_call_id"],
        )
        for message in messages
    )


def _build_parts(parts: Any, sources: Mapping[str, bytes]) -> tuple[Part, ...]:
    return tuple(
        Part(part["type"], restore_value(part["type"], part["value"], sources)) for part in parts
    )
