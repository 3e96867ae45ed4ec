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
MAX_REPORT_CHARS = 2**17


def list_evaluations(directory: RunDirectory) -> list[dict[str, Any]]:
    """Return the evaluations of a run that have answers, in the order of their steps.

    Each has the keys `name` (its path in `evals/`), `stage` and `step`. Evaluations by `ratchet
    eval` have the step None, and come last.
    """
    paths = [*directory.evals.glob(f"*/{RESULTS}"), *directory.evals.glob(f"*/*/{RESULTS}")]
    evaluations = [_describe(path.parent.relative_to(directory.evals)) for path in sorted(paths)]

    def get_step(evaluation: dict[str, Any]) -> float:
        return float("inf") if evaluation["step"] is None else evaluation["step"]

    return sorted(evaluations, key=get_step)


def _describe(path: Path) -> dict[str, Any]:
    match = STEP.fullmatch(path.name)
    step = int(match[1]) if match and len(path.parts) == 2 else None
    return {"name": path.as_posix(), "stage": path.parts[0], "step": step}


def read_answers(directory: RunDirectory, name: str) -> dict[str, Any]:
    """Return the answers of an evaluation: its `threshold`, and a row for each task.

    A row is [id, tag, digest, prompt, end, reward, text]. The last three are those of the greedy
    attempt, or of the first sampled attempt if there is no greedy one. Raises DataError if the run
    has no such evaluation, or if its file can't be read.
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
    """Return the answers that a report contains.

    These are the answers of each stage's first and last evaluation. Files that can't be read are
    left out.

    Args:
        max_tasks: Maximum number of tasks; MAX_REPORT_CHARS bounds them too.

    Returns:
        A dictionary with the keys:
        evaluations: The evaluations, as `list_evaluations` describes them.
        tasks: [id, tag, digest, prompt] of each task.
        answers: The result of `read_answers` by the evaluation's name, but with rows
            [index in `tasks`, end, reward, text].
        task_counts: [number of tasks in the report, number of tasks in the largest evaluation].
    """
    evaluations = _choose_first_and_last(list_evaluations(directory))
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
        "evaluations": [evaluation for evaluation in evaluations if evaluation["name"] in answers],
        "tasks": list(indices),
        "answers": answers,
        "task_counts": [n_tasks, total],
    }


def _choose_first_and_last(evaluations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first and the last evaluation of each stage, in order."""
    by_stage: dict[str, list[dict[str, Any]]] = {}
    for evaluation in evaluations:
        by_stage.setdefault(evaluation["stage"], []).append(evaluation)
    names = {
        evaluation["name"]
        for stage_evaluations in by_stage.values()
        for evaluation in (stage_evaluations[0], stage_evaluations[-1])
    }
    return [evaluation for evaluation in evaluations if evaluation["name"] in names]


def _count_fitting(answers: Mapping[str, Any], max_tasks: int) -> int:
    """Return how many tasks fit into MAX_REPORT_CHARS."""
    chars = 0
    for n_tasks in range(max_tasks):
        # The next task's row in each evaluation that has more than `n_tasks` tasks.
        next_task = slice(n_tasks, n_tasks + 1)
        rows = [row for content in answers.values() for row in content["rows"][next_task]]
        chars += sum(len(text) for *_, text in rows)
        chars += max((len(row[3]) for row in rows), default=0)  # the prompt is stored once
        if chars > MAX_REPORT_CHARS:
            return n_tasks
    return max_tasks
