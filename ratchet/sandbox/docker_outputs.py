"""Read the stdout and stderr of a command in a container, within limits."""

from __future__ import annotations

from ratchet.sandbox.base import (
    Reason,
)
from ratchet.sandbox.docker_api import DockerStream


class CommandOutputs:
    """The stdout and stderr of one command, each up to `max_bytes`.

    end: the marker that ends each of the two.
    """

    def __init__(self, max_bytes: int, end: str) -> None:
        self.texts = {1: bytearray(), 2: bytearray()}
        self._max_bytes = max_bytes
        self._end = end.encode()

    def listen(self, stream: DockerStream, deadline: float) -> Reason | None:
        """Read until both outputs are complete or the stream ends.

        Returns Reason.WALL or Reason.OUTPUT if a limit was exceeded, else None.
        """
        try:
            for kind, data in stream.frames(deadline):
                text = self.texts[2 if kind == 2 else 1]
                text += data
                if len(text) > self._max_bytes + len(self._end):
                    return Reason.OUTPUT
                if self.is_complete:
                    break
        except TimeoutError:
            return Reason.WALL
        exceeded = any(len(text) > self._max_bytes for text in self._without_end())
        return Reason.OUTPUT if exceeded else None

    @property
    def is_complete(self) -> bool:
        return all(text.endswith(self._end) for text in self.texts.values())

    def texts_without_end(self) -> tuple[bytes, bytes]:
        first, second = (text[: self._max_bytes] for text in self._without_end())
        return first, second

    def _without_end(self) -> list[bytes]:
        return [bytes(text).removesuffix(self._end) for text in self.texts.values()]
