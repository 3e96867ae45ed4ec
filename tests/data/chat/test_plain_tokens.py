"""Text without special meaning, to every kind of model: what has no token, what text could
spell."""

import json
from contextlib import suppress

import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.errors import DataError, ModelError

PIECES = ["<unk>", "</s>", "▁", "h", "i", "hi", "<", "/", "s", ">"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def vocabulary(*more):
    return {piece: i for i, piece in enumerate([*PIECES, *more])}


def unigram(unk_id, *more):
    pieces = [(piece, 0.0 if piece[1:] else -3.0) for piece in PIECES]
    return models.Unigram([*pieces, *((piece, -9.0) for piece in more)], unk_id, bool(more))


def bpe(*more, **options):
    return models.BPE(vocab=vocabulary(*more), merges=[("h", "i")], **options)


WHOLE = {
    "unigram": unigram(0),
    "unigram without unknown": unigram(None),
    "unigram with some bytes": unigram(0, *BYTES[:99]),
    "bpe": bpe(unk_token="<unk>"),
    "bpe fused": bpe(unk_token="<unk>", fuse_unk=True),
    "bpe without unknown": bpe(),
    "bpe that ignores merges": bpe(ignore_merges=True),
    "bpe with a wrong unknown": bpe(unk_token="<none>"),
    "bpe with some bytes": bpe(*BYTES[:99], byte_fallback=True),
    "wordpiece": models.WordPiece(vocabulary("##i"), unk_token="<unk>"),
    "wordlevel": models.WordLevel(vocabulary(), unk_token="<unk>"),
    "wordlevel with a wrong unknown": models.WordLevel(vocabulary(), unk_token="<none>"),
}
FALLBACK = {
    "unigram": unigram(0, *BYTES),
    "bpe": bpe(*BYTES, unk_token="<unk>", byte_fallback=True),
    "bpe without unknown": bpe(*BYTES, byte_fallback=True),
}


def tokenizer(model):
    backend = Backend(model)
    if isinstance(model, models.WordLevel | models.WordPiece):
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<unk>", "</s>", "<beyond>"])
    return Tokenizer(backend, config={"eos_token": "</s>"})


@pytest.mark.parametrize("name", WHOLE)
def test_a_character_without_a_token_is_refused(name):
    assert tokenizer(WHOLE[name]).encode("hi") == [PIECES.index("hi")]
    with pytest.raises(DataError, match=r"☃.*U\+2603.* has no token"):
        tokenizer(WHOLE[name]).encode("☃")


@pytest.mark.parametrize("name", FALLBACK)
def test_bytes_stand_for_what_has_no_token(name):
    assert tokenizer(FALLBACK[name]).encode("☃") == [10 + byte for byte in "☃".encode()]


@pytest.mark.parametrize("name", [*WHOLE, "fallback"])
def test_no_text_spells_a_special_token(name):
    encoder = tokenizer(WHOLE.get(name, FALLBACK["unigram"]))
    special = set(encoder.special_ids.values())
    for text in ("</s>", "hi</s>hi", "hi </s> hi", "<unk>", "<beyond>"):
        with suppress(DataError):  # a model of whole words has no other token for it
            assert not set(encoder.encode(text)) & special
    ids = encoder.encode("hi</s><beyond>", allow_special=True)
    assert ids[-2:] == [1, encoder.special_ids["<beyond>"]]


def test_tokens_beyond_the_vocabulary_keep_their_ids():
    for model in (unigram(0), models.WordLevel(vocabulary(), unk_token="<unk>")):
        backend = Backend(model)
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.add_special_tokens(["</s>", "<beyond>"])
        backend.add_tokens(["☃"])
        assert Tokenizer(backend).encode("hi ☃") == backend.encode("hi ☃").ids == [5, 11]


def test_a_panic_of_the_library_is_a_data_error(capfd):
    backend = Backend(bpe(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("(h+)+$"), "isolated")
    with pytest.raises(DataError, match=r"can't encode a text of 41 characters: .*retry-limit"):
        Tokenizer(backend).encode("h" * 40 + "i")
    backend.decoder = decoders.Strip("h", 99, 99)  # more than there is
    with pytest.raises(DataError, match=r"can't decode 1 tokens: .*check the decoder"):
        Tokenizer(backend).decode(backend.encode("h").ids)
    assert "panicked" in capfd.readouterr().err  # the library's own words


def test_an_unknown_token_of_one_character_is_itself():
    encoder = tokenizer(bpe("?", unk_token="?"))
    assert encoder.encode("hi?") == [5, 10]
    with pytest.raises(DataError, match="☃"):
        encoder.encode("hi☃")


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("normalizer", normalizers.Sequence([normalizers.Replace("h", "h" * 10)] * 3)),
        ("normalizer", normalizers.Prepend("h" * 100)),
        ("decoder", decoders.Replace("h", "h" * 100)),
    ],
)
def test_a_tokenizer_that_multiplies_texts_is_refused(name, part, tmp_path):
    backend = Backend(bpe())
    setattr(backend, name, part)
    Tokenizer(backend).save(tmp_path)
    with pytest.raises(ModelError, match=rf"its {name} makes up to 1,?000? characters of one"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("normalizer", "reason"),
    [
        ({"type": "Sequence", "normalizers": 5}, "expected a sequence"),
        ({"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "can't be loaded: Precompiled"),
    ],
)
def test_a_tokenizer_that_the_library_refuses_or_panics_at(normalizer, reason, tmp_path):
    Tokenizer(Backend(bpe())).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normalizer}))
    with pytest.raises(ModelError, match=rf"tokenizer.json can't be used: .*{reason}"):
        load_tokenizer(tmp_path)


def test_a_token_with_an_id_that_takes_all_memory_is_refused(tmp_path):
    Tokenizer(Backend(bpe())).save(tmp_path)
    path = tmp_path / "tokenizer.json"
    state = json.loads(path.read_text())
    state["model"]["vocab"]["far away"] = 2**31
    path.write_text(json.dumps(state))
    with pytest.raises(ModelError, match="gives a token the id 2,147,483,648, and at most"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("as_text", [True, False])
def test_merges_that_spell_a_special_token_are_left_out(as_text):
    """A BPE that was trained on a text with its own special token has merges that spell it."""
    vocabulary = {name: i for i, name in enumerate(["<unk>", "</s>", "<", "/s>", "/", "s", ">"])}
    vocabulary["/s"] = 7
    merges = [("/", "s"), ("/s", ">"), ("<", "/s>")]
    backend = Backend(models.BPE(vocabulary, merges, unk_token="<unk>"))
    backend.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    if as_text:
        state = json.loads(backend.to_str())
        state["model"]["merges"] = [" ".join(merge) for merge in merges]
        backend = Backend.from_str(json.dumps(state))
    tokenizer = Tokenizer(backend, config={"eos_token": "</s>"})
    assert tokenizer.encode("</s>") == [vocabulary["<"], vocabulary["/s>"]]
    assert tokenizer.encode("</s>", allow_special=True) == [vocabulary["</s>"]]
