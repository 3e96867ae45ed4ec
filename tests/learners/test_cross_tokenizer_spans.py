"""Spans of two tokenizers: properties over tokenizers of every kind, and cases by hand."""

import random
import unicodedata
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from learners.span_cases import FRAGMENTS, MAKERS, tokenizer

from ratchet.data.chat.tokenizer import Tokenizer
from ratchet.errors import DataError
from ratchet.learners.cross_tokenizer_spans import TokenRun, align_positions, find_common_spans

REPLACED = "\N{REPLACEMENT CHARACTER}"
LOSSLESS = ["bytes", "gpt2", "llama", "gemma"]


# --- the oracle: every beginning of the tokens is decoded by itself


def beginnings(name, tokens):
    return [tokenizer(name).decode(tokens[:count]) for count in range(len(tokens) + 1)]


def skeleton(text):
    """Return letters and digits alone, in lower case without accents."""
    plain = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    return "".join(character for character in plain if character.isalnum())


def check_spans(student, mine, teacher, theirs, spans):
    """Each span is the same text at the same place; spans are ordered and disjoint."""
    my_texts, their_texts = beginnings(student, mine), beginnings(teacher, theirs)
    for (a, x), (b, y) in pairwise([(range(0), range(0)), *spans]):
        assert a.stop <= b.start < b.stop <= len(mine)
        assert x.stop <= y.start < y.stop <= len(theirs)
    for a, b in spans:
        my_before, my_text = my_texts[a.start], my_texts[a.stop]
        their_before, their_text = their_texts[b.start], their_texts[b.stop]
        assert my_text.startswith(my_before)
        assert their_text.startswith(their_before)
        my_span, their_span = my_text[len(my_before) :], their_text[len(their_before) :]
        assert unicodedata.normalize("NFD", my_span) == unicodedata.normalize("NFD", their_span)
        rests = (my_texts[-1][len(my_before) :], their_texts[-1][len(their_before) :])
        same_before = skeleton(my_before) == skeleton(their_before)
        assert same_before or skeleton(rests[0]) == skeleton(rests[1]), "another place in the text"


def shortest_spans(student, mine, teacher, theirs):
    """Return all spans of a text that both decode to: they end wherever both have written the
    same."""
    their_counts = {}
    for count, text in enumerate(beginnings(teacher, theirs)):
        their_counts.setdefault(text, count)
    ends = {"": (0, 0)}
    my_texts = beginnings(student, mine)
    for count, text in enumerate(my_texts):
        whole = my_texts[-1].startswith(text) and not text.endswith(REPLACED)
        if whole and text in their_counts:
            ends.setdefault(text, (count, their_counts[text]))
    ends[my_texts[-1]] = (len(mine), len(theirs))
    return [(range(a, b), range(x, y)) for (a, x), (b, y) in pairwise(ends.values()) if b > a]


def spans_of(student, mine, teacher):
    """Return the teacher's tokens and the spans; no tokens where it has none for the text."""
    run = TokenRun(tokenizer(student), mine)
    try:
        theirs = tokenizer(teacher).encode(run.text)
    except DataError:
        return [], []
    return theirs, list(find_common_spans(run, TokenRun(tokenizer(teacher), theirs)))


def plain_tokens(name):
    controls = {*tokenizer(name).special_ids.values(), *tokenizer(name).eos_ids}
    return [token for token in range(tokenizer(name).vocab_size) if token not in controls]


@st.composite
def written(draw):
    """Draw (a tokenizer, tokens): of a text, of a text in pieces, cut off, or any tokens at all."""
    name = draw(st.sampled_from(list(MAKERS)))
    pieces = draw(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=3), max_size=8))
    if draw(st.booleans()):
        pieces = ["".join(pieces)]
    tokens = []
    for piece in pieces:
        try:
            tokens += tokenizer(name).encode(piece, after="text" if tokens else "start")
        except DataError:
            continue
    some = st.lists(st.sampled_from(plain_tokens(name)), max_size=4)
    start, stop = draw(st.integers(0, 2)), draw(st.integers(0, 2))
    kind = draw(st.sampled_from(["whole", "whole", "cut", "mixed"]))
    if kind == "cut":
        tokens = tokens[start : len(tokens) - stop]
    elif kind == "mixed":
        place = draw(st.integers(0, len(tokens)))
        tokens = [*tokens[:place], *draw(some), *tokens[place:]]
    return name, tokens


def check_row(row, teacher):
    """Hold the spans to the oracle, and to the shortest where the teacher gives the text back."""
    student, mine = row
    theirs, spans = spans_of(student, mine, teacher)
    check_spans(student, mine, teacher, theirs, spans)
    text = tokenizer(student).decode(mine)
    if theirs and tokenizer(teacher).decode(theirs) == text and REPLACED not in text:
        assert spans == shortest_spans(student, mine, teacher, theirs)
        assert [i for a, _ in spans for i in a] == list(range(len(mine)))
        assert [i for _, b in spans for i in b] == list(range(len(theirs)))


