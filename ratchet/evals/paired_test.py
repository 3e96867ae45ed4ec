"""Compare two evaluations of the same prompts, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ratchet.errors import DataError
from ratchet.evals.results import EvalResults, PromptResult
from ratchet.evals.statistics import PairedDifference, compare_pairs

# A difference with a larger p-value may be due to chance.
SIGNIFICANCE_LEVEL = 0.05


@dataclass(frozen=True)
class EvalComparison:
    """A paired comparison of two evaluations."""

    by_measure: Mapping[str, PairedDifference]
    """The differences of "sampled" (mean over sampled attempts) and of "greedy" (greedy accuracy).
    A measure that one evaluation lacks is left out."""
    by_tag: Mapping[str, PairedDifference]
    """The difference of the first measure for each tag; empty unless there are several tags."""
    n_excluded_prompts: int
    """The number of prompts that only one evaluation contains, or that lack a reward for the first
    measure in one."""


def compare(a: EvalResults, b: EvalResults) -> EvalComparison:
    """Compare two evaluations.

    Raises:
        DataError: A prompt's text differs under the same id, the evaluations have no common prompt,
            or no prompt has a reward in both.
    """
    prompts_b = {prompt.id: prompt for prompt in b.prompts}
    common_prompts = [
        (prompt, prompts_b[prompt.id]) for prompt in a.prompts if prompt.id in prompts_b
    ]
    if not common_prompts:
        raise DataError(
            "the two evaluations have no prompt in common: evaluate both on the same tasks"
        )
    changed_id = next(
        (
            result_a.id
            for result_a, result_b in common_prompts
            if result_a.digest != result_b.digest
        ),
        None,
    )
    if changed_id is not None:
        raise DataError(
            f"prompt '{changed_id}' differs between the two evaluations: evaluate both on the same "
            "data"
        )
    by_measure: dict[str, PairedDifference] = {}
    for name, get_value in VALUE_GETTERS.items():
        pairs = _pair_values(common_prompts, get_value)
        if pairs:
            by_measure[name] = _compare_values(pairs, a.seed)
    if not by_measure:
        raise DataError("no prompt has a reward in both evaluations: there is nothing to compare")
    get_main_value = VALUE_GETTERS[next(iter(by_measure))]
    tags = sorted({result_a.tag for result_a, _ in common_prompts})
    pairs_by_tag = (
        {
            tag: _pair_values(
                [pair for pair in common_prompts if pair[0].tag == tag], get_main_value
            )
            for tag in tags
        }
        if len(tags) > 1
        else {}
    )
    n_prompts = len({prompt.id for prompt in (*a.prompts, *b.prompts)})
    n_compared = next(iter(by_measure.values())).n_prompts
    return EvalComparison(
        by_measure,
        {tag: _compare_values(pairs, a.seed) for tag, pairs in pairs_by_tag.items() if pairs},
        n_prompts - n_compared,
    )


def _get_greedy_mean(prompt: PromptResult) -> float | None:
    return prompt.mean([prompt.greedy])


def _get_sampled_mean(prompt: PromptResult) -> float | None:
    return prompt.mean(prompt.sampled)


# Sampled attempts come first: their mean is less noisy than a single greedy attempt.
VALUE_GETTERS: Mapping[str, Callable[[PromptResult], float | None]] = {
    "sampled": _get_sampled_mean,
    "greedy": _get_greedy_mean,
}


def _pair_values(
    common_prompts: list[tuple[PromptResult, PromptResult]],
    get_value: Callable[[PromptResult], float | None],
) -> list[tuple[float, float]]:
    """Return the pair of values of each prompt that has a value in both evaluations."""
    values = [(get_value(result_a), get_value(result_b)) for result_a, result_b in common_prompts]
    return [(a, b) for a, b in values if a is not None and b is not None]


def _compare_values(pairs: list[tuple[float, float]], seed: int) -> PairedDifference:
    return compare_pairs(*zip(*pairs, strict=True), seed=seed)


def name_better(test: PairedDifference) -> str:
    """Return the better evaluation, "A" or "B", or "-" if the difference may be due to chance."""
    if test.p_value > SIGNIFICANCE_LEVEL:
        return "-"
    return "A" if test.difference > 0 else "B"
