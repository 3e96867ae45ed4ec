"""Copies of tokenizers for untrusted text, such as the contents of messages.

With such a copy no text encodes to a special token (the text "<|im_end|>" stays plain text), and
every character without a token encodes to the same unknown id.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers

from ratchet.errors import DataError
from ratchet.utils.terminal_text import get_first_line

# GUARD is put before a text, so that the text is not encoded as the start of a sequence. HIDDEN is
# put before the content of a special token, so that no text spells the token. Both are random, so
# that no text can contain them on purpose.
GUARD = f"\U0010fffd{secrets.token_hex(8)}"
HIDDEN = f"\U0010fffc{secrets.token_hex(8)}:"
UNKNOWN = f"{HIDDEN}unknown"


@contextmanager
def convert_panics(task: str, remedy: str) -> Iterator[None]:
    """Raise DataError if the tokenizers library panics, as its regexes do on some texts.

    The exception class of a panic can't be imported, and it is not a subclass of Exception.

    Args:
        task: What the library does, such as "decode 3 tokens".
        remedy: What the user can do about a panic.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        reason = get_first_line(str(error))
        raise DataError(f"the tokenizer can't {task}: {reason}: {remedy}") from error


def compute_max_growth(section: Any) -> int:
    """Return the maximum number of characters that one character can become.

    Args:
        section: The normalizers or decoders of a tokenizer.json.
    """
    if not isinstance(section, dict):
        return 1
    parts = section.get("normalizers") or section.get("decoders")
    inserted_texts = [section.get(name) for name in ("content", "prepend")]
    growth = max([1, *(len(text) for text in inserted_texts if isinstance(text, str))])
    # The library refuses parts that are no list.
    return growth * math.prod(map(compute_max_growth, parts if isinstance(parts, list) else ()))


def copy_for_text(backend: tokenizers.Tokenizer) -> tuple[tokenizers.Tokenizer, int | None]:
    """Return a copy that encodes special tokens as ordinary text, and the id of its unknown token.

    The id is None if every character has tokens.
    """
    state = backend.to_str()
    copy = tokenizers.Tokenizer.from_str(state)
    copy.encode_special_tokens = True
    copy.add_tokens([tokenizers.AddedToken(GUARD, special=False, normalized=False)])
    if isinstance(copy.model, tokenizers.models.BPE):
        name = copy.model.unk_token
        unknown = None if name is None else copy.token_to_id(name)
        # Rewriting a vocabulary of 150,000 tokens takes 1.6 s, and hardly any BPE needs it.
        # A BPE whose unknown token has one character is rewritten, because the token also stands
        # for that character.
        covers_all = _has_all_bytes(copy) if name is None else unknown is not None and len(name) > 1
        if covers_all and not _spells_special(copy):
            return copy, unknown
    return _rewrite(state)


def _has_all_bytes(backend: tokenizers.Tokenizer) -> bool:
    """True if every byte has a token, so that every text can be encoded."""
    if backend.model.byte_fallback:
        return all(backend.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    if "ByteLevel" not in f"{backend.pre_tokenizer} {backend.normalizer}":
        return False
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    return all(backend.token_to_id(character) is not None for character in alphabet)


def _spells_special(copy: tokenizers.Tokenizer) -> bool:
    """True if the text of a special token encodes to its id.

    Tokens of one character are exempt, since they can't be split.
    """
    special_by_id = {
        i: token.content for i, token in copy.get_added_tokens_decoder().items() if token.special
    }
    name = copy.model.unk_token
    unknown = None if name is None else copy.token_to_id(name)
    if name is not None and unknown is not None:
        special_by_id[unknown] = name
    contents = [content for content in special_by_id.values() if len(content) > 1]
    texts = [context + content for content in contents for context in ("", GUARD)]
    encodings = copy.encode_batch(texts, add_special_tokens=False)
    return any(special_by_id.get(i, "") in contents for encoding in encodings for i in encoding.ids)


def _rewrite(serialised: str) -> tuple[tokenizers.Tokenizer, int]:
    """Return a copy whose special tokens no text can spell, and the id of a new unknown token.

    `encode_special_tokens` alone is not enough. A model that looks up whole pieces (Unigram,
    WordLevel, BPE that ignores merges) has special tokens in its vocabulary. A BPE without an
    unknown token drops characters.
    """
    state = json.loads(serialised)
    special = {token["content"] for token in state["added_tokens"] if token["special"]}
    special |= _list_unknown_tokens(state["model"])
    special = {content for content in special if len(content) > 1}
    for token in state["added_tokens"]:
        token["content"] = _hide_special(token["content"], special)
    unknown = _rewrite_vocabulary(state, special)
    copy = tokenizers.Tokenizer.from_str(json.dumps(state))
    copy.encode_special_tokens = True
    copy.add_tokens([tokenizers.AddedToken(GUARD, special=False, normalized=False)])
    return copy, unknown


def _list_unknown_tokens(model: dict[str, Any]) -> set[str]:
    """Return the text of the model's unknown token, which some files do not mark as special."""
    if isinstance(model["vocab"], list):
        return {model["vocab"][model["unk_id"]][0]} if model["unk_id"] is not None else set()
    return {model["unk_token"]} - {None}


def _hide_special(content: str, special: set[str]) -> str:
    return HIDDEN + content if content in special else content


def _rewrite_vocabulary(state: dict[str, Any], special: set[str]) -> int:
    """Hide special tokens in the vocabulary, append an unknown token, and return its id.

    Added tokens that the vocabulary lacks have the ids after its end. They are put into the
    vocabulary first, because the new unknown token would otherwise shift their ids.
    """
    model, added = state["model"], state["added_tokens"]
    if isinstance(model["vocab"], list):
        vocabulary = [[_hide_special(piece, special), score] for piece, score in model["vocab"]]
        appended = sorted(
            (token for token in added if token["id"] >= len(vocabulary)),
            key=lambda token: token["id"],
        )
        vocabulary += [[token["content"], 0.0] for token in appended]
        model["vocab"] = [*vocabulary, [UNKNOWN, 0.0]]
        model["unk_id"] = len(vocabulary)
        return len(vocabulary)
    pieces = {_hide_special(piece, special): i for piece, i in model["vocab"].items()}
    pieces |= {token["content"]: token["id"] for token in added}
    pieces[UNKNOWN] = max(pieces.values(), default=-1) + 1
    if "merges" in model:  # without those that would spell a special token
        prefix = model.get("continuing_subword_prefix") or ""
        model["merges"] = [
            merge
            for merge in model["merges"]
            if special.isdisjoint(_list_merged_pieces(merge, prefix))
        ]
    model["vocab"], model["unk_token"] = pieces, UNKNOWN
    return pieces[UNKNOWN]


def _list_merged_pieces(merge: str | Sequence[str], prefix: str) -> list[str]:
    """Return both pieces of a merge of a BPE, and what they become. Older files have a text."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [left, right, left + right.removeprefix(prefix)]
