"""ROLL's IFEval and CrossThinkQA data, against cases worked by hand from its workers."""

import asyncio
import json
from itertools import islice

import pytest

from ratchet.config.resolve import build, resolve
from ratchet.errors import DataError
from ratchet.rewards.integrations.roll_ifeval import FUNCTIONS
from ratchet.testing import answered
from ratchet.types import Failed, Message, Task, Truncated


def judged(kind, text, answer, ended=None, **keys):
    task = Task("t/0", (Message("user", "?"),), answer=answer, tag=kind)
    reward = build(resolve("rewards", {"kind": kind, **keys}))
    return asyncio.run(reward.score([answered(task, text, ended)], task))[0]


def followed(text, name, **arguments):
    # The published rows have every argument of every function, mostly null.
    row = json.dumps({"func_name": name, "N": None, "quantifier": None, **arguments})
    return judged("ifeval", text, row).reward


# function, arguments, a text that follows, a text that does not
CASES = [
    ("verify_keywords", {"keyword_list": ["Tea", "cup"]}, "a CUP of tea", "tea"),
    ("verify_keyword_frequency", {"word": "Tea", "N": 2}, "tea, Tea", "tea teas"),
    ("validate_forbidden_words", {"forbidden_words": ["tea"]}, "coffee", "steaming"),
    ("verify_letter_frequency", {"letter": "a", "N": 2}, "A banal", "a banal"),
    ("verify_letter_frequency", {"letter": "a", "N": 3}, "banana", "banal"),
    ("validate_response_language", {"language": "de"}, "Das ist ein langer deutscher Satz.", "This is a long English sentence."),
    ("verify_paragraph_count", {"N": 2}, "a\n * * * \nb", "a\n* * *\n"),
    ("validate_word_constraint", {"N": 30, "quantifier": "around"}, "w " * 33, "w " * 34),
    ("validate_word_constraint", {"N": 2, "quantifier": "at most"}, "a b", "a b c"),
    ("validate_word_constraint", {"N": 2, "quantifier": "at least"}, "a b", "a"),
    ("verify_sentence_constraint", {"N": 2, "quantifier": "at least"}, "See e.g. this. Yes.", "See Mr. X."),
    ("verify_sentence_constraint", {"N": 1, "quantifier": "around"}, "A. B.", "A. B. C."),
    ("validate_paragraphs", {"N": 2, "first_word": "So", "i": 2}, "a\n\n So it is", "So\n\na"),
    ("verify_postscript", {"postscript_marker": "P.S."}, "a\nP.S. b", "a\nP.S. "),
    ("validate_placeholders", {"N": 2}, "[a] [b]", "[a\n] [b]"),
    ("verify_bullet_points", {"N": 2}, "* a\n - b\nc", "* a"),
    ("validate_title", {}, "<<poem>>\nx", "<<poem\n>>"),
    ("validate_choice", {"options": ["My answer is yes.", "no"]}, "no", "No!"),
    ("validate_highlighted_sections", {"N": 2}, "*a* and *b*", "*a* and *\nb*"),
    ("validate_sections", {"N": 2, "section_splitter": "Section"}, "Section 1 Section 2", "Section 1"),
    ("validate_json_format", {}, '{"a": [1]}', "{a: 1}"),
    ("validate_repeat_prompt", {"original_prompt": "Do it"}, "Do it now", "I do it"),
    ("validate_two_responses", {}, "a ****** b", "a ****** a"),
    ("validate_two_responses", {}, "a\n******\nb", "a ****** b ****** c"),
    ("validate_uppercase", {}, "ABC 1", "ABc"),
    ("validate_lowercase", {}, "abc 1", "abC"),
    ("validate_frequency_capital_words", {"N": 2, "quantifier": "around"}, "AN Apple IS", "AN Apple"),
    ("validate_end", {"end_phrase": "Any more?"}, "a. Any more?", "Any more? a"),
    ("validate_quotation", {}, '"a"', 'a"'),
    ("validate_no_commas", {}, "a; b", "a, b"),
]  # fmt: skip


