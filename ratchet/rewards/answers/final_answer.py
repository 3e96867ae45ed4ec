"""Extract the final answer of a text, and normalise the spelling of LaTeX answers.

Both take time linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ratchet.errors import DataError
from ratchet.rewards.answers.numeric import (
    MINUS_SIGNS,
    SCALE,
    SCALES,
    find_last_match,
    has_minus_before_box,
    parse_bare_number,
    spell_symbols,
)
from ratchet.types import Task

# A longer \boxed{} counts as not closed. Longer answers with other marks are cut off.
MAX_ANSWER_CHARS = 2000

BOXED = re.compile(r"\\f?boxed(?:\{|(?=\s?[0-9A-Za-z]))")
BRACES = re.compile(r"\\.|[{}]", re.DOTALL)
HASHES = re.compile(r"^####(?!#)[ \t]*([^\n]*)", re.MULTILINE)
# Text after "####" that begins with two letters is a heading ("#### Step 2"), no answer ("#### C").
HEADING = re.compile(r"[^\W\d_]{2}")


# Symbols and their LaTeX.
SYMBOLS = str.maketrans(
    {
        "∞": "\\infty ",
        "∪": "\\cup ",
        "∩": "\\cap ",
        "∈": "\\in ",
        "∅": "\\emptyset ",
        "±": "\\pm ",
        "·": "\\cdot ",
        "⋅": "\\cdot ",
        "×": "\\times ",
        "÷": "\\div ",
        "≤": "\\leq ",
        "≥": "\\geq ",
        "≠": "\\neq ",
        "π": "\\pi ",
        "ℝ": "\\mathbb{R}",
        "ℤ": "\\mathbb{Z}",
        "℃": "^\\circ C",
        "℉": "^\\circ F",
    }
)
# A number, perhaps with a unit, that is all in one text command.
TEXT_NUMBER = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\{\s*([-+]?(?:\\?\$)?[0-9][^{}\\]*)\}")
ROOT = re.compile(r"√ ?(?:\(([^()]*)\)|\{([^{}]*)\}|([0-9]+|[A-Za-z]))")


def make_no_answer_error(task: Task) -> DataError:
    """Return the error of a task without an answer, with the key of a recipe that names one."""
    return DataError(
        f"task '{task.id}' has no answer to compare with: add a column `answer` to its row, or "
        "name yours, environment.columns={answer: ...}"
    )


def _join_thousands(match: re.Match[str]) -> str:
    return match[1].replace(" ", "")


# Patterns and their replacements, applied in this order.
SPELLINGS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    # Dollars by another name than their sign.
    (re.compile(r"(?<![A-Za-z\\])(?:US(?=\\?\$)|USD ?(?=\\?\$?[-+]?[0-9.]))"), ""),
    (re.compile(r"^(-?)[€£¥₹](?=[-+]?[0-9.])"), r"\1"),
    (
        re.compile(r"\\!|\\(?:left|right|displaystyle|limits)(?![a-zA-Z])|(?<!\\)\$|\\\$"),
        "",
    ),
    (re.compile(r"(?<=[0-9])\{:\}(?=[0-9])"), ":"),
    (re.compile(r"(?:\\[,;:> ]|\\quad(?![a-zA-Z])|~|\s)+"), " "),
    (re.compile(r"\\[dt]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:text|mathrm|textbf|mathbf|textit|boldsymbol|bm)\{([^{}]*)\}"), r"\1"),
    (re.compile(r"^(?:[A-Za-z] ?)?\\approx(?![a-zA-Z])|(?<=[0-9]),$"), ""),
    (re.compile(r"(?<=[0-9]) +to +(?=[0-9])"), ":"),
    (re.compile(rf"(?<=[0-9])((?: ?{SCALE})*) ?(?:USD|dollars?|[€£¥₹]|euros?)$"), r"\1"),
    (
        re.compile(
            r"(?:\^\{?\\circ\}?|\\degree|°| degrees?)(?: ?(?:[CF]|Celsius|Fahrenheit)$)?|\\?%"
        ),
        "",
    ),
    (re.compile(r"\\[lc]?dots[bcm]?(?![a-zA-Z])|…"), "..."),
    (re.compile(r"\\(?:cdot|times)(?![a-zA-Z])"), "*"),
    (re.compile(r"\\(le|ge|ne)q?(?![a-zA-Z])"), r"\\\1"),
    (re.compile(r"\\varnothing(?![a-zA-Z])"), r"\\emptyset"),
    (re.compile(r"\\mathbb ?([A-Z])"), r"\\mathbb{\1}"),
    (re.compile(r"\\frac ?([0-9]) ?([0-9])"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac([0-9])(?=\{)"), r"\\frac{\1}"),
    (re.compile(r"\\frac(\{[^{}]*\})([0-9])"), r"\\frac\1{\2}"),
    (re.compile(r"\\sqrt([0-9a-zA-Z])"), r"\\sqrt{\1}"),
    (MINUS_SIGNS, "-"),
    (re.compile(r"^(?i:minus|negative) ?(?=[0-9.$\\])"), "-"),
    # A time of day. `end_with_different_suffixes` tells morning from afternoon.
    (re.compile(r"^((?:1[0-2]|0?[1-9])(?::[0-5][0-9])?) ?[ap]\.?m\.?$", re.IGNORECASE), r"\1"),
    # Spaces between digits stay: "1 1/2" is no "11/2". A space that separates thousands is removed.
    (re.compile(r"(?<!\d) +| +(?!\d)"), ""),
    (re.compile(r"(?<![\d.,/ ])(\d{1,3}(?: +\d{3})+)(?![\d/])"), _join_thousands),
)
# Words whose case means nothing.
VERDICTS = ("yes", "no", "true", "false")
# Units that answers are given in, each with its other names.
UNIT_NAMES = """
mm millimeter millimetre; cm centimeter centimetre; m meter metre; km kilometer kilometre;
in inch inches; ft foot feet; yd yard; mi mile; mg milligram; g gram; kg kilogram; lb lbs pound;
ms millisecond; s sec second; min minute; h hr hrs hour; day; week; month; year;
ml milliliter millilitre; l liter litre
"""
UNITS = {
    name + plural: names.split()[0]
    for names in UNIT_NAMES.split(";")
    for name in names.split()
    for plural in (("", "s") if len(name) > 3 or name == "day" else ("",))
}
POWER_WORD = re.compile(
    rf"\b(?:(?P<square>square|sq\.?)|cubic|cu\.) (?P<unit>{'|'.join(UNITS)})\b(?P<brace>\s*\}}?)"
)
SPEED = re.compile(r"(?<![A-Za-z])(?:mph|kph|kmh)(?![A-Za-z])")
SPEEDS = {"mph": "mi/h", "kph": "km/h", "kmh": "km/h"}
# The scale of a temperature: 20^\circ\text{C}, 20 degrees Celsius.
TEMPERATURE = re.compile(
    r"(?:\\circ\}?|\\degree|°|\bdegrees?)(?:\s|~|\\[,;: ]|\\(?:text|mathrm)\{)*"
    r"(C|F|K|[cC]elsius|[fF]ahrenheit|[kK]elvin)(?![A-Za-z])"
)
PER = re.compile(r"/|\sper\s")
SUFFIX = re.compile(
    rf"(?<=[\d\s{{])((?i:[ap]\.?m|(?:(?:{'|'.join(UNITS)})(?:{PER.pattern}))?"
    rf"(?:{'|'.join(UNITS)}))|{SCALE})(?:\}}?\^\{{?([0-9]))?$"
)
# The value of a function or the probability of an event: f(2)=5, P(X=1)=0.3.
VALUE = re.compile(r"([A-Za-z]\([^()+*]*\))=([^=]+)")
SUM = re.compile(r"\+|[\w})]\s*-")
# A currency before or after a number, per cent, or degrees. A dollar sign of two surrounds a
# formula.
QUANTITY = re.compile(
    r"(?P<dollar>^-?(?:US)?(?:\\?\$|USD)-? ?[0-9.][^$]*$|\b(?:dollars?|USD)(?:\W*$| ?(?:/|per\b)))"
    r"|(?P<euro>^-?€|(?:\beuros?|€)(?:[^\w€]*$| ?(?:/|per\b)))"
    r"|(?P<cent>(?:\bcents?|¢)(?:[^\w¢]*$| ?(?:/|per\b)))"
    r"|(?P<percent>(?:%|\bper ?cent)[^\w%]*$)"
    r"|(?P<degree>(?:\^\{?\\circ|\\degree|°|\bdegrees?)\W{0,4}$)"
)
# A unit at the end, as in 5\text{ cm}^2, 5 km/h and 5 miles per hour.
UNIT = re.compile(
    r"(?<=[0-9}])(?:\\[,;: ]|[~\s])*(?:"
    rf"\\(?:text|mathrm)\{{(?!\s*{SCALE})[^{{}}0-9,]*\}}(?:\^\{{?[0-9]\}}?)?"
    r"|(?:km|mi|cm|ft|m)/(?:h|hr|s)(?:\^\{?[0-9]\}?)?|[A-Za-z]{4,}\sper\s[A-Za-z]{3,}"
    rf"|(?<=\s)(?:{'|'.join(name for name in UNITS if len(name) > 1)})(?:\^\{{?[0-9]\}}?)?)$"
)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{}; "" if it is not closed, None if there is none.

    The content of -\boxed{} is negated.
    """
    opening = find_last_match(BOXED, text)
    if opening is None:
        return None
    content = _read_box(text, opening)
    if not content or not has_minus_before_box(text, opening.start()):
        return content
    return f"-({content})" if re.search("[-+]", content) else f"-{content}"


