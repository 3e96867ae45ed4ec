"""Checks for instructions that data name by a function, as ROLL and Open-Instruct's data do.

A task's answer is {"func_name": "validate_word_constraint", "N": 100, "quantifier": "at least"}.
Each function of `FUNCTIONS` takes the text and those of the arguments that it has.

Source: `IF_FUNCTIONS_MAP` of ROLL's `ifeval_rule_reward_worker.py`, after open-instruct's
`if_functions.py`. The checks differ in four ways. `verify_keyword_frequency` counts the word (ROLL
counts all words, since it compares each with itself). An empty answer follows nothing, and equals
none of the options of `validate_choice`. A text of unknown language fails. An unknown function or a
missing argument is an error of the task, and no 0.

All take time linear in the text's length.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ratchet.errors import DataError
from ratchet.rewards.answers.ifeval_checks import check_arguments, detect_language
from ratchet.utils.safe_read import parse_json

END_OF_THINKING = "</think>"
WORDS = re.compile(r"\b\w+\b")
CAPITAL_WORDS = re.compile(r"\b[A-Z]+\b")
# White space after a full stop or a question mark, but not after "e.g." or "Mr.".
SENTENCE_BREAK = re.compile(r"(?<!\w\.\w.)(?<![A-Z][a-z]\.)(?<=\.|\?)\s")
STARS = "******"


def cut_thinking(text: str) -> str:
    """Return the text after the last `</think>`, without line breaks at its beginning."""
    before, tag, after = text.rpartition(END_OF_THINKING)
    return after.lstrip("\n") if tag else before + after


def follows_function(text: str, constraint: Mapping[str, Any], task_id: str) -> bool:
    """Return True if the text follows a constraint with its `func_name` and arguments.

    Raises DataError if the function is unknown, or lacks an argument or gets an unusable one.
    """
    name = constraint.get("func_name")
    function = FUNCTIONS.get(name) if isinstance(name, str) else None
    if function is None:
        raise DataError(
            f"task '{task_id}': func_name={name!r} is none of the known functions: "
            f"{', '.join(sorted(FUNCTIONS))}"
        )
    names = list(inspect.signature(function).parameters)[1:]
    missing = [key for key in names if constraint.get(key) is None]
    if missing:
        raise DataError(f"task '{task_id}': {name} lacks its argument {', '.join(missing)}")
    try:
        arguments = check_arguments(function, {key: constraint[key] for key in names})
        return bool(text.strip()) and function(text, **arguments)
    except ValueError as error:
        raise DataError(f"task '{task_id}': {name} has an unusable argument: {error}") from error


def _compare_count(count: int, n: int, quantifier: str, tolerance: int) -> bool:
    if quantifier == "at least":
        return count >= n
    if quantifier == "at most":
        return count <= n
    if quantifier == "around":
        return abs(count - n) <= tolerance
    raise ValueError(f"quantifier={quantifier!r:.80} is none of at least, at most, around")


def has_keywords(text: str, keyword_list: Sequence[str]) -> bool:
    lower = text.lower()
    return all(keyword.lower() in lower for keyword in keyword_list)


def has_keyword_frequency(text: str, word: str, N: int) -> bool:
    return WORDS.findall(text.lower()).count(word.lower()) == N


def lacks_forbidden_words(text: str, forbidden_words: Sequence[str]) -> bool:
    lower = text.lower()
    return not any(word.lower() in lower for word in forbidden_words)


def has_letter_frequency(text: str, letter: str, N: int) -> bool:
    if len(letter) != 1:
        raise ValueError(f"letter {letter!r} must be one character")
    return text.count(letter) == N


def has_language(text: str, language: str) -> bool:
    return detect_language(text) == language


def has_paragraph_count(text: str, N: int) -> bool:
    """Return True if "* * *" separates `N` paragraphs, none of which is empty."""
    cleaned = "\n".join(line.strip() for line in text.splitlines()).strip()
    paragraphs = cleaned.split("* * *")
    return len(paragraphs) == N and all(paragraph.strip() for paragraph in paragraphs)


def has_word_count(text: str, N: int, quantifier: str) -> bool:
    """Return True if the number of words fits; "around" allows a tenth, at least one word."""
    return _compare_count(len(text.split()), N, quantifier, max(round(N * 0.1), 1))


def has_sentence_count(text: str, N: int, quantifier: str) -> bool:
    return _compare_count(len(SENTENCE_BREAK.split(text)), N, quantifier, 1)


def has_paragraphs(text: str, N: int, first_word: str, i: int) -> bool:
    """Return True if there are `N` paragraphs, the `i`-th of which begins with `first_word`."""
    paragraphs = text.split("\n\n")
    return len(paragraphs) == N and 1 <= i <= N and paragraphs[i - 1].strip().startswith(first_word)


def has_postscript(text: str, postscript_marker: str) -> bool:
    start = text.find(postscript_marker)
    return start >= 0 and len(text[start:].strip()) > len(postscript_marker)


def has_placeholders(text: str, N: int) -> bool:
    """Return True if at least `N` pairs of brackets open and close in a line."""
    return sum(_count_brackets(line) for line in text.split("\n")) >= N


def _count_brackets(line: str) -> int:
    count, start = 0, line.find("[")
    while start >= 0 and (end := line.find("]", start)) >= 0:
        count += 1
        start = line.find("[", end)
    return count


def has_bullet_points(text: str, N: int) -> bool:
    return sum(line.strip().startswith(("*", "-")) for line in text.split("\n")) == N


def has_title(text: str) -> bool:
    """Return True if a line has a title in double angle brackets, <<title>>."""
    return any(
        (start := line.find("<<")) >= 0 and line.find(">>", start + 2) >= 0
        for line in text.split("\n")
    )


def is_choice(text: str, options: Sequence[str]) -> bool:
    return any(text in option for option in options)


def has_highlights(text: str, N: int) -> bool:
    """Return True if at least `N` pairs of asterisks open and close in a line."""
    return sum(line.count("*") // 2 for line in text.split("\n")) >= N


def has_sections(text: str, N: int, section_splitter: str) -> bool:
    sections = text.split(section_splitter)
    return len(sections) - (not sections[0]) == N


def is_json(text: str) -> bool:
    try:
        parse_json(text)
    except ValueError:
        return False
    return True


def repeats_prompt(text: str, original_prompt: str) -> bool:
    return text.startswith(original_prompt)


def has_two_responses(text: str) -> bool:
    first, stars, second = text.partition(STARS)
    return bool(stars) and STARS not in second and first.strip() != second.strip()


def is_uppercase(text: str) -> bool:
    return text == text.upper()


def is_lowercase(text: str) -> bool:
    return text == text.lower()


def has_capital_words(text: str, N: int, quantifier: str) -> bool:
    return _compare_count(len(CAPITAL_WORDS.findall(text)), N, quantifier, 0)


def has_end(text: str, end_phrase: str) -> bool:
    return text.endswith(end_phrase)


def is_quoted(text: str) -> bool:
    return text.startswith('"') and text.endswith('"')


def has_no_commas(text: str) -> bool:
    return "," not in text


# The functions by their names in the data.
FUNCTIONS: Mapping[str, Callable[..., bool]] = {
    "verify_keywords": has_keywords,
    "verify_keyword_frequency": has_keyword_frequency,
    "validate_forbidden_words": lacks_forbidden_words,
    "verify_letter_frequency": has_letter_frequency,
    "validate_response_language": has_language,
    "verify_paragraph_count": has_paragraph_count,
    "validate_word_constraint": has_word_count,
    "verify_sentence_constraint": has_sentence_count,
    "validate_paragraphs": has_paragraphs,
    "verify_postscript": has_postscript,
    "validate_placeholders": has_placeholders,
    "verify_bullet_points": has_bullet_points,
    "validate_title": has_title,
    "validate_choice": is_choice,
    "validate_highlighted_sections": has_highlights,
    "validate_sections": has_sections,
    "validate_json_format": is_json,
    "validate_repeat_prompt": repeats_prompt,
    "validate_two_responses": has_two_responses,
    "validate_uppercase": is_uppercase,
    "validate_lowercase": is_lowercase,
    "validate_frequency_capital_words": has_capital_words,
    "validate_end": has_end,
    "validate_quotation": is_quoted,
    "validate_no_commas": has_no_commas,
}
