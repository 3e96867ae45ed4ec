"""Two evaluations of the same prompts, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ratchet.errors import DataError
from ratchet.evals.results import Prompt, Results
from ratchet.evals.statistics import Paired, paired

SIGNIFICANT = 0.05


@dataclass(frozen=True)
class Comparison:
    """measures: by name, the mean over sampled attempts and greedy accuracy, as far as both have
    them; by_tag: the first of them for each tag, where there are several. left_out: prompts that
    one of the two was not asked, or has no reward for."""

    measures: Mapping[str, Paired]
    by_tag: Mapping[str, Paired]
    left_out: int


def compare(a: Results, b: Results) -> Comparison:
    """Raises DataError where they were asked different things under one id, have no prompt in
    common, or are judged by none."""
    theirs = {prompt.id: prompt for prompt in b.prompts}
    both = [(prompt, theirs[prompt.id]) for prompt in a.prompts if prompt.id in theirs]
    if not both:
        raise DataError(
            "the two evaluations have no prompt in common: evaluate both on the same tasks"
        )
    other = next((one.id for one, two in both if one.digest != two.digest), None)
    if other is not None:
        raise DataError(
            f"prompt '{other}' asks something else in the two evaluations: evaluate both on the "
            "same data"
        )
    measures: dict[str, Paired] = {}
    for name, of in VALUES.items():
        pairs = _values(both, of)
        if pairs:
            measures[name] = _paired(pairs, a.seed)
    if not measures:
        raise DataError("no prompt has a reward in both evaluations: there is nothing to compare")
    first = VALUES[next(iter(measures))]
    tags = sorted({one.tag for one, _ in both})
    by_tag = (
        {tag: _values([pair for pair in both if pair[0].tag == tag], first) for tag in tags}
        if len(tags) > 1
        else {}
    )
    asked = len({prompt.id for prompt in (*a.prompts, *b.prompts)})
    compared = next(iter(measures.values())).prompts
    return Comparison(
        measures,
        {tag: _paired(pairs, a.seed) for tag, pairs in by_tag.items() if pairs},
        asked - compared,
    )


def _greedy(prompt: Prompt) -> float | None:
    return prompt.mean([prompt.greedy])


def _sampled(prompt: Prompt) -> float | None:
    return prompt.mean(prompt.sampled)


# Sampled attempts first: a mean over several says more of a prompt than a single attempt.
VALUES: Mapping[str, Callable[[Prompt], float | None]] = {"sampled": _sampled, "greedy": _greedy}


def _values(
    both: list[tuple[Prompt, Prompt]], of: Callable[[Prompt], float | None]
) -> list[tuple[float, float]]:
    found = [(of(one), of(two)) for one, two in both]
    return [(one, two) for one, two in found if one is not None and two is not None]


def _paired(pairs: list[tuple[float, float]], seed: int) -> Paired:
    return paired(*zip(*pairs, strict=True), seed=seed)


def better(found: Paired) -> str:
    """A, B, or neither where the difference may be chance."""
    if found.p_value > SIGNIFICANT:
        return "-"
    return "A" if found.difference > 0 else "B"
