"""Boxed answers, multiple choice, tags, regular expressions, similarity and length."""

import asyncio
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.config.resolve import resolve
from ratchet.errors import ConfigError
from ratchet.rewards.answers.final_answer import (
    extract_boxed,
    extract_marked_answer,
    is_same_answer,
)
from ratchet.rewards.answers.format import Format, FormatConfig
from ratchet.rewards.answers.length import Length, LengthConfig
from ratchet.rewards.answers.multiple_choice import MultipleChoice, MultipleChoiceConfig
from ratchet.rewards.answers.numeric import extract_final_number
from ratchet.rewards.answers.regex import Regex, RegexConfig
from ratchet.rewards.answers.similarity import (
    Similarity,
    SimilarityConfig,
    compute_common_subsequence_length,
)
from ratchet.testing import answered, check_reward, conversation
from ratchet.testing.builders import make_trajectory
from ratchet.training.stage_from_config import build_reward
from ratchet.types import Failed, Message, Task, Truncated


def task(answer=None) -> Task:
    return Task("t/0", (Message("user", "?"),), answer=answer)


def outcome(reward, text, answer=None, ended=None):
    return asyncio.run(reward.score([answered(task(answer), text, ended)], task(answer)))[0]


def earned(reward, text, answer=None) -> float:
    return outcome(reward, text, answer).reward


def made(kind, **keys):
    return build_reward((resolve("rewards", {"kind": kind, **keys}),))


# --- boxed


@pytest.mark.parametrize(
    ("text", "inner"),
    [
        (r"so \boxed{5}", "5"),
        (r"\boxed{1} then \boxed{ 2 }.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{\left\{x}", r"\left\{x"),
        (r"\fbox{7}", None),
        (r"\fboxed{7}", "7"),
        (r"$\boxed 9$", "9"),
        (r"$x = -\boxed{5}$", "-5"),
        (r"so it is −\boxed{\frac{1}{2}}", r"-\frac{1}{2}"),
        (r"\(-\boxed{a + b}\)", "-(a + b)"),
        (r"- \boxed{5}", "5"),
        (r"9 -\boxed{5}", "5"),
        (r"-\boxed{", ""),
        (r"\boxed{open", ""),
        (r"\boxed{}", ""),
        ("none", None),
        ("\\boxed{" * 20_000, ""),
        ("\\boxed{" + "9" * 5000 + "}", ""),
    ],
)
def test_the_last_box(text, inner):
    assert extract_boxed(text) == inner


