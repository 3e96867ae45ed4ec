"""The text of each token of a rollout, by the run's own tokenizer."""

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

LONGEST = 4  # tokens that one character is spread over
BROKEN = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Texts of tokens one by one, such that joined they are the text. Without a tokenizer they are
    ids in brackets."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._before = [] if tokenizer is None else _something(tokenizer)
        self._of = cache(self._decode)

    def __call__(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            text, used = self._of((ids[start],)), 1
            # a part of a character
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
        # After another token, as the first of a text would lose the space in front of it.
        return self.tokenizer.decode([*self._before, *ids], skip_special=False)[len(self._prefix) :]

    @property
    def _prefix(self) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self._before, skip_special=False)


def _something(tokenizer: Tokenizer) -> list[int]:
    """Return a token with a text of its own; [] if neither letters nor digits have one."""
    for text in "a0":
        try:
            return tokenizer.encode(text)[-1:]
        except RatchetError:
            continue
    return []


def find_tokenizer(directory: RunDirectory) -> Tokenizer | None:
    """Return the trained model's tokenizer, else the recipe's, if it is built in or on this
    machine's disk. Reading a run neither downloads anything nor runs code that the run names."""
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
