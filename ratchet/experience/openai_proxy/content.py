"""Read the content of messages: text, and images for models that read them.

Images come as base64 data within the request. Addresses and paths are refused: this process would
otherwise read files or call servers that the client chooses.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ratchet.data.formats.media_columns import join_parts
from ratchet.types import Part

Content = str | tuple[Part, ...]
# Types of image parts: `image_url` of chat completions, `input_image` of Responses.
IMAGE_TYPES = ("image_url", "input_image")
IMAGE_FORMATS = ("image/png", "image/jpeg", "image/gif", "image/webp")


def join_text_parts(content: Any, kinds: Sequence[str]) -> str:
    """Return the text of a content, which is text, a list of text parts, or null.

    Args:
        kinds: The values of `type` that text parts may have.

    Raises:
        ValueError: The content is something else, or has a part that is not text.
    """
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise ValueError("must be text, or a list of text parts")
    return "".join(read_text_part(part, kinds, "this part takes text only") for part in content)


def read_content(content: Any, kinds: Sequence[str]) -> Content:
    """Return a content as text, or as parts if it has images.

    Args:
        content: Text, a list of parts of text and images, null, or the result of this function.
        kinds: The values of `type` that text parts may have.

    Raises:
        ValueError: The content is something else, or has a part that can't be read.
    """
    if isinstance(content, tuple):
        return content
    if not isinstance(content, list):
        return join_text_parts(content, kinds)
    accepted_types = f"this endpoint takes {', '.join((*kinds, *IMAGE_TYPES))}"
    return join_parts(
        [
            _read_image(part)
            if isinstance(part, dict) and part.get("type") in IMAGE_TYPES
            else Part("text", read_text_part(part, kinds, accepted_types))
            for part in content
        ]
    )


def make_image(media_type: str, data: str) -> Part:
    """Return an image from base64 data. Raises ValueError for a format that is not supported."""
    if media_type not in IMAGE_FORMATS:
        raise ValueError(
            f"an image of type '{media_type:.40}' can't be read: send {', '.join(IMAGE_FORMATS)}"
        )
    return Part("image", f"data:{media_type};base64,{data}")


def check_image_role(role: str, content: Content) -> None:
    """Raise ValueError for images in a message of the assistant, as a policy writes none."""
    if role == "assistant" and not isinstance(content, str):
        raise ValueError("a message of the assistant can't hold images: put them into the user's")


def read_text_part(part: Any, kinds: Sequence[str], known: str) -> str:
    """Return the text of a part. Raises ValueError, with `known`, for a part that is not text."""
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if kind not in kinds or not isinstance(part.get("text"), str):
        raise ValueError(f"a part of type '{kind!s:.40}' can't be read: {known}")
    return part["text"]


def _read_image(part: dict[str, Any]) -> Part:
    image = part.get("image_url")
    url = image.get("url") if isinstance(image, dict) else image
    header, _, data = url.partition(";base64,") if isinstance(url, str) else ("", "", "")
    if not header.startswith("data:") or not data:
        raise ValueError(
            "an image must be a data: URL (data:image/png;base64,...): addresses, paths and ids of "
            "files are not read"
        )
    return make_image(header.removeprefix("data:"), data)
