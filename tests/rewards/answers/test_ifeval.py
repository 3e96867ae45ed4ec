"""The 25 instructions of IFEval: a text that follows, one that doesn't, and one at the edge, for
each."""

import asyncio
import json

import pytest

from ratchet.config.resolve import resolve
from ratchet.errors import DataError, MissingDependency
from ratchet.rewards.answers import ifeval
from ratchet.rewards.answers.ifeval import IFEvalConfig
from ratchet.rewards.answers.ifeval_checks import CHECKS, follows_instruction, split_sentences
from ratchet.testing import answered, check_reward
from ratchet.training.stage_from_config import build_reward
from ratchet.types import Failed, Message, Task

ENGLISH = "The old man walked slowly along the river and thought about the years that had gone by"
GERMAN = "Der alte Mann ging langsam am Fluss entlang und dachte an die vergangenen Jahre"
CHINESE = "老人慢慢地沿着河边走,想着过去的岁月。"

# id, arguments, a text that follows, one that does not, one at the edge, and whether that one
# follows
ROWS = [
    (
        "keywords:existence",
        {"keywords": ["river", "C++"]},
        "A River in c++.",
        "A river.",
        "riverside c++",
        True,
    ),
    (
        "keywords:frequency",
        {"keyword": "dog", "frequency": 2, "relation": "at least"},
        "Dog, dog",
        "dog",
        "hotdogs dog",
        True,
    ),
    (
        "keywords:frequency",
        {"keyword": "a.b", "frequency": 1, "relation": "less than"},
        "axb",
        "a.b",
        "no",
        True,
    ),
    (
        "keywords:forbidden_words",
        {"forbidden_words": ["can", "C++"]},
        "I may",
        "I CAN do",
        "a canal, scan",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "Z", "let_frequency": 2, "let_relation": "at least"},
        "zZ",
        "z",
        "pizza",
        True,
    ),
    (
        "keywords:letter_frequency",
        {"letter": "#", "let_frequency": 2, "let_relation": "less than"},
        "#1",
        "##",
        "none",
        True,
    ),
    ("language:response_language", {"language": "de"}, GERMAN, ENGLISH, "12345 ...", False),
    ("language:response_language", {"language": "zh"}, CHINESE, ENGLISH, GERMAN, False),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        "It is late. Go home!",
        "It is late, Dr. Smith, at 3.14 p.m. by J. Doe's clock.",
        "One? Two",
        True,
    ),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "less than"},
        "One.",
        "1. One. Two.",
        "1. One.",
        True,
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 2},
        "a\n***\nb",
        "a\n\nb",
        "***\na\n***\nb\n***",
        True,
    ),
    (
        "length_constraints:number_paragraphs",
        {"num_paragraphs": 1},
        "a",
        "a *** b",
        "a ****** b",
        False,
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "at least"},
        "a b c",
        "a b",
        "it's - ok",
        True,
    ),
    (
        "length_constraints:number_words",
        {"num_words": 3, "relation": "less than"},
        "a b",
        "a b c",
        "... !!!",
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Dog"},
        "a cat\n\ndog's life",
        "dog\n\ncat",
        'a\n\n"Dog," he said',
        True,
    ),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 1, "nth_paragraph": 1, "first_word": "dog"},
        "Dog.",
        "dogs",
        "dog\n\ncat",
        False,
    ),
    (
        "detectable_content:number_placeholders",
        {"num_placeholders": 2},
        "[a] to [b]",
        "[a] to b",
        "[[a]] [\n]",
        False,
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
        "Hi.\nP.S. bye",
        "Hi. PS bye",
        "p. s. bye",
        True,
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "P.P.S"},
        "P.P.S bye",
        "P.S. bye",
        "p. p. s",
        True,
    ),
    (
        "detectable_content:postscript",
        {"postscript_marker": "N.B."},
        "n.b. bye",
        "bye",
        "nxbx",
        False,
    ),
    (
        "detectable_format:number_bullet_lists",
        {"num_bullets": 2},
        "* a\n- b",
        "* a\n* b\n* c",
        "  * a\n**b**\n-c",
        True,
    ),
    (
        "detectable_format:constrained_response",
        {},
        "My answer is no.",
        "No.",
        "  Well: My answer is maybe. Or so",
        True,
    ),
    (
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 2},
        "*a* *b*",
        "*a* b",
        "**a** ** ** *b*",
        True,
    ),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        "Section 1\na\nSection 2\nb",
        "Section 1\na",
        "Section one Section1 Section 22",
        True,
    ),
    ("detectable_format:json_format", {}, '```json\n{"a": [1]}\n```', "{a: 1}", "3", True),
    ("detectable_format:title", {}, "<<joy>>\nA poem", "<joy>", "<<  >>", False),
    (
        "combination:two_responses",
        {},
        "a\n******\nb",
        "a ****** a",
        "****** a ****** b ******",
        True,
    ),
    ("combination:two_responses", {}, "a ****** b", "a", "a ****** ****** b", False),
    (
        "combination:repeat_prompt",
        {"prompt_to_repeat": "Who? "},
        "who? me",
        "me. Who?",
        "  Who?",
        True,
    ),
    (
        "startend:end_checker",
        {"end_phrase": "Any questions? "},
        "Hi. any questions?",
        "Any questions? No.",
        '"Any questions?"',
        True,
    ),
    ("startend:quotation", {}, ' "hi" ', "hi", '"', False),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "at least"},
        "GO AWAY",
        "GO Away",
        "I GO",
        True,
    ),
    (
        "change_case:capital_word_frequency",
        {"capital_frequency": 2, "capital_relation": "less than"},
        "One NASA",
        "NASA and ESA",
        "WELL-KNOWN",
        True,
    ),
    ("change_case:english_capital", {}, ENGLISH.upper(), ENGLISH, GERMAN.upper(), False),
    ("change_case:english_lowercase", {}, ENGLISH.lower(), ENGLISH, GERMAN.lower(), False),
    ("punctuation:no_comma", {}, "a; b", "a, b", "a，b", True),
]


