"""Check an Algorithm against all invariances and properties: `check_algorithm(algorithm)`.

Batches are synthetic and ragged, models are tiny, and everything is in float64. Losses are
differentiated with respect to the models' outputs for each token, because errors of different rows
could cancel in gradients of parameters. A slope is such a derivative. T = tokens, S = sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgorithmTerm
from ratchet.algorithms.properties import PROPERTIES, is_applicable
from ratchet.batch import Batch
from ratchet.errors import RatchetError
from ratchet.learners.compute.microbatching import select_weighted_rows
from ratchet.protocols import SEQUENCE_OUTPUTS
from ratchet.testing.harness import BrokenRule, require
from ratchet.testing.synthetic import Draw
from ratchet.testing.synthetic_update import (
    LossAndSlopes,
    Update,
    compute_metrics,
    compute_row_values,
    differentiate,
    gather_rows,
    list_token_indices,
    require_equal,
)

SEEDS = (0, 1, 2)
# Maximum answer lengths, tried in order until the property breaks: some exemptions, such as that of
# a length penalty, show only in long answers.
ANSWER_LENGTHS = (0, 64, 512, 4096, 32768)


class PropertyBroken(AssertionError):
    """An error for a property that does not hold. Other failures are plain AssertionErrors."""


@dataclass(frozen=True)
class Finding:
    """The result of one check."""

    name: str
    verdict: str  # "holds", "fails", "exempt" or "n/a"
    note: str = ""  # the error of "fails", the reason of "exempt" and "n/a"


def check_algorithm(algorithm: Algorithm) -> None:
    """Raise AssertionError if a check of the algorithm fails; the message lists all failures.

    A check fails if an invariance is broken, if a claimed property does not hold, or if an exempt
    property holds (see `ratchet.algorithms.properties`).
    """
    failures = [
        f"{finding.name}: {finding.note}"
        for finding in examine(algorithm)
        if finding.verdict == "fails"
    ]
    require(not failures, f"algorithm '{algorithm.name}': " + "; ".join(failures))


def examine(algorithm: Algorithm) -> list[Finding]:
    """Return the findings of all invariances, then of all properties, in a fixed order."""
    _check_names(algorithm)
    cases = [Case(algorithm, Draw(seed)) for seed in SEEDS]
    findings = [
        _run_check(name, lambda check=check: [check(case) for case in cases])
        for name, check in INVARIANCES.items()
    ]
    findings.append(_run_check("learns", lambda: _check_learning(cases)))
    return [*findings, *(_check_property(algorithm, name) for name in PROPERTIES)]


def _check_names(algorithm: Algorithm) -> None:
    """Raise AssertionError if an exemption names no known property."""
    for name in algorithm.exempt:
        close_names = get_close_matches(name, PROPERTIES, n=1)
        hint = f"did you mean '{close_names[0]}'? " if close_names else ""
        require(
            name in PROPERTIES,
            f"algorithm '{algorithm.name}' is exempt from '{name}': {hint}there are "
            f"{', '.join(PROPERTIES)}",
        )


def _run_check(name: str, check: Callable[[], object]) -> Finding:
    """Run a check; the finding fails if it raises AssertionError."""
    try:
        check()
    except AssertionError as error:
        return Finding(name, "fails", str(error))
    return Finding(name, "holds")


# --- one batch, ready for its updates


@dataclass(frozen=True)
class Case:
    """An algorithm and the synthetic batch that it is checked on."""

    algorithm: Algorithm
    draw: Draw

    @cached_property
    def whole(self) -> Update:
        """Return the whole batch as one update."""
        return Update.from_groups(self.algorithm, self.draw.groups(self.algorithm))

    @property
    def updates(self) -> Iterator[Update]:
        """Yield the whole batch as one update, then its mini-batches if there are several."""
        yield self.whole
        if self.algorithm.minibatches > 1:
            for mini in itertools.islice(
                self.algorithm.split(self.whole.batch), self.algorithm.minibatches
            ):
                yield self.whole.with_minibatch(mini)

    def iter_results(self) -> Iterator[tuple[Update, str, LossAndSlopes]]:
        """Yield each update and role, with the loss and slopes of the update as one micro-batch."""
        for update in self.updates:
            for role in self.algorithm.losses:
                yield update, role, differentiate(update, role, range(update.batch.n_sequences))

    def list_units(self, batch: Batch) -> list[list[int]]:
        """Return the rows of each unit. The rows of a unit stay in one micro-batch."""
        if self.algorithm.unit != "group":
            return [[row] for row in range(batch.n_sequences)]
        group_S = batch.group_S.tolist()
        return [
            [row for row, row_group in enumerate(group_S) if row_group == group]
            for group in range(batch.n_groups)
        ]


# --- invariances, which hold for every algorithm


def _check_micro_batches(case: Case) -> None:
    """Check that micro-batches sum to the whole batch, however it is cut and ordered.

    The weights are computed once, before the cut. Rows of weight 0 may be left out.
    """
    rng = np.random.default_rng(case.draw.seed)
    for update, role, whole in case.iter_results():
        units = case.list_units(update.batch)
        for n_pieces in range(2, 5):
            order = rng.permutation(len(units))
            cuts = sorted({0, len(units), *rng.integers(0, len(units) + 1, n_pieces - 1).tolist()})
            pieces = [
                [row for unit in order[begin:end] for row in units[unit]]
                for begin, end in itertools.pairwise(cuts)
            ]
            require_equal(_sum_pieces(update, role, pieces), whole, "cut into micro-batches")
        active = select_weighted_rows(update.batch, update.terms(role))
        require_equal(
            differentiate(update, role, active), whole, "without the rows that weigh nothing"
        )


def _check_packing(case: Case) -> None:
    """Check that units computed one by one sum to the packed batch."""
    for update, role, whole in case.iter_results():
        require_equal(
            _sum_pieces(update, role, case.list_units(update.batch)), whole, "one unit at a time"
        )


def _check_shards(case: Case) -> None:
    """Check that losses and slopes of data-parallel ranks sum to those of a single rank.

    One of the ranks has no rows.
    """
    for update, role, whole in case.iter_results():
        units = case.list_units(update.batch)
        ranks = [[row for unit in units[rank::3] for row in unit] for rank in range(3)]
        try:
            total = _sum_pieces(update, role, [*ranks, []])
        except (RuntimeError, IndexError, ValueError) as error:
            raise BrokenRule(
                f"a rank without rows can't compute the loss ({type(error).__name__}: {error})"
            ) from error
        require_equal(total, whole, "sharded over ranks, one of them without rows")


def _check_order(case: Case) -> None:
    """Check that the order of groups, and of attempts within a group, changes nothing.

    The rows of one attempt stay in order. So do pairs, whose first row is the chosen one.
    """
    rng = np.random.default_rng(case.draw.seed)
    algorithm = case.algorithm
    groups = case.draw.groups(algorithm)
    rows = [row for group in groups for row in group.trajectories if row.is_usable]
    shuffled = [groups[i] for i in rng.permutation(len(groups))]
    if algorithm.source != "pairs":
        shuffled = [
            replace(
                group,
                trajectories=tuple(
                    row for i in rng.permutation(len(group.attempts)) for row in group.attempts[i]
                ),
            )
            for group in shuffled
        ]
    shuffled_rows = [id(row) for group in shuffled for row in group.trajectories if row.is_usable]
    update = Update.from_groups(algorithm, groups)
    other = Update.from_groups(algorithm, shuffled)
    positions = [shuffled_rows.index(id(row)) for row in rows]
    for role in algorithm.losses:
        slopes = differentiate(other, role, range(len(rows)))
        expected = differentiate(update, role, range(len(rows)))
        require_equal(
            gather_rows(slopes, other.batch, positions),
            expected,
            "with groups and rows in another order",
        )


def _sum_pieces(update: Update, role: str, row_lists: Sequence[Sequence[int]]) -> LossAndSlopes:
    """Return the sum of the losses and slopes of several pieces, each a list of rows."""
    return sum(
        (differentiate(update, role, rows) for rows in row_lists), LossAndSlopes.zero(update, role)
    )


def _check_learning(cases: Sequence[Case]) -> None:
    """Check that each role gets a gradient. Without one, the invariances would prove nothing."""
    for role in cases[0].algorithm.losses:
        results = (
            differentiate(case.whole, role, range(case.whole.batch.n_sequences)) for case in cases
        )
        require(
            any(slope.any() for result in results for slope in result.slopes.values()),
            f"no batch gives role {role} a gradient",
        )


INVARIANCES: dict[str, Callable[[Case], None]] = {
    "micro_batches": _check_micro_batches,
    "packing": _check_packing,
    "shards": _check_shards,
    "order": _check_order,
}


# --- properties, which an algorithm claims unless it is exempt


def _check_property(algorithm: Algorithm, name: str) -> Finding:
    """Check a property that is claimed, or the reason of an exemption."""
    reason = algorithm.exempt.get(name)
    check = CHECKS[name]
    if reason is None:
        return _run_check(name, lambda: check(algorithm, [Draw(seed) for seed in SEEDS]))
    if not is_applicable(reason):
        finding = _run_check(name, lambda: _check_inapplicable(algorithm, reason))
        return finding if finding.verdict == "fails" else Finding(name, "n/a", reason)
    finding = _run_check(name, lambda: _check_exemption(algorithm, check, reason))
    return finding if finding.verdict == "fails" else Finding(name, "exempt", reason)


def _check_inapplicable(algorithm: Algorithm, reason: str) -> None:
    """Raise AssertionError if the algorithm has advantages, so that the property does apply."""
    batch = Case(algorithm, Draw(SEEDS[0])).whole.batch
    require(
        not batch.has("advantages"),
        f"is exempt ({reason}), but the algorithm does make a column 'advantages'",
    )


def _check_exemption(
    algorithm: Algorithm, check: Callable[[Algorithm, Sequence[Draw]], None], reason: str
) -> None:
    """Raise AssertionError unless the exempt property breaks on some batch."""
    for longest in ANSWER_LENGTHS:
        try:
            check(algorithm, [Draw(seed, longest=longest) for seed in SEEDS])
        except PropertyBroken:
            return
    require(
        False, f"is exempt ({reason}), but it holds on every synthetic batch: remove the exemption"
    )


def _get_advantages(batch: Batch) -> Tensor:
    """Return the advantages [T]. Raises AssertionError if there are none."""
    require(
        batch.has("advantages"),
        'is claimed, but there are no advantages: exempt it, with a reason "no advantages: ..."',
    )
    return batch.need("advantages")


def _check_isolation(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    """Check that a row's values and slopes do not depend on the tokens of other rows."""
    for draw in draws:
        update = Case(algorithm, draw).whole
        for role in algorithm.losses:
            rows = select_weighted_rows(update.batch, update.terms(role))
            for row in rows[:: max(1, len(rows) // 4)]:
                other = update.with_other_tokens(row)
                for term in algorithm.losses[role]:
                    _check_row_isolated(term, update, other, role, row)


def _check_row_isolated(
    term: AlgorithmTerm, update: Update, other: Update, role: str, row: int
) -> None:
    values, slopes = compute_row_values(term, update, role, row)
    other_values, other_slopes = compute_row_values(term, other, role, row)
    _require_property(
        _is_close(values, other_values),
        f"term '{term.name}' gives a row another value when other rows' tokens change",
    )
    indices_by_level = {
        "tokens": list_token_indices(update.batch, [row]),
        "rows": torch.tensor([row]),
    }
    for name, slope in slopes.items():
        indices = indices_by_level["rows" if name in SEQUENCE_OUTPUTS else "tokens"]
        has_leak = slope.index_fill(0, indices, 0.0).any()
        _require_property(
            not has_leak,
            f"term '{term.name}' makes a row's value depend on the {name} of other rows",
        )
        same_slope = _is_close(slope[indices], other_slopes[name][indices])
        _require_property(
            same_slope,
            f"term '{term.name}' gives a row another slope when other rows' tokens change",
        )


def _check_on_policy(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    """Check that, on on-policy data, the gradient is the policy gradient.

    The gradient at advantages of 0 is subtracted, so that penalties without advantages cancel.
    """
    terms = algorithm.losses.get("policy", ())
    has_policy_gradient = False
    for draw in draws:
        update = Update.from_groups(algorithm, draw.groups(algorithm), on_policy=True)
        advantages_T = _get_advantages(update.batch)
        zero_advantages = update.with_columns(advantages=torch.zeros_like(advantages_T))
        for term in terms:
            rows = range(update.batch.n_sequences)
            result, zero_result = (
                differentiate(variant, "policy", rows, [term])
                for variant in (update, zero_advantages)
            )
            differences = {
                name: slope - zero_result.slopes[name] for name, slope in result.slopes.items()
            }
            if any(slope.any() for slope in differences.values()):
                has_policy_gradient = True
                _check_policy_gradient(term, update, differences)
    require(
        has_policy_gradient,
        'is claimed, but no term depends on the advantages: exempt it, with a reason "no policy '
        'gradient: ..."',
    )


def _check_policy_gradient(
    term: AlgorithmTerm, update: Update, differences: dict[str, Tensor]
) -> None:
    """Raise PropertyBroken unless the slopes are -weight * advantage, and ratios are 1."""
    batch = update.batch
    weight_T = term.weighting(batch)
    advantages_T = torch.where(batch.trainable_T, batch.need("advantages"), 0.0)
    if term.level != "token":
        count_S = batch.sequence_sum(batch.trainable_T.double()).clamp(min=1)
        advantages_T = (batch.sequence_sum(advantages_T) / count_S)[batch.sequence_T]
    expected_T = -batch.weights[term.name].coef * weight_T * advantages_T
    for name, slope in differences.items():
        expected = expected_T if name == "logprobs" else torch.zeros_like(slope)
        largest_error = float((slope - expected).abs().max())
        _require_property(
            _is_close(slope, expected),
            f"on policy, the gradient of term '{term.name}' by {name} is not -weight * A but off "
            f"by up to {largest_error:.2g}",
        )
    ratio = compute_metrics(term, update, "policy").get("ratio")
    _require_property(
        ratio is None or _is_close(ratio, torch.ones_like(ratio)),
        f"on policy, term '{term.name}' has ratios other than 1",
    )


def _check_equal_rewards(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    """Check that advantages are 0 if the rewards in each group are equal."""
    for draw in draws:
        groups = replace(draw, has_equal_rewards=True).groups(algorithm)
        advantages_T = _get_advantages(Update.from_groups(algorithm, groups).batch)
        largest = float(advantages_T.abs().max())
        _require_property(
            not advantages_T.any(),
            f"rewards are equal in every group, but advantages reach {largest:.2g}",
        )


def _check_lone_attempt(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    """Check groups of one attempt: advantages are 0, or an error names the group."""
    for draw in draws:
        groups = replace(draw, attempts=1).groups(algorithm)
        try:
            update = Update.from_groups(algorithm, groups)
            for role in algorithm.losses:
                differentiate(update, role, range(update.batch.n_sequences))
        except RatchetError as error:
            _require_property(
                any(group.id in str(error) for group in groups),
                f"lone attempts are refused without the group's name: {error}",
            )
            continue
        advantages_T = _get_advantages(update.batch)
        _require_property(
            not advantages_T.any(),
            f"lone attempts have advantages of up to {float(advantages_T.abs().max()):.2g}",
        )


def _require_property(condition: bool | Tensor, message: str) -> None:
    """Raise PropertyBroken with the message unless the condition holds."""
    if not condition:
        raise PropertyBroken(message)


def _is_close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


CHECKS: dict[str, Callable[[Algorithm, Sequence[Draw]], None]] = {
    "isolated": _check_isolation,
    "on_policy": _check_on_policy,
    "equal_rewards": _check_equal_rewards,
    "lone_attempt": _check_lone_attempt,
}