SAME = [
    ("1/2", "0.5"),
    (r"\frac{1}{2}", r"\dfrac12"),
    (r"\frac12", "0.5"),
    ("10,000", "10000"),
    (r"10{,}000", "10000"),
    (r"\$5", "5.00"),
    (r"50\%", "50"),
    (r"90^\circ", "90^{\\circ}"),
    (r"5\text{ cm}", "5"),
    (r"5\text{ cm}^2", "5"),
    (r"\text{East}", "East"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"),
    ("x=5", "5"),
    (r"x \leq 3", r"x\le3"),
    (r"\sqrt2", r"\sqrt{2}"),
    ("−3", "-3"),
    ("7.", "7"),
    (r"6\,\text{m/s}", "6"),
    (r"\emptyset", r"\varnothing"),
    ("∅", r"\varnothing"),
    (r"\mathbb R", r"\mathbb{R}"),
    ("ℝ", r"\mathbb{R}"),
    ("√2", r"\sqrt{2}"),
    ("√(x+1)", r"\sqrt{x+1}"),
    ("1½", "1.5"),
    ("3⁄4", "0.75"),
    ("‑5", "-5"),
    ("[2, ∞)", r"[2,\infty)"),
    ("x ≤ 3", r"x\le 3"),
    ("x = 5", "x=5"),
    ("Yes", "yes"),
    ("5 dollars", r"\$5"),
    ("-USD 5", "-5"),
    (r"US\$5", "5 USD"),
    (r"9\text{ a.m.}", r"9\text{ AM}"),
]
DIFFERENT = [
    ("2x", "2y"),
    ("5x", "5"),
    ("5 6", "5"),
    ("1,2", "12"),
    ("12", "1{,}2"),
    ("", ""),
    ("East", "east"),
    ("2^{10}", "210"),
    (r"3\pi", "3"),
    ("-3", "3"),
    ("10", "11"),
    ("[1,2)", "(1,2)"),
    (r"\sqrt{2}", "2"),
    (r"5\text{ or 6}", "5"),
    (r"5\text{, 6}", "5"),
    ("3=5", "5"),
    ("x=4=5", "5"),
    ("x=5", "y=5"),
    ("1½", "1"),
    ("5²", "5"),
    ("-USD 5", "5"),
    (r"9\text{ AM}", r"9\text{ PM}"),
    (r"5\text{ thousand}", r"5\text{ million}"),
]


@pytest.mark.parametrize(("one", "other"), SAME)
def test_the_same_answer_in_two_spellings(one, other):
    assert is_same_answer(one, other)
    assert is_same_answer(other, one)
    assert earned(made("boxed"), f"\\boxed{{{one}}}", other) == 1.0


@pytest.mark.parametrize(("one", "other"), DIFFERENT)
def test_different_answers(one, other):
    assert not is_same_answer(one, other)
    assert not is_same_answer(other, one)


def test_boxed_compares_what_is_in_the_box_alone():
    reward = made("boxed")
    check_reward(reward, task("5"), good=r"\boxed{5}", bad="5")
    assert earned(reward, r"\boxed{4} no, 5", "5") == 0.0
    assert earned(reward, r"\boxed{5", "5") == 0.0
    assert earned(reward, r"\boxed{0.5}", r"So it is \boxed{\frac12}.") == 1.0
    assert earned(made("boxed", normalise=False), r"\boxed{0.5}", r"\frac12") == 0.0
    assert earned(made("boxed", normalise=False), r"\boxed{\frac12}", r"\frac12") == 1.0
    for nothing in (None, "", r"\boxed{}"):
        assert "has no answer" in outcome(reward, r"\boxed{}", nothing).detail


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("thus\n#### 18", "18"),
        ("#### Step 2\nfive", None),
        ("##### 5", None),
        ("<answer>5</answer>", "5"),
        (r"<answer>it is \boxed{5}</answer>", "5"),
        ("<answer>4</answer> #### 5", None),  # a mark begins its line
        ("<answer>4</answer>\n#### 5", "5"),
        ("#### 4\n" + r"\boxed{5}", "5"),
        ("", None),
    ],
)
def test_the_marked_answer(text, answer):
    assert extract_marked_answer(text) == (answer if "</answer> ####" not in text else "4")


# --- multiple choice

CHOICES = [
    ("C", "C"),
    ("C.", "C"),
    (" (C) ", "C"),
    ("**C**", "C"),
    ("C. Paris", "C"),
    ("**C)** Paris", "C"),
    ("I think so.\nC", "C"),
    ("The answer is C.", "C"),
    ("The answer is (C) because A is wrong", "C"),
    ("The answer is: **C**", "C"),
    ("The answer is A. No, wait: the correct answer is B.", "B"),
    ("Final Answer: C", "C"),
    ("answer would be option C", "C"),
    ("so the answer must be C, not A.", "C"),
    ("The correct option is C", "C"),
    (r"so \boxed{C}", "C"),
    (r"so \boxed{\text{(C)}}", "C"),
    ("<answer>C</answer>", "C"),
    ("#### C", "C"),
    ("A or B? \\boxed{C}", "C"),
    ("The answer is A or B.", None),
    ("The answer is A and B", None),
    ("The answer is A, B", None),
    ("<answer>A, B</answer>", None),
    ("<answer>AB</answer>", None),
    (r"\boxed{A/B}", None),
    ("A dog barks", None),
    ("the answer is a dog", None),
    ("c", None),
    ("Z", None),
    ("", None),
    ("The answer is Cairo", None),
    ("Answer: C++", "C"),
    (r"Final answer: \(C\)", "C"),
    (r"The answer is $\textbf{(C)}$.", "C"),
    (r"Answer: \(A\) or \(B\)", None),
    ("Answer: A; B; C", None),
    ("Answer: A|B", None),
    ("The answer is A, or B", None),
    ("The answer is A or maybe B", None),
    ("The answer is A (or B)", None),
    ("The answer is A (B is wrong)", "A"),
    ("The answer is “B”.", "B"),
    ("The answer is 'B'", "B"),
    ("The answer is A's sum", None),
    ("The answer is A or option B", None),
    ("<answer>Option C</answer>", "C"),
    ("<answer>The answer is (C).</answer>", "C"),
    (r"\boxed{\textbf{(C)}\ 5}", "C"),
    ("<answer>Option A or option B</answer>", None),
    ("<answer>option A, option B</answer>", None),
    ("<answer>The answer is A or B</answer>", None),
    (r"\boxed{\textbf{(A)}, \textbf{(B)}}", None),
]


