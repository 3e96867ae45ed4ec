"""Tokenizers of every kind that models have, made in code, and texts on which they differ."""

from functools import cache

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from ratchet.data.chat.builtin_tokenizers import (
    byte_bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
)
from ratchet.data.chat.tokenizer import Tokenizer

FRAGMENTS = [
    "hello", "Hello WORLD", "hello there world", " ", "  ", "\n", "\r\n", "\t", "x", "12", " = ", "don't",
    "café", "cafe\u0301", "naïve", "e\u0301\u0301", "a\u0307\u0323", "q\u0301", "\u0301", "ÅÄ", "\u212b",
    "한글", "\u1112\u1161\u11ab", "\u11ab", "\u09c7\u09be", "ﬁne", "Ⅷ½", "ß", "İstanbul", "日本語", "中",
    "😀", "👩\u200d👩\u200d👧", "👍🏽", "\ufffd", "\ufeff", "\u200b", "\u00a0", "<eos>", "</s>", "▁", "Ġ",
]  # fmt: skip
CHARACTERS = sorted(set("".join(FRAGMENTS)))
WORDS = ["hello", "there", "world", "he", "lo", "ne", "don"]


def byte_level(normalizer=None, *, prefix_space=False):
    """As GPT-2's; with NFC as Qwen2's."""
    made = byte_bpe_tokenizer([*FRAGMENTS, "hello world there"] * 4, vocab_size=420)
    backend = tokenizers.Tokenizer.from_str(made._backend.to_str())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=True)
    if normalizer is not None:
        backend.normalizer = normalizer
    return Tokenizer(backend, config=made.config)


def wordpiece():
    """As BERT's, uncased: lower case, no accents, and no spaces among its tokens."""
    normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces = [
        p for p in dict.fromkeys(normalizer.normalize_str(c) for c in CHARACTERS) if p.strip()
    ]
    letters = dict.fromkeys("".join(pieces))
    names = [
        "[UNK]",
        "</s>",
        *letters,
        *(f"##{letter}" for letter in letters),
        *WORDS,
        "##lo",
        "##ne",
    ]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return _ending(backend)


def llama(*, prepends=True):
    """As conversions of Llama 2's; without a space in front of a text, as Gemma's."""
    letters = [
        character for character in CHARACTERS if character.isascii() and character.isprintable()
    ]
    names = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *letters,
        "é",
        "한",
        "▁h",
        "he",
        "▁he",
    ]
    vocabulary = {name: i for i, name in enumerate(dict.fromkeys(names))}
    merges = [("▁", "h"), ("h", "e"), ("▁", "he")]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    spaces, plain = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    backend.normalizer = (
        normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prepends else spaces
    )
    strip = [decoders.Strip(" ", 1, 0)] if prepends else []
    backend.decoder = decoders.Sequence([plain, decoders.ByteFallback(), decoders.Fuse(), *strip])
    return _ending(backend)


def unigram(normalizer=None, *, falls_back=True, scheme="always"):
    """Pieces with Metaspace; with NFKC, one space for several and no bytes as T5's."""
    normal = normalizer or normalizers.Replace("\x00", "")
    letters = dict.fromkeys("".join(normal.normalize_str(character) for character in CHARACTERS))
    names = (
        ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        if falls_back
        else ["<unk>", "</s>"]
    )
    pieces = dict.fromkeys(["▁", *letters, *(f"▁{word}" for word in WORDS), *WORDS])
    scores = [(name, -20.0) for name in names] + [
        (piece, -8.0 / len(piece)) for piece in pieces if piece != " "
    ]
    backend = tokenizers.Tokenizer(models.Unigram(scores, 0, byte_fallback=falls_back))
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    metaspace = decoders.Metaspace(prepend_scheme=scheme)
    backend.decoder = (
        decoders.Sequence([decoders.ByteFallback(), metaspace]) if falls_back else metaspace
    )
    return _ending(backend)


def _ending(backend):
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return Tokenizer(backend, config={"eos_token": "</s>"})


COLLAPSE = normalizers.Sequence(
    [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
)
UNCASED = normalizers.Sequence(
    [normalizers.NFD(), normalizers.Lowercase(), normalizers.StripAccents()]
)
MAKERS = {
    "characters": lambda: character_tokenizer("".join(CHARACTERS)),
    "bytes": byte_tokenizer,
    "gpt2": byte_level,
    "roberta": lambda: byte_level(prefix_space=True),
    "qwen2 nfc": lambda: byte_level(normalizers.NFC()),
    "nfd": lambda: byte_level(normalizers.NFD()),
    "nfkc": lambda: byte_level(normalizers.NFKC()),
    "lower": lambda: byte_level(UNCASED),
    "newlines": lambda: byte_level(normalizers.Replace("\r\n", "\n")),
    "wordpiece": wordpiece,
    "llama": llama,
    "gemma": lambda: llama(prepends=False),
    "unigram": unigram,
    "mistral": lambda: unigram(scheme="first"),
    "unigram nfc": lambda: unigram(normalizers.NFC()),
    "t5": lambda: unigram(COLLAPSE, falls_back=False),
}


@cache
def tokenizer(name):
    return MAKERS[name]()
