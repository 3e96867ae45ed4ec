"""Read the verdict out of a judge's reply. What is ambiguous is no verdict, so never a reward."""

from __future__ import annotations

import re

from ratchet.errors import DataError

# A number with what is written to it, such as "7.5%", and with what may follow: "7/10",
# "4 stars out of 5", "five out of ten".
NUMBER = r"\d[\w.%]*"
NUMBERS = rf"\.?{NUMBER}(?:[,\u2212\u2013\u2014-]{NUMBER})*"
SIGN = r"(?:[-+\u2212\u2013\u2014]|[<\u2264\u2265]=?[ \t]*)?"
OF_HIGHEST = r"(?:[ \t]+(?:stars?|points?|marks?))?\s*\(?(?:/|(?:out[ \t]+)?of\b)\s*\d[\w.]*"
OF_WORD = r"[ \t]*\(?out[ \t]+of[ \t]+\w+"
# A sign, a comma or a word between two numbers of one line joins them, whatever it means: "5 - 10",
# "3 + 4 = 7", "[5, 7]", "7 or 8", "1 0".
BY_SIGN = rf"[ \t]*[^\w\s.,;:!?(){{}}\[\"'<%][^\w\n.!?(){{}}\[\"'<]{{0,7}}{NUMBER}"
BY_COMMA = r"[ \t]*,[ \t]*\d[\d.]*(?=[ \t]*(?:[\]\n]|$))"
BY_WORD = r"[ \t]+(?:(?:to|and|x|vs\.?|versus|through|until|(?:or[ \t]+)?maybe|or)[ \t]+)?" + NUMBER
FRACTION = r"[ \t]+(?:[\u00bc-\u00be\u2150-\u215e]|%)"
NO_NUMBER = r"n/a\b|(?:nan|none|null|[-+]?inf(?:inity)?)\b"
UNDECIDED = r"(?:un(?:known|clear|able|defined|determined|decided)|cannot|tbd)\b"
# What is written before the word "score", if it is a bound ("maximum score") or a part of the same
# word ("style_score").
BOUND = r"(?:max|min|maximum|minimum|highest|lowest|best|worst)(?:[ _]possible)?[ _]?|possible[ _]"
PREFIX = rf"(?<!\w)(?:({BOUND})|(\w*))"
# This, then the scale in brackets after the word "score", if it has one, and the value: a number
# with whatever belongs to it, or a word or question mark for no value.
SCORE_PATTERN = re.compile(
    rf"{PREFIX}score"
    r"(?:\s?\(([^()\n]{1,40})\)(?=\W{0,3}[:=]))?"
    rf"(?:\W{{0,8}}?({SIGN}{NUMBERS}"
    rf"(?:{OF_HIGHEST}|{OF_WORD}|{BY_SIGN}|{BY_COMMA}|{BY_WORD}|{FRACTION})?|{NO_NUMBER})"
    rf"|\W{{0,3}}[:=]\W{{0,4}}({UNDECIDED})|[ \t]*[:=][ \t]*(\?))",
    re.IGNORECASE,
)
MARKUP = re.compile(r"[*`$]")  # as in "**7**/10"
# The end of a scale before a score: "1 to 10", "/10", "out of 10".
SCALE_END = re.compile(r"(?:to|of|[/\u2212\u2013\u2014-])\s*([0-9.]+)\s*$", re.IGNORECASE)
# A number as a judge is asked for: whole or with a decimal point, and perhaps the highest score.
PLAIN_SCORE = re.compile(
    r"([-+\u2212]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))"
    r"(?:(?:[ \t]+(?:stars?|points?|marks?))?\s*\(?(?:/|(?:out[ \t]+)?of)\s*([0-9.]+)"
    r"|[ \t]*(%))?",
    re.IGNORECASE,
)
# What makes a letter no choice: "A and B", "A/B", "A = B", "A tie", "A (tie)".
NO_CHOICE = (
    r"((?i:\s*(?:[/&|+=]|and\b|n?or\b|vs\b\.?|versus\b)\s*(?:[AB]|tie|draw)\b"
    r"|[\s,;(]{0,3}(?:tie|draw)\b))?"
)
LABEL = r"(?i:better|winner|verdict)[^\w\[.!?,]{0,8}"
NEITHER = r"(?i:neither|both|none|equal|unclear|undecided|unknown|cannot)\b"
# A small "a" before a word is an article: "Better: a tie".
VERDICT_PATTERN = re.compile(
    rf"{LABEL}(?i:an?\s+)?((?i:tie|draw))\b"
    rf"|{LABEL}([AB]|[ab](?!\s+\w))\b{NO_CHOICE}"
    r"|\[\[((?i:A|B|C|tie))\]\](\s*(?i:/|&|and|or|vs\.?|versus)\s*\[\[)?"
    rf"|(?i:better|winner|verdict)\W{{0,3}}[:=]\W{{0,4}}({NEITHER})"
)
# A "no" before another word may be part of a remark: "there is no error".
YES_NO_PATTERN = re.compile(r"\b(?:YES|NO|(?i:yes)|(?i:no)(?![ \t]+\w))\b")
# A mention of YES or NO that is not a verdict: "YES or NO", "neither YES nor NO", "not a yes", "I
# can't say YES".
NO_VERDICT = re.compile(
    r"(?:\b(?:yes|no)\W{0,4}(?:/|n?or\b|and\b)\W{0,4}(?:yes|no)"
    r"|(?:\b(?:not|never|cannot)|n['\u2019]t) (?:(?:say|be|answer|give) )?(?:an? )?\W{0,4}"
    r"(?:yes|no)"
    r")\b",
    re.IGNORECASE,
)
TIES = ("tie", "draw", "c")
THINKING_START, THINKING_END = "<think>", "</think>"


