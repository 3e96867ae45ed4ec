import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from ratchet.config.registry import KINDS
from ratchet.config.resolve import section_class
from ratchet.data.chat.builtin_tokenizers import (
    SPECIAL_TOKENS,
    build_auto,
    build_byte_bpe,
    build_bytes,
    build_characters,
    byte_bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
)
from ratchet.data.chat.chat_templates import BUILTIN_TEMPLATES
from ratchet.data.chat.tokenizer import BATCH_CALL_CHARS, GUARD, Tokenizer
from ratchet.data.chat.tokenizer_loading import load_tokenizer
from ratchet.data.tokenizer_config import (
    PRINTABLE,
    AutoTokenizerConfig,
    ByteBPEConfig,
    BytesConfig,
    CharactersConfig,
)
from ratchet.errors import ConfigError, DataError, ModelError

TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "the dog and the fox",
    "12 + 34 = 46\n\n",
] * 20
CHARACTERS, BYTES, BPE = character_tokenizer(), byte_tokenizer(), byte_bpe_tokenizer(TEXTS, 300)


# --- made in code


def test_characters_have_one_token_each_after_the_special_ones():
    tokenizer = character_tokenizer("01=")
    assert tokenizer.encode("10=") == [9, 8, 10]
    # 8 special tokens, 3 characters, reserved up to a multiple of 8
    assert tokenizer.vocab_size == 16
    assert (tokenizer.pad_id, tokenizer.eos_ids, tokenizer.bos_id) == (0, (1,), None)
    assert tokenizer.decode([9, 8, 1, 10]) == "10="
    assert tokenizer.decode([9, 1], skip_special=False) == "1<eos>"


def test_the_default_alphabet_is_printable_ascii_and_the_line_break():
    assert sorted(PRINTABLE) == sorted([*map(chr, range(32, 127)), "\n"])
    assert CHARACTERS.vocab_size == 104


@pytest.mark.parametrize("alphabet", ["", "aa"])
def test_an_alphabet_holds_each_character_once(alphabet):
    with pytest.raises(ConfigError, match="must not be empty or repeat a character"):
        character_tokenizer(alphabet)


@given(st.text(alphabet=PRINTABLE))
def test_characters_round_trip(text):
    ids = CHARACTERS.encode(text)
    assert len(ids) == len(text)
    assert CHARACTERS.decode(ids) == text


def test_a_character_without_a_token_is_named_with_the_fix():
    with pytest.raises(
        DataError,
        match=r"'é' \(U\+00E9\) has no token: add it to `tokenizer.alphabet`.*`tokenizer.kind: "
        r"bytes`",
    ):
        CHARACTERS.encode("café")
    with pytest.raises(DataError, match=r"'é'"):
        CHARACTERS.encode("é", after="text")


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@given(text=st.text())
def test_bytes_round_trip_any_unicode(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert not set(ids) & set(range(len(SPECIAL_TOKENS)))
    assert tokenizer.encode(text, after="special") == ids


def test_bytes_are_one_token_a_byte():
    assert BYTES.vocab_size == 264
    assert len(BYTES.encode("aé€")) == 1 + 2 + 3
    assert BYTES.decode(BYTES.encode("é")[:1]) == "\ufffd"


def test_a_lone_surrogate_is_refused():
    with pytest.raises(DataError, match="U\\+D800"):
        BYTES.encode("a\ud800")


def test_bpe_learns_frequent_words_and_depends_on_its_texts_alone():
    assert BPE.vocab_size == 300
    assert len(BPE.encode(" the")) == 1
    assert len(BPE.encode("46")) == 2, "digits stay single"
    assert byte_bpe_tokenizer(TEXTS, 300).fingerprint == BPE.fingerprint
    assert byte_bpe_tokenizer(TEXTS[:2], 300).fingerprint != BPE.fingerprint


def test_a_vocabulary_too_small_for_the_bytes_is_refused():
    with pytest.raises(ConfigError, match="vocab_size=263"):
        byte_bpe_tokenizer(TEXTS, 263)


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES, BPE], ids=["characters", "bytes", "bpe"])
def test_typed_control_tokens_stay_text(tokenizer):
    ids = tokenizer.encode("a<eos>b")
    assert not set(ids) & set(tokenizer.special_ids.values())
    assert tokenizer.decode(ids) == "a<eos>b"
    assert tokenizer.encode("a<eos>b", allow_special=True) == [
        *tokenizer.encode("a"),
        1,
        *tokenizer.encode("b"),
    ]


