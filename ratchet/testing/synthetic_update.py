"""One update of an algorithm on a synthetic batch: its losses, and their slopes by what the models
say of each token.

T = tokens, S = sequences.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ratchet.algorithms.base import Algorithm, AlgorithmTerm, AlgoState
from ratchet.algorithms.scoring import fill_columns
from ratchet.batch import Batch
from ratchet.data.packing import pack
from ratchet.protocols import OF_SEQUENCES, Learner, Outputs, needed
from ratchet.testing.harness import require
from ratchet.testing.synthetic import VOCAB, TinyRole
from ratchet.types import Group

RELATIVE, ABSOLUTE = 1e-10, 1e-12  # float64: rounding in another order, and nothing else
T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """A weighed batch, and the models as they are by then."""

    algorithm: Algorithm
    batch: Batch
    models: Mapping[str, TinyRole]

    @classmethod
    def of(
        cls, algorithm: Algorithm, groups: Sequence[Group], *, on_policy: bool = False
    ) -> Update:
        """Packed, scored, estimated and weighed.

        on_policy: as the first update of a stage: no model has moved, those without a path are
        copies of the policy, and the sampler agreed with the learner. Otherwise every model has
        moved since the passes, and the sampler was another.
        """
        roles = {"policy": TinyRole("policy")}
        for name, role in algorithm.roles.items():
            roles[name] = TinyRole("policy" if on_policy and role.path is None else name)
        batch = pack(groups)
        if algorithm.source == "rollouts":
            batch = _sampled(batch, roles["policy"], exact=on_policy)
        batch = algorithm.advantage(
            _ran(fill_columns(batch, algorithm, cast(Mapping[str, Learner], roles))), AlgoState()
        )
        models = (
            roles if on_policy else {name: TinyRole(name, drift=0.1) for name in algorithm.losses}
        )
        return cls(algorithm, algorithm.weigh(batch, AlgoState()), models)

    def mini(self, batch: Batch) -> Update:
        """The update on one of its mini-batches."""
        return replace(self, batch=self.algorithm.weigh(batch, AlgoState()))

    def terms(self, role: str) -> tuple[AlgorithmTerm, ...]:
        return self.algorithm.losses[role]

    @cached_property
    def columns(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the columns that each role's terms read of its model."""
        return {
            role: self.models[role].outputs(self.batch, needed(terms))
            for role, terms in self.algorithm.losses.items()
        }

    def with_columns(self, **columns: Tensor) -> Update:
        """Return the update with other token columns, and the same weights."""
        return replace(self, batch=self.batch.fill_tokens(**columns))

    def with_other_tokens(self, row: int) -> Update:
        """Return the update with other tokens in all other rows, and with other outputs of the
        models for them."""
        batch = self.batch
        there_T, there_S = batch.sequence_T != row, torch.arange(batch.n_sequences) != row

        def moved(column: Tensor, there: Tensor) -> Tensor:
            place = there.reshape(-1, *[1] * (column.dim() - 1))
            return (
                torch.where(place, 0.7 * column - 0.3, column)
                if column.is_floating_point()
                else column
            )

        batch = replace(
            batch,
            tokens_T=torch.where(there_T, (batch.tokens_T * 3 + 1) % VOCAB, batch.tokens_T),
            rollout_logprobs_T=moved(batch.rollout_logprobs_T, there_T),
            log_kept_mass_T=moved(batch.log_kept_mass_T, there_T),
        )
        asked = self.algorithm.columns
        tokens = {
            name: moved(column, there_T)
            for name, column in batch.token_columns.items()
            if name in asked
        }
        rows = {
            name: moved(column, there_S)
            for name, column in batch.sequence_columns.items()
            if name in asked
        }
        return replace(self, batch=batch.fill_tokens(**tokens).fill_sequences(**rows))


def _sampled(batch: Batch, sampler: TinyRole, *, exact: bool) -> Batch:
    """Return the batch with logprobs of the sampler: the policy's own, or with an error that
    depends on the token and its place alone."""
    logprobs_T = _ran(sampler.score(batch, ["logprobs"]))["logprobs"]
    if exact:
        return replace(
            batch, rollout_logprobs_T=logprobs_T, log_kept_mass_T=torch.zeros_like(logprobs_T)
        )
    chance_T = (
        torch.sin(12.9898 * batch.tokens_T + 78.233 * batch.positions_T).double() * 43758.5453
    ) % 1
    error_T = 0.2 * (chance_T - 0.5) + 1.5 * (chance_T > 0.93) - 1.5 * (chance_T < 0.07)
    return replace(
        batch, rollout_logprobs_T=torch.where(batch.predicted_T, logprobs_T + error_T, 0.0).float()
    )


def _ran(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine that never waits. It needs no event loop, and runs inside of
    one too."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a tiny model never waits")


# --- losses and slopes


@dataclass(frozen=True)
class LossAndSlopes:
    """The loss of some rows of an update, its slopes by output (columns of the whole batch, 0 for
    other rows), and the metrics."""

    loss: float
    slopes: Mapping[str, Tensor]
    metrics: Mapping[str, float]

    @classmethod
    def zero(cls, update: Update, role: str) -> LossAndSlopes:
        return cls(
            0.0,
            {name: torch.zeros_like(column) for name, column in update.columns[role].items()},
            {},
        )

    def __add__(self, other: LossAndSlopes) -> LossAndSlopes:
        names = {**self.metrics, **other.metrics}
        return LossAndSlopes(
            self.loss + other.loss,
            {name: slope + other.slopes[name] for name, slope in self.slopes.items()},
            {name: self.metrics.get(name, 0.0) + other.metrics.get(name, 0.0) for name in names},
        )