@pytest.mark.parametrize(("text", "letter"), CHOICES)
def test_the_letter_chosen(text, letter):
    assert MultipleChoice(MultipleChoiceConfig()).extract_choice(text) == letter


def test_multiple_choice_rewards_the_tasks_letter_or_index():
    reward = made("multiple_choice")
    check_reward(reward, task("C"), good="The answer is C", bad="The answer is D")
    assert [earned(reward, "C", answer) for answer in ("C", "(C)", 2, "2", "B", 0)] == [
        1.0,
        1.0,
        1.0,
        1.0,
        0.0,
        0.0,
    ]
    assert earned(made("multiple_choice", require_marker=True), "C", "C") == 0.0
    assert earned(made("multiple_choice", require_marker=True), "Answer: C", "C") == 1.0
    assert earned(made("multiple_choice", letters="ABC"), "D", "C") == 0.0
    for broken in (None, "Paris", 99, "99", "-1", "²", -1, True, 1.5, "A or B"):
        assert "is none of ABCDEFGHIJ" in outcome(reward, "C", broken).detail


# --- format

THOUGHT = "<think>a</think><answer>b</answer>"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (THOUGHT, True),
        ("\n<think>\na\n</think>\n\n<answer>b</answer>\n", True),
        ("<think>1 < 2 <b>x</b></think><answer>b</answer>", True),
        ("<answer>b</answer><think>a</think>", False),
        ("<think>a<answer>b</answer></think>", False),
        ("<think>a</think><answer>b", False),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False),
        ("<think> </think><answer>b</answer>", False),
        ("hm <think>a</think><answer>b</answer>", False),
        ("<think>a</think> so <answer>b</answer>", False),
        ("<think>a</think><answer>b</answer> bye", False),
        ("<THINK>a</THINK><answer>b</answer>", False),
        ("", False),
        ("<think>" * 50_000, False),
    ],
)
def test_tags(text, right):
    assert earned(Format(FormatConfig()), text) == float(right)


def test_options_of_format():
    check_reward(made("format"), task(), good=THOUGHT, bad="b")
    assert earned(made("format", opened=True), "a</think><answer>b</answer>") == 1.0
    assert earned(made("format", opened=True), THOUGHT) == 0.0
    assert earned(made("format", outside=True), f"hm {THOUGHT} bye") == 1.0
    assert earned(made("format", tags=["plan"]), "<plan>a</plan>") == 1.0
    shaped = made("format", share=0.5)
    texts = (
        THOUGHT,
        f"hm {THOUGHT}",
        "<answer>b</answer><think>a</think>",
        "<think>a</think>",
        "b",
    )
    assert [earned(shaped, text) for text in texts] == [1.0, 0.5, 0.5, 0.25, 0.0]
    assert outcome(made("format"), THOUGHT, ended=Truncated(None)).reward == 0.0


# --- regular expressions


@pytest.mark.medium
def test_a_pattern_is_searched_for_or_must_match_the_whole():
    reward = made("regex", pattern=r"(?i)answer: \d+")
    check_reward(reward, task(), good="The Answer: 12.", bad="12")
    assert earned(made("regex", pattern=r"\d+", whole=True), "12") == 1.0
    assert earned(made("regex", pattern=r"\d+", whole=True), "12.") == 0.0
    assert earned(made("regex", pattern=r"\d+", invert=True), "12") == 0.0
    assert earned(made("regex", pattern=r"\d+", invert=True), "none") == 1.0