def _read_box(text: str, opening: re.Match[str]) -> str:
    content = text[opening.end() : opening.end() + MAX_ANSWER_CHARS]
    if not opening.group().endswith("{"):  # no braces, as in "\boxed 5"
        return content.split(maxsplit=1)[0].rstrip("$.,;")
    depth = 1
    for brace in BRACES.finditer(content):
        depth += {"{": 1, "}": -1}.get(brace.group(), 0)
        if depth == 0:
            return content[: brace.start()].strip()
    return ""


def extract_marked_answer(text: str) -> str | None:
    r"""Return the content of a text's last mark; None if it has none.

    Marks are \boxed{}, "#### " and <answer></answer>.
    """
    answers_by_position: dict[int, str] = {}
    if (boxed := extract_boxed(text)) is not None:
        answers_by_position[max(text.rfind("\\boxed"), text.rfind("\\fboxed"))] = boxed
    for match in HASHES.finditer(text):
        if match.group(1).strip() and not HEADING.match(match.group(1)):
            answers_by_position[match.start()] = match.group(1)
    if (start := text.rfind("<answer>")) >= 0:
        inner = text[start + len("<answer>") :].partition("</answer>")[0]
        nested = extract_boxed(inner)
        answers_by_position[start + len(inner)] = inner if nested is None else nested
    return (
        answers_by_position[max(answers_by_position)].strip()[:MAX_ANSWER_CHARS]
        if answers_by_position
        else None
    )