@pytest.mark.parametrize("tokenizer", [CHARACTERS, BYTES, BPE], ids=["characters", "bytes", "bpe"])
def test_saved_directories_load_to_equal_ids_here_and_in_transformers(tokenizer, tmp_path):
    from transformers import AutoTokenizer

    tokenizer.save(tmp_path / "new" / "model")
    ours, theirs = (
        load_tokenizer(tmp_path / "new" / "model"),
        AutoTokenizer.from_pretrained(tmp_path / "new" / "model"),
    )
    text = "the fox: 1+2=3\n <eos> the<user>"
    assert (
        ours.encode(text, allow_special=True)
        == tokenizer.encode(text, allow_special=True)
        == theirs.encode(text)
    )
    assert theirs.decode(theirs.encode(text), skip_special_tokens=True) == tokenizer.decode(
        ours.encode(text, allow_special=True)
    )
    assert (ours.eos_ids, ours.pad_id, ours.vocab_size) == (
        tokenizer.eos_ids,
        tokenizer.pad_id,
        tokenizer.vocab_size,
    )
    assert (theirs.eos_token_id, theirs.pad_token_id, len(theirs)) == (1, 0, tokenizer.vocab_size)
    assert ours.fingerprint == tokenizer.fingerprint
    assert ours.chat_template == theirs.chat_template == BUILTIN_TEMPLATES["plain"]


# --- read from directories


def directory(tmp_path, **files):
    character_tokenizer("abc").save(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    for name, content in files.items():
        path = tmp_path / f"{name}.json"
        path.write_text(
            json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **content})
        )
    return tmp_path


def test_eos_ids_come_from_all_that_names_them_the_tokenizers_first(tmp_path):
    both = directory(
        tmp_path / "a", generation_config={"eos_token_id": [5, 1, 6]}, config={"eos_token_id": 9}
    )
    assert load_tokenizer(both).eos_ids == (1, 5, 6)
    assert load_tokenizer(directory(tmp_path / "b", config={"eos_token_id": 9})).eos_ids == (1, 9)
    none = directory(
        tmp_path / "c", tokenizer_config={"eos_token": None}, config={"eos_token_id": 9}
    )
    assert load_tokenizer(none).eos_ids == (9,)


def test_several_eos_ids_survive_saving_beside_a_models_own_file(tmp_path):
    tokenizer = load_tokenizer(
        directory(tmp_path / "a", generation_config={"eos_token_id": [5, 1]})
    )
    tokenizer.save(tmp_path / "b")
    assert load_tokenizer(tmp_path / "b").eos_ids == (1, 5)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "generation_config.json").write_text('{"eos_token_id": 6}')
    tokenizer.save(tmp_path / "c")
    assert load_tokenizer(tmp_path / "c").eos_ids == (1, 6)


def test_special_tokens_may_be_objects_or_lie_in_the_older_file(tmp_path):
    config = {"bos_token": {"content": "<system>", "lstrip": False}}
    tokenizer = load_tokenizer(
        directory(tmp_path, tokenizer_config=config, special_tokens_map={"cls_token": "<user>"})
    )
    assert tokenizer.bos_id == 3
    assert tokenizer.special_tokens["cls_token"] == "<user>"