@pytest.mark.medium
def test_a_group_of_the_last_match_is_compared_with_the_answer():
    for keys in ({"pattern": r"= *(\d+)", "group": 1}, {"pattern": r"= *(?P<n>\d+)", "group": "n"}):
        reward = made("regex", **keys)
        assert [earned(reward, text, 7) for text in ("x = 7", "= 3 = 7 ", "= 7 = 3", "7")] == [
            1.0,
            1.0,
            0.0,
            0.0,
        ]
    assert "has no answer" in outcome(made("regex", pattern="(a)", group=1), "a").detail
    assert earned(made("regex", pattern="(a)|b", group=1), "b", "a") == 0.0
    assert earned(made("regex", pattern="a", group=0), "a", "a") == 1.0


@pytest.mark.medium
def test_a_pattern_that_backtracks_without_end_fails_its_attempt_and_names_itself():
    reward = Regex(RegexConfig(pattern="(a+)+$", timeout_s=0.2))
    hanging, fine = asyncio.run(
        reward.score([answered(task(), text) for text in ("a" * 60 + "b", "aaa")], task())
    )
    assert isinstance(hanging, Failed)
    assert "(a+)+$" in hanging.detail
    assert "backtracks too long on an answer of 61 characters" in hanging.detail
    assert fine.reward == 1.0


def test_what_is_no_pattern_is_refused():
    with pytest.raises(
        (ConfigError, ValueError), match="is not a regular expression of Python: missing"
    ):
        resolve("rewards", {"kind": "regex", "pattern": "(a"})
    for group in (2, -1, "m"):
        with pytest.raises(
            ValueError, match=r"is not in the pattern: it has groups 0 to 1, named \['n'\]"
        ):
            RegexConfig(pattern="(?P<n>a)", group=group)


# --- similarity


@pytest.mark.medium
@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_the_common_subsequence_is_the_longest(one, other):
    def is_within(part, whole):
        letters = iter(whole)
        return all(letter in letters for letter in part)

    longest = max(
        n for n in range(len(one) + 1) for part in combinations(one, n) if is_within(part, other)
    )
    assert compute_common_subsequence_length(one, other) == longest


@pytest.mark.parametrize(
    ("measure", "text", "answer", "similarity"),
    [
        ("characters", "kitten", "sitting", 8 / 13),
        ("characters", "same", "same", 1.0),
        ("characters", "", "", 1.0),
        ("characters", "", "x", 0.0),
        ("characters", " x\n", "x", 1.0),
        ("characters", "X", "x", 0.0),
        ("words", "the cat sat", "the dog sat", 2 / 3),
        ("words", "sat the", "the sat", 1 / 2),
        ("bag", "sat, the.", "the sat", 1.0),
        ("bag", "the the the", "the cat", 2 / 5),
    ],
)
def test_similarities_worked_by_hand(measure, text, answer, similarity):
    assert earned(Similarity(SimilarityConfig(measure=measure)), text, answer) == pytest.approx(
        similarity
    )


def test_options_of_similarity():
    check_reward(made("similarity"), task("hello"), good="hello", bad="help")
    assert earned(made("similarity", ignore_case=True), "X", "x") == 1.0
    strict = made("similarity", threshold=0.6)
    assert [earned(strict, text, "sitting") for text in ("kitten", "bitter", "kit")] == [
        1.0,
        0.0,
        0.0,
    ]
    assert "has no answer" in outcome(made("similarity"), "x").detail
    for measure in ("words", "bag"):
        reward = made("similarity", measure=measure)
        assert "its answer '+' has no words" in outcome(reward, "!", "+").detail
        assert earned(reward, "!", "") == 0.0
        assert earned(reward, " ", "") == 1.0
    assert earned(made("similarity"), "a" * 1_000_000, "a" * 100) == pytest.approx(200 / 1_000_100)


# --- length


@pytest.mark.parametrize(
    ("words", "reward"), [(5, 1.0), (10, 1.0), (12, 0.5), (14, 0.0), (99, 0.0), (3, 0.5), (0, 0.0)]
)
def test_length_falls_off_beyond_its_bounds(words, reward):
    config = LengthConfig(unit="words", at_least=5, at_most=10, margin=4)
    assert earned(Length(config), "word " * words) == reward


