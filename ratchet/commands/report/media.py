"""Embed images, audio clips and videos of rollouts as `data:` URLs, so a page loads no other
files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ratchet.config.media_limits import MediaConfig
from ratchet.data.formats.media import decode_image, embed_bytes
from ratchet.errors import RatchetError
from ratchet.observe.records.media import parse_placeholder
from ratchet.types import MediaKind

MAX_UNSCALED_BYTES = 2**16  # larger images are scaled down
MAX_SIDE = 640  # pixels of a scaled image
MAX_BYTES = 2**22  # larger media are left out
# Types that can't hold markup. SVG images can.
ALLOWED_TYPES = re.compile(r"data:(image/(png|jpeg|gif|webp|bmp)|audio/[\w.+-]+|video/[\w.+-]+);")


def add_media_names(
    messages: Sequence[Mapping[str, Any]], placed: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return the messages of a record's row, with the name of each part's medium as `media`.

    The name comes from the part's value. If the value has no name, and the row has as many parts as
    media, the parts get the names of the media in order. Otherwise the name is None.

    Args:
        messages: The messages of the row.
        placed: The row's `media`, in the order in which the model got them.
    """
    parts = [
        part for message in messages for part in message["parts"] or () if part["type"] != "text"
    ]
    ordered_names = (
        [medium["name"] for medium in placed] if len(placed) == len(parts) else [None] * len(parts)
    )
    names = iter(
        [
            parse_placeholder(part["value"]) or name
            for part, name in zip(parts, ordered_names, strict=True)
        ]
    )
    return [
        {
            **message,
            "parts": message["parts"]
            and [
                part if part["type"] == "text" else {**part, "media": next(names)}
                for part in message["parts"]
            ],
        }
        for message in messages
    ]


def collect_names(details: Iterable[Mapping[str, Any]]) -> dict[str, MediaKind]:
    """Return the kind of each medium in the rollouts, by the medium's name."""
    parts = (
        part
        for detail in details
        for message in detail["messages"]
        for part in message["parts"] or ()
    )
    return {part["media"]: part["type"] for part in parts if part.get("media")}


def make_data_url(kind: MediaKind, source: bytes) -> str | None:
    """Return a medium as a `data:` URL.

    None if the medium is unreadable, too large, or of a type that browsers do not show.
    """
    try:
        if kind == "image" and len(source) > MAX_UNSCALED_BYTES:
            source = _scale_down(source)
    except RatchetError:
        return None
    url = embed_bytes(kind, source).value if len(source) <= MAX_BYTES else ""
    return url if ALLOWED_TYPES.match(url) else None


def _scale_down(source: bytes) -> bytes:
    image = decode_image(source, where="the record", limits=MediaConfig())
    image.thumbnail((MAX_SIDE, MAX_SIDE))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=85)
    return buffer.getvalue()