def test_templates_come_from_the_file_then_from_the_configuration(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    path = directory(tmp_path, tokenizer_config={"chat_template": named})
    assert load_tokenizer(path).chat_template == "d"
    assert "chat_template" not in load_tokenizer(path).config
    (path / "chat_template.jinja").write_text("j")
    assert load_tokenizer(path).chat_template == "j"


def test_other_settings_of_a_model_are_saved_again(tmp_path):
    tokenizer = load_tokenizer(
        directory(tmp_path / "a", tokenizer_config={"model_max_length": 4096})
    )
    tokenizer.save(tmp_path / "b")
    assert (
        json.loads((tmp_path / "b" / "tokenizer_config.json").read_text())["model_max_length"]
        == 4096
    )


def test_truncation_and_padding_in_the_file_do_not_change_texts(tmp_path):
    backend = Backend.from_str(BYTES._backend.to_str())
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(load_tokenizer(tmp_path).encode("abcde")) == 5


def test_a_token_that_the_configuration_alone_calls_special_is_a_control_token(tmp_path):
    backend = Backend(
        models.WordLevel({"a": 0, "</s>": 1, "<": 2, "/": 3, "s": 4, ">": 5, "?": 6}, unk_token="?")
    )
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = Tokenizer(backend, config={"eos_token": "</s>"})
    assert tokenizer.encode("a</s>", allow_special=True) == [0, 1]
    assert tokenizer.encode("a</s>") == [0, 2, 3, 4, 5]
    assert tokenizer.decode([0, 1]) == "a"
    assert tokenizer.vocab_size == 7


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config": {"eos_token_id": 16}}, "EOS id 16 lies outside the tokenizer's 16 tokens"),
        (
            {"tokenizer_config": {"eos_token": "</s>"}},
            "eos_token '</s>' of tokenizer_config.json is not a token",
        ),
    ],
)
def test_files_that_contradict_each_other_are_refused(tmp_path, files, message):
    with pytest.raises(ModelError, match=message):
        load_tokenizer(directory(tmp_path, **files))


