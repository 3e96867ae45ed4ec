"""Find stop strings in the decoded text, also across token boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ratchet.errors import RequestFailed

SHORTEST_WINDOW = 32  # tokens; a shorter window is not trimmed


class TextDecoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, ids: list[int], /) -> str: ...


class StopStrings:
    """A detector of stop strings in one completion, fed token by token.

    Only the end of the completion is decoded: a window of tokens whose text is at least twice as
    long as the longest stop string. A tokenizer may decode the start of a window differently (it
    may drop a space or see half a character). The extra length keeps such a difference from
    affecting a match.
    """

    def __init__(self, strings: Sequence[str], tokenizer: TextDecoder) -> None:
        self.strings = tuple(strings)
        self.tokenizer = tokenizer
        # A trimmed window decodes to more than this number of characters.
        self.min_window_characters = 2 * max(map(len, self.strings))
        self.window: list[int] = []

    def feed(self, token: int) -> bool:
        """Add a token and return True if a stop string is now complete.

        A character of several tokens is matched only after its last token. Raises RequestFailed if
        the tokenizer can't decode.
        """
        self.window.append(token)
        text = self._decode(self.window)
        if any(string in text for string in self.strings):
            return True
        if len(self.window) >= SHORTEST_WINDOW:
            last_half = self.window[len(self.window) // 2 :]
            if len(self._decode(last_half)) > self.min_window_characters:
                self.window = last_half
        return False

    def _decode(self, tokens: list[int]) -> str:
        try:
            return self.tokenizer.decode(tokens)
        # Tokenizers raise various types; each concerns these tokens, so this request alone fails.
        except Exception as error:
            raise RequestFailed(
                f"the tokenizer can't decode {tokens[-8:]}, so stop strings can't be found "
                f"({type(error).__name__}: {error}). Use stop_ids in place of stop."
            ) from error
