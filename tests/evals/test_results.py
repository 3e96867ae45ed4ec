"""What follows from attempts: by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from ratchet.errors import DataError
from ratchet.evals.paired_test import compare, name_better
from ratchet.evals.report import format_comparison, format_report, save_report
from ratchet.evals.results import (
    MAX_PROMPT_CHARS,
    AttemptResult,
    EvalResults,
    PromptResult,
    hash_task,
    list_powers_of_two,
    shorten_prompt,
)
from ratchet.types import Message, Part, Task


def attempts(*rewards: float | None, answers: str = "") -> tuple[AttemptResult, ...]:
    """An answer a letter; _ for none. A reward of None is a failure."""
    said = [None if letter == "_" else letter for letter in answers] or [None] * len(rewards)
    return tuple(
        AttemptResult("scored", reward, answer, 3, "text")
        if reward is not None
        else AttemptResult("failed", None, detail="sandbox: gone")
        for reward, answer in zip(rewards, said, strict=True)
    )


def prompt(
    name: str, *rewards: float | None, greedy: float | None = 1.0, tag: str = "", answers: str = ""
) -> PromptResult:
    return PromptResult(
        name,
        tag,
        f"digest of {name}",
        bool(answers),
        attempts(greedy)[0],
        attempts(*rewards, answers=answers),
    )


def values(found: EvalResults) -> dict[str, float]:
    return {measure.name: measure.value for measure in found.compute_measures()}


def test_measures_by_hand():
    found = EvalResults(
        (
            prompt("a", 1.0, 1.0, 0.0, 0.0, answers="xxyz"),
            prompt("b", 0.0, 0.0, 0.0, 1.0, answers="uu_x", greedy=0.0),
        )
    )
    assert values(found) == pytest.approx(
        {
            "accuracy": 0.5,
            "sampled": 3 / 8,
            "pass_at_1": 3 / 8,
            "pass_at_2": (5 / 6 + 1 / 2) / 2,
            "pass_at_3": (1 + 3 / 4) / 2,
            "pass_at_4": 1.0,
            "cons_at_1": 3 / 8,
            # of the 6 pairs of a: xx 1, xy xz xy xz 1/2 each, yz 0; of b: uu 0, u_ u_ 0, ux ux 1/2,
            # _x 1
            "cons_at_2": (3 / 6 + 2 / 6) / 2,
            "cons_at_4": (1.0 + 0.0) / 2,
        }
    )


def test_every_prompt_is_there_and_a_failure_is_neither_right_nor_wrong():
    found = EvalResults(
        (
            prompt("a", 1.0, None),
            prompt("b", None, None, greedy=None),
            prompt("c", 0.0, 1.0, greedy=0.0),
        )
    )
    named = {measure.name: measure for measure in found.compute_measures()}
    assert (named["accuracy"].value, named["accuracy"].prompts) == (0.5, 2)
    assert (named["sampled"].value, named["sampled"].prompts) == (0.75, 2)
    assert (named["pass_at_1"].value, named["pass_at_1"].prompts) == (0.75, 2)
    assert (named["pass_at_2"].value, named["pass_at_2"].prompts) == (1.0, 1)
    assert found.failures == {"sandbox": 4}
    numbers = found.get_metrics()
    assert numbers["failed"] == 4.0
    assert (numbers["min_reward"], numbers["max_reward"]) == (0.0, 1.0)
    assert len(found.as_dict()["prompts"]) == 3
    text = format_report(found, "t")
    assert "4 of 9 attempts have no reward" in text
    assert "| accuracy | 0.500 |" in text
    assert "2 of 3" in text
    assert f"accuracy  ├{'─' * 19}●{'─' * 19}┤\n" in text
    assert "- a: sandbox: gone" in text


def test_where_nothing_could_be_judged_nothing_is_said(tmp_path: Path):
    found = EvalResults((prompt("a", None, greedy=None),))
    assert math.isnan(found.accuracy.value)
    assert math.isnan(found.get_metrics()["pass_at_1"])
    assert save_report(found, tmp_path / "e", "t")
    stored = json.loads((tmp_path / "e" / "results.json").read_text())
    assert stored["measures"][0] == {
        "name": "accuracy", "value": None, "low": None, "high": None, "prompts": 0, "error": 0.0,
    }  # fmt: skip


def test_what_passes_is_said():
    rows = (prompt("a", 0.5, 0.2),)
    assert values(EvalResults(rows))["pass_at_2"] == 0.0
    assert values(EvalResults(rows, pass_threshold=0.5))["pass_at_1"] == 0.5


def test_without_greedy_attempts_accuracy_is_of_the_sampled_ones():
    found = EvalResults((PromptResult("a", "", "", False, None, attempts(1.0, 0.0)),))
    assert values(found)["accuracy"] == 0.5
    assert found.get_metrics()["truncated_share"] == 0.0


def test_tags_have_numbers_of_their_own():
    found = EvalResults(
        (
            prompt("a", 1.0, tag="m"),
            prompt("b", 0.0, greedy=0.0, tag="n"),
            prompt("c", 1.0, tag="n"),
        )
    )
    numbers = found.get_metrics()
    assert (numbers["accuracy/m"], numbers["accuracy/n"]) == (1.0, 0.5)
    assert [row["value"] for row in found.as_dict()["by_tag"]["n"]] == [0.5, 0.5, 0.5]
    assert "| n | 2 | 0.500" in format_report(found, "t")
    assert "accuracy/" not in " ".join(EvalResults((prompt("a", 1.0),)).get_metrics())


def test_what_is_written_is_read_back(tmp_path: Path):
    found = EvalResults(
        (prompt("a", 1.0, None, answers="x_"), prompt("ä|\n", 0.25)),
        pass_threshold=0.5,
        seed=3,
        about={"on": "x"},
    )
    found.write(tmp_path)
    assert EvalResults.read(tmp_path) == EvalResults.read(tmp_path / "results.json") == found


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt", 0),
        ("digest", {}),
        ("votes", "yes"),
        ("greedy.text", -1),
        ("greedy.reward", "1"),
        ("greedy.reward", math.nan),
        ("greedy.reward", 10**400),
        ("greedy.tokens", None),
        ("greedy.answer", [1]),
    ],
)
def test_values_of_another_type_are_named(tmp_path: Path, name: str, value: object) -> None:
    EvalResults((prompt("a", 1.0),), pass_threshold=0.5, seed=3, about={}).write(tmp_path)
    path = tmp_path / "results.json"
    content = json.loads(path.read_text())
    section, _, key = f"row.{name}".rpartition(".")
    row = content["prompts"][0]
    (row["greedy"] if "greedy" in section else row)[key] = value
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=key):
        EvalResults.read(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "can't be read"),
        ("{", "no results of `ratchet eval`"),
        ("[1]", "no results"),
        ('{"format": 7}', "format 7"),
        ('{"format": 2, "prompts": [{}]}', "no results"),
    ],
)
def test_what_is_no_result_is_named(tmp_path: Path, text: str | None, message: str):
    if text is not None:
        (tmp_path / "results.json").write_text(text)
    with pytest.raises(DataError, match=message):
        EvalResults.read(tmp_path / "results.json")


def test_the_steps_of_k():
    assert [list_powers_of_two(n) for n in (0, 1, 5, 8)] == [[], [1], [1, 2, 4, 5], [1, 2, 4, 8]]


def test_a_digest_is_of_question_and_answer():
    one = Task("i", (Message("user", "q"),), answer="a")
    assert hash_task(one) == hash_task(Task("other", (Message("user", "q"),), answer="a"))
    assert hash_task(one) != hash_task(Task("i", (Message("user", "q"),), answer="b"))
    shown = [
        Task("i", (Message("user", (Part("image", name), Part("text", "q"))),), answer="a")
        for name in ("x.png", "y.png")
    ]
    assert len({hash_task(one), *map(hash_task, shown)}) == 3
    assert hash_task(one) != hash_task(Task("i", (Message("user", "Q"),), answer="a"))


def test_two_are_compared_prompt_by_prompt():
    a = EvalResults(tuple(prompt(f"{i}", 1.0, 1.0, tag="xy"[i % 2]) for i in range(10)))
    b = EvalResults(
        (
            *(prompt(f"{i}", 0.0, 0.5, greedy=0.0, tag="xy"[i % 2]) for i in range(9)),
            prompt("9", None, None),
        )
    )
    found = compare(a, b)
    assert found.n_excluded_prompts == 1
    assert (found.by_measure["sampled"].n_prompts, found.by_measure["greedy"].n_prompts) == (9, 10)
    assert found.by_measure["sampled"].difference == 0.75
    assert found.by_measure["sampled"].p_value == pytest.approx(2 / 2**9)
    assert name_better(found.by_measure["sampled"]) == "A"
    assert name_better(compare(b, a).by_measure["sampled"]) == "B"
    assert name_better(compare(a, a).by_measure["greedy"]) == "-"
    assert {tag: one.n_prompts for tag, one in found.by_tag.items()} == {"x": 5, "y": 4}
    text = format_comparison(found, "one", "two")
    assert "| sampled | 9 | +0.750 |" in text
    assert f"sampled  {'·' * 20}┊{'·' * 14}●{'·' * 5}\n" in text
    assert "-1                  0                   1\n" in text
    assert "```" not in format_comparison(compare(a, a), "one", "one"), "all differences are 0"
    assert "the exact sign-flip test" in text
    assert "1 prompts are excluded" in text


def test_what_can_not_be_compared_is_refused():
    a = EvalResults((prompt("a", 1.0),))
    with pytest.raises(DataError, match="no prompt in common"):
        compare(a, EvalResults((prompt("b", 1.0),)))
    with pytest.raises(DataError, match="'a' differs between"):
        compare(a, EvalResults((replace(prompt("a", 1.0), digest="other"),)))
    with pytest.raises(DataError, match="no prompt has a reward in both"):
        compare(a, EvalResults((prompt("a", None, greedy=None),)))


def test_results_keep_the_beginning_of_a_tasks_last_message(tmp_path):
    messages = (Message("system", "be brief"), Message("user", "1" * (MAX_PROMPT_CHARS + 1)))
    assert shorten_prompt(Task("a", messages)) == "1" * MAX_PROMPT_CHARS
    assert shorten_prompt(Task("a", ())) == ""
    results = EvalResults((replace(prompt("a", 1.0), prompt="add"),))
    results.write(tmp_path)
    assert EvalResults.read(tmp_path).prompts[0].prompt == "add"
    content = json.loads((tmp_path / "results.json").read_text())
    del content["prompts"][0]["prompt"]  # as earlier versions wrote it
    (tmp_path / "results.json").write_text(json.dumps(content))
    assert EvalResults.read(tmp_path).prompts[0].prompt == ""