def test_units_of_length():
    text = "two words\nand more"
    for unit, length in (("words", 4), ("characters", 18), ("lines", 2)):
        assert earned(made("length", unit=unit, at_least=length, at_most=length), text) == 1.0
        assert earned(made("length", unit=unit, at_most=length - 1), text) == 0.0
        assert earned(made("length", unit=unit, at_least=length + 1), text) == 0.0
    written = replace(
        make_trajectory([1, 2, 3], [4, 5]),
        messages=conversation([Message("assistant", text)]).messages,
    )
    for most, reward in ((2, 1.0), (1, 0.0)):
        assert (
            asyncio.run(made("length", at_most=most).score([written], task()))[0].reward == reward
        )
    assert outcome(made("length"), text, ended=Truncated(None)).reward == 0.0
    check_reward(made("length", unit="words", at_most=2), task(), good="a b", bad="a b c")


def test_bounds_of_length_that_no_answer_meets_are_refused():
    with pytest.raises(ValueError, match="at_most=3 is below at_least=5: no length fits"):
        LengthConfig(at_least=5, at_most=3)


# --- whatever is written

HOSTILE = [
    "\\boxed{" * 15_000,
    "\\boxed" * 15_000,
    "####" * 25_000,
    "\n#### " * 20_000,
    "<answer>" * 12_000,
    "</answer>" * 12_000,
    "answer is " * 10_000,
    "answer" + " " * 100_000,
    "answer is (" * 10_000,
    "*" * 100_000,
    "\n" * 100_000,
    "\\text{" * 15_000,
    "<think>" * 15_000,
    "\\" * 100_000,
    "=" * 100_000,
    "\x00\ud800\u202e",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("kind", ["boxed", "multiple_choice", "format"])
@pytest.mark.fault("S11")
def test_hostile_text_earns_0_and_never_raises(kind, text):
    """A pattern that backtracked quadratically would take minutes on these."""
    reward = made(kind)
    for written in (text, f"\\boxed{{{text}}}", f"<answer>{text}</answer>"):
        assert earned(reward, written, "C") == 0.0


@given(st.text(alphabet="ABC abcinswer.:,*()<>/{}\\#boxedtext\n", max_size=60))
def test_no_text_raises(text):
    for reward in (MultipleChoice(MultipleChoiceConfig()), Format(FormatConfig())):
        assert reward.grade(text, task("C")) in (0.0, 1.0)
    assert is_same_answer(extract_marked_answer(text) or "", "C") in (True, False)


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("1 1/2", "3/2", True),
        ("1 1/2", "11/2", False),
        (r"1\ 1/2", "11/2", False),
        (r"1\quad 1/2", "1.5", True),
        ("x = 1 1 / 2", "3/2", True),
        ("-1 1/2", "-3/2", True),
        ("1 2", "12", False),
        ("12 345", "12345", True),
        (r"12\,345", "12345", True),
        ("3 4", "34", False),
        (r"2 \frac{3}{4}", r"\frac{11}{4}", True),
        (r"\frac1{2}", "0.5", True),
        (r"\frac{1}2", "0.5", True),
        ("(1, 2)", "(1,2)", True),
        ("3 x + 1", "3x+1", True),
    ],
)
def test_a_space_between_digits_counts(one, other, same):
    assert is_same_answer(one, other) is same
    assert is_same_answer(other, one) is same


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("The answer is B. Option A is wrong.", "B"),
        ("Answer: C\n\nChoice A is too small.\nChoice D is too large.", "C"),
        ("So the answer is (B).\n- Option A: too big\n- Option C: too small", "B"),
        ("Option A is wrong, so the answer is D.", "D"),
        ("The answer is A. No, the answer is B.", "B"),
        ("I choose option D", "D"),
    ],
)
def test_a_remark_on_another_option_is_no_choice(text, letter):
    assert MultipleChoice(MultipleChoiceConfig()).extract_choice(text) == letter


@pytest.mark.parametrize("text", [r"\leq 5", r"\pm 5", "±5", r"\log 5", r"\sin(5)", "-(5)"])
def test_a_bound_or_a_function_is_no_number(text):
    assert extract_final_number(rf"\boxed{{{text}}}") is None
    assert extract_final_number("It is about\n- (5 apples)") == 5
