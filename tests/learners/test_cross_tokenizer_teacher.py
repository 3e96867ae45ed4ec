"""A teacher with another tokenizer: spans by hand, sums over spans, control tokens, and the limit
of equal tokens. What spans are is tested in test_spans.py."""

import asyncio
import math
import unicodedata
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from learners.span_cases import FRAGMENTS
from learners.span_cases import tokenizer as of_kind

from ratchet.algorithms.advantages.teacher import on_policy_distillation
from ratchet.algorithms.base import AlgoState
from ratchet.config.model_shape.decoder_config import DecoderConfig
from ratchet.data.chat.builtin_tokenizers import (
    byte_bpe_tokenizer,
    byte_tokenizer,
    character_tokenizer,
)
from ratchet.data.packing import pack
from ratchet.errors import DataError
from ratchet.learners.config import LocalConfig
from ratchet.learners.cross_tokenizer_teacher import AlignedTeacher
from ratchet.learners.local import LocalLearner
from ratchet.models.decoder import Decoder
from ratchet.models.policy import DecoderPolicy
from ratchet.testing.builders import make_group, make_trajectory

WORDS = ["hello world", "hello there world", "the other world"] * 8


@pytest.fixture(scope="module")
def merged():
    """Byte-level BPE with whole words among its tokens."""
    return byte_bpe_tokenizer(WORDS, vocab_size=320)


def teacher_of(tokenizer, student, seed=0):
    config = DecoderConfig(tokenizer.vocab_size, 16, 2, 2, 1, 8, 24, init_std=0.3)
    net = DecoderPolicy(Decoder(config).init_weights(seed).to(torch.float64))
    inner = LocalLearner(LocalConfig(), net, optimizer=None, total_steps=1)
    return AlignedTeacher(inner, student, tokenizer, max_positions=net.max_positions), inner


def scored(teacher, batch):
    return asyncio.run(teacher.score(batch, ["logprobs", "spans"]))


def row(tokenizer, prompt, answer, *, ends=True, **fields):
    end = list(tokenizer.eos_ids[:1]) if ends else []
    return make_trajectory(
        tokenizer.encode(prompt), [*tokenizer.encode(answer, after="text"), *end], **fields
    )


def packed(*rows):
    return pack([make_group(f"g{i}", [row]) for i, row in enumerate(rows)])


def test_spans_end_where_both_tokenizers_have_a_boundary(merged):
    """In the teacher's merges "hello" and " world" are one token each; the student spells them, and
    its own end is the end."""
    student = byte_tokenizer()
    teacher, _ = teacher_of(merged, student)
    assert [merged.decode([token]) for token in merged.encode("hello world")] == ["hello", " world"]
    tokens = [*student.encode("12"), *student.encode("hello world"), student.eos_ids[0]]
    made = teacher.translate(tokens, [False] * 2 + [True] * 12)
    assert made.tokens == [*merged.encode("12"), *merged.encode("hello world"), merged.eos_ids[0]]
    assert made.is_scored == [False, False, True, True, True]
    assert made.spans == [
        (range(2, 7), range(2, 3)),
        (range(7, 13), range(3, 4)),
        (range(13, 14), range(4, 5)),
    ]


def test_spans_end_where_both_have_a_boundary_whoever_has_the_longer_tokens(merged):
    student, spelt = merged, byte_tokenizer()
    teacher, _ = teacher_of(spelt, student)
    made = teacher.translate(student.encode("7hello world"), [False, True, True])
    assert made.spans == [(range(1, 2), range(1, 6)), (range(2, 3), range(6, 12))]


def test_tokens_that_overlap_share_a_span():
    """ "abc" as "ab" + "c" beside "a" + "bc": no boundary in common before the end."""
    left, right = (
        byte_bpe_tokenizer(["ab"] * 4, vocab_size=265),
        byte_bpe_tokenizer(["bc"] * 4, vocab_size=265),
    )
    teacher, _ = teacher_of(right, left)
    assert (len(left.encode("abc")), len(right.encode("abc"))) == (2, 2)
    made = teacher.translate(left.encode("7abc"), [False, True, True])
    assert made.spans == [(range(1, 3), range(1, 3))]


def test_bytes_of_one_character_share_a_span():
    student, teaching = byte_tokenizer(), character_tokenizer("aé€")
    teacher, _ = teacher_of(teaching, student)
    tokens = student.encode("aaé€a")
    assert len(tokens) == 1 + 1 + 2 + 3 + 1
    made = teacher.translate(tokens, [False] + [True] * 7)
    assert made.spans == [
        (range(1, 2), range(1, 2)),
        (range(2, 4), range(2, 3)),
        (range(4, 7), range(3, 4)),
        (range(7, 8), range(4, 5)),
    ]


