"""Convert text to token ids and back, with the Rust library `tokenizers` and Hugging Face files.

There are two kinds of text. In untrusted text (`encode(text)`), such as a message, "<|im_end|>" is
ten ordinary characters. In a template's text (`allow_special=True`) it is the special token.
"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn

import tokenizers

from ratchet.data.chat.plain_tokens import GUARD, convert_panics, copy_for_text
from ratchet.errors import DataError, ModelError
from ratchet.utils.terminal_text import shorten_text

# What precedes a text that is encoded: nothing, a special token, or other text.
After = Literal["start", "special", "text"]

# Keys of tokenizer_config.json that hold a special token. Templates may name these tokens.
SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
SLOW_TOKENIZER_FILES = (
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
DOWNLOAD_PATTERNS = [
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*config.json",
    "*.model",
    "vocab.*",
    "merges.txt",
]
# Maximum characters that a normalizer or decoder may make of one character. Published ones make 3.
MAX_GROWTH = 64
# The largest id of a token. The tokenizers library takes memory for all ids below the largest; the
# largest published vocabulary has some 1,000,000 tokens.
MAX_TOKEN_ID = 2**24
# White space as the library defines it: Unicode's, without four separators that Python includes.
WHITE_SPACE = re.compile(r"[^\S\x1c-\x1f]")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")

# Texts of at least this many characters are encoded by the library's batch call, which releases
# Python's GIL. Without it a text of 2 MiB blocks all other threads for 12.2 s, with it for 0.3 s.
# The batch call takes 9 us longer.
BATCH_CALL_CHARS = 2**14


class SpecialToken(NamedTuple):
    """A special token in a text, at characters [start, end).

    The range includes adjacent white space if the token is defined to strip it.
    """

    start: int
    end: int
    id: int


class Tokenizer:
    """A tokenizer with its special tokens and chat template.

    Batches in Ratchet are packed, without padding: `pad_id` is only saved for other programs.

    Args:
        backend: The library's tokenizer.
        config: The content of tokenizer_config.json, which names the special tokens.
        eos_ids: Further tokens that end a turn, besides the EOS of `config`.
        chat_template: The template's source; None: no template.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: Mapping[str, Any] | None = None,
        eos_ids: Sequence[int] = (),
        chat_template: str | None = None,
    ) -> None:
        # tokenizer.json may enable truncation or padding, which would silently change texts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.config = dict(config or {})
        self.chat_template = chat_template
        last_id = max(backend.get_vocab(with_added_tokens=True).values())
        if last_id > MAX_TOKEN_ID:
            raise ModelError(
                f"tokenizer.json gives a token the id {last_id:,}, and at most {MAX_TOKEN_ID:,} is "
                "allowed. Copy the file from the original model again"
            )
        self.vocab_size = 1 + last_id
        names = ((name, _get_token_text(self.config.get(name))) for name in SPECIAL_NAMES)
        self.special_tokens: dict[str, str] = {
            name: text for name, text in names if text is not None
        }
        for token in self.special_tokens.values():
            if backend.token_to_id(token) is not None:
                # Some files name a special token without marking it as special.
                backend.add_special_tokens([token])
        self.bos_id = self._get_special_id("bos_token")
        self.pad_id = self._get_special_id("pad_token")
        eos_id = self._get_special_id("eos_token")
        self.eos_ids: tuple[int, ...] = tuple(
            dict.fromkeys([eos_id, *eos_ids] if eos_id is not None else eos_ids)
        )
        self._check_eos(eos_id)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without cached properties.

        Some of them contain `GUARD`, which is random in each process.
        """
        cached = {
            name for name, value in vars(type(self)).items() if isinstance(value, cached_property)
        }
        return {name: value for name, value in self.__dict__.items() if name not in cached}

    def _get_special_id(self, name: str) -> int | None:
        return self.token_id(self.special_tokens[name]) if name in self.special_tokens else None

    def _check_eos(self, eos_id: int | None) -> None:
        if eos_id is None and "eos_token" in self.special_tokens:
            token = self.special_tokens["eos_token"]
            raise ModelError(
                f"eos_token {token!r} of tokenizer_config.json is not a token of tokenizer.json: "
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
        """Return the ids of `text`, without BOS or EOS.

        Raises DataError for a character that has no token.

        Args:
            allow_special: True to encode the text of a special token as that token.
            after: What precedes `text`: nothing ("start"), a special token ("special"), or other
                text ("text"; SentencePiece then adds no space in front).
        """
        if not allow_special:
            return self._encode_text(text, after)
        ids: list[int] = []
        for piece in self.split_special(text):
            if isinstance(piece, int):
                ids.append(piece)
                after = "special"
            else:
                ids += self._encode_text(piece, after)
                after = "text"
        return ids

    def split_special(self, text: str) -> Iterator[str | int]:
        """Yield the text between special tokens, and each special token as its id, in order."""
        position = 0
        for special in self.find_special_tokens(text):
            if special.start > position:
                yield text[position : special.start]
            yield special.id
            position = special.end
        if position < len(text):
            yield text[position:]

    def find_special_tokens(self, text: str) -> list[SpecialToken]:
        """Return the special tokens in `text`, in order."""
        pattern, tokens = self._special_pattern
        specials: list[SpecialToken] = []
        end = 0
        for match in pattern.finditer(text) if tokens else ():
            token, token_id = tokens[(match.lastindex or 0) - 1]
            start = match.start()
            # White space before the token is searched backwards, because a pattern that begins with
            # white space takes quadratic time, and a model may write any number of spaces.
            while token.lstrip and start > end and WHITE_SPACE.fullmatch(text[start - 1]):
                start -= 1
            end = match.end()
            specials.append(SpecialToken(start, end, token_id))
        return specials

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of `ids`. Invalid UTF-8 becomes U+FFFD; unknown ids are left out.

        Raises DataError if the tokenizer's decoder fails.
        """
        with convert_panics(f"decode {len(ids):,} tokens", "check the decoder in tokenizer.json"):
            return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The id of each special token."""
        return {
            token.content: i
            for i, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }

    @cached_property
    def adds_bos(self) -> bool:
        """True if the tokenizer itself puts BOS before a text. Models trained this way need it."""
        return self.bos_id is not None and self._backend.encode("").ids[:1] == [self.bos_id]

    @cached_property
    def fingerprint(self) -> str:
        """The SHA-256 (hex) of everything that determines the ids of a conversation."""
        other_state = json.dumps(
            [self.special_tokens, self.eos_ids, self.chat_template], sort_keys=True
        )
        return hashlib.sha256(f"{self._backend.to_str()}\n{other_state}".encode()).hexdigest()

    @cached_property
    def max_token_chars(self) -> int:
        """The largest number of characters of one token in the vocabulary."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)))

    def to_json(self) -> str:
        """Return the content of tokenizer.json."""
        return self._backend.to_str()

    def has_same_tokens(self, other: Tokenizer) -> bool:
        """True if both turn every text into the same ids. Their templates may differ."""
        return self._backend.to_str() == other._backend.to_str()

    def with_chat_template(self, source: str | None) -> Tokenizer:
        """Return the same tokenizer with another chat template."""
        other = copy.copy(self)
        other.chat_template = source
        return other

    def save(self, directory: str | Path) -> None:
        """Write the files that `load_tokenizer` and `transformers.AutoTokenizer` read.

        Several EOS ids are written to generation_config.json, unless the model's own file is there
        already.
        """
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        _write_text(directory / "tokenizer.json", self._backend.to_str(pretty=True))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self.config}
        _write_text(
            directory / "tokenizer_config.json",
            json.dumps(config, indent=2, ensure_ascii=False) + "\n",
        )
        if self.chat_template is not None:
            _write_text(directory / "chat_template.jinja", self.chat_template)
        generation = directory / "generation_config.json"
        if len(self.eos_ids) > 1 and not generation.exists():
            _write_text(
                generation, json.dumps({"eos_token_id": list(self.eos_ids)}, indent=2) + "\n"
            )

    # --- plain text

    @cached_property
    def _plain_copy(self) -> tuple[tokenizers.Tokenizer, int | None]:
        """The tokenizer of plain text, and the id of its unknown token."""
        with convert_panics(f"encode {len(GUARD)} characters", "check tokenizer.json"):
            return copy_for_text(self._backend)

    @property
    def _plain_backend(self) -> tokenizers.Tokenizer:
        return self._plain_copy[0]

    @cached_property
    def _context_by_after(self) -> dict[After, tuple[str, list[int]]]:
        """Return, for each `after`, the context that is encoded in front of a text, and its ids.

        Some SentencePiece conversions put a space before every stretch of text, even after a
        special token. Text that continues other text must not get this space. A newline at the end
        of its context prevents it.
        """
        probe = self._encode_plain(f"{GUARD}a")
        adds_space = len(probe.tokens) > 1 and probe.tokens[1][0] in "▁Ġ"
        contexts: dict[After, str] = {
            "start": "",
            "special": GUARD,
            "text": f"{GUARD}\n" if adds_space else GUARD,
        }
        return {after: (text, self._encode_plain(text).ids) for after, text in contexts.items()}

    def _encode_text(self, text: str, after: After) -> list[int]:
        """Return the ids of plain text, encoded in the context of `_context_by_after`."""
        if not text:
            return []
        context, context_ids = self._context_by_after[after]
        encoding = self._encode_plain(context + text)
        if encoding.ids[: len(context_ids)] != context_ids:  # the newline merged with the text
            return self._encode_text(text, "special")
        ids = encoding.ids[len(context_ids) :]
        unknown = self._plain_copy[1]
        if unknown is not None and unknown in ids:
            start, end = encoding.offsets[len(context_ids) + ids.index(unknown)]
            self._refuse((context + text)[start:end])
        return ids

    def _encode_plain(self, text: str) -> tokenizers.Encoding:
        """Encode plain text. Raises DataError if the library can't encode it."""
        try:
            with convert_panics(f"encode a text of {len(text):,} characters", "shorten it"):
                if len(text) < BATCH_CALL_CHARS:
                    return self._plain_backend.encode(text, add_special_tokens=False)
                return self._plain_backend.encode_batch([text], add_special_tokens=False)[0]
        except TypeError as error:  # the library rejects half of a surrogate pair
            surrogate = next(c for c in text if "\ud800" <= c <= "\udfff")
            raise DataError(
                f"the text holds the lone surrogate U+{ord(surrogate):04X}, which is not a "
                "character: remove it"
            ) from error

    def _refuse(self, characters: str) -> NoReturn:
        code_points = " ".join(f"U+{ord(c):04X}" for c in characters[:8]) + (
            " ..." if characters[8:] else ""
        )
        raise DataError(
            f"{shorten_text(repr(characters), 80)} ({code_points}) has no token: add it to "
            "`tokenizer.alphabet`, or use `tokenizer.kind: bytes`, which can encode all text"
        )

    @cached_property
    def _special_pattern(self) -> tuple[re.Pattern[str], list[tuple[tokenizers.AddedToken, int]]]:
        """Return a pattern that matches special tokens, and the (token, id) pair of each.

        Longer tokens come first. Group n of the pattern is the n-th token. The match also includes
        white space after the token if the token strips it.
        """
        special_tokens = [
            (token, i)
            for i, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        ]
        special_tokens.sort(key=lambda item: -len(item[0].content))
        return re.compile(
            "|".join(_make_token_pattern(token) for token, _ in special_tokens)
        ), special_tokens


def _make_token_pattern(token: tokenizers.AddedToken) -> str:
    body = f"({re.escape(token.content)})"
    if token.single_word:
        body = rf"(?<!\w){body}(?!\w)"
    return body + (f"{WHITE_SPACE.pattern}*" if token.rstrip else "")


def _get_token_text(value: Any) -> str | None:
    """Return the text of a special token in tokenizer_config.json, where it may be an object."""
    return value["content"] if isinstance(value, Mapping) else value


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8", newline="\n")