def extract_first_tagged(text: str) -> str | None:
    """Return the text between the first <answer> and the next </answer>; None without them."""
    _, _, rest = text.partition("<answer>")
    answer, closing_tag, _ = rest.partition("</answer>")
    return answer if closing_tag else None


def spell_latex(answer: str) -> str:
    """Return an answer with mathematical symbols, such as √2, ½ and ∞, as LaTeX.

    Square metres are m^2, and mph is mi/h. Of \\text{5 cm}, it returns the content.
    """
    text = TEXT_NUMBER.fullmatch(answer.strip())
    answer = POWER_WORD.sub(_spell_power, text[1] if text else answer)
    answer = SPEED.sub(lambda speed: SPEEDS[speed[0]], answer)
    if answer.isascii():
        return answer
    roots = ROOT.sub(lambda root: f"\\sqrt{{{root[1] or root[2] or root[3] or ''}}}", answer)
    return MINUS_SIGNS.sub("-", spell_symbols(roots).translate(SYMBOLS))


def _spell_power(unit: re.Match[str]) -> str:
    return f"{unit['unit']}{unit['brace']}^{2 if unit['square'] else 3}"


def normalize_spelling(latex: str) -> str:
    """Return an answer in a normalised spelling: equal for different spellings of the same LaTeX.

    It leaves out surplus spaces, sizes (\\left, \\displaystyle), text commands, a trailing unit, a
    leading "x=", and degree, percent and dollar signs. Fractions and roots get braces.
    """
    return _split_name(latex)[1]


