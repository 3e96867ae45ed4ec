"""Create tokenizers in code: one token per character, one per byte, or trained byte-level BPE.

All can be saved as Hugging Face directories. Their default template is `plain`, and they have the
special tokens of the template `turns`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from ratchet.data.chat.chat_templates import BUILTIN_TEMPLATES, load_template_source
from ratchet.data.chat.template_defaults import set_defaults
from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.jsonl import decode_line, iter_raw_lines
from ratchet.data.tokenizer_config import (
    PRINTABLE,
    AutoTokenizerConfig,
    ByteBPEConfig,
    BytesConfig,
    CharactersConfig,
    TokenizerConfig,
)
from ratchet.errors import ConfigError, DataError
from ratchet.utils.safe_read import open_file

SPECIAL_TOKENS = (
    "<pad>",
    "<eos>",
    "<unk>",
    "<system>",
    "<user>",
    "<assistant>",
    "<tool>",
    "<reserved_0>",
)
N_BYTES = 256

# BPE merges only within these pieces: words with the space before them, single digits, punctuation,
# line breaks. It is the pattern of Qwen2's tokenizer, so that text is split as by the tokenizers of
# published models.
WORD_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def character_tokenizer(
    alphabet: str = PRINTABLE,
    *,
    multiple_of: int = 8,
    extra_specials: Sequence[str] = (),
    eos: str = "<eos>",
    template: str = BUILTIN_TEMPLATES["plain"],
) -> Tokenizer:
    """Return a tokenizer with one token per character of `alphabet`, after the special tokens.

    Encoding any other character raises DataError. Raises ConfigError if `alphabet` is empty or
    repeats a character.

    Args:
        multiple_of: The vocabulary is padded with reserved tokens to a multiple of this.
        extra_specials: Additional special tokens, which may include `eos`.
        eos: The special token that ends a turn.
        template: The Jinja text of the chat template.
    """
    if not alphabet or len(set(alphabet)) < len(alphabet):
        raise ConfigError(
            f"tokenizer.alphabet {alphabet!r} must not be empty or repeat a character"
        )
    specials = [*SPECIAL_TOKENS, *extra_specials]
    n_used = len(specials) + len(alphabet)
    reserved = [f"<reserved_{i + 1}>" for i in range(-n_used % multiple_of)]
    vocabulary = {token: i for i, token in enumerate([*specials, *alphabet, *reserved])}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return _create_tokenizer(
        backend, [*specials, *reserved], {"unk_token": "<unk>", "eos_token": eos}, template
    )


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per UTF-8 byte, which can encode every text."""
    return byte_bpe_tokenizer((), vocab_size=len(SPECIAL_TOKENS) + N_BYTES)


def byte_bpe_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Return a byte-level BPE tokenizer trained on `texts`, which can encode every text.

    Equal arguments give equal tokenizers. The tokenizer has fewer than `vocab_size` tokens if the
    texts have too few pairs to merge. Raises ConfigError if `vocab_size` is less than the number of
    bytes and special tokens.
    """
    if vocab_size < len(SPECIAL_TOKENS) + N_BYTES:
        raise ConfigError(
            f"vocab_size={vocab_size} can't hold 256 bytes and {len(SPECIAL_TOKENS)} special "
            "tokens: use 264 or more"
        )
    backend = Backend(models.BPE())
    split_words = pre_tokenizers.Split(Regex(WORD_PATTERN), "isolated")
    map_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split_words, map_bytes])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return _create_tokenizer(backend, SPECIAL_TOKENS, {})


def _create_tokenizer(
    backend: Backend,
    specials: Sequence[str],
    token_by_name: dict[str, str],
    template: str = BUILTIN_TEMPLATES["plain"],
) -> Tokenizer:
    """Return a Tokenizer around a backend.

    Args:
        token_by_name: Special tokens by their name in the tokenizer's config.
    """
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in specials]
    )
    config = {
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "clean_up_tokenization_spaces": False,
        **token_by_name,
    }
    return Tokenizer(backend, config=config, chat_template=template)


# --- factories of the config sections; `model` is the model's directory or Hub id


def apply_chat_template_kwargs(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """Return the tokenizer with the recipe's variables as defaults of its chat template.

    Raises DataError for a variable that the template does not read.
    """
    if not config.chat_template_kwargs:
        return tokenizer
    source = load_template_source(config.template, tokenizer)
    return tokenizer.with_chat_template(set_defaults(source, config.chat_template_kwargs))


def build_auto(config: AutoTokenizerConfig, model: str | None) -> Tokenizer:
    source = config.path or model
    if source is None:
        raise ConfigError(
            "tokenizer.kind 'auto' reads the model's tokenizer, but the model starts from random "
            "weights: set tokenizer.path to a directory, or tokenizer.kind to 'characters' or "
            "'bytes'"
        )
    return apply_chat_template_kwargs(load_tokenizer(source, revision=config.revision), config)


def build_characters(config: CharactersConfig, model: str | None) -> Tokenizer:
    return apply_chat_template_kwargs(character_tokenizer(config.alphabet), config)


def build_bytes(config: BytesConfig, model: str | None) -> Tokenizer:
    return apply_chat_template_kwargs(byte_tokenizer(), config)


def build_byte_bpe(config: ByteBPEConfig, model: str | None) -> Tokenizer:
    tokenizer = byte_bpe_tokenizer(_read_lines(config.texts), config.vocab_size)
    return apply_chat_template_kwargs(tokenizer, config)


def _read_lines(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            with open_file(path) as file:
                for line_number, offset, raw in iter_raw_lines(file, path):
                    yield decode_line(raw, path, line_number, offset) + "\n"
        except OSError as error:
            raise DataError(f"tokenizer.texts: {path} can't be read: {error.strerror}") from error
