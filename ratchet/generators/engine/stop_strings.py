"""Stop strings: found in the decoded text, wherever the tokens' boundaries lie."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ratchet.errors import RequestFailed

SHORTEST_WINDOW = 32  # tokens; below it, trimming costs more than it saves


class TextDecoder(Protocol):
    """What stop strings need of a tokenizer."""

    def decode(self, ids: list[int], /) -> str: ...


class StopStrings:
    """Watches one completion, token by token.

    Only the end of the completion is decoded: a window of tokens with at least twice the longest
    stop string in text. What a tokenizer does differently at the start of a text (a space dropped,
    half a character) thus can't touch a match.
    """

    def __init__(self, strings: Sequence[str], tokenizer: TextDecoder) -> None:
        self.strings, self.tokenizer = tuple(strings), tokenizer
        self.margin = 2 * max(map(len, self.strings))
        self.window: list[int] = []

    def feed(self, token: int) -> bool:
        """Whether a stop string is complete now. A character of several tokens counts from its last
        one on. Raises RequestFailed where the tokenizer can't decode."""
        self.window.append(token)
        text = self._decoded(self.window)
        if any(string in text for string in self.strings):
            return True
        if len(self.window) >= SHORTEST_WINDOW:
            half = self.window[len(self.window) // 2 :]
            if len(self._decoded(half)) > self.margin:
                self.window = half
        return False

    def _decoded(self, tokens: list[int]) -> str:
        try:
            return self.tokenizer.decode(tokens)
        # whatever a tokenizer raises, it concerns these tokens, and with them this request
        except Exception as error:
            raise RequestFailed(
                f"the tokenizer can't decode {tokens[-8:]}, so stop strings can't be found "
                f"({type(error).__name__}: {error}). "
                "Use stop_ids in place of stop."
            ) from error
