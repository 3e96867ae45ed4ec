"""Compare two evaluations of the same prompts, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ratchet.errors import DataError
from ratchet.evals.results import EvalResults, PromptResult
from ratchet.evals.statistics import PairedDifference, compare_pairs

# A difference with a larger p-value may be chance.
SIGNIFICANT = 0.05


@dataclass(frozen=True)
class EvalComparison:
    """A paired comparison of two evaluations.

    Attributes:
        measures: The comparisons by name: "sampled" (mean over sampled attempts) and "greedy"
            (greedy accuracy). A measure that one evaluation lacks is left out.
        by_tag: The first of `measures` for each tag; empty unless there are several tags.
        left_out: Number of prompts that only one evaluation contains, or that lack a reward in one.
    """

    measures: Mapping[str, PairedDifference]
    by_tag: Mapping[str, PairedDifference]
    left_out: int


def compare(a: EvalResults, b: EvalResults) -> EvalComparison:
    """Compare two evaluations.

    Raises:
        DataError: A prompt's text differs under the same id, there is no common prompt, or no
            prompt has a reward in both.
    """
    prompts_b = {prompt.id: prompt for prompt in b.prompts}
    shared = [(prompt, prompts_b[prompt.id]) for prompt in a.prompts if prompt.id in prompts_b]
    if not shared:
        raise DataError(
            "the two evaluations have no prompt in common: evaluate both on the same tasks"
        )
    changed = next((one.id for one, two in shared if one.digest != two.digest), None)
    if changed is not None:
        raise DataError(
            f"prompt '{changed}' asks something else in the two evaluations: evaluate both on the "
            "same data"
        )
    measures: dict[str, PairedDifference] = {}
    for name, value_of in VALUES.items():
        pairs = _values(shared, value_of)
        if pairs:
            measures[name] = _paired(pairs, a.seed)
    if not measures:
        raise DataError("no prompt has a reward in both evaluations: there is nothing to compare")
    first = VALUES[next(iter(measures))]
    tags = sorted({one.tag for one, _ in shared})
    by_tag = (
        {tag: _values([pair for pair in shared if pair[0].tag == tag], first) for tag in tags}
        if len(tags) > 1
        else {}
    )
    asked = len({prompt.id for prompt in (*a.prompts, *b.prompts)})
    compared = next(iter(measures.values())).prompts
    return EvalComparison(
        measures,
        {tag: _paired(pairs, a.seed) for tag, pairs in by_tag.items() if pairs},
        asked - compared,
    )


def _greedy(prompt: PromptResult) -> float | None:
    return prompt.mean([prompt.greedy])


def _sampled(prompt: PromptResult) -> float | None:
    return prompt.mean(prompt.sampled)


# Sampled attempts come first: their mean is less noisy than a single greedy attempt.
VALUES: Mapping[str, Callable[[PromptResult], float | None]] = {
    "sampled": _sampled,
    "greedy": _greedy,
}


def _values(
    shared: list[tuple[PromptResult, PromptResult]],
    value_of: Callable[[PromptResult], float | None],
) -> list[tuple[float, float]]:
    """Return the pair of values of each prompt that has one in both evaluations."""
    values = [(value_of(one), value_of(two)) for one, two in shared]
    return [(one, two) for one, two in values if one is not None and two is not None]


def _paired(pairs: list[tuple[float, float]], seed: int) -> PairedDifference:
    return compare_pairs(*zip(*pairs, strict=True), seed=seed)


def name_better(test: PairedDifference) -> str:
    """Return the better evaluation, "A" or "B", or "-" if the difference may be chance."""
    if test.p_value > SIGNIFICANT:
        return "-"
    return "A" if test.difference > 0 else "B"
