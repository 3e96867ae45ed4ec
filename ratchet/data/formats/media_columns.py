"""Media in rows: what columns and messages say of them becomes parts of messages, each at its
place.

A place is a part of a message without a file of its own, as {"type": "image"}, or a mark in its
text, as <image>; they take what the columns hold, in order. Without any place, media stand before
the first thing that a user says.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ratchet.config.media_limits import MediaLimits
from ratchet.data.files import reading
from ratchet.data.formats.media import check, embedded, fetch, located, shown
from ratchet.data.jsonl import describe_type
from ratchet.errors import DataError
from ratchet.types import MediaKind, Message, Part

COLUMNS: Mapping[str, MediaKind] = {"images": "image", "audio": "audio", "videos": "video"}
MARK = re.compile(r"(<image>|<audio>|<video>)")
# How parts of messages are called, and the keys under which they say where their file is.
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
SOURCES = ("url", "path", "bytes", "data", "base64")


def read_content(value: list[Any], where: str) -> tuple[Part, ...]:
    """Parts as OpenAI's and Hugging Face's formats write them; one without a file has an empty
    value. Raises DataError."""
    return tuple(_part(item, f"{where}, part {index}") for index, item in enumerate(value))


def _part(item: Any, where: str) -> Part:
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
            "is one "
            f"of {part_types}"
        )
    sources = [values[key] for key in (kind, *PART_TYPES, *SOURCES) if values.get(key) is not None]
    return Part(
        PART_TYPES[kind], media_reference(PART_TYPES[kind], sources[0], where) if sources else ""
    )


def media_reference(kind: MediaKind, value: Any, where: str) -> str:
    """The path, `data:` URL or address of one medium: text, bytes, or an object with them, as
    `datasets` writes images."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return embedded(kind, value).value
    if isinstance(value, dict):
        # OpenAI's input_audio
        if isinstance(value.get("data"), str) and isinstance(value.get("format"), str):
            return f"data:{kind}/{value['format']};base64,{value['data']}"
        column = next(
            (value[key] for key in ("bytes", "url", "path") if value.get(key) is not None), None
        )
        if column is not None:
            return media_reference(kind, column, where)
    raise DataError(
        f"{where} is {describe_type(value)}, must be a path, an address, bytes, or an object with "
        "'bytes' or 'path'"
    )


def read_column(kind: MediaKind, value: Any, where: str) -> list[Part]:
    """One medium or several; null is none."""
    values = [] if value is None else value if isinstance(value, list) else [value]
    return [
        Part(kind, media_reference(kind, one, f"{where}, item {index}"))
        for index, one in enumerate(values)
    ]


@dataclass(frozen=True, slots=True)
class Placing:
    """root: what paths are relative to and may not leave; None: rows may not name paths."""

    root: Path | str | None
    limits: MediaLimits

    def place(
        self, messages: Sequence[Message], media: Mapping[MediaKind, Sequence[Part]], where: str
    ) -> tuple[Message, ...]:
        """The messages with every medium at its place. Marks of a kind that `media` does not name
        are text.

        Raises DataError where there are more or fewer of a kind than places, and for a reference
        that may not be followed.
        """
        split = [_split(message, media) for message in messages]
        first = next((i for i, message in enumerate(messages) if message.role == "user"), 0)
        for kind in reversed(tuple(COLUMNS.values())):
            parts = media.get(kind, ())
            places = sum(part.type == kind and not part.value for said in split for part in said)
            if parts and not places:
                split[first] = [*(Part(kind, "") for _ in parts), *split[first]]
            elif len(parts) != places:
                raise DataError(
                    f"{where}: the text has {places} places for {kind}s, as <{kind}>, and the row "
                    f"has {len(parts)} of them: "
                    "give each its place, or leave all marks out"
                )
        queues = {kind: iter(parts) for kind, parts in media.items()}

        def filled(part: Part) -> Part:
            if part.type == "text":
                return part
            return self._followed(part if part.value else next(queues[part.type]), where)

        return tuple(
            message
            if all(part.type == "text" for part in parts)
            else replace(message, content=tuple(map(filled, parts)))
            for message, parts in zip(messages, split, strict=True)
        )

    def _followed(self, part: Part, where: str) -> Part:
        reference = part.value
        if reference.startswith("data:"):
            return part
        if reference.lower().startswith(("http://", "https://")):
            if not self.limits.urls:
                fetch(reference, where=where, limits=self.limits)  # says so
            return part
        if self.root is None:
            raise DataError(
                f"{where}: {shown(reference)}: nothing says what this path is relative to: set "
                "media_root"
            )
        place = located(reference, where=where, root=self.root)
        if isinstance(place, Path):
            with reading(f"{where}: {shown(reference)}"):
                place.stat()
        return Part(part.type, str(place))

    def check(self, messages: Iterable[Message], where: str) -> None:
        """Looks at the headers of what lies on this machine. Raises DataError."""
        for part in list_media(messages):
            if "://" not in part.value:
                check(part, where=where, limits=self.limits)

    def key(self, message: Message) -> Any:
        """Return a value of a message's text and media, the same on every machine."""
        if isinstance(message.content, str):
            return message.content
        root = f"{Path(self.root).resolve()}/" if isinstance(self.root, Path) else ""
        return [
            part.value if part.type == "text" else part.value.removeprefix(root)
            for part in message.content
        ]


def list_media(messages: Iterable[Message]) -> list[Part]:
    contents = (message.content for message in messages if not isinstance(message.content, str))
    return [part for content in contents for part in content if part.type != "text"]


def without_media(value: Any) -> Any:
    """A value of a row without the files in it: bytes become null, and `data:` URLs empty."""
    if isinstance(value, bytes):
        return None
    if isinstance(value, str):
        return "" if value.startswith("data:") and ";base64," in value[:100] else value
    if isinstance(value, dict):
        held = isinstance(value.get("bytes"), bytes)
        return "" if held else {key: without_media(item) for key, item in value.items()}
    return [without_media(item) for item in value] if isinstance(value, list) else value


def _split(message: Message, kinds: Iterable[MediaKind]) -> list[Part]:
    """The parts of a message; marks of these kinds in what others than the assistant say become
    places."""
    parts = (
        [Part("text", message.content)]
        if isinstance(message.content, str)
        else list(message.content)
    )
    if message.role == "assistant":
        return parts
    marks: dict[str, Part] = {f"<{kind}>": Part(kind, "") for kind in kinds}
    found: list[Part] = []
    for part in parts:
        pieces = MARK.split(part.value) if part.type == "text" else []
        found += (
            [marks.get(piece, Part("text", piece)) for piece in pieces if piece]
            if marks.keys() & {*pieces}
            else [part]
        )
    return found