def test_every_instruction_of_the_paper_has_a_row():
    assert len(CHECKS) == 25
    assert {row[0] for row in ROWS} == set(CHECKS)


@pytest.mark.medium
@pytest.mark.needs("langdetect")
@pytest.mark.parametrize(
    ("instruction", "arguments", "good", "bad", "edge", "holds"), ROWS, ids=[row[0] for row in ROWS]
)
def test_an_instruction(instruction, arguments, good, bad, edge, holds):
    assert follows_instruction(good, instruction, arguments)
    assert not follows_instruction(bad, instruction, arguments)
    assert follows_instruction(edge, instruction, arguments) == holds
    assert not follows_instruction("  \n", instruction, arguments)
    # as rows of the published table have it
    assert follows_instruction(good, instruction, arguments | {"some_other_key": None})


HOSTILE = [c * 100_000 for c in "[<*\n-.!?\"' ,{PSp1"]
HOSTILE += [
    "." * 100_000 + "x",
    "]" * 100_000 + "[" * 100_000,
    "<<" * 50_000 + ">",
    "** " * 30_000,
    "'\"" * 50_000,
    "a-" * 50_000,
]
HOSTILE += [
    "[" * 100_000 + "]",
    "***" * 30_000,
    "p." * 50_000,
    "Section" * 15_000,
    "\x00\ud800\u202e",
    "@." * 50_000,
]


@pytest.mark.needs("langdetect")
@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_gets_a_verdict_in_linear_time(text):
    """A pattern that backtracked quadratically would take minutes on these."""
    for instruction, arguments, *_ in ROWS:
        assert follows_instruction(text, instruction, arguments) in (True, False)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("", 0),
        ("No stop", 1),
        ("One. Two! Three?", 3),
        ("Wait... what?! Yes.", 3),
        ('He said "Go." Then he went.', 2),
        ("Mr. and Mrs. Smith met Dr. Who.", 1),
        ("It costs 3.50 dollars.", 1),
        ("1. Buy milk.\n2. Go home.", 2),
        ("Cats, dogs, etc. are pets. Cats, dogs, etc. They are pets.", 3),
        ("It was me. I did it. So did I. Yes.", 4),
        ("你好。再见！", 2),
        ("Done. ***", 1),
    ],
)
def test_sentences_are_counted(text, count):
    assert len(split_sentences(text)) == count


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("I'm A", 2),
        ("IT'S", 2),
        ("DON’T", 2),
        ("O'BRIEN", 1),
        ("TCP/IP and U.S.", 2),
        ("X-RAY", 1),
        ("A_B c", 1),
        ("9 A1", 1),
    ],
)
def test_words_of_capital_letters_are_counted(text, count):
    for bound, holds in ((count, True), (count + 1, False)):
        arguments = {"capital_frequency": bound, "capital_relation": "at least"}
        assert follows_instruction(text, "change_case:capital_word_frequency", arguments) == holds


