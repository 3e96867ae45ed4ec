"""One update of an algorithm on a synthetic batch: its losses, and their slopes.

A slope is the gradient of a loss with respect to an output of a model, such as the logprobs.

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
from ratchet.protocols import SEQUENCE_OUTPUTS, Learner, Outputs, list_needed_outputs
from ratchet.testing.harness import require
from ratchet.testing.synthetic import VOCAB, TinyRole
from ratchet.types import Group

# Tolerances that only allow for rounding in another order, in float64.
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-10, 1e-12
Result = TypeVar("Result")


@dataclass(frozen=True)
class Update:
    """A batch with the weights of each term, and the models at the time of the update."""

    algorithm: Algorithm
    batch: Batch
    models: Mapping[str, TinyRole]

    @classmethod
    def from_groups(
        cls, algorithm: Algorithm, groups: Sequence[Group], *, on_policy: bool = False
    ) -> Update:
        """Return the update on some groups: packed, with scores, advantages and term weights.

        Args:
            on_policy: True makes the first update of a stage: no model has changed since the
                scoring passes, models without a path are copies of the policy, and the sampler's
                logprobs equal the policy's. False: every model has changed since the passes, and
                the sampler's logprobs differ from the policy's.
        """
        roles = {"policy": TinyRole("policy")}
        for name, role in algorithm.roles.items():
            roles[name] = TinyRole("policy" if on_policy and role.path is None else name)
        batch = pack(groups)
        if algorithm.source == "rollouts":
            batch = _with_sampler_logprobs(batch, roles["policy"], is_exact=on_policy)
        scored_batch = _run_without_waiting(
            fill_columns(batch, algorithm, cast(Mapping[str, Learner], roles))
        )
        batch = algorithm.advantage(scored_batch, AlgoState())
        models = (
            roles if on_policy else {name: TinyRole(name, drift=0.1) for name in algorithm.losses}
        )
        return cls(algorithm, algorithm.weigh(batch, AlgoState()), models)

    def with_minibatch(self, batch: Batch) -> Update:
        """Return the update on a mini-batch of this one, with weights computed for `batch`."""
        return replace(self, batch=self.algorithm.weigh(batch, AlgoState()))

    def terms(self, role: str) -> tuple[AlgorithmTerm, ...]:
        return self.algorithm.losses[role]

    @cached_property
    def columns(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Return the model outputs that the terms of each role read."""
        return {
            role: self.models[role].outputs(self.batch, list_needed_outputs(terms))
            for role, terms in self.algorithm.losses.items()
        }

    def with_columns(self, **columns: Tensor) -> Update:
        """Return the update with these token columns replaced. Weights stay the same."""
        return replace(self, batch=self.batch.fill_tokens(**columns))

    def with_other_tokens(self, row: int) -> Update:
        """Return the update with different tokens and columns in all rows except `row`.

        The outputs of the models differ in those rows too, because they are computed from tokens.
        """
        batch = self.batch
        other_T = batch.sequence_T != row
        other_S = torch.arange(batch.n_sequences) != row

        def shift_values(column: Tensor, mask: Tensor) -> Tensor:
            broadcast_mask = mask.reshape(-1, *[1] * (column.dim() - 1))
            return (
                torch.where(broadcast_mask, 0.7 * column - 0.3, column)
                if column.is_floating_point()
                else column
            )

        batch = replace(
            batch,
            tokens_T=torch.where(other_T, (batch.tokens_T * 3 + 1) % VOCAB, batch.tokens_T),
            rollout_logprobs_T=shift_values(batch.rollout_logprobs_T, other_T),
            log_kept_mass_T=shift_values(batch.log_kept_mass_T, other_T),
        )
        algorithm_columns = self.algorithm.columns
        token_columns = {
            name: shift_values(column, other_T)
            for name, column in batch.token_columns.items()
            if name in algorithm_columns
        }
        sequence_columns = {
            name: shift_values(column, other_S)
            for name, column in batch.sequence_columns.items()
            if name in algorithm_columns
        }
        return replace(
            self, batch=batch.fill_tokens(**token_columns).fill_sequences(**sequence_columns)
        )


