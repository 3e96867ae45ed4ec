"""Checks for the 25 verifiable instructions of IFEval (arXiv:2311.07911).

Each function in `CHECKS` takes a text and the arguments of its instruction in the published data.

The checks are safe for hostile text: each takes time linear in the text's length, and words of the
data are never used as patterns. They differ from the published code in three ways: rules split
sentences (the published code uses a trained model), a text of unknown language fails a language
instruction (in the published code it passes), and a line that is a lone asterisk is not a bullet
(in the published code it may be one).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.errors import DataError

Check = Callable[..., bool]

MAX_DETECTED_CHARS = 10_000
WORD = re.compile(r"\w+")
# The published code counts clitics as separate words: "I'm" is "I" and "'m".
CLITIC_PATTERN = r"['’](?:s|m|d|t|re|ve|ll)\b"
COMPOUND = re.compile(rf"\w+(?:(?!{CLITIC_PATTERN})['’./-]\w+)*|{CLITIC_PATTERN}", re.IGNORECASE)
CONSTRAINED_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
SENTENCE_END = re.compile(r"(?<![.!?…])(?>[.!?…]+[\"'”’)\]*_]*)(?=\s|$)|[。！？]+")
TITLES = frozenset(("mr", "mrs", "ms", "dr", "prof", "st", "vs", "e.g", "i.e", "cf", "fig", "capt"))
ABBREVIATIONS = frozenset(
    ("etc", "sr", "jr", "al", "inc", "ltd", "co", "corp", "u.s", "u.k", "a.m", "p.m", "p.s", "ph.d")
)


def satisfies_relation(count: int, relation: str, threshold: int) -> bool:
    if relation == "less than":
        return count < threshold
    if relation == "at least":
        return count >= threshold
    raise DataError(f"the relation '{relation}' is neither 'less than' nor 'at least'")


def detect_language(text: str) -> str | None:
    """Return the ISO 639-1 code that langdetect gives; None if it can't tell."""
    from langdetect import DetectorFactory, LangDetectException, detect

    DetectorFactory.seed = 0  # unseeded, one text may get several languages
    try:
        return detect(text[:MAX_DETECTED_CHARS])
    except LangDetectException:
        return None


def split_sentences(text: str) -> list[str]:
    """Return the sentences, each of which ends in . ! ? … before white space, or in 。！？.

    A full stop after a title, an initial or a list number ("1.") ends no sentence. After another
    abbreviation it ends one before a capital letter.
    """
    pieces: list[str] = []
    start = 0
    for end in SENTENCE_END.finditer(text):
        if end.group() == "." and _is_inside_sentence(text, start, end.start()):
            continue
        piece = text[start : end.end()].strip()
        if piece.rstrip(".").isdigit():
            continue
        pieces.append(piece)
        start = end.end()
    return (
        [*pieces, remainder]
        if (remainder := text[start:].strip()) and WORD.search(remainder)
        else pieces
    )


def _is_inside_sentence(text: str, start: int, stop: int) -> bool:
    """Return True if the full stop at `stop` belongs to the word before it and ends nothing."""
    previous_words = text[max(start, stop - 20) : stop].split()
    word = previous_words[-1].strip("\"'“‘([*_") if previous_words else ""
    if word.lower() in ABBREVIATIONS:
        return not text[stop + 1 : stop + 3].strip()[:1].isupper()
    return word.lower() in TITLES or (len(word) == 1 and word.isupper() and word != "I")


# --- keywords


def existence(text: str, keywords: Sequence[str]) -> bool:
    return all(_count_occurrences(keyword, text) > 0 for keyword in keywords)


def frequency(text: str, keyword: str, frequency: int, relation: str) -> bool:
    return satisfies_relation(_count_occurrences(keyword.strip(), text), relation, frequency)


def forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    patterns = (rf"(?<!\w){re.escape(word.strip())}(?!\w)" for word in forbidden_words)
    return not any(re.search(pattern, text, re.IGNORECASE) for pattern in patterns)


def letter_frequency(text: str, letter: str, let_frequency: int, let_relation: str) -> bool:
    return satisfies_relation(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    )


def _count_occurrences(keyword: str, text: str) -> int:
    return len(re.findall(re.escape(keyword), text, re.IGNORECASE))


# --- language and letters


def response_language(text: str, language: str) -> bool:
    detected = detect_language(text)
    if detected is None:
        return False
    return language in (detected, detected.partition("-")[0])  # zh-cn is zh


def english_capital(text: str) -> bool:
    return text.isupper() and detect_language(text) == "en"


def english_lowercase(text: str) -> bool:
    return text.islower() and detect_language(text) == "en"


def capital_word_frequency(text: str, capital_frequency: int, capital_relation: str) -> bool:
    return satisfies_relation(
        sum(word.isupper() for word in COMPOUND.findall(text)), capital_relation, capital_frequency
    )


# --- length


def number_sentences(text: str, num_sentences: int, relation: str) -> bool:
    return satisfies_relation(len(split_sentences(text)), relation, num_sentences)


def number_words(text: str, num_words: int, relation: str) -> bool:
    return satisfies_relation(sum(1 for _ in WORD.finditer(text)), relation, num_words)


def number_paragraphs(text: str, num_paragraphs: int) -> bool:
    """Return True if dividers of three asterisks separate this number of paragraphs.

    Only the pieces before the first and after the last divider may be empty; they don't count then.
    """
    first, *later = re.split(r"\s?\*\*\*\s?", text)
    inner, last = (later[:-1], later[-1:]) if later else ([], [])
    outer = [piece for piece in (first, *last) if piece.strip()]
    return all(piece.strip() for piece in inner) and len(inner) + len(outer) == num_paragraphs