@pytest.mark.fault("M9")
@settings(max_examples=150)
@given(row=written(), teacher=st.sampled_from(list(MAKERS)))
def test_a_span_is_the_same_text_in_both_tokenizers(row, teacher):
    check_row(row, teacher)


@pytest.mark.slow
@settings(max_examples=2000)
@given(row=written(), teacher=st.sampled_from(list(MAKERS)))
def test_a_span_is_the_same_text_in_many_trials(row, teacher):
    check_row(row, teacher)


@settings(max_examples=80)
@given(
    pieces=st.lists(
        st.sampled_from([f for f in FRAGMENTS if REPLACED not in f]) | st.text(max_size=3)
    ),
    student=st.sampled_from(LOSSLESS),
    teacher=st.sampled_from(LOSSLESS),
)
def test_lossless_tokenizers_cover_every_token(pieces, student, teacher):
    text = "a" + "".join(pieces).replace("▁", "_")  # SentencePiece writes it as a space
    mine = tokenizer(student).encode(text)
    theirs, spans = spans_of(student, mine, teacher)
    if tokenizer(student).decode(mine) == text:
        assert tokenizer(teacher).decode(theirs) == text
    assert [i for a, _ in spans for i in a] == list(range(len(mine)))


# --- by hand


def texts_of(student, teacher, text, mine=None):
    """Return the spans' texts, and what no span covers in brackets."""
    mine = tokenizer(student).encode(text) if mine is None else mine
    _, spans = spans_of(student, mine, teacher)
    my_texts, pieces, at = beginnings(student, mine), [], 0
    for a, _ in [*spans, (range(len(mine), len(mine)), None)]:
        if a.start > at:
            pieces.append(f"[{my_texts[a.start][len(my_texts[at]) :]}]")
        pieces.append(my_texts[a.stop][len(my_texts[a.start]) :])
        at = a.stop
    return [piece for piece in pieces if piece]


def test_accents_that_nfc_composes_shift_no_later_span():
    """Positions in the two decoded texts differ by one from the accent on."""
    text = "cafe\u0301 = 12"
    assert texts_of("bytes", "qwen2 nfc", text) == ["cafe\u0301", " =", " ", "1", "2"]
    spelt = ["c", "a", "f", "e\u0301", " ", "=", " ", "1", "2"]
    assert texts_of("characters", "unigram nfc", text) == spelt


@pytest.mark.parametrize(
    ("teacher", "text", "pieces"),
    [
        ("lower", "12 Xx", ["1", "2", " ", "[X]", "x"]),
        ("lower", "é12", ["[é]", "1", "2"]),
        ("nfkc", "Ⅷ½ 12", ["[Ⅷ½]", " ", "1", "2"]),
    ],
)
def test_what_a_tokenizer_rewrites_has_no_span(teacher, text, pieces):
    assert texts_of("bytes", teacher, text) == pieces


def test_places_go_on_behind_a_difference():
    assert align_positions("aBc", "abc") == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert align_positions("ﬁx", "fix") == [(0, 0), (1, 2), (2, 3)]
    assert align_positions("a  b", "a b") == [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3)]
    assert align_positions("e\u0301x", "éx") == [(0, 0), (2, 1), (3, 2)]


def test_behind_what_nothing_explains_places_count_from_the_end():
    """The left text has a letter more: "bb" must not be taken for its neighbour."""
    assert align_positions("axbb", "abb") == [(0, 0), (1, 1), (2, 1), (3, 2), (4, 3)]
    assert align_positions("x\u1112\u1161\u11ab", "y한") == [(0, 0), (1, 1), (4, 2)]
    assert align_positions("ab", "cd") == [(0, 0), (2, 2)]


def test_bytes_that_are_no_character_have_no_span():
    """U+FFFD stands for them in the text, a character that was not written."""
    encoded = tokenizer("bytes").encode("é")
    for broken in (encoded[:1], encoded[1:]):
        mine = [*tokenizer("bytes").encode("a"), *broken, *tokenizer("bytes").encode("b")]
        assert texts_of("bytes", "gpt2", None, mine) == ["a", f"[{REPLACED}b]"]
    assert "".join(texts_of("bytes", "gpt2", f"a{REPLACED}b")) == f"a{REPLACED}b"