def _with_sampler_logprobs(batch: Batch, sampler: TinyRole, *, is_exact: bool) -> Batch:
    """Return the batch with logprobs of the sampler.

    Args:
        is_exact: True uses the policy's own logprobs. False adds an error to them that depends
            only on a token and its position.
    """
    logprobs_T = _run_without_waiting(sampler.score(batch, ["logprobs"]))["logprobs"]
    if is_exact:
        return replace(
            batch, rollout_logprobs_T=logprobs_T, log_kept_mass_T=torch.zeros_like(logprobs_T)
        )
    # A hash of token and position serves as a random number in [0, 1).
    chance_T = (
        torch.sin(12.9898 * batch.tokens_T + 78.233 * batch.positions_T).double() * 43758.5453
    ) % 1
    # Most errors are within 0.1; 7 % are about +1.5, and 7 % about -1.5.
    error_T = 0.2 * (chance_T - 0.5) + 1.5 * (chance_T > 0.93) - 1.5 * (chance_T < 0.07)
    return replace(
        batch, rollout_logprobs_T=torch.where(batch.predicted_T, logprobs_T + error_T, 0.0).float()
    )


def _run_without_waiting(coroutine: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that never waits, and return its result.

    This needs no event loop, and also works inside a running one.
    """
    try:
        coroutine.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("a tiny model never waits")


# --- losses and slopes


@dataclass(frozen=True)
class LossAndSlopes:
    """The loss of some rows of an update, with its slopes and metrics."""

    loss: float
    slopes: Mapping[str, Tensor]  # by output; columns of the whole batch, 0 for other rows
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


def differentiate(
    update: Update, role: str, rows: Sequence[int], terms: Sequence[AlgorithmTerm] | None = None
) -> LossAndSlopes:
    """Return the loss of some rows, summed over terms as a learner does, and its slopes.

    Raises BrokenRule (an AssertionError) if a loss or a slope is not finite.

    Args:
        terms: Terms of the role to sum; None: all of them.
    """
    batch = update.batch.take(rows)
    indices = {
        "tokens": list_token_indices(update.batch, rows),
        "rows": torch.tensor(list(rows), dtype=torch.int64),
    }
    leaves = _make_leaves(update, role, indices)
    loss, metrics = torch.zeros((), dtype=torch.float64), dict[str, float]()
    for term in update.terms(role) if terms is None else terms:
        value, term_metrics = term(_make_outputs(batch, leaves, term), batch)
        loss = loss + value
        metrics |= {
            f"{term.name}/{name}": float(metric.detach()) for name, metric in term_metrics.items()
        }
        require(
            bool(value.isfinite()), f"the loss of term '{term.name}' is {float(value.detach())}"
        )
    slopes = {}
    for name, slope in _compute_gradients(loss, leaves).items():
        require(bool(slope.isfinite().all()), f"the gradient by {name} is not finite")
        batch_zeros = torch.zeros_like(update.columns[role][name])
        slopes[name] = batch_zeros.index_copy(0, _get_output_indices(name, indices), slope)
    return LossAndSlopes(float(loss.detach()), slopes, metrics)


def compute_row_values(
    term: AlgorithmTerm, update: Update, role: str, row: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a row's unweighted values of a term, and the slopes of their sum.

    Values whose weight is 0 count as 0. The slopes are with respect to the outputs of all rows.
    """
    batch = update.batch
    indices = {"tokens": torch.arange(batch.n_tokens), "rows": torch.arange(batch.n_sequences)}
    leaves = _make_leaves(update, role, indices)
    values, _ = term.fn(_make_outputs(batch, leaves, term), batch)
    # Indices of the row's values at the level of the term.
    row_indices = {
        "token": list_token_indices(batch, [row]),
        "sequence": torch.tensor([row]),
        "group": batch.group_S[[row]],
    }[term.level]
    weight = batch.weights[term.name].values
    row_values = torch.where(weight[row_indices] != 0, values[row_indices], 0.0)
    return row_values.detach(), _compute_gradients(row_values.sum(), leaves)


def compute_metrics(term: AlgorithmTerm, update: Update, role: str) -> dict[str, Tensor]:
    """Return a term's metrics at each of its values whose weight is not 0."""
    batch = update.batch
    indices = {"tokens": torch.arange(batch.n_tokens), "rows": torch.arange(batch.n_sequences)}
    _, metrics = term.fn(_make_outputs(batch, _make_leaves(update, role, indices), term), batch)
    active = batch.weights[term.name].values != 0
    return {name: metric[active].detach() for name, metric in metrics.items()}


def list_token_indices(batch: Batch, rows: Sequence[int]) -> Tensor:
    """Return the indices of the tokens of some rows, one row after the other."""
    starts, lengths = batch.starts_S.tolist(), batch.lengths_S.tolist()
    index_ranges = [torch.arange(starts[row], starts[row] + lengths[row]) for row in rows]
    return torch.cat(index_ranges) if index_ranges else torch.zeros(0, dtype=torch.int64)


def gather_rows(result: LossAndSlopes, batch: Batch, rows: Sequence[int]) -> LossAndSlopes:
    """Return the result with its slopes reordered: the rows of `batch` in the order of `rows`."""
    indices = {
        "tokens": list_token_indices(batch, rows),
        "rows": torch.tensor(list(rows), dtype=torch.int64),
    }
    slopes = {
        name: slope[_get_output_indices(name, indices)] for name, slope in result.slopes.items()
    }
    return replace(result, slopes=slopes)


def require_equal(result: LossAndSlopes, expected: LossAndSlopes, method: str) -> None:
    """Raise BrokenRule (an AssertionError) if two results differ by more than rounding.

    Args:
        method: How `result` was computed; the error message begins with it.
    """
    require(
        _is_near(result.loss, expected.loss),
        f"{method}, the loss is {result.loss:.12g} and not {expected.loss:.12g}",
    )
    for name, slope in expected.slopes.items():
        limit = (
            RELATIVE_TOLERANCE * float(slope.abs().max()) + ABSOLUTE_TOLERANCE
            if slope.numel()
            else 0.0
        )
        difference = float((result.slopes[name] - slope).abs().max()) if slope.numel() else 0.0
        require(
            difference <= limit,
            f"{method}, the gradient by {name} is off by up to {difference:.2g}",
        )
    for name, metric in expected.metrics.items():
        value = result.metrics.get(name, 0.0)
        require(
            _is_near(value, metric),
            f"{method}, metric {name} is {value:.12g} and not {metric:.12g}",
        )


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b)) + ABSOLUTE_TOLERANCE


