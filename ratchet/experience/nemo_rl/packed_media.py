"""Media of a batch as columns: from message logs, from placed media, and for a model's forward.

B = rows of a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from ratchet.errors import DataError
from ratchet.experience.nemo_rl.packed_tensor import PackedSegment, PackedTensor, PackedTensorError
from ratchet.types import PlacedMedium

# Tensors [B, S] that say of each token whether it stands for an image or a video.
TOKEN_TYPE_KEYS = ("token_type_ids", "mm_token_type_ids")
PIXEL_KEYS = ("pixel_values", "pixel_values_videos")
# Columns that must have as many segments in each row: pixels, and the sizes of their images.
COUPLED_KEYS = (
    ("pixel_values", "image_grid_thw"),
    ("pixel_values", "imgs_sizes"),
    ("pixel_values", "num_frames"),
    ("pixel_values_videos", "video_grid_thw"),
)
# Columns of media for a generator's own processor, and the `type` of a content part with a medium.
GENERATOR_MEDIA_KEYS = frozenset({"vllm_content", "vllm_images", "vllm_videos", "vllm_audios"})
MEDIA_PART_TYPES = frozenset(
    f"{prefix}{kind}{suffix}"
    for kind in ("image", "video", "audio")
    for prefix, suffix in (("", ""), ("input_", ""), ("", "_url"))
)


def select_media(
    columns: Mapping[str, Any],
    *,
    as_tensors: bool,
    device: str | torch.device | None,
    pixel_dtype: torch.dtype | None,
) -> dict[str, Any]:
    """Return the columns of media. `BatchedDataDict.get_multimodal_dict` describes it."""
    media: dict[str, Any] = {}
    if _has_placed_media(columns.get("media")):
        media |= pack_placed_media(columns["media"])
    for name, column in columns.items():
        if isinstance(column, PackedTensor) or name in TOKEN_TYPE_KEYS:
            media[name] = column
    if pixel_dtype is not None:
        media |= {name: media[name].to_dtype(pixel_dtype) for name in PIXEL_KEYS if name in media}
    if not as_tensors:
        return media
    _check_coupled_columns(media)
    return {
        name: column.as_tensor(device) if isinstance(column, PackedTensor) else column.to(device)
        for name, column in media.items()
    }


def _check_coupled_columns(media: Mapping[str, Any]) -> None:
    """Raise PackedTensorError if pixels and sizes differ in their numbers of segments.

    Without deduplication a row is one tensor, which may have several images.
    """
    for names in COUPLED_KEYS:
        coupled = [media[name] for name in names if isinstance(media.get(name), PackedTensor)]
        if len(coupled) < 2 or not any(column.deduplication_enabled for column in coupled):
            continue
        counts = [column.logical_segment_counts_by_row() for column in coupled]
        if counts[0] != counts[1]:
            raise PackedTensorError(
                f"columns '{names[0]}' and '{names[1]}' must have the same ordered per-row segment "
                f"counts: they have {counts[0]} and {counts[1]}"
            )


def _has_placed_media(column: Any) -> bool:
    """True if a column's rows are placed media. A batch may have another column of that name."""
    return isinstance(column, list) and all(
        isinstance(row, tuple) and all(isinstance(placed, PlacedMedium) for placed in row)
        for row in column
    )


def pack_placed_media(rows: Sequence[Sequence[PlacedMedium]]) -> dict[str, PackedTensor]:
    """Return the inputs of placed media by name: B rows, with a segment for each medium.

    Media with equal keys share a segment.
    """
    names = dict.fromkeys(
        name for placed in chain.from_iterable(rows) for name in placed.medium.inputs
    )
    packed: dict[str, PackedTensor] = {}
    for name in names:
        column = PackedTensor([None] * len(rows), dim_to_pack=0).enable_deduplication()
        stored: dict[str, PackedSegment] = {}
        for row, placed_media in enumerate(rows):
            media = [placed.medium for placed in placed_media if name in placed.medium.inputs]
            for medium in media:
                if medium.key not in stored:
                    tensor = torch.as_tensor(medium.inputs[name])
                    stored[medium.key] = PackedSegment(tensor, f"{medium.key}/{name}")
            column.rows[row] = tuple(stored[medium.key] for medium in media)
        packed[name] = column
    return packed


def pack_logs(logs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, PackedTensor]:
    """Return the PackedTensors of message logs by key: a row for each log.

    The row has the segments of all messages in their order, and none if the log lacks the key.

    Raises:
        DataError: A key has a PackedTensor in one message, and another value in another one.
    """
    names = dict.fromkeys(
        name
        for entry in chain.from_iterable(logs)
        for name, value in entry.items()
        if isinstance(value, PackedTensor)
    )
    columns: dict[str, PackedTensor] = {}
    for name in names:
        by_row = [[entry[name] for entry in log if name in entry] for log in logs]
        for row, values in enumerate(by_row):
            if not all(isinstance(value, PackedTensor) for value in values):
                raise DataError(
                    f"'{name}' is a PackedTensor in some messages, and another value in "
                    f"message_log {row}. Leave it out of messages without media"
                )
        empty = PackedTensor.empty_rows_like(next(chain.from_iterable(by_row)), 1)
        columns[name] = PackedTensor.concat(
            [PackedTensor.merge_segments(values) if values else empty for values in by_row]
        )
    return columns


def check_media_are_in_content(entry: Mapping[str, Any]) -> None:
    """Raise DataError if a message has PackedTensors and only text, which generators read alone."""
    name = next((name for name, value in entry.items() if isinstance(value, PackedTensor)), None)
    if name is not None and isinstance(entry.get("content"), str):
        raise DataError(
            f"a message of role {entry.get('role')} has '{name}' as a PackedTensor and only text "
            "as content, so that a generator would not read it. Give its media as parts of the "
            "content"
        )


def list_shared_media(column: str, item: Any) -> list[Any]:
    """Return the media in an item of a list column, which copies of the item can share.

    These are the values of columns, keys and content parts that hold media. PackedTensors in the
    item get deduplication enabled.
    """
    return list(_iterate_media(item, holds_media=column in GENERATOR_MEDIA_KEYS))


def _iterate_media(item: Any, *, holds_media: bool) -> Iterator[Any]:
    if isinstance(item, PackedTensor):
        item.enable_deduplication()
    elif isinstance(item, PlacedMedium):
        yield item.medium
    elif isinstance(item, Mapping):
        is_part = item.get("type") in MEDIA_PART_TYPES
        for name, value in item.items():
            inside = holds_media or is_part or name in GENERATOR_MEDIA_KEYS
            yield from _iterate_media(value, holds_media=inside)
    elif isinstance(item, list | tuple):
        for value in item:
            yield from _iterate_media(value, holds_media=holds_media)
    elif holds_media:
        yield item
