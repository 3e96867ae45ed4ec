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
    common_prompts = [
        (prompt, prompts_b[prompt.id]) for prompt in a.prompts if prompt.id in prompts_b
    ]
    if not common_prompts:
        raise DataError(
            "the two evaluations have no prompt in common: evaluate both on the same tasks"
        )
    changed = next(
        (
            result_a.id
            for result_a, result_b in common_prompts
            if result_a.digest != result_b.digest
        ),
        None,
    )
    if changed is not None:
        raise DataError(
            f"prompt '{changed}' differs between the two evaluations: evaluate both on the same "
            "data"
        )
    measures: dict[str, PairedDifference] = {}
    for name, get_value in VALUES.items():
        pairs = _values(common_prompts, get_value)
        if pairs:
            measures[name] = _compare_values(pairs, a.seed)
    if not measures:
        raise DataError("no prompt has a reward in both evaluations: there is nothing to compare")
    main_value = VALUES[next(iter(measures))]
    tags = sorted({result_a.tag for result_a, _ in common_prompts})
    by_tag = (
        {
            tag: _values([pair for pair in common_prompts if pair[0].tag == tag], main_value)
            for tag in tags
        }
        if len(tags) > 1
        else {}
    )
    prompt_count = len({prompt.id for prompt in (*a.prompts, *b.prompts)})
    compared_count = next(iter(measures.values())).prompts
    return EvalComparison(
        measures,
        {tag: _compare_values(pairs, a.seed) for tag, pairs in by_tag.items() if pairs},
        prompt_count - compared_count,
    )


def _get_greedy_mean(prompt: PromptResult) -> float | None:
    return prompt.mean([prompt.greedy])


def _get_sampled_mean(prompt: PromptResult) -> float | None:
    return prompt.mean(prompt.sampled)


# Sampled attempts come first: their mean is less noisy than a single greedy attempt.
VALUES: Mapping[str, Callable[[PromptResult], float | None]] = {
    "sampled": _get_sampled_mean,
    "greedy": _get_greedy_mean,
}


def _values(
    common_prompts: list[tuple[PromptResult, PromptResult]],
    get_value: Callable[[PromptResult], float | None],
) -> list[tuple[float, float]]:
    """Return the pair of values of each prompt that has one in both evaluations."""
    values = [(get_value(result_a), get_value(result_b)) for result_a, result_b in common_prompts]
    return [(a, b) for a, b in values if a is not None and b is not None]


def _compare_values(pairs: list[tuple[float, float]], seed: int) -> PairedDifference:
    return compare_pairs(*zip(*pairs, strict=True), seed=seed)


def name_better(test: PairedDifference) -> str:
    """Return the better evaluation, "A" or "B", or "-" if the difference may be chance."""
    if test.p_value > SIGNIFICANT:
        return "-"
    return "A" if test.difference > 0 else "B"
