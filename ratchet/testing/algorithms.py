"""The checks of every Algorithm, as one call: `check_algorithm(algorithm)`.

The kit's batches are ragged and synthetic, its models tiny, everything in float64. Losses are
differentiated with respect to what the models say of each token, not to parameters: there, errors
of different rows could cancel. T = tokens, S = sequences.
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
from ratchet.protocols import OF_SEQUENCES
from ratchet.testing.harness import require
from ratchet.testing.synthetic import Draw
from ratchet.testing.synthetic_update import (
    LossAndSlopes,
    Update,
    compute_row_values,
    differentiated,
    gathered,
    measured,
    same,
    token_indices,
)

SEEDS = (0, 1, 2)
# For exemptions that only long answers show, as that of a length penalty: tried until one does.
LONGEST = (0, 64, 512, 4096, 32768)


class Broken(AssertionError):
    """A property does not hold; anything else that is wrong is a plain AssertionError."""


@dataclass(frozen=True)
class Finding:
    """verdict: "holds", "exempt" and "n/a" (with the reason as note), "fails" (with what is
    wrong)."""

    name: str
    verdict: str
    note: str = ""


def check_algorithm(algorithm: Algorithm) -> None:
    """Raises AssertionError with every broken invariance, every claimed property that does not
    hold, and every exemption from one that does (see `ratchet.algorithms.properties`)."""
    broken = [
        f"{finding.name}: {finding.note}"
        for finding in examine(algorithm)
        if finding.verdict == "fails"
    ]
    require(not broken, f"algorithm '{algorithm.name}': " + "; ".join(broken))


def examine(algorithm: Algorithm) -> list[Finding]:
    """Every invariance and every property, in a fixed order."""
    _check_names(algorithm)
    cases = [Case(algorithm, Draw(seed)) for seed in SEEDS]
    findings = [
        _tried(name, lambda check=check: [check(case) for case in cases])
        for name, check in INVARIANCES.items()
    ]
    findings.append(_tried("learns", lambda: _learns(cases)))
    return [*findings, *(_property(algorithm, name) for name in PROPERTIES)]


def _check_names(algorithm: Algorithm) -> None:
    for name in algorithm.exempt:
        near = get_close_matches(name, PROPERTIES, n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        require(
            name in PROPERTIES,
            f"algorithm '{algorithm.name}' is exempt from '{name}': {hint}there are "
            f"{', '.join(PROPERTIES)}",
        )


def _tried(name: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except AssertionError as error:
        return Finding(name, "fails", str(error))
    return Finding(name, "holds")


# --- one batch, ready for its updates


@dataclass(frozen=True)
class Case:
    algorithm: Algorithm
    draw: Draw

    @cached_property
    def whole(self) -> Update:
        return Update.of(self.algorithm, self.draw.groups(self.algorithm))

    @property
    def minis(self) -> Iterator[Update]:
        """The whole batch as one update; and the mini-batches, where there are several."""
        yield self.whole
        if self.algorithm.minibatches > 1:
            for mini in itertools.islice(
                self.algorithm.split(self.whole.batch), self.algorithm.minibatches
            ):
                yield self.whole.mini(mini)

    def found(self) -> Iterator[tuple[Update, str, LossAndSlopes]]:
        """Each update by each role, in one piece."""
        for update in self.minis:
            for role in self.algorithm.losses:
                yield update, role, differentiated(update, role, range(update.batch.n_sequences))

    def units(self, batch: Batch) -> list[list[int]]:
        """Rows that stay together."""
        if self.algorithm.unit != "group":
            return [[row] for row in range(batch.n_sequences)]
        group_S = batch.group_S.tolist()
        return [[row for row, of in enumerate(group_S) if of == g] for g in range(batch.n_groups)]


# --- invariances: of every algorithm


def _micro_batches(case: Case) -> None:
    """Weighed once, cut anywhere, in any order: the parts sum to the whole; rows without weight may
    stay away."""
    rng = np.random.default_rng(case.draw.seed)
    for update, role, whole in case.found():
        units = case.units(update.batch)
        for parts in range(2, 5):
            order = rng.permutation(len(units))
            cuts = sorted({0, len(units), *rng.integers(0, len(units) + 1, parts - 1).tolist()})
            pieces = [
                [row for u in order[a:b] for row in units[u]] for a, b in itertools.pairwise(cuts)
            ]
            same(_total(update, role, pieces), whole, "cut into micro-batches")
        active = select_weighted_rows(update.batch, update.terms(role))
        same(differentiated(update, role, active), whole, "without the rows that weigh nothing")


def _packing(case: Case) -> None:
    """Each unit alone gives what it gives packed with the others."""
    for update, role, whole in case.found():
        same(_total(update, role, case.units(update.batch)), whole, "one unit at a time")


def _shards(case: Case) -> None:
    """Ranks of a data-parallel learner, more of them than there are units: sums over ranks are
    those of one machine."""
    for update, role, whole in case.found():
        units = case.units(update.batch)
        ranks = [[row for unit in units[rank::3] for row in unit] for rank in range(3)]
        try:
            total = _total(update, role, [*ranks, []])
        except (RuntimeError, IndexError, ValueError) as error:
            raise AssertionError(
                f"a rank without rows can't compute the loss ({type(error).__name__}: {error})"
            ) from error
        same(total, whole, "sharded over ranks, one of them without rows")


def _order(case: Case) -> None:
    """Groups in any order, and rows within a group, but for pairs, whose first row is the chosen
    one, and for the rows of one attempt, which follow each other."""
    rng = np.random.default_rng(case.draw.seed)
    algorithm = case.algorithm
    groups = case.draw.groups(algorithm)
    rows = [row for group in groups for row in group.trajectories if row.counts]
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
    moved = [id(row) for group in shuffled for row in group.trajectories if row.counts]
    update, other = Update.of(algorithm, groups), Update.of(algorithm, shuffled)
    places = [moved.index(id(row)) for row in rows]
    for role in algorithm.losses:
        slopes = differentiated(other, role, range(len(rows)))
        expected = differentiated(update, role, range(len(rows)))
        same(
            gathered(slopes, other.batch, places), expected, "with groups and rows in another order"
        )


def _total(update: Update, role: str, pieces: Sequence[Sequence[int]]) -> LossAndSlopes:
    return sum(
        (differentiated(update, role, rows) for rows in pieces), LossAndSlopes.zero(update, role)
    )


def _learns(cases: Sequence[Case]) -> None:
    """Or the invariances would hold of nothing."""
    for role in cases[0].algorithm.losses:
        results = (differentiated(c.whole, role, range(c.whole.batch.n_sequences)) for c in cases)
        require(
            any(slope.any() for one in results for slope in one.slopes.values()),
            f"no batch gives role {role} a gradient",
        )


INVARIANCES: dict[str, Callable[[Case], None]] = {
    "micro_batches": _micro_batches,
    "packing": _packing,
    "shards": _shards,
    "order": _order,
}


# --- properties: claimed unless exempt


def _property(algorithm: Algorithm, name: str) -> Finding:
    reason = algorithm.exempt.get(name)
    check = CHECKS[name]
    if reason is None:
        return _tried(name, lambda: check(algorithm, [Draw(seed) for seed in SEEDS]))
    if not is_applicable(reason):
        finding = _tried(name, lambda: _check_inapplicable(algorithm, reason))
        return finding if finding.verdict == "fails" else Finding(name, "n/a", reason)
    finding = _tried(name, lambda: _check_exemption(algorithm, check, reason))
    return finding if finding.verdict == "fails" else Finding(name, "exempt", reason)


def _check_inapplicable(algorithm: Algorithm, reason: str) -> None:
    batch = Case(algorithm, Draw(SEEDS[0])).whole.batch
    require(
        not batch.has("advantages"),
        f"is exempt ({reason}), but the algorithm does make a column 'advantages'",
    )


def _check_exemption(
    algorithm: Algorithm, check: Callable[[Algorithm, Sequence[Draw]], None], reason: str
) -> None:
    for longest in LONGEST:
        try:
            check(algorithm, [Draw(seed, longest=longest) for seed in SEEDS])
        except Broken:
            return
    require(
        False, f"is exempt ({reason}), but it holds on every batch of the kit: remove the exemption"
    )


def _advantages(batch: Batch) -> Tensor:
    require(
        batch.has("advantages"),
        'is claimed, but there are no advantages: exempt it, with a reason "no advantages: ..."',
    )
    return batch.need("advantages")


def _isolated(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    """A row's values, and their slopes, while all that is known of other rows' tokens changes."""
    for draw in draws:
        update = Case(algorithm, draw).whole
        for role in algorithm.losses:
            rows = select_weighted_rows(update.batch, update.terms(role))
            for row in rows[:: max(1, len(rows) // 4)]:
                other = update.with_other_tokens(row)
                for term in algorithm.losses[role]:
                    _check_isolated(term, update, other, role, row)


def _check_isolated(
    term: AlgorithmTerm, update: Update, other: Update, role: str, row: int
) -> None:
    x, slopes = compute_row_values(term, update, role, row)
    moved_x, moved_slopes = compute_row_values(term, other, role, row)
    _hold(
        _close(x, moved_x),
        f"term '{term.name}' gives a row another value when other rows' tokens change",
    )
    places = {"tokens": token_indices(update.batch, [row]), "rows": torch.tensor([row])}
    for name, slope in slopes.items():
        indices = places["rows" if name in OF_SEQUENCES else "tokens"]
        leaks = slope.index_fill(0, indices, 0.0).any()
        _hold(
            not leaks, f"term '{term.name}' gives a row's value a slope by the {name} of other rows"
        )
        same_slope = _close(slope[indices], moved_slopes[name][indices])
        _hold(
            same_slope,
            f"term '{term.name}' gives a row another slope when other rows' tokens change",
        )


def _on_policy(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    """Check the policy gradient by the difference to advantages of 0, so that other penalties drop
    out."""
    terms = algorithm.losses.get("policy", ())
    moved = False
    for draw in draws:
        update = Update.of(algorithm, draw.groups(algorithm), on_policy=True)
        advantages_T = _advantages(update.batch)
        without = update.with_columns(advantages=torch.zeros_like(advantages_T))
        for term in terms:
            rows = range(update.batch.n_sequences)
            result, base = (
                differentiated(one, "policy", rows, [term]) for one in (update, without)
            )
            gained = {name: slope - base.slopes[name] for name, slope in result.slopes.items()}
            if any(slope.any() for slope in gained.values()):
                moved = True
                _check_policy_gradient(term, update, gained)
    require(
        moved,
        'is claimed, but no term moves with the advantages: exempt it, with a reason "no policy '
        'gradient: ..."',
    )


def _check_policy_gradient(term: AlgorithmTerm, update: Update, gained: dict[str, Tensor]) -> None:
    batch = update.batch
    weight_T, advantages_T = (
        term.weighting(batch),
        torch.where(batch.trainable_T, batch.need("advantages"), 0.0),
    )
    if term.level != "token":
        count_S = batch.sequence_sum(batch.trainable_T.double()).clamp(min=1)
        advantages_T = (batch.sequence_sum(advantages_T) / count_S)[batch.sequence_T]
    expected_T = -batch.weights[term.name].coef * weight_T * advantages_T
    for name, slope in gained.items():
        expected = expected_T if name == "logprobs" else torch.zeros_like(slope)
        off = float((slope - expected).abs().max())
        _hold(
            _close(slope, expected),
            f"on policy, the gradient of term '{term.name}' by {name} is not -weight * A but off "
            f"by up to {off:.2g}",
        )
    ratio = measured(term, update, "policy").get("ratio")
    _hold(
        ratio is None or _close(ratio, torch.ones_like(ratio)),
        f"on policy, term '{term.name}' has ratios other than 1",
    )


def _equal_rewards(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    for draw in draws:
        groups = replace(draw, equal=True).groups(algorithm)
        advantages_T = _advantages(Update.of(algorithm, groups).batch)
        largest = float(advantages_T.abs().max())
        _hold(
            not advantages_T.any(),
            f"rewards are equal in every group, and advantages reach {largest:.2g}",
        )


def _lone_attempt(algorithm: Algorithm, draws: Sequence[Draw]) -> None:
    for draw in draws:
        groups = replace(draw, attempts=1).groups(algorithm)
        try:
            update = Update.of(algorithm, groups)
            for role in algorithm.losses:
                differentiated(update, role, range(update.batch.n_sequences))
        except RatchetError as error:
            _hold(
                any(group.id in str(error) for group in groups),
                f"lone attempts are refused without the group's name: {error}",
            )
            continue
        advantages_T = _advantages(update.batch)
        _hold(
            not advantages_T.any(),
            f"lone attempts have advantages of up to {float(advantages_T.abs().max()):.2g}",
        )


def _hold(rule: bool | Tensor, broken: str) -> None:
    if not rule:
        raise Broken(broken)


def _close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-9, atol=1e-12)


CHECKS: dict[str, Callable[[Algorithm, Sequence[Draw]], None]] = {
    "isolated": _isolated,
    "on_policy": _on_policy,
    "equal_rewards": _equal_rewards,
    "lone_attempt": _lone_attempt,
}
