"""Format evaluations as Markdown, for a file and for the terminal."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

from ratchet.evals.interval_plot import Interval, draw_intervals
from ratchet.evals.markdown import format_table
from ratchet.evals.paired_test import SIGNIFICANCE_LEVEL, EvalComparison, name_better
from ratchet.evals.results import EvalResults, Measure, list_powers_of_two
from ratchet.evals.statistics import PairedDifference
from ratchet.observe.write_files import replace_text

REPORT = "report.md"
MAX_SHOWN_FAILURES = 3

log = logging.getLogger(__name__)


def format_report(results: EvalResults, title: str) -> str:
    """Return the report: measures, tags and failures.

    It shows pass@k for k = 1, 2, 4, ... and all samples; results.json has every k.
    """
    measures = _select_measures(results)
    sections = [
        f"# {title}",
        _format_settings(results),
        _format_measures(measures, len(results.prompts), results.samples),
        _draw_measures(measures, results.samples),
    ]
    if len(results.tags) > 1:
        sections += ["## By tag", _format_tags(results)]
    sections += _format_failures(results)
    return "\n\n".join(section for section in sections if section) + "\n"


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


def format_comparison(comparison: EvalComparison, a: str, b: str) -> str:
    """Return the report of a comparison. `a` and `b` are the names of the evaluations."""
    rows = [
        _format_pair(name, test)
        for name, test in {**comparison.by_measure, **comparison.by_tag}.items()
    ]
    heading = ("", "prompts", "A - B", "95 % interval", "A wins", "B wins", "p", "better")
    lines = [f"# A against B\n\nA: {a}\n\nB: {b}", format_table(heading, rows)]
    if plot := _draw_differences(comparison):
        lines.append(plot)
    test_kind = (
        "the exact"
        if all(test.is_exact for test in comparison.by_measure.values())
        else "a sampled"
    )
    lines.append(
        f"p: chance of a difference at least as large if A and B were alike, by {test_kind} "
        f"sign-flip test over prompts; better: the larger if p is at most {SIGNIFICANCE_LEVEL:g}."
    )
    if comparison.n_excluded_prompts:
        lines.append(
            f"{comparison.n_excluded_prompts} prompts are excluded: they are in only one "
            "evaluation, or lack a reward in one."
        )
    return "\n\n".join(lines) + "\n"


def _select_measures(results: EvalResults) -> list[Measure]:
    shown_names = {f"pass_at_{k}" for k in list_powers_of_two(results.samples)}
    return [
        measure
        for measure in results.compute_measures()
        if not measure.name.startswith("pass_at_") or measure.name in shown_names
    ]


def _format_settings(results: EvalResults) -> str:
    return "\n".join(
        f"- {key}: {value}" for key, value in results.about.items() if value is not None
    )


def _format_measures(measures: Sequence[Measure], n_prompts: int, n_samples: int) -> str:
    rows = []
    for measure in measures:
        sampling_error = "" if measure.error == 0 else f" (sampled: ± {measure.error:.2g})"
        rows.append(
            (
                _format_name(measure.name, n_samples),
                f"{_format_number(measure.value)}{sampling_error}",
                _format_interval(measure.low, measure.high),
                f"{measure.prompts} of {n_prompts}",
            )
        )
    return format_table(("measure", "value", "95 % interval", "prompts"), rows)


def _draw_measures(measures: Sequence[Measure], n_samples: int) -> str:
    """Return a plot of the measures on a scale from 0 to 1; "" if one lies beyond it."""
    if any(measure.value < 0 or measure.value > 1 for measure in measures):
        return ""
    intervals = [
        Interval(_format_name(measure.name, n_samples), measure.low, measure.value, measure.high)
        for measure in measures
    ]
    return draw_intervals(intervals, low=0.0, high=1.0)


def _draw_differences(comparison: EvalComparison) -> str:
    """Return a plot of the differences on a scale around 0, which is their mark in the middle."""
    intervals = [
        Interval(name, test.low, test.difference, test.high)
        for name, test in {**comparison.by_measure, **comparison.by_tag}.items()
    ]
    numbers = [abs(number) for interval in intervals for number in interval[1:]]
    reach = max(filter(math.isfinite, numbers), default=0.0)
    if not 1e-9 < reach < 1e9:
        return ""
    # The first of 1, 2 and 5 times a power of ten that is large enough.
    power = 10.0 ** math.floor(math.log10(reach))
    limit = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= reach)
    return draw_intervals(intervals, low=-limit, high=limit)


def _format_tags(results: EvalResults) -> str:
    rows = []
    for tag in results.tags:
        tag_results = results.for_tag(tag)
        rows.append(
            (
                tag or "(none)",
                str(len(tag_results.prompts)),
                *(
                    f"{_format_number(measure.value)} {_format_interval(measure.low, measure.high)}"
                    for measure in _select_main_measures(tag_results)
                ),
            )
        )
    return format_table(
        (
            "tag",
            "prompts",
            *(
                _format_name(measure.name, results.samples)
                for measure in _select_main_measures(results)
            ),
        ),
        rows,
    )


def _select_main_measures(results: EvalResults) -> list[Measure]:
    names = ("accuracy", "sampled", f"pass_at_{results.samples}", f"cons_at_{results.samples}")
    return [measure for measure in results.compute_measures(every_k=False) if measure.name in names]


def _format_failures(results: EvalResults) -> list[str]:
    attempts = [(prompt, attempt) for prompt in results.prompts for attempt in prompt.attempts]
    if not results.failures:
        return [f"All {len(attempts)} attempts have a reward."]
    rows = [(kind, str(count)) for kind, count in sorted(results.failures.items())]
    heading = (
        f"{sum(results.failures.values())} of {len(attempts)} attempts have no reward, and are "
        "neither right nor wrong:"
    )
    shown_failures = [(p, a) for p, a in attempts if a.reward is None][:MAX_SHOWN_FAILURES]
    examples = [
        f"- {prompt.id}: {_get_last_line(attempt.detail or attempt.end)}"
        for prompt, attempt in shown_failures
    ]
    return [
        "## Without a reward",
        heading,
        format_table(("why", "attempts"), rows),
        "\n".join(examples),
    ]


def _format_pair(name: str, test: PairedDifference) -> tuple[str, ...]:
    interval = f"{test.low:+.3f} to {test.high:+.3f}"
    cells = (
        f"{test.difference:+.3f}",
        interval,
        str(test.n_better),
        str(test.n_worse),
        f"{test.p_value:.2g}",
    )
    return (name, str(test.n_prompts), *cells, name_better(test))


def _format_name(name: str, n_samples: int) -> str:
    shown_names = {"accuracy": "accuracy", "sampled": f"mean@{n_samples}"}
    return shown_names.get(name) or name.replace("_at_", "@")


def _format_number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.3f}"


def _format_interval(low: float, high: float) -> str:
    return "" if math.isnan(low) else f"{_format_number(low)} to {_format_number(high)}"


def _get_last_line(text: str) -> str:
    """Return the last line of a text, which may be a traceback."""
    return (text.strip().splitlines() or [""])[-1][:300]
