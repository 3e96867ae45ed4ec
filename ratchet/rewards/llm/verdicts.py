"""Read the verdict out of a judge's reply. What is ambiguous is no verdict, so never a reward."""

from __future__ import annotations

import re

from ratchet.errors import DataError

# The value after the word "score" and perhaps its scale, as in "Score (1 to 10): 7". It is a number
# with whatever belongs to it ("7/10", "7,5", "5-10", "7 or 8", "1 0"), or a word for no value.
SCORE_PATTERN = re.compile(
    r"score(?:\s?\([^()\n]{1,40}\)(?=\W{0,3}[:=]))?\W{0,8}?("
    r"[-+\u2212\u2013\u2014]?\.?\d[\w.%]*(?:[,\u2212\u2013\u2014-]\d[\w.%]*)*"
    r"(?:\s*\(?(?:/|out of)\s*\d[\w.]*|[ \t]+(?:(?:to|or)[ \t]+)?\d[\w.%]*|[ \t]+%)?"
    r"|n/a\b|(?:nan|none|null|[-+]?inf(?:inity)?)\b)",
    re.IGNORECASE,
)
# A number as a judge is asked for: whole or with a decimal point, and perhaps the highest score.
PLAIN_SCORE = re.compile(
    r"([-+\u2212]?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+))(?:\s*\(?(?:/|out of)\s*([0-9.]+)|[ \t]*(%))?",
    re.IGNORECASE,
)
# What makes a letter no choice: "A and B", "A/B", "A tie".
NO_CHOICE = r"(\s*(?i:(?:[/&]|and\b|or\b|vs\b\.?)\s*[AB]\b|(?:tie|draw)\b))?"
LABEL = r"(?i:better|winner|verdict)[^\w\[.!?,]{0,8}"
# A small "a" before a word is an article: "Better: a tie".
VERDICT_PATTERN = re.compile(
    rf"{LABEL}(?i:an?\s+)?((?i:tie|draw))\b"
    rf"|{LABEL}([AB]|[ab](?!\s+\w))\b{NO_CHOICE}"
    r"|\[\[((?i:A|B|C|tie))\]\]"
)
# A "no" before another word may be part of a remark: "there is no error".
YES_NO_PATTERN = re.compile(r"\b(?:YES|NO|(?i:yes)|(?i:no)(?![ \t]+\w))\b")
# A mention of YES or NO that is not a verdict: "YES or NO", "neither YES nor NO", "not a yes".
NO_VERDICT = re.compile(
    r"\b(?:(?:yes|no)\W{0,4}(?:/|n?or\b)\W{0,4}(?:yes|no)|not (?:an? )?\W{0,4}(?:yes|no))\b",
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
    it isn't one plain number ("7,5", "5-10"), or if it lies outside the scale.
    """
    scores = SCORE_PATTERN.findall(drop_thinking(reply))
    if not scores:
        raise DataError(f"the judge's reply holds no score: {reply[-300:]!r}")
    text = scores[-1].rstrip("._")
    match = PLAIN_SCORE.fullmatch(text)
    highest = match and ("100" if match[3] else match[2])
    if match is None or (highest and not _is_number(highest, high)):
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
    tie, letter, contradiction, bracketed = verdicts[-1] if verdicts else ("", "", "", "")
    if not verdicts or contradiction:
        raise DataError(f"the judge's reply holds no verdict: {reply[-300:]!r}")
    last_verdict = (tie or letter or bracketed).lower()
    return 0.5 if last_verdict in TIES else float(last_verdict == "a")