def name_different_variables(a: str, b: str) -> bool:
    """True if both answers are one equation, as "x=5" and "y=5", of different variables."""
    (name_a, value_a), (name_b, value_b) = _split_name(a), _split_name(b)
    is_single = "=" not in value_a + value_b
    return is_single and bool(name_a and name_b) and name_a.casefold() != name_b.casefold()


def end_with_different_suffixes(a: str, b: str) -> bool:
    """True if both answers end with AM or PM, a word of scale or a unit, and these differ.

    So "9 AM" is not "9 PM", "10 cents" is not "\\$10", "5\\%" is not "\\$5", and "5 cm" is neither
    "5 m" nor "5 cm^2", which algebra takes for equal.
    """
    return any(
        len({read(text) for text in (a, b)} - {None}) == 2
        for read in (_read_suffix, _read_quantity, _read_temperature_scale)
    )


def _read_temperature_scale(text: str) -> str | None:
    scale = TEMPERATURE.search(spell_latex(text))
    return scale and scale[1][0].upper()


def _read_suffix(text: str) -> tuple[str, ...] | None:
    """Return AM or PM, the word of scale, or the unit and its power, at the end of an answer."""
    text = spell_latex(text).strip(" .}$")
    match = SUFFIX.search(text)
    if match is None:
        return None
    # In 4m^2 + 2s^2 these letters are variables, unlike that of 1 + 2\text{ m}.
    before = text[: match.start()].rstrip()
    if len(match[1]) == 1 and not before.endswith("{") and SUM.search(before):
        return None
    parts = PER.split(match[1].casefold().replace(".", ""))
    return (*(UNITS.get(part, part) for part in parts), match[2] or "")


def _read_quantity(text: str) -> str | None:
    """Return the currency of an answer, or "percent", "degree" or "unit"; else None."""
    if match := QUANTITY.search(spell_latex(text).strip()):
        return match.lastgroup
    suffix = _read_suffix(text)
    return None if suffix is None or suffix[0] in SCALES else "unit"


def _split_name(latex: str) -> tuple[str, str]:
    """Return the name of "x=5" or "f(2)=5" and the normalised rest; the name is "" without one."""
    latex = UNIT.sub("", spell_latex(latex[:MAX_ANSWER_CHARS]).strip().rstrip("."))
    for pattern, replacement in SPELLINGS:
        latex = pattern.sub(replacement, latex)
    latex = latex.casefold() if latex.casefold() in VERDICTS else latex
    if value_at := VALUE.fullmatch(latex):
        return value_at[1], value_at[2]
    name, equals, value = latex.partition("=")
    return (name, value) if equals and len(name) <= 2 and name[:1].isalpha() else ("", latex)


def canonicalize(answer: str) -> str:
    """Return the same text for all answers that `is_same_answer` finds equal."""
    spelling = normalize_spelling(answer)
    number = parse_bare_number(spelling)
    return spelling if number is None else str(number)


def is_same_answer(a: str, b: str) -> bool:
    """True if two answers have the same non-empty spelling, or are the same number."""
    if name_different_variables(a, b) or end_with_different_suffixes(a, b):
        return False
    a, b = normalize_spelling(a), normalize_spelling(b)
    if a == b:
        return a != ""
    number_a, number_b = parse_bare_number(a), parse_bare_number(b)
    return number_a is not None and number_a == number_b
