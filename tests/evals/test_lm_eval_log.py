"""The samples of lm-evaluation-harness become results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import DataError
from ratchet.evals.lm_eval_log import find_samples, read_lm_eval_log
from ratchet.evals.results import EvalResults


def make_row(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "doc_id": number,
        "doc_hash": f"{number:064d}",
        "arguments": {"gen_args_0": {"arg_0": f"{number}+1=", "arg_1": {"until": ["\n"]}}},
        "resps": [["said"]],
        "filter": "strict",
        "metrics": ["bleu", "exact_match"],
        "bleu": [1, 2],
        "exact_match": float(number % 2),
        **changes,
    }


def read(path: Path, rows: list[dict[str, Any]], **settings: Any) -> EvalResults:
    (path / "samples_my_task_2026-01-02T03-04-05.6.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows)
    )
    config = {"my_task": {"generation_kwargs": settings}}
    outcome = {"configs": config, "n-shot": {"my_task": 5}, "lm_eval_version": "0.4.13"}
    (path / "results_2026-01-02T03-04-05.6.json").write_text(json.dumps(outcome))
    ((samples, results),) = find_samples(path)
    return read_lm_eval_log(samples, results)


def test_the_first_number_after_the_first_filter_is_the_reward(tmp_path: Path) -> None:
    rows = [make_row(0), make_row(1)]
    rows += [make_row(number, filter="flexible", exact_match=1.0) for number in range(2)]
    results = read(tmp_path, rows, max_gen_toks=8)
    assert [prompt.greedy and prompt.greedy.reward for prompt in results.prompts] == [0, 1]
    assert [prompt.prompt for prompt in results.prompts] == ["0+1=", "1+1="]
    assert results.prompts[0].greedy is not None
    assert results.prompts[0].greedy.text == "said"
    facts = {"on": "lm_eval:my_task", "metric": "exact_match", "filter": "strict"}
    assert results.about.items() >= {**facts, "num_fewshot": 5, "max_new_tokens": 8}.items()


def test_sampled_answers_and_choices(tmp_path: Path) -> None:
    (prompt,) = read(tmp_path, [make_row(1)], do_sample=True, temperature=0.5).prompts
    assert (prompt.greedy, prompt.sampled[0].reward) == (None, 1)
    choices = {f"gen_args_{i}": {"arg_0": "?", "arg_1": word} for i, word in enumerate("ab")}
    row = make_row(0, arguments=choices, resps=[[["-2.5", "False"]], [["-1.5", "True"]]])
    (prompt,) = read(tmp_path, [row]).prompts
    assert prompt.greedy is not None
    assert prompt.greedy.text == "b"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([make_row(0, exact_match=[1, 2])], "none gives each row a number"),
        ([make_row(0, arguments=None)], "not a log of lm-evaluation-harness"),
        ([{"doc_id": 1}], "not a log of lm-evaluation-harness"),
    ],
)
def test_files_that_are_no_log_are_refused(
    rows: list[dict[str, Any]], message: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, rows)