def drop_thinking(reply: str) -> str:
    """Return the reply after its thinking; all of it if it has none.

    Raise DataError if the thinking has no end: the verdict comes after it.
    """
    _, end, answer = reply.rpartition(THINKING_END)
    if THINKING_START in answer:
        raise DataError(f"the judge's reply ends while it thinks: {reply[-300:]!r}")
    return answer if end else reply


def parse_score(reply: str, low: float, high: float) -> float:
    """Return the last "Score: N" of a reply, or the "score" of its JSON.

    N may be followed by the highest score, as in "7/10". Raise DataError if there is no score, if
    it isn't one plain number ("7,5", "5 - 10"), or if it is of another scale or outside of it.
    """
    matches = SCORE_PATTERN.findall(MARKUP.sub("", drop_thinking(reply)))
    scores = [match[1:] for match in matches if not match[0]]  # "maximum score: 10" is none
    if not scores:
        raise DataError(f"the judge's reply holds no score: {reply[-300:]!r}")
    # "score" counts before "style_score".
    _, scale, *values = next((s for s in reversed(scores) if not s[0]), scores[-1])
    text = "".join(values).rstrip("._")
    match = PLAIN_SCORE.fullmatch(text)
    scale_end = SCALE_END.search(scale)
    highest = [scale_end[1]] if scale_end else []
    if match and (match[2] or match[3]):
        highest.append(match[2] or "100")
    if match is None or not all(_is_number(number, high) for number in highest):
        raise DataError(
            f"the judge's score {text!r} is not a number of the scale {low:g} to {high:g}: "
            f"{reply[-300:]!r}"
        )
    score = float(match[1].replace("\u2212", "-"))
    if not low <= score <= high:
        raise DataError(
            f"the judge's score {score:g} lies outside of the scale {low:g} to {high:g}: "
            f"{reply[-300:]!r}"
        )
    return score


def _is_number(text: str, number: float) -> bool:
    try:
        return float(text) == number
    except ValueError:  # "1.2.3"
        return False


def parse_yes_no(reply: str) -> float:
    """Return 1 if a reply says YES, and 0 if it says NO.

    The last word of the reply counts if it is one of them; else the words in capitals, or in any
    case, if they are all the same. Raise DataError if there is none, or if they differ.
    """
    answer = NO_VERDICT.sub("", drop_thinking(reply))
    words = YES_NO_PATTERN.findall(answer)
    if not words:
        raise DataError(f"the judge's reply holds neither YES nor NO: {reply[-300:]!r}")
    if re.search(rf"\b{words[-1]}\W*$", answer):
        words = words[-1:]
    words = [word for word in words if word.isupper()] or words
    verdicts = {word.lower() for word in words}
    if len(verdicts) > 1:
        raise DataError(f"the judge's reply holds both YES and NO: {reply[-300:]!r}")
    return float(verdicts == {"yes"})


def parse_verdict(reply: str) -> float:
    """Return 1 if the last verdict of a reply is for A, 0 for B, and 0.5 for a tie.

    Raise DataError if there is none, or if it names both ("A and B").
    """
    verdicts = VERDICT_PATTERN.findall(drop_thinking(reply))
    tie, letter, contradiction, bracketed, another, neither = (verdicts or [("",) * 6])[-1]
    if not verdicts or contradiction or another or neither:
        raise DataError(f"the judge's reply holds no verdict: {reply[-300:]!r}")
    last_verdict = (tie or letter or bracketed).lower()
    return 0.5 if last_verdict in TIES else float(last_verdict == "a")