def test_damaged_and_missing_files_are_named(tmp_path):
    with pytest.raises(ModelError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version"')
    with pytest.raises(ModelError, match=r"tokenizer\.json is not valid JSON"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_path_that_is_nowhere_and_a_hub_id_that_is_out_of_reach_say_so():
    with pytest.raises(ModelError, match="no model directory '/nowhere/at all'"):
        load_tokenizer("/nowhere/at all")
    with pytest.raises(
        ModelError,
        match="'nobody/nothing' is not a local directory, and can't be downloaded from the Hugging Face Hub",
    ):
        load_tokenizer("nobody/nothing")  # the tests run offline


def test_a_directory_with_older_files_only_goes_through_transformers(tmp_path):
    model = json.loads(BPE._backend.to_str())["model"]
    vocabulary = {**model["vocab"], "<|endoftext|>": max(model["vocab"].values()) + 1}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = (" ".join(merge) for merge in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>"}'
    )
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the quick fox\n")) == "the quick fox\n"
    assert tokenizer.encode(" the") == [vocabulary["Ġthe"]]
    assert tokenizer.eos_ids == (300,)


# --- the same ids as a whole text gets


def sentencepiece(prefix: str) -> Tokenizer:
    """A tiny SentencePiece conversion: "legacy" puts a space before every stretch of text, "first"
    before the text only."""
    pieces = ["<unk>", "<s>", "</s>", "<0x0A>", "▁", "h", "i", "hi", "▁hi", "▁▁hi", "?"]
    merges = [("h", "i"), ("▁", "hi"), ("▁", "▁hi")]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}
    backend = Backend(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True
        )
    )
    spaces = normalizers.Replace(" ", "▁")
    if prefix == "legacy":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
    else:
        backend.normalizer = spaces
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return Tokenizer(
        backend, config={"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    )


@pytest.mark.parametrize("prefix", ["legacy", "first"])
@given(text=st.lists(st.sampled_from(["<s>", "</s>", "hi", " ", "\n", "?", " hi"])).map("".join))
def test_sentencepiece_texts_get_the_ids_of_the_library(prefix, text):
    tokenizer = sentencepiece(prefix)
    assert (
        tokenizer.encode(text, allow_special=True)
        == tokenizer._backend.encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize("prefix", ["legacy", "first"])
def test_sentencepiece_text_that_follows_text_gets_no_space_of_its_own(prefix):
    tokenizer = sentencepiece(prefix)
    pieces = {i: piece for piece, i in tokenizer._backend.get_vocab().items()}

    def split(text, after):
        return [pieces[i] for i in tokenizer.encode(text, after=after)]

    assert split("hi", "start") == ["▁hi"]
    assert split("hi", "special") == (["▁hi"] if prefix == "legacy" else ["hi"])
    assert split("hi", "text") == ["hi"]
    assert split(" hi", "text") == ["▁hi"]
    assert split("\nhi", "text") == ["<0x0A>", "hi"]


SWALLOWED = ["<l>", "<r>", "<b>", "<w>", " ", "\n", "\x1c", "\x85", "a", "."]


@given(st.lists(st.sampled_from(SWALLOWED), max_size=8).map("".join))
def test_special_tokens_that_swallow_spaces_or_stand_alone_act_as_in_the_library(text):
    backend = Backend.from_str(BYTES._backend.to_str())
    backend.add_special_tokens(
        [
            AddedToken("<l>", lstrip=True),
            AddedToken("<r>", rstrip=True),
            AddedToken("<b>", lstrip=True, rstrip=True),
            AddedToken("<w>", single_word=True),
        ]
    )
    ids = backend.encode(text, add_special_tokens=False).ids
    assert Tokenizer(backend).encode(text, allow_special=True) == ids


@pytest.mark.medium
def test_special_tokens_are_searched_in_linear_time():
    backend = Backend.from_str(BYTES._backend.to_str())
    backend.add_special_tokens([AddedToken("<l>", lstrip=True)])
    text = " " * 300_000 + "a" + " " * 300_000 + "<l>"
    assert Tokenizer(backend).find_special_tokens(text) == [(300_001, 600_004, 264)]


def test_the_longest_special_token_wins():
    backend = Backend.from_str(BYTES._backend.to_str())
    backend.add_special_tokens(["<|end|>", "<|end|><|end|>"])
    assert Tokenizer(backend).encode("<|end|><|end|><|end|>", allow_special=True) == [265, 264]


def test_the_guard_costs_no_id_and_ids_beyond_the_vocabulary_decode_to_nothing():
    assert BYTES.encode("a", after="special") == BYTES.encode("a")
    assert BYTES.vocab_size == 264, "the guard is known to a private copy only"
    assert BYTES.token_id(GUARD) is None
    assert BYTES.decode([*BYTES.encode("a"), 999]) == "a"


def test_the_fingerprint_tells_templates_and_eos_apart():
    backend = BYTES._backend
    prints = {
        Tokenizer(backend, config={"eos_token": "<eos>"}).fingerprint,
        Tokenizer(backend, config={"eos_token": "<eos>"}, chat_template="x").fingerprint,
        Tokenizer(backend, config={"eos_token": "<eos>"}, eos_ids=[2]).fingerprint,
    }
    assert len(prints) == 3


# --- configuration


def test_each_kind_builds_its_tokenizer(tmp_path):
    (tmp_path / "t.txt").write_text("\n".join(TEXTS))
    assert build_characters(CharactersConfig(alphabet="ab"), None).encode("ba") == [9, 8]
    assert build_bytes(BytesConfig(), None).fingerprint == BYTES.fingerprint
    assert (
        build_byte_bpe(ByteBPEConfig(texts=(tmp_path / "t.txt",), vocab_size=300), None).vocab_size
        == 300
    )
    CHARACTERS.save(tmp_path)
    assert build_auto(AutoTokenizerConfig(), str(tmp_path)).fingerprint == CHARACTERS.fingerprint
    BYTES.save(tmp_path / "other")
    assert (
        build_auto(AutoTokenizerConfig(path=str(tmp_path / "other")), str(tmp_path)).fingerprint
        == BYTES.fingerprint
    )


def test_each_kind_names_what_builds_it():
    import importlib

    for kind in KINDS["tokenizer"]:
        module, _, name = section_class("tokenizer", kind).builds.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_wrong_settings_say_what_to_change(tmp_path):
    with pytest.raises(ConfigError, match=r"random weights.*tokenizer.kind to 'characters'"):
        build_auto(AutoTokenizerConfig(), None)
    with pytest.raises(ValueError, match="alphabet repeats 'a'"):
        CharactersConfig(alphabet="aba")
    with pytest.raises(DataError, match=r"none\.txt can't be read"):
        build_byte_bpe(ByteBPEConfig(texts=(tmp_path / "none.txt",)), None)


@pytest.mark.medium
def test_configuration_needs_no_tokenizer_and_rendering_no_torch():
    script = (
        "import sys, ratchet.data.tokenizer_config; assert not {'tokenizers', 'torch', 'jinja2'} & "
        "set(sys.modules)\n"
        "import ratchet.data.chat.renderer, ratchet.data.chat.builtin_tokenizers\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_long_texts_have_the_tokens_of_single_ones() -> None:
    text = "ab \u00e9 <|im_end|>\n" * 2000
    assert len(text) > BATCH_CALL_CHARS
    assert byte_tokenizer().encode(text) == byte_tokenizer().encode(text[:16]) * 2000
