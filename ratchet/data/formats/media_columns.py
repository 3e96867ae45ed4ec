"""Put the images, audio clips and videos of a row into the parts of its messages.

A place for a medium is a message part without a file, such as {"type": "image"}, or a mark in the
text, such as <image>. The media of the columns fill the places in order. If a kind of media has no
place, its media are put at the beginning of the first user message.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.config.media_limits import MediaLimits
from ratchet.data.files import convert_read_errors
from ratchet.data.formats.media import check_media, embed_bytes, fetch, locate, shorten_reference
from ratchet.data.jsonl import describe_type
from ratchet.errors import DataError
from ratchet.types import MediaKind, Message, Part

MEDIA_COLUMNS: Mapping[str, MediaKind] = {"images": "image", "audio": "audio", "videos": "video"}
MARK_PATTERN = re.compile(r"(<image>|<audio>|<video>)")
# Types of media parts. A part has its file under one of these keys, or under one of SOURCE_KEYS.
PART_TYPES: Mapping[str, MediaKind] = {
    "image": "image",
    "image_url": "image",
    "input_image": "image",
    "audio": "audio",
    "audio_url": "audio",
    "input_audio": "audio",
    "video": "video",
    "video_url": "video",
}
SOURCE_KEYS = ("url", "path", "bytes", "data", "base64")


def read_content(value: list[Any], where: str) -> tuple[Part, ...]:
    """Parse the parts of a message in OpenAI's or Hugging Face's format. Raises DataError.

    A place for a medium becomes a part with an empty value.
    """
    return tuple(_read_part(item, f"{where}, part {index}") for index, item in enumerate(value))


def join_parts(parts: Sequence[Part]) -> str | tuple[Part, ...]:
    """Return the joined text of the parts, or the parts if some of them are not text."""
    if all(part.type == "text" for part in parts):
        return "".join(part.value for part in parts)
    return tuple(parts)


def _read_part(item: Any, where: str) -> Part:
    if isinstance(item, str):
        return Part("text", item)
    values: Mapping[str, Any] = item if isinstance(item, dict) else {}
    kind = str(values.get("type"))
    if kind in ("text", "input_text", "output_text") and isinstance(values.get("text"), str):
        return Part("text", values["text"])
    if kind not in PART_TYPES:
        part_types = ", ".join(("text", *PART_TYPES))
        raise DataError(
            f"{where} is {describe_type(item)} of type '{kind:.40}', must be an object whose type "
            f"is one of {part_types}"
        )
    sources = [
        values[key] for key in (kind, *PART_TYPES, *SOURCE_KEYS) if values.get(key) is not None
    ]
    return Part(
        PART_TYPES[kind],
        get_media_reference(PART_TYPES[kind], sources[0], where) if sources else "",
    )


def get_media_reference(kind: MediaKind, value: Any, where: str) -> str:
    """Return the path, `data:` URL or address of one medium.

    Args:
        value: A string, bytes, or an object with one of them, as `datasets` writes images.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return embed_bytes(kind, value).value
    if isinstance(value, dict):
        # OpenAI's input_audio
        if isinstance(value.get("data"), str) and isinstance(value.get("format"), str):
            return f"data:{kind}/{value['format']};base64,{value['data']}"
        content = next(
            (value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None
        )
        if content is not None:
            return get_media_reference(kind, content, where)
    raise DataError(
        f"{where} is {describe_type(value)}, must be a path, an address, bytes, or an object with "
        "'bytes' or 'path'"
    )


def read_column(kind: MediaKind, value: Any, where: str) -> list[Part]:
    """Return the media of a column's value: one medium, a list of them, or null for none."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    return [
        Part(kind, get_media_reference(kind, item, f"{where}, item {index}"))
        for index, item in enumerate(values)
    ]


@dataclass(frozen=True, slots=True)
class MediaPlacer:
    """Puts the media of rows into messages, and checks their paths and sizes."""

    root: Path | str | None
    """Directory or store that paths are relative to and may not leave; None: rows may not name
    paths."""
    limits: MediaLimits

    def place(
        self, messages: Sequence[Message], media: Mapping[MediaKind, Sequence[Part]], where: str
    ) -> tuple[Message, ...]:
        """Return the messages with every medium at its place.

        Marks of kinds that are not keys of `media` stay text. Raises DataError if the numbers of
        media and places of a kind differ, or if a reference is not allowed.
        """
        parts_by_message = [_split_at_marks(message, media) for message in messages]
        first_user = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
        # Each kind is put in front of the previous one, so reversed order puts images first.
        for kind in reversed(tuple(MEDIA_COLUMNS.values())):
            media_parts = media.get(kind, ())
            n_places = sum(
                part.type == kind and not part.value for parts in parts_by_message for part in parts
            )
            if media_parts and not n_places:
                new_places = [Part(kind, "") for _ in media_parts]
                parts_by_message[first_user] = [*new_places, *parts_by_message[first_user]]
            elif len(media_parts) != n_places:
                raise DataError(
                    f"{where}: the text has {n_places} marks <{kind}>, and the row has "
                    f"{len(media_parts)} {kind}s: write one mark for each, or none at all"
                )
        queues = {kind: iter(parts) for kind, parts in media.items()}

        def fill_place(part: Part) -> Part:
            if part.type == "text":
                return part
            return self._resolve(part if part.value else next(queues[part.type]), where)

        return tuple(
            message
            if all(part.type == "text" for part in parts)
            else replace(message, content=tuple(map(fill_place, parts)))
            for message, parts in zip(messages, parts_by_message, strict=True)
        )

    def _resolve(self, part: Part, where: str) -> Part:
        """Return the part with the location of its file. Raises DataError if it may not be read."""
        reference = part.value
        if reference.startswith("data:"):
            return part
        if reference.lower().startswith(("http://", "https://")):
            if not self.limits.urls:
                fetch(reference, where=where, limits=self.limits)  # raises: URLs are disabled
            return part
        if self.root is None:
            raise DataError(
                f"{where}: {shorten_reference(reference)}: it is unknown what this path is "
                "relative to: set media_root"
            )
        location = locate(reference, where=where, root=self.root)
        if isinstance(location, Path):
            with convert_read_errors(f"{where}: {shorten_reference(reference)}"):
                location.stat()  # raises if the file is missing
        return Part(part.type, str(location))

    def check_media(self, messages: Iterable[Message], where: str) -> None:
        """Raise DataError for an unreadable or too large medium. Media at addresses are skipped."""
        for part in list_media(messages):
            if "://" not in part.value:
                check_media(part, where=where, limits=self.limits)

    def make_content_key(self, message: Message) -> Any:
        """Return the message's text and media, to identify a row on any machine.

        Paths are relative to `root`.
        """
        if isinstance(message.content, str):
            return message.content
        root = f"{Path(self.root).resolve()}/" if isinstance(self.root, Path) else ""
        return [
            part.value if part.type == "text" else part.value.removeprefix(root)
            for part in message.content
        ]


def list_media(messages: Iterable[Message]) -> list[Part]:
    """Return the media parts of all messages, in order."""
    contents = (message.content for message in messages if not isinstance(message.content, str))
    return [part for content in contents for part in content if part.type != "text"]


def strip_media(value: Any) -> Any:
    """Return a value of a row without embedded files.

    Bytes become null; `data:` URLs and objects with bytes become empty strings.
    """
    if isinstance(value, bytes):
        return None
    if isinstance(value, str):
        return "" if value.startswith("data:") and ";base64," in value[:100] else value
    if isinstance(value, dict):
        has_bytes = isinstance(value.get("bytes"), bytes)
        return "" if has_bytes else {key: strip_media(item) for key, item in value.items()}
    return [strip_media(item) for item in value] if isinstance(value, list) else value


def _split_at_marks(message: Message, kinds: Iterable[MediaKind]) -> list[Part]:
    """Return the parts of a message, with places instead of marks of these kinds.

    Marks in assistant messages stay text.
    """
    parts = (
        [Part("text", message.content)]
        if isinstance(message.content, str)
        else list(message.content)
    )
    if message.role == "assistant":
        return parts
    marks: dict[str, Part] = {f"<{kind}>": Part(kind, "") for kind in kinds}
    split_parts: list[Part] = []
    for part in parts:
        pieces = MARK_PATTERN.split(part.value) if part.type == "text" else []
        split_parts += (
            [marks.get(piece, Part("text", piece)) for piece in pieces if piece]
            if marks.keys() & {*pieces}
            else [part]
        )
    return split_parts
