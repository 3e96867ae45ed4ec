import asyncio
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratchet.rewards.answers.numeric import (
    NumericAnswer,
    NumericAnswerConfig,
    extract_final_number,
    read_number,
)
from ratchet.testing import answered, check_reward
from ratchet.types import Failed, Message, Task, Truncated

reward = NumericAnswer(NumericAnswerConfig())


def task(answer) -> Task:
    return Task("t/0", (Message("user", "how many?"),), answer=answer)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        (" 70,000 ", 70_000),
        ("$1,234,567.50", Fraction(2469135, 2)),
        ("-3", -3),
        ("−3", -3),  # U+2212
        ("+3", 3),
        ("-$5", -5),
        ("$-5", -5),
        ("0.1", Fraction(1, 10)),
        (".5", Fraction(1, 2)),
        ("5.", 5),
        ("18 dollars", 18),
        ("18kg", 18),
        ("50%", 50),
        (r"\$18", 18),
        (r"50\%", 50),
        (r"90^\circ", 90),
        ("3/4", Fraction(3, 4)),
        ("-3/4", Fraction(-3, 4)),
        ("1.5/2", Fraction(3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"\frac{1}{2}", Fraction(1, 2)),
        (r"-\dfrac{1}{2}", Fraction(-1, 2)),
        (r"2\frac{1}{2}", Fraction(5, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("10{,}000", 10_000),
        (r"10\,000", 10_000),
        (r"10,\!000", 10_000),
        ("007", 7),
        ("3/0", None),
        ("", None),
        ("none", None),
        ("- 5", -5),
        ("–5", -5),  # U+2013
        ("x = - 5", -5),
        ("-€5", -5),
        (r"-\;5", -5),
        (r"-\text{5}", -5),
        (r"- \frac{5}{2}", Fraction(-5, 2)),
        (r"-\left(5\right)", -5),
        ("minus 5", -5),
        ("-USD 5", -5),
        ("-US$5", -5),
        ("−EUR 5", -5),
        ("USD 5", 5),
        ("5 million people", 5_000_000),
        ("$2 hundred thousand", 200_000),
        (r"-\frac{3}{4} Billion", -750_000_000),
        (r"5\text{ million dollars}", 5_000_000),
        ("3 hundredths", 3),
        ("‑5", -5),  # U+2011
        (r"\frac12", Fraction(1, 2)),
        ("1½", Fraction(3, 2)),
        ("3⁄4", Fraction(3, 4)),
        ("10⁴", None),
        ("3 × 10⁴", None),
        ("5 cm^2", 5),
        ("5 cm²", 5),
        (r"5\text{ m}^2", 5),
        (r"5\ \mathrm{m/s}^{2}", 5),
        ("5 x^2", None),
        ("Answer - 5", 5),
        ("about 5 - and no more", 5),
        ("1 2", None),
        ("4 or 5", None),
        ("2^10", None),
        ("^{10}", None),
        (r"\sqrt{2}", None),
        ("< 5", None),
        (">=5", None),
        ("<answer>5", 5),
        (r"2\pi", None),
        ("H2O", None),
        ("٣", None),  # ARABIC-INDIC DIGIT THREE
        ("inf", None),
        ("nan", None),
        ("1e999999", None),
        ("9" * 401, None),
        ("9" * 400, int("9" * 400)),
    ],
)
def test_one_number_is_read(text, value):
    assert read_number(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("He has 3 dogs and 4 cats, so 7 pets.", 7),
        ("7-5 is left", 5),
        ("so 7 - 5 = 2.", 2),
        ("between 3 and -5", -5),
        ("so x=-5", -5),
        ("first 10, then 1,000, finally 1,23", 23),
        ("about 1,2345", 2345),  # no thousands
        ("it is...5", 5),
        ("**18**", 18),
        ("no number", None),
        ("", None),
        ("5 + 3 = 8\n#### 8", 8),
        ("####8", 8),
        ("#### $1,000.00 dollars\nand 3 more words", 1000),
        ("#### 4\n#### 5", 5),
        ("#### 4 or 5", None),
        ("#### Step 2\nThe total is 15.", 15),
        ("#### **18**", 18),
        (r"so \boxed{18}", 18),
        (r"so \boxed{\$18\text{ in 1 day}}", None),
        (r"so \boxed{18\text{ dollars}} for 2 days", 18),
        (r"\boxed{3} no, \boxed{\frac{3}{4}}", Fraction(3, 4)),
        (r"\boxed{3, 4}", None),
        (r"\boxed{5", None),
        (r"\boxed{}", None),
        (r"#### 3 wait \boxed{4}", 4),
        ("\\boxed{3} wait\n#### 4", 4),
        ("2 to the 10 is 2^10", None),
        ("#### - 5", -5),
        ("#### -€5", -5),
        ("#### minus 5", -5),
        ("The answer is minus 5", -5),
        ("That is negative $5.", -5),
        ("That is -€5", -5),
        ("It is 8 minus 5", 5),
        ("#### -**5**", -5),
        ("#### **-5**", -5),
        ("#### -€ 5", -5),
        ("#### **Step 2**\nThe total is 15.", 15),
        (r"$x = -\boxed{5}$", -5),
        (r"that is -\boxed{5}", -5),
        (r"- \boxed{5}", 5),  # an item of a list
        (r"8 - 3 = 8 -\boxed{5}", 5),
        ("The options are:\n- 5", 5),
        ("so x = - 5.", -5),
        ("x =- $5", -5),
        ("<answer>- 5</answer>", -5),
        ("<answer>minus 5</answer>", -5),
        ("The answer is -USD 5.", -5),
        ("The balance is -US$5,000", -5000),
        ("pre-USD 5", 5),
    ],
)
def test_the_number_that_a_text_ends_on(text, value):
    assert extract_final_number(text) == value