def test_a_span_never_reaches_over_the_end_of_the_prompt(merged):
    """The prompt ends within what the teacher would write as one token, so it is asked about two
    texts."""
    student = byte_tokenizer()
    teacher, _ = teacher_of(merged, student)
    made = teacher.translate(student.encode("hello"), [False] * 3 + [True] * 2)
    before, after = merged.encode("hel"), merged.encode("lo", after="text")
    assert made.tokens == [*before, *after]
    assert made.is_scored == [False] * len(before) + [True] * len(after)
    assert (made.spans[0][0].start, made.spans[-1][0].stop) == (3, 5)
    assert (made.spans[0][1].start, made.spans[-1][1].stop) == (
        len(before),
        len(before) + len(after),
    )


def test_control_tokens_become_the_teachers_of_the_same_name():
    student, teaching = (
        character_tokenizer("ab", multiple_of=1),
        character_tokenizer("xyzba", multiple_of=1),
    )
    teacher, _ = teacher_of(teaching, student)
    names = ["<user>", "<assistant>", "<eos>"]
    tokens = [
        student.special_ids["<user>"],
        *student.encode("ab"),
        student.special_ids["<assistant>"],
    ]
    tokens += [*student.encode("ba"), student.special_ids["<eos>"]]
    made = teacher.translate(tokens, [False] * 4 + [True] * 3)
    theirs = [teaching.special_ids[name] for name in names]
    assert made.tokens == [
        theirs[0],
        *teaching.encode("ab"),
        theirs[1],
        *teaching.encode("ba"),
        theirs[2],
    ]
    assert made.spans == [(range(i, i + 1), range(i, i + 1)) for i in (4, 5, 6)]


def test_the_same_name_as_text_is_not_a_control_token():
    """An answer may spell "<eos>" in ordinary characters: the teacher is asked about those."""
    student, teaching = character_tokenizer("<eos>"), character_tokenizer(">soe<")
    teacher, _ = teacher_of(teaching, student)
    made = teacher.translate(student.encode("<eos>"), [True] * 5)
    assert teaching.eos_ids[0] not in made.tokens
    assert len(made.tokens) == 5


def test_sums_over_spans_are_the_teachers_own_logprobs_of_the_text(merged):
    student = byte_tokenizer()
    teacher, inner = teacher_of(merged, student)
    texts = [("say: ", "hello world", 1.0), ("now: ", "the other hello", 0.7)]
    batch = packed(*(row(student, prompt, answer, temperature=t) for prompt, answer, t in texts))
    own = packed(*(row(merged, prompt, answer, temperature=t) for prompt, answer, t in texts))
    columns = scored(teacher, batch)
    direct = asyncio.run(inner.score(own, ["logprobs"]))["logprobs"]
    mine, theirs = (
        batch.sequence_sum(columns["logprobs"]),
        own.sequence_sum(torch.where(own.predicted_T, direct, 0.0)),
    )
    assert mine.tolist() == pytest.approx(theirs.tolist(), rel=1e-12)
    assert (theirs < -1).all()


def test_a_spans_logprob_is_spread_evenly_over_its_tokens(merged):
    student = byte_tokenizer()
    teacher, _ = teacher_of(merged, student)
    batch = packed(row(student, "say: ", "hello world"), row(student, "say: ", "the", ends=False))
    columns = scored(teacher, batch)
    logprobs, spans = columns["logprobs"], columns["spans"]
    assert (spans >= 0).equal(batch.predicted_T)
    assert (logprobs[spans < 0] == 0).all()
    # numbered over the whole batch
    assert spans[spans >= 0].unique().tolist() == list(range(int(spans.max()) + 1))
    for number in range(int(spans.max()) + 1):
        assert logprobs[spans == number].unique().numel() == 1
    assert not set(spans[batch.sequence_T == 0].tolist()) & set(
        spans[batch.sequence_T == 1].tolist()
    ) - {-1}


def test_with_the_same_tokenizer_they_are_the_plain_logprobs():
    tokenizer = character_tokenizer("0123456789=")
    teacher, inner = teacher_of(tokenizer, tokenizer)
    batch = packed(
        row(tokenizer, "73=", "37"),
        row(tokenizer, "1=", "1", temperature=0.5),
        row(tokenizer, "20=", "", ends=True),
    )
    columns = scored(teacher, batch)
    plain = asyncio.run(inner.score(batch, ["logprobs"]))["logprobs"]
    torch.testing.assert_close(columns["logprobs"], torch.where(batch.predicted_T, plain, 0.0))
    assert columns["spans"][batch.predicted_T].tolist() == list(range(6))