def _get_output_indices(name: str, indices: Mapping[str, Tensor]) -> Tensor:
    """Return the indices along an output's first axis: of rows or of tokens."""
    return indices["rows" if name in SEQUENCE_OUTPUTS else "tokens"]


def _make_leaves(update: Update, role: str, indices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the outputs of a role's model at `indices`, as leaves of the autograd graph."""
    return {
        name: column[_get_output_indices(name, indices)].clone().requires_grad_()
        for name, column in update.columns[role].items()
    }


def _make_outputs(batch: Batch, leaves: Mapping[str, Tensor], term: AlgorithmTerm) -> Outputs:
    """Return the outputs that the term declares in `needs`, and no others.

    So a term that reads an output it does not declare fails here, even if another term declares it.
    """
    columns = {name: leaf for name, leaf in leaves.items() if name in term.needs}
    if "old_logprobs" in term.needs:
        old_logprobs = (
            batch.need("old_logprobs").double() if batch.has("old_logprobs") else leaves["logprobs"]
        )
        columns["old_logprobs"] = old_logprobs.detach()
    return Outputs(sequence_sum=batch.sequence_sum, **columns)


def _compute_gradients(value: Tensor, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of `value` by each leaf, zeros for a leaf that it does not depend on."""
    if not value.requires_grad:
        return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    slopes = torch.autograd.grad(value, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if slope is None else slope
        for (name, leaf), slope in zip(leaves.items(), slopes, strict=True)
    }