@pytest.mark.parametrize(
    ("instruction", "arguments", "message"),
    [
        ("keywords:none", {}, "is none of the 25"),
        ("keywords:existence", {}, "can't take the arguments {}: "),
        ("keywords:existence", {"keywords": None}, "can't take the arguments {}: "),
        ("keywords:existence", {"keywords": ["a"], "colour": 1}, "can't take the arguments"),
        (
            "keywords:frequency",
            {"keyword": "a", "frequency": 1, "relation": "at most"},
            "neither 'less than' nor 'at least'",
        ),
        (
            "length_constraints:number_words",
            {"num_words": "x", "relation": "at least"},
            "can't take the arguments",
        ),
        ("keywords:existence", {"keywords": "a text"}, "no list of texts"),
        ("keywords:forbidden_words", {"forbidden_words": []}, "no list of texts"),
        ("startend:end_checker", {"end_phrase": " "}, "no text"),
        ("detectable_content:number_placeholders", {"num_placeholders": True}, "no whole number"),
        ("detectable_content:number_placeholders", {"num_placeholders": 0.5}, "no whole number"),
    ],
)
def test_a_broken_row_is_named(instruction, arguments, message):
    with pytest.raises(DataError, match=message):
        follows_instruction("a text", instruction, arguments)


def test_a_whole_number_may_be_a_float_of_a_table():
    arguments = {"num_words": 2.0, "relation": "at least"}
    assert follows_instruction("a text", "length_constraints:number_words", arguments)


# --- the reward

ROW = {
    "key": 1000,
    "prompt": "Write two lines without commas, in quotation marks.",
    "instruction_id_list": [
        "punctuation:no_comma",
        "startend:quotation",
        "length_constraints:number_words",
    ],
    "kwargs": [{}, {"num_words": None}, {"num_words": 3, "relation": "at least", "keyword": None}],
}
PROMPT = (Message("user", ROW["prompt"]),)


def outcome(reward, text, **fields):
    task = Task("t/0", PROMPT, **fields)
    return asyncio.run(reward.score([answered(task, text)], task))[0]


def made(**keys):
    return build_reward((resolve("rewards", {"kind": "ifeval", **keys}),))


@pytest.mark.needs("langdetect")
def test_all_or_the_share_of_the_instructions_counts():
    check_reward(made(), Task("t/0", PROMPT, meta=ROW), good='"one two three"', bad="one two three")
    texts = ('"one two three"', "one two three", "one, two", "")
    assert [outcome(made(), text, meta=ROW).reward for text in texts] == [1.0, 0.0, 0.0, 0.0]
    shares = made(credit="share")
    assert [outcome(shares, text, meta=ROW).reward for text in texts] == pytest.approx(
        [1.0, 2 / 3, 0.0, 0.0]
    )
    parts = outcome(shares, "one two three", meta=ROW).parts
    assert parts["ifeval/startend:quotation"] == 0.0
    assert parts["ifeval/punctuation:no_comma"] == pytest.approx(1 / 3)


@pytest.mark.needs("langdetect")
def test_the_row_may_be_the_tasks_answer_as_a_mapping_or_as_json():
    for answer in (ROW, json.dumps(ROW)):
        assert outcome(made(), '"one two three"', answer=answer).reward == 1.0


@pytest.mark.needs("langdetect")
def test_loose_reading_forgives_a_first_or_last_line_and_asterisks():
    for text in (
        'Sure:\n"one two three"',
        '"one two three"\nBye',
        '*"one two three"*',
        'Sure\n*"one two three"*\nBye',
    ):
        assert [outcome(made(loose=loose), text, meta=ROW).reward for loose in (False, True)] == [
            0.0,
            1.0,
        ]
    assert outcome(made(loose=True), "one two three", meta=ROW).reward == 0.0


@pytest.mark.needs("langdetect")
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "has no instruction_id_list"),
        ({"answer": "no json"}, "has no instruction_id_list"),
        ({"answer": "[1]"}, "has no instruction_id_list"),
        (
            {"meta": {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}, {}]}},
            "has 1 instructions, but kwargs for 2",
        ),
        ({"meta": {"instruction_id_list": ["punctuation:none"]}}, "is none of the 25"),
    ],
)
def test_a_task_without_usable_instructions_fails_and_is_named(fields, message):
    failed = outcome(made(), "text", **fields)
    assert isinstance(failed, Failed)
    assert message in failed.detail
    assert "task 't/0'" in failed.detail


def test_the_package_that_tells_languages_is_asked_for_by_name(monkeypatch):
    monkeypatch.setattr(ifeval, "find_spec", lambda name: None)
    with pytest.raises(
        MissingDependency,
        match=r"needs the package 'langdetect': pip install 'ratchet-rl\[rewards\]'",
    ):
        ifeval.IFEval(IFEvalConfig())
