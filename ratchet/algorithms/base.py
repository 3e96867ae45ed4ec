"""An algorithm is data: passes that fill columns, an advantage estimator, loss terms by role, and
the unit that micro-batches must not split. The one loop (`ratchet/training/loop.py`) reads it;
nothing anywhere branches on an algorithm's name.
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
from ratchet.protocols import Outputs

TermFunction = Callable[[Outputs, Batch], tuple[Tensor, dict[str, Tensor]]]
Weighting = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Term:
    """One summand of a role's loss: `coef * sum(weight * x)`.

    `fn(out, batch) -> (x, metrics)` gives x and detached metrics at the term's `level` ([T], [S] or
    [G]). `weighting(batch)` gives the [T] column that carries the complete normaliser, computed
    once over an optimizer step; a sequence or a group weighs what its tokens weigh together.
    `needs` names the `Outputs` that the learner must produce. Both functions are module-level, or a
    `functools.partial` of one, so that a term can be sent to another process by name. With `coef=0`
    it is only measured, and adds nothing to the loss, whatever its values.
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
                    f"term '{self.name}': {role} is a closure or a lambda, which can't reach "
                    "another process; "
                    "use a module-level function, with functools.partial for its options"
                )

    def __call__(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        x, metrics = self.fn(out, batch)
        _, weight, total, coef = batch.weights[self.name]
        assert x.shape == weight.shape, (
            f"term '{self.name}' returned {tuple(x.shape)} for weights {tuple(weight.shape)}"
        )
        # A weight of 0 means "not part of the loss": inf * 0 from such an entry must not poison the
        # sum.
        active = weight != 0
        loss = coef * (weight * torch.where(active, x, 0.0)).sum() if coef else weight.new_zeros(())
        share = weight / total if total else weight
        means = {
            k: (share * torch.where(active, v.to(weight.dtype), 0.0)).sum()
            for k, v in metrics.items()
        }
        return loss, means


def _importable(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", "")
    return bool(name) and "<locals>" not in name and "<lambda>" not in name


@dataclass(frozen=True)
class Pass:
    """Before the update, `role` computes the column `wanted` without gradient; it is stored under
    the name `produces`.

    tag: only for rows whose task has this tag; several passes may then fill one column, a part
    each. top_k: how many columns "topk_ids" and "topk_logprobs" have; 0: one for each token of the
    vocabulary.
    """

    role: str
    wanted: str
    produces: str
    level: Level = "token"
    tag: str | None = None
    top_k: int = 0


@dataclass(frozen=True)
class Role:
    """How a role beside the policy is made.

    path: directory or hub id of its model; None: a copy of the policy as the stage finds it. lr:
    its own peak learning rate; None: the policy's. aligned: its tokenizer differs from the
    policy's, and its columns are aligned by text spans.
    """

    path: str | None = None
    lr: float | None = None
    aligned: bool = False


@dataclass
class AlgoState:
    """What an algorithm remembers between steps (adaptive coefficients, running statistics);
    checkpointed."""

    step: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


def no_advantage(batch: Batch, state: AlgoState) -> Batch:
    """For supervised algorithms: nothing to estimate."""
    return batch


def no_adaptation(state: AlgoState, metrics: Mapping[str, float]) -> None:
    """For algorithms without adaptive coefficients."""


@dataclass(frozen=True)
class Algorithm:
    """See the module's docstring.

    source: the kind of groups it learns from, one of `ratchet.training.build.SOURCES`. advantage:
    everything between the passes and the update that makes columns; `fills` names those of them
    that stand in for a pass. adapt: may change `state.numbers` after a step, where "coef/<term>"
    replaces a term's `coef`. warmup: steps of the stage for which a role is not updated yet.

    Of the data: group_size: attempts at a prompt. greedy_baseline: and a greedy one, with
    use="baseline". reference_rows: a labelled row comes with the answer to another prompt, with
    use="reference". turns: which of the assistant's turns train in given text. temperature: of
    given text, whose sampling nobody knows.

    replays: the policy's routers choose the experts that the sampler recorded.

    minibatches_of: what a batch is dealt out to its mini-batches by. Losses that compare the rows
    of a group need "groups".

    reads_reward: False where nothing of it depends on rewards: attempts need none then, and those
    that nobody judged train. reads_parts: True where attempts of equal reward still differ if the
    named parts of their rewards do.

    exempt: properties of `ratchet.algorithms.properties` that it does not have, with the reason.
    """

    name: str
    losses: Mapping[str, tuple[Term, ...]]
    source: str
    passes: tuple[Pass, ...] = ()
    advantage: Callable[[Batch, AlgoState], Batch] = no_advantage
    fills: frozenset[str] = frozenset()
    adapt: Callable[[AlgoState, Mapping[str, float]], None] = no_adaptation
    roles: Mapping[str, Role] = field(default_factory=dict)
    warmup: Mapping[str, int] = field(default_factory=dict)
    minibatches: int = 1
    minibatches_of: Literal["groups", "attempts"] = "groups"
    epochs: int = 1
    group_size: int = 1
    greedy_baseline: bool = False
    reference_rows: bool = False
    temperature: float = 1.0
    turns: Literal["all", "last"] = "all"
    reads_reward: bool = True
    reads_parts: bool = False
    replays: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [term.name for terms in self.losses.values() for term in terms]
        if len(set(names)) != len(names):
            raise ConfigError(f"algorithm '{self.name}': two terms share a name among {names}")
        unknown = {*self.losses, *(item.role for item in self.passes)} - {*self.roles, "policy"}
        if unknown:
            raise ConfigError(
                f"algorithm '{self.name}' names the role '{min(unknown)}' and doesn't say how it "
                "is made: add it to roles"
            )
        if self.minibatches_of == "attempts" and self.unit == "group":
            raise ConfigError(
                f"algorithm '{self.name}' compares the rows of a group, and "
                "minibatches_of=attempts takes them apart: set "
                "minibatches_of=groups"
            )
        reads_old = any(
            "old_logprobs" in term.needs for terms in self.losses.values() for term in terms
        )
        if reads_old and self.updates_per_batch > 1 and "old_logprobs" not in self.columns:
            raise ConfigError(
                f"algorithm '{self.name}' takes {self.updates_per_batch} optimizer steps a batch "
                "and reads old_logprobs: "
                "add Pass('policy', 'logprobs', 'old_logprobs'), or set minibatches and epochs to 1"
            )

    @property
    def updates_per_batch(self) -> int:
        return self.minibatches * self.epochs

    @property
    def columns(self) -> frozenset[str]:
        """What is filled before the update."""
        return self.fills | {item.produces for item in self.passes}

    @property
    def unit(self) -> Level:
        """What micro-batches never split."""
        levels = {term.level for terms in self.losses.values() for term in terms}
        return "group" if "group" in levels else "sequence"

    def needs_of(self, role: str) -> frozenset[str]:
        """Everything that a role is asked for, by terms and by passes."""
        wanted = (item.wanted for item in self.passes if item.role == role)
        return frozenset(wanted).union(*(term.needs for term in self.losses.get(role, ())))

    def roles_to_update(self, state: AlgoState) -> Iterator[str]:
        return (role for role in self.losses if state.step >= self.warmup.get(role, 0))

    def split(self, batch: Batch) -> Iterator[Batch]:
        """The mini-batches of one batch, `epochs` times over, as even as counts allow: whole groups
        in order, or some attempts of every group.

        A step that lost groups to failures may have fewer groups than mini-batches: some are empty
        then, and count as optimizer steps that change nothing, so that schedules keep their pace.
        """
        parts = [batch]
        if self.minibatches > 1:
            part_S = self._parts(batch)
            parts = [
                batch.take((part_S == i).nonzero()[:, 0].tolist()) for i in range(self.minibatches)
            ]
        for _ in range(self.epochs):
            yield from parts

    def _parts(self, batch: Batch) -> Tensor:
        """The mini-batch of each sequence: part i has the groups from floor(i * G / count) on, or
        attempts are dealt out in turn, each with all of its sequences."""
        count, group_S = self.minibatches, batch.group_S
        if self.minibatches_of == "groups":
            return torch.div(
                (group_S + 1) * count - 1, max(1, batch.n_groups), rounding_mode="floor"
            )
        begins_S = torch.ones_like(batch.train_S)
        begins_S[1:] = (group_S.diff() != 0) | (batch.attempt_S.diff() != 0)
        begins_S &= ~batch.baseline_S  # which goes with the attempt before it: it trains nothing
        return (begins_S.cumsum(0) - 1) % count

    def weigh(self, mini: Batch, state: AlgoState) -> Batch:
        """Adds every term's weight column, computed over this whole optimizer step: after this,
        losses only sum."""
        weights: dict[str, Weight] = {}
        for term in (term for terms in self.losses.values() for term in terms):
            values = term.weighting(mini)
            assert len(values) == mini.n_tokens, (
                f"the weighting of '{term.name}' is not a column of tokens"
            )
            total = float(values.sum())
            if term.level != "token":
                values = mini.sequence_sum(values)
            if term.level == "group":
                values = mini.group_sum(values)
            weights[term.name] = Weight(
                term.level, values, total, state.numbers.get(f"coef/{term.name}", term.coef)
            )
        return replace(mini, weights=weights)

    def token_weights(self, batch: Batch) -> Tensor:
        """What each token weighs in the policy's loss of its optimizer step: the terms' weights, by
        the size of their coefficients. [T], float64."""
        terms = [term for term in self.losses.get("policy", ()) if term.coef]
        weights_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
        placed = batch.fill_tokens(place=torch.arange(batch.n_tokens))
        for mini in itertools.islice(self.split(placed), self.minibatches):
            for term in terms:
                weights_T[mini.need("place")] += abs(term.coef) * term.weighting(mini)
        return weights_T

    def observe(self, state: AlgoState, metrics: Mapping[str, float]) -> None:
        """After a step: `metrics` are means over its optimizer steps, by "role/term/name" and
        "batch/name"."""
        # before that nothing moved that could be adapted to
        if state.step >= self.warmup.get("policy", 0):
            self.adapt(state, metrics)
        state.step += 1
