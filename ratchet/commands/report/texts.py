"""Decode the tokens of a rollout one by one with the run's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ratchet.config.registry import KINDS
from ratchet.config.resolve import build, resolve
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import RatchetError
from ratchet.runs.run_dir import RunDirectory

LONGEST = 4  # maximum number of tokens that encode one character
BROKEN = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """A decoder that returns one text per token; joined, they are the whole text.

    Without a tokenizer the texts are token ids in brackets.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._before = [] if tokenizer is None else _something(tokenizer)
        self._of = cache(self._decode)

    def __call__(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            text, used = self._of((ids[start],)), 1
            # The token is only a part of a character: add tokens until the character is complete.
            # Its text stands at its first token; the others get "".
            while BROKEN in text and used < LONGEST and start + used < len(ids):
                used += 1
                text = self._of(tuple(ids[start : start + used]))
            if BROKEN in text:
                text, used = self._of((ids[start],)), 1
            texts += [text] + [""] * (used - 1)
        return texts

    def _decode(self, ids: tuple[int, ...]) -> str:
        if self.tokenizer is None:
            return "".join(f"[{i}]" for i in ids)
        # Decode after another token: some tokenizers drop a leading space of the first token.
        return self.tokenizer.decode([*self._before, *ids], skip_special=False)[len(self._prefix) :]

    @property
    def _prefix(self) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self._before, skip_special=False)


def _something(tokenizer: Tokenizer) -> list[int]:
    """Return a one-token prefix for `_decode`; [] if neither "a" nor "0" can be encoded."""
    for text in "a0":
        try:
            return tokenizer.encode(text)[-1:]
        except RatchetError:
            continue
    return []


def find_tokenizer(directory: RunDirectory) -> Tokenizer | None:
    """Return the trained model's tokenizer, else the recipe's, else None.

    The recipe's is used only if its kind is built in and its files are on this machine: reading a
    run neither downloads anything nor runs code that the run names.
    """
    try:
        if (directory.path / "model" / "tokenizer.json").is_file():
            return load_tokenizer(directory.path / "model")
        config = directory.read_config()
        section = {"kind": "auto", **config.get("tokenizer", {})}
        model = config.get("model", {}).get("path")
        if section["kind"] not in KINDS["tokenizer"] or (
            section["kind"] == "auto" and not _is_local(section, model)
        ):
            return None
        return build(resolve("tokenizer", section), model)
    except RatchetError:
        return None


def _is_local(section: dict[str, object], model: str | None) -> bool:
    return Path(str(section.get("path") or model or "?")).is_dir()