def test_another_order_of_the_alphabet_changes_nothing_but_ids():
    student, teaching = character_tokenizer("=9876543210"), character_tokenizer("0123456789=")
    teacher, inner = teacher_of(teaching, student)
    texts = [("73=", "37"), ("901=", "019")]
    batch = packed(*(row(student, *text) for text in texts))
    own = packed(*(row(teaching, *text) for text in texts))
    plain = asyncio.run(inner.score(own, ["logprobs"]))["logprobs"]
    torch.testing.assert_close(
        scored(teacher, batch)["logprobs"], torch.where(own.predicted_T, plain, 0.0)
    )


def test_an_answer_without_tokens_has_no_span():
    student, teaching = character_tokenizer("ab"), character_tokenizer("ba")
    teacher, _ = teacher_of(teaching, student)
    batch = packed(row(student, "ab", "b"), row(student, "ab", "", ends=False))
    columns = scored(teacher, batch)
    assert (columns["spans"][batch.sequence_T == 1] == -1).all()


def test_the_advantage_is_the_teachers_span_against_the_policys(merged):
    student = byte_tokenizer()
    teacher, _ = teacher_of(merged, student)
    batch = packed(row(student, "say: ", "hello world"))
    columns = scored(teacher, batch)
    old = torch.where(batch.predicted_T, -0.5, 0.0)
    batch = batch.fill_tokens(
        teacher_logprobs=columns["logprobs"], teacher_spans=columns["spans"], old_logprobs=old
    )
    filled = on_policy_distillation(batch, AlgoState()).need("advantages")
    for number in range(3):
        inside = columns["spans"] == number
        expected = float(columns["logprobs"][inside].sum()) + 0.5 * int(inside.sum())
        assert filled[inside].tolist() == pytest.approx([expected] * int(inside.sum()), rel=1e-6)
        assert math.isfinite(expected)
    assert (filled[columns["spans"] < 0] == 0).all()


def test_what_the_teacher_has_no_tokens_for_is_left_out():
    student, teacher = byte_tokenizer(), character_tokenizer("0123456789=")
    aligned = AlignedTeacher(SimpleNamespace(can_offload=False), student, teacher, max_positions=64)  # pyright: ignore[reportArgumentType]
    for written in ("1a", "é"):
        tokens = [*student.encode("7="), *student.encode(written)[:2]]
        made = aligned.translate(tokens, [False] * 2 + [True] * (len(tokens) - 2))
        assert made.tokens == teacher.encode("7=")
        assert made.spans == []
    with pytest.raises(DataError, match="has no token"):
        aligned.translate(student.encode("a1"), [False, True])


@pytest.mark.fault("M9")
def test_accents_that_the_teacher_composes_shift_no_advantage():
    """Its text is a character shorter than the student's: every span behind must still be of one
    text."""
    student, teaching = byte_tokenizer(), of_kind("qwen2 nfc")
    teacher, inner = teacher_of(teaching, student)
    answer = "cafe\u0301 = 12 or 13"
    batch = packed(row(student, "say: ", answer, ends=False))
    columns = scored(teacher, batch)
    prompt, theirs = teaching.encode("say: "), teaching.encode(answer, after="text")
    own = packed(make_trajectory(prompt, theirs))
    plain = asyncio.run(inner.score(own, ["logprobs"]))["logprobs"][len(prompt) :].tolist()
    at = len(student.encode("say: "))
    for number, (token, logprob) in enumerate(zip(theirs, plain, strict=True)):
        text = unicodedata.normalize("NFD", teaching.decode([token]))
        count = len(student.encode(text))
        span = slice(at, at + count)
        assert student.decode(batch.tokens_T[span].tolist()) == text
        assert columns["spans"][span].tolist() == [number] * count, text
        assert columns["logprobs"][span].tolist() == pytest.approx(
            [logprob / count] * count, rel=1e-9
        )
        at += count
    assert at == batch.n_tokens


def test_text_that_the_teacher_rewrites_is_left_out_and_counted():
    student = byte_tokenizer()
    teacher, _ = teacher_of(of_kind("lower"), student)
    batch = packed(row(student, "say: ", "AB12", ends=False))
    columns = scored(teacher, batch)
    old = torch.where(batch.predicted_T, -0.5, 0.0)
    named = {"teacher_logprobs": columns["logprobs"], "teacher_spans": columns["spans"]}
    filled = on_policy_distillation(batch.fill_tokens(**named, old_logprobs=old), AlgoState())
    assert (filled.need("advantages")[-4:] != 0).tolist() == [False, False, True, True]
    assert filled.metrics["teacher/uncovered_share"] == pytest.approx(0.5)


