"""Read the held-out answers of a run's evaluations for the report page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ratchet.errors import DataError
from ratchet.evals.results import RESULTS, AttemptResult, EvalResults, PromptResult
from ratchet.runs.run_dir import RunDirectory

STEP = re.compile(r"step-(\d+)")
# Characters of an answer that the page gets; the end of an answer tells most.
MAX_ANSWER_CHARS = 4000
# Maximum characters of a run's answers and prompts in a report.
MAX_FILE_CHARS = 2**17


def list_evaluations(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the evaluations of a run that have answers, in the order of their steps.

    Each has a `name`, its path in `evals/`, the `stage` and the `step`, None for an evaluation by
    `ratchet eval`; these come last.
    """
    paths = [*directory.evals.glob(f"*/{RESULTS}"), *directory.evals.glob(f"*/*/{RESULTS}")]
    evaluations = [_describe(path.parent.relative_to(directory.evals)) for path in sorted(paths)]
    latest = float("inf")
    return sorted(evaluations, key=lambda each: latest if each["step"] is None else each["step"])


def _describe(path: Path) -> dict[str, Any]:
    match = STEP.fullmatch(path.name)
    step = int(match[1]) if match and len(path.parts) == 2 else None
    return {"name": path.as_posix(), "stage": path.parts[0], "step": step}


def read_answers(directory: RunDirectory, name: str) -> dict[str, Any]:
    """Return the answers of an evaluation: its `threshold`, and a row for each task.

    A row is [id, tag, digest, prompt, end, reward, text] of the greedy attempt, or of the first
    sampled one. Raises DataError if the run has no such evaluation or it can't be read.
    """
    if name not in [evaluation["name"] for evaluation in list_evaluations(directory)]:
        raise DataError(f"{directory.path} has no evaluation '{name}' (any more)")
    results = EvalResults.read(directory.evals / name)
    return {
        "threshold": results.pass_threshold,
        "rows": [_make_row(prompt) for prompt in results.prompts],
    }


def _make_row(prompt: PromptResult) -> list[Any]:
    attempt = next(iter(prompt.attempts), AttemptResult("cancelled", None))
    text = attempt.text or attempt.detail
    if len(text) > MAX_ANSWER_CHARS:
        text = f"… {text[-MAX_ANSWER_CHARS:]}"
    return [prompt.id, prompt.tag, prompt.digest, prompt.prompt, attempt.end, attempt.reward, text]


def sample_answers(directory: RunDirectory, max_tasks: int) -> dict[str, Any]:
    """Return what a report has of the answers: those of the first and last evaluation of a stage.

    `evaluations` lists these. `tasks` has [id, tag, digest, prompt] of each task. `answers` maps
    names of evaluations to what `read_answers` returns, with rows [index in `tasks`, end, reward,
    text]. `shares` has the number of tasks in the report and in the evaluation. A file that can't
    be read is left out.

    Args:
        max_tasks: Maximum number of tasks; MAX_FILE_CHARS bounds them too.
    """
    evaluations = _choose_ends(list_evaluations(directory))
    answers: dict[str, Any] = {}
    for evaluation in evaluations:
        try:
            answers[evaluation["name"]] = read_answers(directory, evaluation["name"])
        except DataError:
            continue
    total = max((len(content["rows"]) for content in answers.values()), default=0)
    n_tasks = _count_fitting(answers, min(max_tasks, total))
    indices: dict[tuple[Any, ...], int] = {}
    for content in answers.values():
        content["rows"] = [
            [indices.setdefault(tuple(row[:4]), len(indices)), *row[4:]]
            for row in content["rows"][:n_tasks]
        ]
    return {
        "evaluations": [each for each in evaluations if each["name"] in answers],
        "tasks": list(indices),
        "answers": answers,
        "shares": [n_tasks, total],
    }


def _choose_ends(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first and the last evaluation of each stage, in order."""
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for evaluation in evaluations:
        by_stage.setdefault(evaluation["stage"], []).append(evaluation)
    names = {each["name"] for stage in by_stage.values() for each in (stage[0], stage[-1])}
    return [evaluation for evaluation in evaluations if evaluation["name"] in names]


def _count_fitting(answers: Mapping[str, Any], max_tasks: int) -> int:
    """Return how many tasks fit into MAX_FILE_CHARS."""
    chars = 0
    for n_tasks in range(max_tasks):
        rows = [content["rows"][n_tasks : n_tasks + 1] for content in answers.values()]
        chars += sum(len(row[6]) for found in rows for row in found)
        chars += max((len(row[3]) for found in rows for row in found), default=0)
        if chars > MAX_FILE_CHARS:
            return n_tasks
    return max_tasks
