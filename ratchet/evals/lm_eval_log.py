"""Read the samples of an lm-evaluation-harness evaluation as results.

Source: lm-evaluation-harness 0.4.13, `lm_eval.loggers.EvaluationTracker`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratchet.errors import DataError
from ratchet.evals.results import MAX_PROMPT_CHARS, AttemptResult, EvalResults, PromptResult
from ratchet.utils.safe_read import parse_json, read_json


def find_samples(directory: Path) -> list[tuple[Path, Path]]:
    """Return the file of each task's samples, in order, with the file of the results."""
    results = sorted(directory.rglob("results_*.json"))
    return [(file, results[-1]) for file in sorted(directory.rglob("samples_*.jsonl")) if results]


def read_lm_eval_log(samples: Path, results: Path) -> EvalResults:
    """Return the results of a task. A row is a prompt with one attempt.

    The reward is the task's first metric that gives each row a number, after the task's first
    filter. Rows are greedy attempts, unless the task samples its answers.

    Args:
        samples: The file of the task's samples (JSON lines).
        results: The file of the results of all tasks.

    Raises:
        DataError: A file is not of the harness, or no metric gives a row a number.
    """
    try:
        rows = [parse_json(line) for line in samples.read_text(encoding="utf-8").splitlines()]
        outcome = read_json(results)
        task = samples.name.removeprefix("samples_").rpartition("_")[0]
        config = outcome["configs"][task]
        first_filter = rows[0]["filter"] if rows else None
        rows = [row for row in rows if row["filter"] == first_filter]
        metric = _find_metric(rows, task)
        settings = config.get("generation_kwargs") or {}
        is_greedy = not settings.get("do_sample")
        prompt_results = [_make_prompt_result(row, task, metric, is_greedy) for row in rows]
        about = {
            "on": f"lm_eval:{task}",
            "tasks": len(prompt_results),
            "samples": 0 if is_greedy else 1,
            "temperature": settings.get("temperature"),
            "max_new_tokens": settings.get("max_gen_toks"),
            "metric": metric,
            "filter": first_filter,
            "num_fewshot": (outcome.get("n-shot") or {}).get(task),
            "lm_eval": outcome.get("lm_eval_version"),
        }
    except OSError as error:
        raise DataError(f"{error.filename}: can't be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise DataError(
            f"{samples} is not a log of lm-evaluation-harness: {type(error).__name__}: {error}"
        ) from error
    return EvalResults(tuple(prompt_results), about=about)


def _find_metric(rows: list[Mapping[str, Any]], task: str) -> str | None:
    """Return the first metric that has a number for each row; None if there are no rows."""
    if not rows:
        return None
    for metric in rows[0]["metrics"]:
        if all(_is_number(row.get(metric)) for row in rows):
            return str(metric)
    raise DataError(
        f"task {task} has the metrics {', '.join(rows[0]['metrics'])}, of which none gives each "
        "row a number: choose another task"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _make_prompt_result(
    row: Mapping[str, Any], task: str, metric: str | None, is_greedy: bool
) -> PromptResult:
    attempt = AttemptResult("scored", float(row[str(metric)]), text=_get_text(row))
    prompt = str(row["arguments"]["gen_args_0"]["arg_0"])
    return PromptResult(
        id=str(row["doc_id"]),
        tag=task,
        digest=str(row["doc_hash"])[:16],
        votes=False,
        greedy=attempt if is_greedy else None,
        sampled=() if is_greedy else (attempt,),
        prompt=prompt[-MAX_PROMPT_CHARS:],
    )


def _get_text(row: Mapping[str, Any]) -> str:
    """Return the answer's text, or the likeliest of the choices."""
    responses = [responses[0] for responses in row["resps"]]
    if isinstance(responses[0], str):
        return responses[0]
    likelihoods = [float(response[0]) for response in responses]
    best = max(range(len(likelihoods)), key=likelihoods.__getitem__)
    choice = row["arguments"][f"gen_args_{best}"].get("arg_1")
    return choice if isinstance(choice, str) else json.dumps(choice)
