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

MAX_TOKENS_PER_CHARACTER = 4
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """A decoder that returns one text for each token. The joined texts are the whole text.

    Without a tokenizer the texts are token ids in brackets.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._prefix_ids = [] if tokenizer is None else _encode_prefix(tokenizer)
        self._decode_cached = cache(self._decode)
        # Names of control tokens by id, such as <|im_end|>.
        self._names = {} if tokenizer is None else _list_special_names(tokenizer)

    def __call__(self, ids: Sequence[int]) -> list[str]:
        texts: list[str] = []
        while len(texts) < len(ids):
            start = len(texts)
            if ids[start] in self._names:
                texts.append(self._names[ids[start]])
                continue
            text, n_tokens = self._decode_cached((ids[start],)), 1
            # If the token is only a part of a character, add tokens until the character is
            # complete. The first token gets the text, and the others get "".
            while (
                REPLACEMENT in text
                and n_tokens < MAX_TOKENS_PER_CHARACTER
                and start + n_tokens < len(ids)
            ):
                n_tokens += 1
                text = self._decode_cached(tuple(ids[start : start + n_tokens]))
            if REPLACEMENT in text:
                text, n_tokens = self._decode_cached((ids[start],)), 1
            texts += [text] + [""] * (n_tokens - 1)
        return texts

    def find_special(self, ids: Sequence[int]) -> list[int]:
        """Return the positions of control tokens.

        The texts alone do not tell: ordinary tokens can also spell `<|im_end|>`.
        """
        return [position for position, token in enumerate(ids) if token in self._names]

    def _decode(self, ids: tuple[int, ...]) -> str:
        if self.tokenizer is None:
            return "".join(f"[{i}]" for i in ids)
        # Another token is decoded in front, because some tokenizers drop a leading space of the
        # first token.
        return self.tokenizer.decode([*self._prefix_ids, *ids], skip_special=False)[
            len(self._prefix) :
        ]

    @property
    def _prefix(self) -> str:
        assert self.tokenizer is not None
        return self.tokenizer.decode(self._prefix_ids, skip_special=False)


def _list_special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """Return the names of control tokens by id, including end tokens that aren't marked special."""
    names = {token: name for name, token in tokenizer.special_ids.items()}
    end_names = {
        token: tokenizer.decode([token], skip_special=False) for token in tokenizer.eos_ids
    }
    return {token: name or f"[{token}]" for token, name in (end_names | names).items()}


def _encode_prefix(tokenizer: Tokenizer) -> list[int]:
    """Return a one-token prefix for `_decode`; [] if neither "a" nor "0" can be encoded."""
    for text in "a0":
        try:
            return tokenizer.encode(text)[-1:]
        except RatchetError:
            continue
    return []


def find_tokenizer(directory: RunDirectory) -> Tokenizer | None:
    """Return the trained model's tokenizer, else the recipe's, else None.

    The recipe's tokenizer is used only if its kind is built in and its files are on this machine,
    because a report must neither download anything nor run code that a run names.
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
