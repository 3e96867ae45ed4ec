"""Read the stdout and stderr of a command in a container, within limits."""

from __future__ import annotations

from ratchet.sandbox.base import (
    Reason,
)
from ratchet.sandbox.docker_api import DockerStream


class CommandOutputs:
    """The stdout and stderr of one command, each up to `max_bytes`.

    Args:
        end_marker: The text that ends each of the two outputs.
    """

    def __init__(self, max_bytes: int, end_marker: str) -> None:
        self.texts = {1: bytearray(), 2: bytearray()}
        self._max_bytes = max_bytes
        self._end_marker = end_marker.encode()

    def read_to_end(self, stream: DockerStream, deadline: float) -> Reason | None:
        """Read until both outputs are complete or the stream ends.

        Returns Reason.WALL or Reason.OUTPUT if a limit was exceeded, else None.
        """
        try:
            for stream_number, data in stream.iter_frames(deadline):
                text = self.texts[2 if stream_number == 2 else 1]
                text += data
                if len(text) > self._max_bytes + len(self._end_marker):
                    return Reason.OUTPUT
                if self.is_complete:
                    break
        except TimeoutError:
            return Reason.WALL
        is_over_limit = any(len(text) > self._max_bytes for text in self._remove_end_markers())
        return Reason.OUTPUT if is_over_limit else None

    @property
    def is_complete(self) -> bool:
        return all(text.endswith(self._end_marker) for text in self.texts.values())

    def get_truncated_texts(self) -> tuple[bytes, bytes]:
        """Return stdout and stderr without their end markers, each cut to `max_bytes`."""
        first, second = (text[: self._max_bytes] for text in self._remove_end_markers())
        return first, second

    def _remove_end_markers(self) -> list[bytes]:
        return [bytes(text).removesuffix(self._end_marker) for text in self.texts.values()]