@pytest.mark.parametrize("name", ["llama", "unigram", "wordpiece"])
def test_a_run_behind_other_text_keeps_its_first_space(name):
    """A decoder drops a space at the beginning of a text, and not in the middle."""
    previous = tokenizer(name).encode("12")
    tokens = tokenizer(name).encode("12 hello")[len(previous) :]
    assert TokenRun(tokenizer(name), tokens, previous).text == " hello"
    assert TokenRun(tokenizer(name), tokens).text == "hello"
    spelt = tokenizer("bytes").encode(" hello")
    spans = list(
        find_common_spans(
            TokenRun(tokenizer("bytes"), spelt), TokenRun(tokenizer(name), tokens, previous)
        )
    )
    assert [i for a, _ in spans for i in a] == list(range(6))


def test_bytes_of_two_runs_make_no_character():
    first, second = tokenizer("bytes").encode("é")
    text = tokenizer("bytes").encode("ab")
    assert TokenRun(tokenizer("bytes"), [second, *text], [first]).text == f"{REPLACED}ab"
    assert TokenRun(tokenizer("bytes"), [second], [*text, first]).text == REPLACED
    assert TokenRun(tokenizer("bytes"), text, [first]).text == "ab"


def test_a_run_without_tokens_has_no_span():
    assert (
        list(find_common_spans(TokenRun(tokenizer("bytes"), []), TokenRun(tokenizer("gpt2"), [])))
        == []
    )


# --- where tokens end in the text


def cuts_by_beginnings(name, tokens):
    texts = beginnings(name, tokens)
    cuts = {0: 0}
    for count, text in enumerate(texts[:-1]):
        if texts[-1].startswith(text) and not text.endswith(REPLACED):
            cuts.setdefault(len(text), count)
    return {**cuts, len(texts[-1]): len(tokens)}


@pytest.mark.parametrize("name", ["characters", "bytes", "gpt2", "llama", "gemma", "unigram", "t5"])
def test_cuts_are_those_of_every_beginning_decoded(name):
    """Rows are random tokens (half characters too), real text, and text whose end is missing."""
    rng, usual = random.Random(name), plain_tokens(name)
    rows = [[rng.choice(usual) for _ in range(rng.randrange(1, 60))] for _ in range(60)]
    for _ in range(40):
        text = "".join(
            rng.choices(["hello there ", "naïve café ", "日本語 ", "😀e\u0301 ", "  \n\n he "], k=4)
        )
        row = [token for word in text for token in tokenizer(name).encode(word, after="text")]
        rows += [row, row[: rng.randrange(1, len(row) + 1)], row[rng.randrange(len(row)) :]]
    for row in rows:
        assert TokenRun(tokenizer(name), row).cuts == cuts_by_beginnings(name, row), row


@pytest.mark.parametrize("text", ["hello world ", "日本語 😀", "\x80", "e\u0301X\r\n"])
@pytest.mark.parametrize(("student", "teacher"), [("bytes", "qwen2 nfc"), ("llama", "lower")])
def test_the_work_grows_with_the_length_alone(student, teacher, text, monkeypatch):
    unit = tokenizer(student).encode(text)
    unit = unit[-1:] if text == "\x80" else unit  # the last byte alone is not a character
    decoded, plain = [], Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: decoded.append(len(ids)) or plain(self, ids)
    )
    work = []
    for count in (400, 800):
        decoded.clear()
        spans_of(student, (unit * count)[:count], teacher)
        work.append(sum(decoded))
    assert work[1] < 2.1 * work[0]


@pytest.mark.medium
def test_a_row_of_many_thousand_tokens_has_its_spans():
    mine = tokenizer("bytes").encode("hello e\u0301 " * 2000)
    _, spans = spans_of("bytes", mine, "qwen2 nfc")
    assert [i for a, _ in spans for i in a] == list(range(len(mine)))


@pytest.mark.medium
def test_a_half_character_behind_fallback_bytes_costs_linear_work(monkeypatch):
    """One missing byte at the end makes U+FFFD of all bytes before it: no beginning is the
    text's."""
    decoded, plain = [], Tokenizer.decode
    monkeypatch.setattr(
        Tokenizer, "decode", lambda self, ids: decoded.append(len(ids)) or plain(self, ids)
    )
    work = []
    for count in (1000, 2000, 4000):
        decoded.clear()
        mine = tokenizer("llama").encode("日" * count)[:-1]
        assert tokenizer("llama").decode(mine).strip(REPLACED) == ""
        assert spans_of("llama", mine, "gpt2")[1] == []
        work.append(sum(decoded))
    assert work[2] < 2.3 * work[1] < 5.3 * work[0]


def test_text_behind_fallback_bytes_that_are_no_character_has_spans():
    mine = [tokenizer("llama").token_id("<0x80>")] * 300 + tokenizer("llama").encode(
        "hello there world " * 20, after="text"
    )
    _, spans = spans_of("llama", mine, "gpt2")
    assert [i for a, _ in spans for i in a] == list(range(spans[0][0].start, len(mine)))
    assert 300 <= spans[0][0].start < 300 + 300 // 8 + 8
