"""Define the columns of a record's Parquet files, which docs/records.md explains.

Each trajectory has one row. The schema is the same in every file of every run: a value that a run
does not have is null. Numbers come first, so that a reader of curves reads only the first part of
each file and no tokens.
"""

from __future__ import annotations

import pyarrow as pa

VERSION = 1  # raised when the columns change; readers ignore columns that they don't know

NUMBER_BY_NAME = pa.map_(pa.string(), pa.float64())
TURN = pa.struct([
    pa.field("start", pa.int32()),
    pa.field("end", pa.int32()),
    pa.field("reward", pa.float64()),
    pa.field("state_key", pa.string()),
    pa.field("terminated", pa.bool_()),
    pa.field("cut", pa.bool_()),
    pa.field("malformed_call", pa.bool_()),
    pa.field("malformed_thinking", pa.bool_()),
])  # fmt: skip
# An image or other medium that the model was shown, and the tokens that it takes.
PLACED = pa.struct([
    pa.field("start", pa.int32()),  # index of its first token in the row
    pa.field("span", pa.int32()),  # number of its tokens
    pa.field("kind", pa.string()),
    pa.field("key", pa.string()),
    pa.field("name", pa.string()),  # name of its bytes in `media/`
])  # fmt: skip
PART = pa.struct([pa.field("type", pa.string()), pa.field("value", pa.string())])
TOOL_CALL = pa.struct(
    [pa.field("id", pa.string()), pa.field("name", pa.string()), pa.field("arguments", pa.string())]
)
MESSAGE = pa.struct([
    pa.field("role", pa.string()),
    pa.field("content", pa.string()),
    pa.field("parts", pa.list_(PART)),
    pa.field("tool_calls", pa.list_(TOOL_CALL)),
    pa.field("tool_call_id", pa.string()),
])  # fmt: skip

# Columns with one number or string for each trajectory.
SCALARS = {
    "step": pa.int32(),
    "stage": pa.string(),
    "group_index": pa.int32(),
    "row": pa.int32(),
    "group": pa.string(),
    "task": pa.string(),
    "environment": pa.string(),
    "tag": pa.string(),
    "task_seed": pa.int64(),
    "uses": pa.int32(),
    "attempt": pa.int32(),
    "use": pa.string(),
    "outcome": pa.string(),
    "truncated": pa.bool_(),
    "failure": pa.string(),
    "reward": pa.float64(),
    "advantage": pa.float64(),
    "weight": pa.float64(),
    "temperature": pa.float64(),
    "length": pa.int32(),
    "generated_tokens": pa.int32(),
    "trained_tokens": pa.int32(),
    "policy_turns": pa.int32(),
    "oldest_version": pa.int32(),
    "newest_version": pa.int32(),
    "rollout_logprob": pa.float64(),
}
DETAILS = {
    "reward_parts": NUMBER_BY_NAME,
    "metrics": NUMBER_BY_NAME,
    "turns": pa.list_(TURN),
    "failure_detail": pa.string(),
    "answer": pa.string(),
    "task_meta": pa.string(),
    "prompt": pa.list_(MESSAGE),
    "messages": pa.list_(MESSAGE),
    "media": pa.list_(PLACED),
    "extras": pa.string(),
}
# Lists with a value for each token, from sampling. `routes` is a flattened array of the shape
# `routes_shape` (tokens, layers, experts), `allowed_masks` the masks of `AllowedTokens`, of which
# `allowed` is the index.
SAMPLED = {
    "tokens": pa.list_(pa.int32()),
    "owner": pa.list_(pa.int8()),
    "trainable": pa.list_(pa.bool_()),
    "rollout_logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(pa.int32()),
    "log_kept_mass": pa.list_(pa.float32()),
    "routes": pa.list_(pa.int16()),
    "routes_shape": pa.list_(pa.int32()),
    "allowed": pa.list_(pa.int32()),
    "allowed_masks": pa.list_(pa.uint8()),
}
# Lists with a value for each token, from the learner: the batch's columns of the same names, null
# if the algorithm has no such column.
LEARNED = {
    name: pa.list_(pa.float32())
    for name in (
        "trained",
        "old_logprobs",
        "ref_logprobs",
        "teacher_logprobs",
        "values",
        "advantages",
        "returns",
        "weights",
    )
} | {"trained": pa.list_(pa.bool_())}

SCHEMA = pa.schema(
    [pa.field(name, kind) for name, kind in (SCALARS | DETAILS | SAMPLED | LEARNED).items()],
    metadata={"ratchet.record": str(VERSION)},
)
