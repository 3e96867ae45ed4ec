"""An algorithm is data: passes that fill columns, an advantage estimator, loss terms by role, and the unit that micro-batches
must not split. The one loop (`ratchet/loop.py`) reads it; nothing anywhere branches on an algorithm's name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ratchet.batch import Batch, Level, Weight
from ratchet.errors import ConfigError
from ratchet.interfaces import Outputs

TermFunction = Callable[[Outputs, Batch], tuple[Tensor, dict[str, Tensor]]]
Weighting = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Term:
    """One summand of a role's loss: `coef * sum(weight * x)`.

    `fn(out, batch) -> (x, metrics)` gives x and detached metrics at the term's `level` ([T], [S] or [G]); `weighting(batch)`
    gives the column of the same length that carries the complete normaliser, computed once over an optimizer step. `needs`
    names the `Outputs` that the learner must produce. Both functions are module-level, or a `functools.partial` of one, so
    that a term can be sent to another process by name.
    """

    name: str
    fn: TermFunction
    weighting: Weighting
    level: Level = "token"
    needs: frozenset[str] = frozenset({"logprobs"})
    coef: float = 1.0

    def __post_init__(self) -> None:
        for role, function in (("fn", self.fn), ("weighting", self.weighting)):
            if not _importable(function):
                raise ConfigError(
                    f"term '{self.name}': {role} is a closure or a lambda, which can't reach another process; "
                    "use a module-level function, with functools.partial for its options"
                )

    def __call__(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, metrics = self.fn(out, batch)
        _, weight, total = batch.weights[self.name]
        assert x.shape == weight.shape, f"term '{self.name}' returned {tuple(x.shape)} for weights {tuple(weight.shape)}"
        # A weight of 0 means "not part of the loss": inf * 0 from such an entry must not poison the sum.
        active = weight != 0
        loss = self.coef * (weight * torch.where(active, x, 0.0)).sum()
        share = weight / total if total else weight
        means = {k: (share * torch.where(active, v.to(weight.dtype), 0.0)).sum() for k, v in metrics.items()}
        return loss, means


def _importable(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", "")
    return bool(name) and "<locals>" not in name and "<lambda>" not in name


@dataclass(frozen=True)
class Pass:
    """Before the update, `role` computes the column `wanted` without gradient; it is stored under the name `produces`."""

    role: str
    wanted: str
    produces: str
    level: Level = "token"


def no_advantage(batch: Batch, state: AlgoState) -> Batch:
    """For supervised algorithms: nothing to estimate."""
    return batch


@dataclass
class AlgoState:
    """What an algorithm remembers between steps (adaptive coefficients, running statistics); checkpointed."""

    step: int = 0
    numbers: dict[str, float] = field(default_factory=dict)

    def observe(self, metrics: Mapping[str, float]) -> None:
        self.step += 1


@dataclass(frozen=True)
class Algorithm:
    """See the module's docstring.

    source: the kind of groups it learns from ("rows", "pairs" or "rollouts"). turns: which of the assistant's turns train
    in given text. unit: what micro-batches never split.
    """

    name: str
    losses: Mapping[str, tuple[Term, ...]]
    source: str
    passes: tuple[Pass, ...] = ()
    advantage: Callable[[Batch, AlgoState], Batch] = no_advantage
    unit: Level = "sequence"
    minibatches: int = 1
    epochs: int = 1
    group_size: int = 1
    turns: Literal["all", "last"] = "all"

    def __post_init__(self) -> None:
        names = [term.name for terms in self.losses.values() for term in terms]
        if len(set(names)) != len(names):
            raise ConfigError(f"algorithm '{self.name}': two terms share a name among {names}")
        reads_old = any("old_logprobs" in term.needs for terms in self.losses.values() for term in terms)
        if reads_old and self.updates_per_batch > 1 and "old_logprobs" not in {p.produces for p in self.passes}:
            raise ConfigError(
                f"algorithm '{self.name}' takes {self.updates_per_batch} optimizer steps a batch and reads old_logprobs: "
                "add Pass('policy', 'logprobs', 'old_logprobs'), or set minibatches and epochs to 1"
            )

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.epochs

    def needed_passes(self) -> tuple[Pass, ...]:
        """With one optimizer step a batch, old logprobs are the update's own first forward: that pass is dropped."""
        return tuple(p for p in self.passes if p.produces != "old_logprobs" or self.updates_per_batch > 1)

    def split(self, batch: Batch) -> Iterator[Batch]:
        """The mini-batches of one batch, `epochs` times over: whole groups, as even as their count allows, in order.

        A step that lost groups to failures may have fewer groups than mini-batches: some are empty then, and count as
        optimizer steps that change nothing, so that schedules keep their pace.
        """
        count = self.minibatches
        if self.minibatches == 1:
            parts = [batch]
        else:
            bounds = [batch.n_groups * i // count for i in range(count + 1)]
            group_S = batch.group_S.tolist()
            parts = [
                batch.take([s for s, g in enumerate(group_S) if low <= g < high]) for low, high in itertools.pairwise(bounds)
            ]
        for _ in range(self.epochs):
            yield from parts

    def weigh(self, mini: Batch) -> Batch:
        """Adds every term's weight column, computed over this whole optimizer step: after this, losses only sum."""
        weights: dict[str, Weight] = {}
        for term in (term for terms in self.losses.values() for term in terms):
            values = term.weighting(mini)
            weights[term.name] = Weight(term.level, values, float(values.sum()))
        sizes = {"token": mini.n_tokens, "sequence": mini.n_sequences, "group": mini.n_groups}
        for name, weight in weights.items():
            assert len(weight.values) == sizes[weight.level], f"weighting of '{name}' is not at level {weight.level}"
        return replace(mini, weights=weights)