def nth_paragraph_first_word(
    text: str, num_paragraphs: int, nth_paragraph: int, first_word: str
) -> bool:
    """Return True if the counts match and paragraph `nth_paragraph` starts with `first_word`.

    Blank lines separate paragraphs.
    """
    pieces = text.split("\n\n")
    count = sum(1 for piece in pieces if piece.strip())
    if not 1 <= nth_paragraph <= count or count != num_paragraphs:
        return False
    words = pieces[nth_paragraph - 1].split()
    word = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0] if words else ""
    return word.lower() == first_word.lower()


# --- content and format


def number_placeholders(text: str, num_placeholders: int) -> bool:
    return len(re.findall(r"\[[^\[\]\n]*\]", text)) >= num_placeholders


def postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    patterns = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
    return re.search(patterns.get(marker, re.escape(marker.lower())), text.lower()) is not None


def number_bullet_lists(text: str, num_bullets: int) -> bool:
    return sum(1 for line in text.split("\n") if _is_bullet(line.lstrip())) == num_bullets


def _is_bullet(line: str) -> bool:
    return line.startswith("-") or (line.startswith("*") and len(line) > 1 and line[1] != "*")


def constrained_response(text: str) -> bool:
    return any(option in text for option in CONSTRAINED_ANSWERS)


def number_highlighted_sections(text: str, num_highlights: int) -> bool:
    """Return True if enough sections are *highlighted* or **highlighted**; each counts once."""
    single = [piece for piece in re.findall(r"\*[^\n*]*\*", text) if piece.strip("*").strip()]
    double = [piece for piece in re.findall(r"\*\*[^\n*]*\*\*", text) if piece.strip("*").strip()]
    return len(single) + len(double) >= num_highlights


def multiple_sections(text: str, section_spliter: str, num_sections: int) -> bool:
    return len(re.findall(rf"{re.escape(section_spliter.strip())}\s?\d+", text)) >= num_sections


def json_format(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def title(text: str) -> bool:
    """Return True if a line holds a title <<in double angular brackets>>."""
    for line in text.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return True
    return False


# --- combinations, start, end, punctuation


def two_responses(text: str) -> bool:
    pieces = [piece.strip() for piece in text.split("******")]
    if not all(pieces[1:-1]):
        return False
    paragraphs = [piece for piece in pieces if piece]
    return len(paragraphs) == 2 and paragraphs[0] != paragraphs[1]


def repeat_prompt(text: str, prompt_to_repeat: str) -> bool:
    return text.strip().lower().startswith(prompt_to_repeat.strip().lower())


def end_checker(text: str, end_phrase: str) -> bool:
    return text.strip().strip('"').lower().endswith(end_phrase.strip().lower())


def quotation(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


def no_comma(text: str) -> bool:
    return "," not in text


CHECKS: Mapping[str, Check] = {
    "keywords:existence": existence,
    "keywords:frequency": frequency,
    "keywords:forbidden_words": forbidden_words,
    "keywords:letter_frequency": letter_frequency,
    "language:response_language": response_language,
    "length_constraints:number_sentences": number_sentences,
    "length_constraints:number_paragraphs": number_paragraphs,
    "length_constraints:number_words": number_words,
    "length_constraints:nth_paragraph_first_word": nth_paragraph_first_word,
    "detectable_content:number_placeholders": number_placeholders,
    "detectable_content:postscript": postscript,
    "detectable_format:number_bullet_lists": number_bullet_lists,
    "detectable_format:constrained_response": constrained_response,
    "detectable_format:number_highlighted_sections": number_highlighted_sections,
    "detectable_format:multiple_sections": multiple_sections,
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    "combination:repeat_prompt": repeat_prompt,
    "startend:end_checker": end_checker,
    "startend:quotation": quotation,
    "change_case:capital_word_frequency": capital_word_frequency,
    "change_case:english_capital": english_capital,
    "change_case:english_lowercase": english_lowercase,
    "punctuation:no_comma": no_comma,
}


def follows_instruction(text: str, instruction: str, arguments: Mapping[str, Any]) -> bool:
    """Return True if `text` follows the instruction; an empty text follows none.

    Raises DataError for an unknown id or arguments.
    """
    check = CHECKS.get(instruction)
    if check is None:
        raise DataError(f"the instruction '{instruction}' is none of the 25 of IFEval")
    # Published rows name the arguments of all instructions, most of them null.
    given_arguments = {name: value for name, value in arguments.items() if value is not None}
    try:
        checked_arguments = check_arguments(check, given_arguments)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the instruction '{instruction}' can't take the arguments {given_arguments}: {error}"
        ) from error
    return bool(text.strip()) and check(text, **checked_arguments)


def check_arguments(check: Check, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a check with the types of its parameters.

    Whole numbers may be floats, as tables with missing values hold them. Raises TypeError for an
    argument that is missing or unknown. Raises ValueError for other types, and for empty texts and
    lists, which every answer would satisfy.
    """
    signature = inspect.signature(check)
    signature.bind("", **arguments)
    return {
        name: CONVERSIONS[signature.parameters[name].annotation](name, value)
        for name, value in arguments.items()
    }


def _to_whole(name: str, value: Any) -> int:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value != value // 1:
        raise ValueError(f"{name}={value!r:.80} is no whole number")
    return int(value)


def _to_text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={value!r:.80} is no text")
    return value


def _to_texts(name: str, value: Any) -> list[str]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name}={value!r:.80} is no list of texts")
    return [_to_text(name, item) for item in value]


# By the annotation of a check's parameter.
CONVERSIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "int": _to_whole,
    "str": _to_text,
    "Sequence[str]": _to_texts,
}
