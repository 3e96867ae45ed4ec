"""The types of a batch's rows, and the interface of generators that take a whole batch.

B = rows of a batch, S = tokens of its longest row, L = tokens of one message.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

import torch
from torch import Tensor

from ratchet.data.formats.media import embed, is_pillow_image
from ratchet.data.formats.media_columns import join_parts, read_content
from ratchet.errors import DataError
from ratchet.experience.nemo_rl.batched_data_dict import BatchedDataDict
from ratchet.experience.nemo_rl.packed_media import check_media_are_in_content
from ratchet.types import Message, PlacedMedium, Role

# A conversation. Each entry has `role`, `content` and `token_ids` (int64 [L]); the tokens of all
# entries, end to end, are the model's input. An entry that the policy generated may have
# `generation_logprobs` (float32 [L]).
MessageLog = list[dict[str, Any]]


class DatumSpec(TypedDict):
    """A sample of a batch.

    Fields:
        message_log: The prompt.
        length: Number of tokens in the prompt.
        extra_env_info: Passed to the environment as `metadata`.
        loss_multiplier: 0 excludes the row from the loss.
        idx: Index of the sample in the data.
        task_name: Name of the environment.
        stop_strings: The stop strings of the sample.
    """

    message_log: MessageLog
    length: int
    extra_env_info: dict[str, Any] | None
    loss_multiplier: float
    idx: int
    task_name: NotRequired[str]
    stop_strings: NotRequired[list[str] | None]


class GenerationDatumSpec(TypedDict):
    """The prompts of a batch.

    Fields:
        input_ids: int64 [B, S], padded on the right.
        input_lengths: int64 [B].
        stop_strings: The stop strings of each row.
        media: The media of each row, with their places in its tokens; absent if no row has any.
            `get_multimodal_dict` returns their inputs as columns.
    """

    input_ids: Tensor
    input_lengths: Tensor
    media: NotRequired[list[tuple[PlacedMedium, ...]]]
    stop_strings: NotRequired[list[list[str] | None]]


class GenerationOutputSpec(TypedDict):
    """The output of a generator.

    Fields:
        output_ids: int64 [B, S], prompt and completion, padded on the right.
        generation_lengths: int64 [B], number of tokens in the completion.
        unpadded_sequence_lengths: int64 [B], number of tokens in prompt and completion.
        logprobs: float32 [B, S], 0 on the prompt.
        truncated: bool [B], True if the row was cut off by a budget.
    """

    output_ids: Tensor
    generation_lengths: Tensor
    unpadded_sequence_lengths: Tensor
    logprobs: NotRequired[Tensor]
    truncated: NotRequired[Tensor]


class GenerationInterface(ABC):
    """A generator that takes a whole batch.

    It may also have `generate_async(data, greedy)`, an async iterator of (row, batch of that one
    row) in the order of completion. A batch generator samples with its own parameters. It gets only
    the stop strings of a `Sampling`, and whether to be greedy.

    `PolicyGeneration` adds upstream's calls before and after a generation and a refit to a
    generator of Ratchet. The rollout functions do not make these calls.
    """

    reads_media: bool = False
    """True if `generate` reads the column `media`. Otherwise prompts with media are refused."""

    @abstractmethod
    def generate(
        self, data: BatchedDataDict[GenerationDatumSpec], greedy: bool = False
    ) -> BatchedDataDict[GenerationOutputSpec]: ...


def collate(data: Sequence[DatumSpec]) -> BatchedDataDict[DatumSpec]:
    """Return a batch of samples. `length` and `loss_multiplier` become tensors.

    A field that a sample lacks is None in its row, if another sample has the field.
    """
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
    "environment": "user",  # chat templates have no such role
}


def as_message(entry: Mapping[str, Any]) -> Message:
    """Return an entry of a log as a message for chat templates.

    Content is text, or a list of parts in OpenAI's or Hugging Face's format. The image of a part
    may be one of Pillow.

    Raises:
        DataError: The role is unknown, the content is neither text nor such parts, or the entry has
            media as PackedTensors alone.
    """
    check_media_are_in_content(entry)
    role, content = str(entry.get("role")), entry.get("content")
    if role not in ROLES or not isinstance(content, str | list):
        raise DataError(
            f"{dict(entry)!r:.120} is not a message. Give it a role of {', '.join(ROLES)}, and "
            "content as text or as a list of parts"
        )
    if isinstance(content, str):
        return Message(ROLES[role], content)
    parts = read_content(embed_images(content), f"content of role {role}")
    return Message(ROLES[role], join_parts(parts))


def embed_images(content: Any) -> Any:
    """Return the content of a message with each image of Pillow as a `data:` URL."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "image", "image": embed(part["image"]).value}
        if isinstance(part, Mapping) and is_pillow_image(part.get("image"))
        else part
        for part in content
    ]