@pytest.mark.needs("langdetect")
@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CASES)
def test_a_function_of_the_data_judges_the_text(name, arguments, right, wrong):
    assert followed(right, name, **arguments) == 1.0
    assert followed(f"<think>{wrong}\n</think>\n\n{right}", name, **arguments) == 1.0
    assert followed(wrong, name, **arguments) == 0.0
    assert followed(" \n", name, **arguments) == 0.0


def test_every_function_has_a_case():
    assert {name for name, *_ in CASES} == set(FUNCTIONS)


@pytest.mark.needs("langdetect")
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"func_name": "validate_titel"}, "none of the known functions"),
        ({"func_name": None}, "none of the known functions"),
        ({"func_name": "validate_end"}, "lacks its argument end_phrase"),
        ({"func_name": "verify_letter_frequency", "letter": "ab", "N": 1}, "unusable argument"),
        ({"func_name": "validate_placeholders", "N": "two"}, "unusable argument"),
        ({"func_name": "verify_keywords", "keyword_list": "a"}, "no list of texts"),
        ({"func_name": "validate_forbidden_words", "forbidden_words": []}, "no list of texts"),
        ({"func_name": "validate_end", "end_phrase": ""}, "is no text"),
        (
            {"func_name": "validate_word_constraint", "N": 1, "quantifier": "about"},
            "quantifier='about' is none of",
        ),
        ({}, "no func_name in its answer"),
    ],
)
def test_a_broken_row_fails_the_attempt(row, message):
    outcome = judged("ifeval", "a", json.dumps(row))
    assert isinstance(outcome, Failed)
    assert message in outcome.detail


@pytest.mark.needs("langdetect")
def test_hostile_text_takes_linear_time():
    for name, arguments in (("validate_placeholders", {"N": 1}), ("validate_title", {})):
        followed(("[" if arguments else "<<") * 500_000, name, **arguments)


@pytest.mark.parametrize(
    ("text", "loose", "soft", "strict"),
    [
        (r"\boxed{A} then \boxed{B}", 1.0, 1.0, 1.0),
        ("The Answer is (B), not A", 1.0, 0.5, -1.0),
        ("<think>the answer is A</think>\nso B", 1.0, 0.5, -1.0),
        (r"\boxed{(A) or B}", -1.0, -0.5, -1.0),
        (r"\boxed{} the answer is b, B", 1.0, 0.5, -1.0),
        ("The first letter counts: B", -1.0, -1.0, -1.0),
        ("none", -1.0, -1.0, -1.0),
    ],
)
def test_a_letter_earns_by_where_it_stands(text, loose, soft, strict):
    for credit, reward in (("loose", loose), ("soft", soft), ("strict", strict)):
        assert judged("crossthinkqa", text, "B) tea", credit=credit).reward == reward


def test_an_unfinished_answer_is_judged_and_a_task_without_a_letter_fails():
    cut = judged("crossthinkqa", "hm", "B", Truncated(None))
    assert isinstance(cut, Truncated)
    assert (cut.reward, cut.parts) == (-1.0, {"right": 0.0, "boxed": 0.0})
    assert isinstance(judged("crossthinkqa", "B", "42"), Failed)


def test_a_column_of_tags_selects_the_rewards_of_a_row(tmp_path):
    rows = [
        {
            "prompt": "a",
            "ground_truth": json.dumps({"func_name": "validate_title"}),
            "tag": "ifeval",
        },
        {"prompt": "b", "ground_truth": "B", "tag": "crossthinkqa"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    keys = {"kind": "dataset", "train": str(path), "test_share": 0.0}

    def tags(**columns):
        columns = {"prompt": "prompt", "answer": "ground_truth", **columns}
        environment = build(resolve("environment", {**keys, "columns": columns}))
        return sorted(task.tag for task in islice(environment.tasks("train", seed=0), 2))

    assert tags(tag="tag") == ["crossthinkqa", "ifeval"]
    assert tags() == ["dataset", "dataset"]
    with pytest.raises(DataError, match="domain"):
        tags(tag="domain")
