"""Rebuild the groups that a step's batch was packed from, from the rows of a record."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ratchet.observe.records.media import find_source, restored
from ratchet.types import (
    Cancelled,
    Failed,
    Group,
    Medium,
    Message,
    Outcome,
    Part,
    Placed,
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
}


def read_groups(table: pa.Table, sources: Mapping[str, bytes] | None = None) -> list[Group]:
    """Return the groups of one step, equal bit for bit to those that the batch was packed from.

    Exceptions: `Medium.inputs` are empty, since the processor computes them again. Values stored
    as JSON (answer, `meta`, tool arguments) come back with JSON's types. `extras` are not read.

    Args:
        sources: encoded media by name.

    Raises DataError for a missing medium.
    """
    media: Mapping[str, bytes] = sources or {}
    media_by_key: dict[str, Medium] = {}  # so that equal media are one object
    tokens = {name: _token_lists(table.column(name), dtype) for name, dtype in DTYPES.items()}
    words = table.drop_columns(list(DTYPES)).to_pylist()
    for word in words:
        word["prompt"], word["messages"] = (
            _messages(word[name] or (), media) for name in ("prompt", "messages")
        )
        word["media"] = _media(word["media"] or (), media, media_by_key)
    rows = [
        (word, _trajectory(word, {name: lists[i] for name, lists in tokens.items()}))
        for i, word in enumerate(words)
    ]
    groups = []
    for _, members in itertools.groupby(rows, key=lambda row: row[0]["group_index"]):
        trajectories = list(members)
        first = trajectories[0][0]
        groups.append(
            Group(
                first["group"],
                _task(first),
                tuple(trajectory for _, trajectory in trajectories),
                first["uses"],
            )
        )
    return groups


def _token_lists(column: pa.ChunkedArray, dtype: type) -> list[NDArray[Any] | None]:
    lists = column.combine_chunks()
    if isinstance(lists, pa.ChunkedArray):  # it has no rows
        return []
    flat = lists.values.to_numpy(zero_copy_only=False).astype(dtype)
    spans = itertools.pairwise(lists.offsets.to_pylist())
    return [
        None if gone else flat[low:high]
        for gone, (low, high) in zip(lists.is_null().to_pylist(), spans, strict=True)
    ]


def _trajectory(word: Mapping[str, Any], columns: dict[str, Any]) -> Trajectory:
    if columns["routes"] is not None:
        columns["routes"] = columns["routes"].reshape(word["routes_shape"])
    return Trajectory(
        **columns,
        attempt=word["attempt"],
        use=word["use"],
        temperature=word["temperature"],
        turns=tuple(Turn(**turn) for turn in word["turns"]),
        messages=word["messages"],
        media=word["media"],
        outcome=_outcome(word),
        metrics=dict(word["metrics"]),
    )


def _media(
    placed: Sequence[Mapping[str, Any]],
    sources: Mapping[str, bytes],
    media_by_key: dict[str, Medium],
) -> tuple[Placed, ...]:
    for one in placed:
        if one["key"] not in media_by_key:
            media_by_key[one["key"]] = Medium(
                one["key"], one["kind"], one["span"], {}, find_source(one["name"], sources)
            )
    return tuple(Placed(one["start"], media_by_key[one["key"]]) for one in placed)


def _outcome(word: Mapping[str, Any]) -> Outcome | None:
    kind = word["outcome"]
    if kind is None:
        return None
    if kind == "scored":
        return Scored(word["reward"], dict(word["reward_parts"]))
    if kind == "truncated":
        return Truncated(word["reward"], dict(word["reward_parts"]))
    if kind == "unjudged":
        return Unjudged(word["truncated"])
    return (
        Failed(word["failure"], word["failure_detail"])
        if kind == "failed"
        else Cancelled(word["failure"])
    )


def _task(word: Mapping[str, Any]) -> Task:
    return Task(
        id=word["task"],
        messages=word["prompt"],
        answer=None if word["answer"] is None else json.loads(word["answer"]),
        environment=word["environment"],
        seed=word["task_seed"],
        tag=word["tag"],
        meta=json.loads(word["task_meta"]) if word["task_meta"] else {},
    )


def _messages(said: Any, sources: Mapping[str, bytes]) -> tuple[Message, ...]:
    return tuple(
        Message(
            role=message["role"],
            content=_parts(message["parts"], sources)
            if message["content"] is None
            else message["content"],
            tool_calls=tuple(
                ToolCall(call["id"], call["name"], json.loads(call["arguments"]))
                for call in message["tool_calls"] or ()
            ),
            tool_call_id=message["tool_call_id"],
        )
        for message in said
    )


def _parts(parts: Any, sources: Mapping[str, bytes]) -> tuple[Part, ...]:
    return tuple(
        Part(part["type"], restored(part["type"], part["value"], sources)) for part in parts
    )
