"""Text to token ids and back: one class over the Rust library, read from and written to Hugging
Face directories.

There are two kinds of text, never mixed up: text of a person or program (`encode(text)`:
"<|im_end|>" is ten ordinary characters) and text of a template (`allow_special=True`: it is the
control token).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import tokenizers

from ratchet.data.chat.plain_tokens import GUARD, copy_for_text, refusing_panics
from ratchet.errors import DataError, ModelError
from ratchet.utils.terminal_text import shorten_text

After = Literal["start", "special", "text"]

# Tokens that templates may name. The rest of tokenizer_config.json is kept as it is.
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
SLOW_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
DOWNLOADS = [
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*config.json",
    "*.model",
    "vocab.*",
    "merges.txt",
]
MAX_GROWTH = 64  # characters that a normalizer makes of one; published ones make 3
# White space to the library: Unicode's, without the four separators that Python counts too.
SPACE = re.compile(r"[^\S\x1c-\x1f]")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Characters from which on a text is encoded by the library's call for batches. That one runs
# without Python's lock, where a single text of 2 MiB holds up every other thread for seconds (12.2
# s against 0.3 s); it takes 9 us longer.
LONG = 2**14


class Special(NamedTuple):
    """A control token in a text: characters [start, end). Some swallow the white space beside
    them."""

    start: int
    end: int
    id: int


class Tokenizer:
    """`config` is the content of tokenizer_config.json (it names the special tokens); `eos_ids`
    adds to its EOS others that end a turn. Nothing in Ratchet pads by id: `pad_id` is only written
    out for other programs."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        # a tokenizer.json may ask for either, and would then change texts silently
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = dict(config or {})
        self.chat_template = chat_template
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        names = ((name, _token_text(self.config.get(name))) for name in SPECIAL_NAMES)
        self.special_tokens: dict[str, str] = {
            name: text for name, text in names if text is not None
        }
        for token in self.special_tokens.values():
            if backend.token_to_id(token) is not None:
                # some files name a token as special that they don't mark so
                backend.add_special_tokens([token])
        self.bos_id, self.pad_id = self._named("bos_token"), self._named("pad_token")
        first = self._named("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys([first, *eos_ids] if first is not None else eos_ids)
        )
        self._check_eos(first)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without what is computed on first use: some of it holds this process's
        own guard."""
        computed = {
            name for name, value in vars(type(self)).items() if isinstance(value, cached_property)
        }
        return {name: value for name, value in self.__dict__.items() if name not in computed}

    def _named(self, name: str) -> int | None:
        return self.token_id(self.special_tokens[name]) if name in self.special_tokens else None

    def _check_eos(self, first: int | None) -> None:
        if first is None and "eos_token" in self.special_tokens:
            name = self.special_tokens["eos_token"]
            raise ModelError(
                f"eos_token {name!r} of tokenizer_config.json is no token of tokenizer.json: "
                "correct one of them"
            )
        for i in self.eos_ids:
            if not 0 <= i < self.vocab_size:
                raise ModelError(
                    f"EOS id {i} lies outside the tokenizer's {self.vocab_size} tokens: correct "
                    "eos_token_id"
                )

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def encode(
        self, text: str, *, allow_special: bool = False, after: After = "start"
    ) -> list[int]:
        """Ids of `text`, without BOS or EOS. `after` says what the text follows: nothing, a special
        token or other text (then no SentencePiece space is put in front of it). Raises DataError
        for a character that has no token."""
        if not allow_special:
            return self._encode_text(text, after)
        ids: list[int] = []
        for piece in self.pieces(text):
            if isinstance(piece, int):
                ids.append(piece)
                after = "special"
            else:
                ids += self._encode_text(piece, after)
                after = "text"
        return ids

    def pieces(self, text: str) -> Iterator[str | int]:
        """`text` cut at its special tokens, which come as ids."""
        position = 0
        for special in self.specials(text):
            if special.start > position:
                yield text[position : special.start]
            yield special.id
            position = special.end
        if position < len(text):
            yield text[position:]

    def specials(self, text: str) -> list[Special]:
        """The special tokens in `text`, in order."""
        pattern, tokens = self._special_pattern
        specials: list[Special] = []
        end = 0
        for match in pattern.finditer(text) if tokens else ():
            token, number = tokens[(match.lastindex or 0) - 1]
            start = match.start()
            # Backwards from each token: a pattern that begins with white space is quadratic in a
            # stretch of it, and a model may write any number of spaces.
            while token.lstrip and start > end and SPACE.fullmatch(text[start - 1]):
                start -= 1
            end = match.end()
            specials.append(Special(start, end, number))
        return specials

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Every control token and its id."""
        return {
            token.content: i
            for i, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }

    @cached_property
    def adds_bos(self) -> bool:
        """Return True if the tokenizer by itself starts a text with BOS: models trained so need
        it."""
        return self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of all that decides how a conversation turns into ids."""
        rest = json.dumps([self.special_tokens, self.eos_ids, self.chat_template], sort_keys=True)
        return hashlib.sha256(f"{self._backend.to_str()}\n{rest}".encode()).hexdigest()

    @cached_property
    def longest(self) -> int:
        """Return the most characters that one token may stand for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def same_tokens(self, other: Tokenizer) -> bool:
        """Return True if both turn every text into the same ids; templates may differ."""
        return self._backend.to_str() == other._backend.to_str()

    def save(self, directory: str | Path) -> None:
        """Writes the files that `load_tokenizer` and `transformers.AutoTokenizer` read. Several EOS
        ids go to generation_config.json, unless the model's own lies there already."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / "tokenizer.json", self._backend.to_str(pretty=True))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        _write(
            directory / "tokenizer_config.json",
            json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        )
        if self.chat_template is not None:
            _write(directory / "chat_template.jinja", self.chat_template)
        generation = directory / "generation_config.json"
        if len(self.eos_ids) > 1 and not generation.exists():
            _write(generation, json.dumps({"eos_token_id": list(self.eos_ids)}, indent=2) + "\n")

    # --- plain text

    @cached_property
    def _copy(self) -> tuple[tokenizers.Tokenizer, int | None]:
        with refusing_panics(GUARD):
            return copy_for_text(self._backend)

    @property
    def _plain(self) -> tokenizers.Tokenizer:
        return self._copy[0]

    @cached_property
    def _contexts(self) -> dict[After, tuple[str, list[int]]]:
        """Return the text, and its ids, that is put before a text so that it is encoded as in the
        middle of a longer one.

        Some SentencePiece conversions put a space before every stretch of text, after a special
        token too; between two stretches of one text there is none, which a newline in front
        reproduces.
        """
        probe = self._encoding(f"{GUARD}a")
        spaced = len(probe.tokens) > 1 and probe.tokens[1][0] in "▁Ġ"
        contexts: dict[After, str] = {
            "start": "",
            "special": GUARD,
            "text": f"{GUARD}\n" if spaced else GUARD,
        }
        return {after: (text, self._encoding(text).ids) for after, text in contexts.items()}

    def _encode_text(self, text: str, after: After) -> list[int]:
        if not text:
            return []
        context, before = self._contexts[after]
        encoding = self._encoding(context + text)
        if encoding.ids[: len(before)] != before:  # the newline merged with the text
            return self._encode_text(text, "special")
        ids = encoding.ids[len(before) :]
        unknown = self._copy[1]
        if unknown is not None and unknown in ids:
            start, end = encoding.offsets[len(before) + ids.index(unknown)]
            self._refuse((context + text)[start:end])
        return ids

    def _encoding(self, text: str) -> tokenizers.Encoding:
        """Encode plain text. Raises DataError for one that the library can't take."""
        try:
            with refusing_panics(text):
                if len(text) < LONG:
                    return self._plain.encode(text, add_special_tokens=False)
                return self._plain.encode_batch([text], add_special_tokens=False)[0]
        except TypeError as error:  # the library takes no half of a UTF-16 pair
            lone = next(c for c in text if "\ud800" <= c <= "\udfff")
            raise DataError(
                f"the text holds the lone surrogate U+{ord(lone):04X}, which is no character: "
                "remove it"
            ) from error

    def _refuse(self, characters: str) -> NoReturn:
        points = " ".join(f"U+{ord(c):04X}" for c in characters[:8]) + (
            " ..." if characters[8:] else ""
        )
        raise DataError(
            f"{shorten_text(repr(characters), 80)} ({points}) has no token: add it to "
            "`tokenizer.alphabet`, or use "
            "`tokenizer.kind: bytes`, which has a token for everything"
        )

    @cached_property
    def _special_pattern(self) -> tuple[re.Pattern[str], list[tuple[tokenizers.AddedToken, int]]]:
        """Return a pattern of the special tokens, the longest first, and each one's token and id.

        Group n of the pattern is the n-th token, with the white space that it swallows behind it.
        """
        added = [
            (token, i)
            for i, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        ]
        added.sort(key=lambda item: -len(item[0].content))
        return re.compile("|".join(_token_pattern(token) for token, _ in added)), added


def _token_pattern(token: tokenizers.AddedToken) -> str:
    body = f"({re.escape(token.content)})"
    if token.single_word:
        body = rf"(?<!\w){body}(?!\w)"
    return body + (f"{SPACE.pattern}*" if token.rstrip else "")


def _token_text(value: Any) -> str | None:
    """A special token in tokenizer_config.json is a string, or an object with its flags."""
    return value["content"] if isinstance(value, Mapping) else value


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")


# --- reading a directory
