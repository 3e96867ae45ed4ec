"""What the rows of a batch hold, and the other shape that a generator may have.

B = rows of a batch, S = tokens of its longest row, L = tokens of one message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.types import Message, Role

# A conversation: each entry has `role` and `content`, `token_ids` (int64 [L]; what all together say
# to the model, end to end), and, where the policy wrote it and it was asked for,
# `generation_logprobs` (float32 [L]).
MessageLog = list[dict[str, Any]]


class DatumSpec(TypedDict):
    """One sample. `length`: tokens of the prompt. `extra_env_info`: what the environment is handed
    as `metadata`. `loss_multiplier`: 0 keeps the row out of the loss. `idx`: its place in the data.
    `task_name`: which environment answers."""

    message_log: MessageLog
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]


class GenerationDatumSpec(TypedDict):
    """Prompts: `input_ids` int64 [B, S], padded on the right, `input_lengths` int64 [B],
    `stop_strings` of each row."""

    input_ids: Tensor
    input_lengths: Tensor
    stop_strings: NotRequired[list[list[str] | None]]


class GenerationOutputSpec(TypedDict):
    """`output_ids` int64 [B, S]: prompt and completion, padded on the right; `generation_lengths`
    and `unpadded_sequence_lengths` int64 [B]: tokens of the completion, and of both; `logprobs`
    float32 [B, S], 0 on the prompt; `truncated` bool [B]: cut off by a budget."""

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: NotRequired[Tensor]
    truncated: NotRequired[Tensor]


class GenerationInterface(ABC):
    """A generator that takes a whole batch at once. May have `generate_async(data, greedy)` too, an
    async iterator of (row, batch of that one row) as they are done. It draws as it was set up to:
    of a `Sampling` it gets the stop strings."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]: ...


def collate(data: Sequence[DatumSpec]) -> BatchedDataDict[DatumSpec]:
    """A batch of samples; `length` and `loss_multiplier` become tensors. What only some of them
    have is None for the others."""
    names = dict.fromkeys(name for datum in data for name in datum)
    batch = BatchedDataDict[DatumSpec](
        {name: [datum.get(name) for datum in data] for name in names}
    )
    for name, dtype in (("length", torch.int64), ("loss_multiplier", torch.float32)):
        if name in batch:
            batch[name] = torch.tensor(batch[name], dtype=dtype)
    return batch


ROLES: Mapping[str, Role] = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "environment": "user",  # chat templates know of no environment
}


def as_message(entry: Mapping[str, Any]) -> Message:
    """An entry of a log as chat templates read it. Raises DataError for a role that is none."""
    role = str(entry.get("role"))
    if role not in ROLES or not isinstance(entry.get("content"), str):
        raise DataError(
            f"{dict(entry)!r:.120} is no message: it needs a role of {', '.join(ROLES)}, and "
            "content as text"
        )
    return Message(ROLES[role], entry["content"])
