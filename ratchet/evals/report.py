"""Format evaluations as Markdown, for a file and for the terminal."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from ratchet.evals.paired_test import SIGNIFICANT, EvalComparison, name_better
from ratchet.evals.results import EvalResults, Measure, list_powers_of_two
from ratchet.evals.statistics import PairedDifference
from ratchet.observe.write_files import replace_text

REPORT = "report.md"
SHOWN_FAILURES = 3

log = logging.getLogger(__name__)


def format_report(results: EvalResults, title: str) -> str:
    """Return the report: measures, tags and failures.

    It shows pass@k for k = 1, 2, 4, ... and all samples; results.json has every k.
    """
    measures = _chosen(results)
    parts = [
        f"# {title}",
        _about(results),
        _measures(measures, len(results.prompts), results.samples),
    ]
    if len(results.tags) > 1:
        parts += ["## By tag", _by_tag(results)]
    parts += _failures(results)
    return "\n\n".join(part for part in parts if part) + "\n"


def save_report(results: EvalResults, directory: Path, title: str) -> bool:
    """Write results.json and report.md, and return False if they cannot be written.

    The error is only logged, so that training continues.
    """
    try:
        results.write(directory)
        replace_text(directory / REPORT, format_report(results, title))
    except OSError as error:
        log.warning("the results of the evaluation can't be written to %s: %s", directory, error)
        return False
    return True


def format_comparison(tests: EvalComparison, a: str, b: str) -> str:
    """Return the report of a comparison, headed by the texts `a` and `b`."""
    rows = [_paired_row(name, one) for name, one in {**tests.measures, **tests.by_tag}.items()]
    heading = ("", "prompts", "A - B", "95 % interval", "A wins", "B wins", "p", "better")
    lines = [f"# A against B\n\nA: {a}\n\nB: {b}", _table(heading, rows)]
    how = "the exact" if all(one.exact for one in tests.measures.values()) else "a sampled"
    lines.append(
        f"p: chance of a difference at least as large if A and B were alike, by {how} sign-flip "
        f"test over prompts; better: the larger of the two if p is at most {SIGNIFICANT:g}."
    )
    if tests.left_out:
        lines.append(
            f"{tests.left_out} prompts are left out: asked of one alone, or without a reward in "
            "one."
        )
    return "\n\n".join(lines) + "\n"


def _chosen(results: EvalResults) -> list[Measure]:
    steps = {f"pass_at_{k}" for k in list_powers_of_two(results.samples)}
    return [
        one
        for one in results.measures()
        if not one.name.startswith("pass_at_") or one.name in steps
    ]


def _about(results: EvalResults) -> str:
    return "\n".join(
        f"- {key}: {value}" for key, value in results.about.items() if value is not None
    )


def _measures(measures: Sequence[Measure], prompts: int, samples: int) -> str:
    rows = []
    for one in measures:
        exact = "" if one.error == 0 else f" (sampled: ± {one.error:.2g})"
        rows.append(
            (
                _label(one.name, samples),
                f"{_number(one.value)}{exact}",
                _range(one.low, one.high),
                f"{one.prompts} of {prompts}",
            )
        )
    return _table(("measure", "value", "95 % interval", "prompts"), rows)


def _by_tag(results: EvalResults) -> str:
    rows = []
    for tag in results.tags:
        tagged = results.for_tag(tag)
        rows.append(
            (
                tag or "(none)",
                str(len(tagged.prompts)),
                *(f"{_number(one.value)} {_range(one.low, one.high)}" for one in _summary(tagged)),
            )
        )
    return _table(
        ("tag", "prompts", *(_label(one.name, results.samples) for one in _summary(results))), rows
    )


def _summary(results: EvalResults) -> list[Measure]:
    names = ("accuracy", "sampled", f"pass_at_{results.samples}", f"cons_at_{results.samples}")
    return [one for one in results.measures(every_k=False) if one.name in names]


def _failures(results: EvalResults) -> list[str]:
    attempts = [(prompt, attempt) for prompt in results.prompts for attempt in prompt.attempts]
    if not results.failures:
        return [f"All {len(attempts)} attempts have a reward."]
    rows = [(kind, str(count)) for kind, count in sorted(results.failures.items())]
    heading = (
        f"{sum(results.failures.values())} of {len(attempts)} attempts have no reward, and are "
        "neither right nor wrong:"
    )
    shown = [(p, a) for p, a in attempts if a.reward is None][:SHOWN_FAILURES]
    examples = [
        f"- {prompt.id}: {_line(attempt.detail or attempt.end)}" for prompt, attempt in shown
    ]
    return ["## Without a reward", heading, _table(("why", "attempts"), rows), "\n".join(examples)]


def _paired_row(name: str, one: PairedDifference) -> tuple[str, ...]:
    reach = f"{one.low:+.3f} to {one.high:+.3f}"
    numbers = (
        f"{one.difference:+.3f}",
        reach,
        str(one.better),
        str(one.worse),
        f"{one.p_value:.2g}",
    )
    return (name, str(one.prompts), *numbers, name_better(one))


def _label(name: str, samples: int) -> str:
    named = {"accuracy": "accuracy", "sampled": f"mean@{samples}"}
    return named.get(name) or name.replace("_at_", "@")


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _range(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{_number(low)} to {_number(high)}"


def _line(text: str) -> str:
    """Return the last line of a text, which may be a traceback."""
    return (text.strip().splitlines() or [""])[-1][:300]


def _table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines
    )