def differentiated(
    update: Update, role: str, rows: Sequence[int], terms: Sequence[AlgorithmTerm] | None = None
) -> LossAndSlopes:
    """The loss of some rows as a learner sums it: of all terms of the role, or of some."""
    batch = update.batch.take(rows)
    places = {
        "tokens": token_indices(update.batch, rows),
        "rows": torch.tensor(list(rows), dtype=torch.int64),
    }
    leaves = _leaves(update, role, places)
    loss, metrics = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for term in update.terms(role) if terms is None else terms:
        value, measured = term(_outputs(batch, leaves, term), batch)
        loss = loss + value
        metrics |= {
            f"{term.name}/{name}": float(metric.detach()) for name, metric in measured.items()
        }
        require(
            bool(value.isfinite()), f"the loss of term '{term.name}' is {float(value.detach())}"
        )
    slopes = {}
    for name, slope in _gradients(loss, leaves).items():
        require(bool(slope.isfinite().all()), f"the gradient by {name} is not finite")
        whole = torch.zeros_like(update.columns[role][name])
        slopes[name] = whole.index_copy(0, _place(name, places), slope)
    return LossAndSlopes(float(loss.detach()), slopes, metrics)


def compute_row_values(
    term: AlgorithmTerm, update: Update, role: str, row: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """(a row's own values of a term before their weights, the slopes of their sum by the outputs of
    all rows)."""
    batch = update.batch
    places = {"tokens": torch.arange(batch.n_tokens), "rows": torch.arange(batch.n_sequences)}
    leaves = _leaves(update, role, places)
    x, _ = term.fn(_outputs(batch, leaves, term), batch)
    place = {
        "token": token_indices(batch, [row]),
        "sequence": torch.tensor([row]),
        "group": batch.group_S[[row]],
    }[term.level]
    weight = batch.weights[term.name].values
    weighed = torch.where(weight[place] != 0, x[place], 0.0)
    return weighed.detach(), _gradients(weighed.sum(), leaves)


def measured(term: AlgorithmTerm, update: Update, role: str) -> dict[str, Tensor]:
    """A term's metrics, one for each of its values that weighs anything."""
    batch = update.batch
    places = {"tokens": torch.arange(batch.n_tokens), "rows": torch.arange(batch.n_sequences)}
    _, metrics = term.fn(_outputs(batch, _leaves(update, role, places), term), batch)
    active = batch.weights[term.name].values != 0
    return {name: metric[active].detach() for name, metric in metrics.items()}


def token_indices(batch: Batch, rows: Sequence[int]) -> Tensor:
    """Return the indices of the tokens of some rows, row by row."""
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    parts = [torch.arange(starts[row], starts[row] + lengths[row]) for row in rows]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def gathered(found: LossAndSlopes, batch: Batch, rows: Sequence[int]) -> LossAndSlopes:
    """Return the slopes of a batch's rows in another order."""
    places = {
        "tokens": token_indices(batch, rows),
        "rows": torch.tensor(list(rows), dtype=torch.int64),
    }
    return replace(
        found, slopes={name: slope[_place(name, places)] for name, slope in found.slopes.items()}
    )


def same(found: LossAndSlopes, expected: LossAndSlopes, how: str) -> None:
    """Raises AssertionError where they differ by more than rounding."""
    require(
        _near(found.loss, expected.loss),
        f"{how}, the loss is {found.loss:.12g} and not {expected.loss:.12g}",
    )
    for name, slope in expected.slopes.items():
        limit = RELATIVE * float(slope.abs().max()) + ABSOLUTE if slope.numel() else 0.0
        off = float((found.slopes[name] - slope).abs().max()) if slope.numel() else 0.0
        require(off <= limit, f"{how}, the gradient by {name} is off by up to {off:.2g}")
    for name, metric in expected.metrics.items():
        value = found.metrics.get(name, 0.0)
        require(_near(value, metric), f"{how}, metric {name} is {value:.12g} and not {metric:.12g}")


def _near(a: float, b: float) -> bool:
    return abs(a - b) <= RELATIVE * max(abs(a), abs(b)) + ABSOLUTE


def _place(name: str, places: Mapping[str, Tensor]) -> Tensor:
    return places["rows" if name in OF_SEQUENCES else "tokens"]


def _leaves(update: Update, role: str, places: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: column[_place(name, places)].clone().requires_grad_()
        for name, column in update.columns[role].items()
    }


def _outputs(batch: Batch, leaves: Mapping[str, Tensor], term: AlgorithmTerm) -> Outputs:
    """Return what the term declares in `needs`, and nothing else: outputs that other terms need may
    be missing tomorrow."""
    columns = {name: leaf for name, leaf in leaves.items() if name in term.needs}
    if "old_logprobs" in term.needs:
        old_logprobs = (
            batch.need("old_logprobs").double() if batch.has("old_logprobs") else leaves["logprobs"]
        )
        columns["old_logprobs"] = old_logprobs.detach()
    return Outputs(sequence_sum=batch.sequence_sum, **columns)


def _gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    }