def test_a_required_marker():
    assert extract_final_number("it is 18", require_marker=True) is None
    assert extract_final_number("#### 18", require_marker=True) == 18
    assert extract_final_number(r"\boxed{18}", require_marker=True) == 18
    strict = NumericAnswer(NumericAnswerConfig(require_marker=True))
    assert [strict.grade(text, task("18")) for text in ("18", "#### 18")] == [0.0, 1.0]


@pytest.mark.parametrize("gold", ["0.3", 0.3, Fraction(3, 10), Decimal("0.3"), "3/10", "30e-2"])
def test_equality_is_exact(gold):
    texts = ["0.3", ".30", "3/10", "0.30000000000000004", "0.29999999999999999", "0.1"]
    assert [reward.grade(text, task(gold)) for text in texts] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]


def test_integers_beyond_float_precision_are_told_apart():
    assert reward.grade(str(2**53 + 1), task(2**53)) == 0.0
    assert reward.grade(f"{2**53 + 1:,}", task(str(2**53 + 1))) == 1.0


@given(
    st.integers(-(10**30), 10**30),
    st.sampled_from(["{}", "{:,}", "{:+,}", "#### {:,}", "\\boxed{{{:,}}}", "It is {:,} km."]),
)
def test_integers_round_trip(n, style):
    assert extract_final_number(style.format(n)) == n


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, min_value=-(10**12), max_value=10**12, places=6
    )
)
def test_decimals_round_trip(x):
    assert read_number(f"{x:,f}") == Fraction(x)
    assert read_number(f"{x:e}") == Fraction(x)


@given(st.integers(-(10**9), 10**9), st.integers(1, 10**9))
def test_fractions_round_trip(above, below):
    assert read_number(f"{above}/{below}") == Fraction(above, below)
    assert read_number(f"\\frac{{{above:,}}}{{{below:,}}}") == Fraction(above, below)


HOSTILE = [
    "(" * 10**6,
    "9" * 100_000,
    "1," * 50_000,
    "1," + "111," * 30_000 + "1",
    "1/" * 50_000,
    "1." * 50_000,
    "1 " * 50_000,
    "-" * 100_000,
    "$-" * 50_000,
    "1e" * 50_000,
    "1e999999",
    "1e-999999",
    "-1e" + "9" * 10_000,
    "####" * 25_000,
    "#### " * 20_000,
    "####" + " " * 100_000,
    "#" * 100_000,
    "\\boxed{" * 20_000,
    "{" * 100_000 + "}" * 100_000,
    "\\boxed{" + "{" * 50_000 + "}" * 50_000,
    "\\frac{" * 20_000,
    "\\frac{1}{" * 20_000,
    "^" + "{" * 100_000,
    "٣" * 100_000,
    "²½Ⅷ",
    '__import__("os").system("true")',
    "\\boxed{__import__('os')}",
    "9**9**9**9**9",
    "\x00\ud800\u202e",
    "nan",
    "inf",
    "Infinity",
]


@pytest.mark.medium
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_earns_0_and_never_raises(text):
    """A pattern that backtracked quadratically would take minutes on these."""
    assert reward.grade(text, task("72")) == 0.0


@given(st.text(alphabet="0123456789.,-+$%/\\{}()^eE# boxedfrac\n", max_size=60))
def test_no_text_raises(text):
    assert reward.grade(text, task("72.125")) in (0.0, 1.0)


def test_the_contract_and_truncation():
    check_reward(reward, task("85"), good="#### 85", bad="#### 86")
    (cut,) = asyncio.run(
        reward.score([answered(task("85"), "#### 85", Truncated(None))], task("85"))
    )
    assert cut == Truncated(0.0, {"numeric_answer": 0.0})


@pytest.mark.parametrize("gold", [None, "many", "", float("nan"), "4 or 5"])
def test_a_task_whose_answer_is_no_number_fails_and_is_named(gold):
    (outcome,) = asyncio.run(reward.score([answered(task(gold), "85")], task(gold)))
    assert isinstance(outcome, Failed)
    assert "task 't/0': its answer" in outcome.detail