@pytest.mark.parametrize("kind", ["llama", "unigram"])
def test_an_answer_right_behind_text_keeps_its_first_space(kind):
    """SentencePiece drops a space at the beginning of a text, and this is the middle of one."""
    for student, teaching in ((byte_tokenizer(), of_kind(kind)), (of_kind(kind), byte_tokenizer())):
        teacher, _ = teacher_of(teaching, student)
        prompt, whole = student.encode("12"), student.encode("12 hello 3")
        made = teacher.translate(whole, [i >= len(prompt) for i in range(len(whole))])
        assert teaching.decode(made.tokens) == "12 hello 3"
        assert [i for mine, _ in made.spans for i in mine] == list(range(len(prompt), len(whole)))


def test_a_teacher_that_needs_bos_gets_it_from_a_student_without():
    """Llama and Gemma were trained with BOS in front of every text, and Qwen has none."""
    student, teaching = character_tokenizer("ab"), character_tokenizer("ba")
    teaching.bos_id, teaching.adds_bos = teaching.special_ids["<reserved_0>"], True
    teacher, _ = teacher_of(teaching, student)
    made = teacher.translate(student.encode("ab"), [False, True])
    assert made.tokens == [teaching.bos_id, *teaching.encode("ab")]
    assert made.is_scored == [False, False, True]
    assert made.spans == [(range(1, 2), range(2, 3))]
    student.bos_id = student.special_ids["<reserved_0>"]
    with_bos = teacher.translate([student.bos_id, *student.encode("ab")], [False, False, True])
    assert with_bos.tokens == made.tokens  # once


def test_a_span_that_nothing_predicts_is_none():
    """The teacher has no BOS: its row begins with the answer, whose first token nothing
    predicts."""
    student, teaching = character_tokenizer("ab"), character_tokenizer("ba")
    student.bos_id = student.special_ids["<reserved_0>"]
    del teaching.special_ids["<reserved_0>"]
    teacher, _ = teacher_of(teaching, student)
    made = teacher.translate([student.bos_id, *student.encode("ab")], [False, True, True])
    assert made.tokens == teaching.encode("ab")
    assert made.spans == [(range(2, 3), range(1, 2))]


LOSSLESS = ["bytes", "gpt2", "llama", "gemma"]
PLAIN = [fragment for fragment in FRAGMENTS if not set(fragment) & set("▁\ufffd")]


@st.composite
def rows_of_writers(draw):
    """Draw (a tokenizer, tokens, which are asked about): texts behind one another or an end of
    turn."""
    name = draw(st.sampled_from(LOSSLESS))
    tokens, after = of_kind(name).encode("12"), "text"
    asked = [False] * len(tokens)
    for on in draw(st.lists(st.booleans(), max_size=6)):
        text = "".join(draw(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=4)))
        more = of_kind(name).encode(text, after=after)
        after = "text"
        if draw(st.booleans()):
            more, after = [*more, of_kind(name).eos_ids[0]], "special"
        tokens, asked = [*tokens, *more], [*asked, *[on] * len(more)]
    return name, tokens, asked


def segments(kind, tokens):
    """Return where each stretch between control tokens begins, and its tokens."""
    start, stretches = 0, []
    for i, token in enumerate([*tokens, kind.eos_ids[0]]):
        if token in kind.eos_ids:
            stretches.append((start, tokens[start:i]))
            start = i + 1
    return stretches


@settings(max_examples=80)
@given(row=rows_of_writers(), teacher=st.sampled_from(LOSSLESS))
def test_rows_of_several_writers_keep_their_text(row, teacher):
    """The teacher reads the student's text, and each token that is asked about has a span of it."""
    name, tokens, asked = row
    student, teaching = of_kind(name), of_kind(teacher)
    made = AlignedTeacher(
        SimpleNamespace(can_offload=False), student, teaching, max_positions=10**6
    ).translate(tokens, asked)  # pyright: ignore
    mine, theirs = segments(student, tokens), segments(teaching, made.tokens)
    assert [student.decode(part) for _, part in mine] == [
        teaching.decode(part) for _, part in theirs
    ]
    assert [i for span, _ in made.spans for i in span] == [i for i, on in enumerate(asked) if on]
    assert [i for _, span in made.spans for i in span] == [
        i for i, on in enumerate(made.is_scored) if on
    ]
    for (a, part), (b, other) in zip(mine, theirs, strict=True):
        for span, span_theirs in made.spans:
            if a <= span.start < a + len(part):
                for end, end_theirs in (
                    (span.start, span_theirs.start),
                    (span.stop, span_theirs.stop),
                ):
                    text = teaching.decode(other[: end_theirs - b])
                    assert student.decode(part[: end - a]) == text
