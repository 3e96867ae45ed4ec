"""An algorithm as data: scoring passes, an advantage estimator, and loss terms by role.

The one training loop (`ratchet/training/loop.py`) reads it; no code branches on an algorithm's
name.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ratchet.batch import Batch, Level, LossWeights
from ratchet.errors import ConfigError
from ratchet.protocols import Outputs
from ratchet.types import TrainedTokens
from ratchet.utils.user_code import get_qualified_name

TermFunction = Callable[[Outputs, Batch], tuple[Tensor, dict[str, Tensor]]]
Weighting = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class AlgorithmTerm:
    """One summand of a role's loss: `coef * sum(weight * x)`.

    fn: `fn(out, batch) -> (x, metrics)` returns x and detached metrics at the term's `level`:
      [T], [S] or [G].
    weighting: `weighting(batch)` returns the weight of each token [T], already divided by the
      normaliser. It is computed once, over all rows of an optimizer step. The weight of a sequence
      or group is the sum of the weights of its tokens.
    needs: names of the `Outputs` that the learner must produce.
    coef: factor of the term. A term with coef=0 is only measured: it adds nothing to the loss, even
      if its values are not finite.

    `fn` and `weighting` are module-level functions, or a `functools.partial` of one, so that a term
    can be sent to another process by name.
    """

    name: str
    fn: TermFunction
    weighting: Weighting
    level: Level = "token"
    needs: frozenset[str] = frozenset({"logprobs"})
    coef: float = 1.0

    def __post_init__(self) -> None:
        for field_name, function in (("fn", self.fn), ("weighting", self.weighting)):
            if not _is_importable(function):
                raise ConfigError(
                    f"term '{self.name}': {field_name} is a closure or a lambda, which can't be "
                    "sent to another process. Use a module-level function, with functools.partial "
                    "for its options."
                )

    def __call__(self, out: Outputs, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the term's loss, summed over the batch, and the weighted means of its metrics."""
        x, metrics = self.fn(out, batch)
        _, weight, total, coef = batch.weights[self.name]
        assert x.shape == weight.shape, (
            f"term '{self.name}' returned {tuple(x.shape)} for weights {tuple(weight.shape)}"
        )
        # A weight of 0 means "not part of the loss": inf * 0 would make the sum NaN.
        active = weight != 0
        loss = coef * (weight * torch.where(active, x, 0.0)).sum() if coef else weight.new_zeros(())
        mean_weight = weight / total if total else weight
        means = {
            name: (mean_weight * torch.where(active, values.to(weight.dtype), 0.0)).sum()
            for name, values in metrics.items()
        }
        return loss, means


def _is_importable(function: Callable[..., Any]) -> bool:
    """True for a module-level function, or a `functools.partial` of one."""
    while isinstance(function, functools.partial):
        function = function.func
    name = get_qualified_name(function)
    return bool(name) and "<locals>" not in name and "<lambda>" not in name


@dataclass(frozen=True)
class Pass:
    """A scoring pass: before the update, the model of `role` fills a column without gradient.

    output: name of the learner's output.
    produces: the column's name in the batch.
    tag: score only rows whose task has this tag; None: score all rows. Passes with different tags
      may fill the same column.
    top_k: number of tokens in "topk_ids" and "topk_logprobs"; 0: the whole vocabulary.
    temperature: factor on the softmax temperature of every row.
    """

    role: str
    output: str
    produces: str
    level: Level = "token"
    tag: str | None = None
    top_k: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class Role:
    """A model beside the policy, such as a reference, critic or teacher.

    path: directory or hub id of the model; None: a copy of the policy at the start of the stage.
    lr: peak learning rate of the role; None: the policy's.
    aligned: True if the role's tokenizer differs from the policy's, so that its columns are aligned
      by text spans.
    """

    path: str | None = None
    lr: float | None = None
    aligned: bool = False


@dataclass
class AlgoState:
    """The state of an algorithm between steps. Checkpoints include it.

    numbers: adaptive coefficients and running statistics, by name.
    """

    step: int = 0
    numbers: dict[str, float] = field(default_factory=dict)


def no_advantage(batch: Batch, state: AlgoState) -> Batch:
    """Return the batch as it is: supervised algorithms estimate no advantages."""
    return batch


def no_adaptation(state: AlgoState, metrics: Mapping[str, float]) -> None:
    """Change nothing: the algorithm has no adaptive coefficients."""


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, as the training loop reads it.

    source: the kind of groups it learns from, one of `ratchet.training.sources.SOURCES`.
    advantage: fills every column that is computed between the scoring passes and the update.
    fills: columns that `advantage` fills in place of a scoring pass.
    adapt: may change `state.numbers` after a step. A number "coef/<term>" replaces a term's `coef`.
    warmup: number of steps at the start of the stage in which a role is not updated, by role.
    minibatches: number of mini-batches that a batch is divided into, with one optimizer step each.
    minibatches_of: unit in which a batch is distributed over its mini-batches. Losses that compare
      the rows of a group need "groups".
    epochs: passes over all mini-batches of a batch.
    group_size: sampled attempts at each prompt.
    greedy_baseline: True if each group also has a greedy attempt, with use="baseline".
    uses_mismatched_pairs: True if each labelled row gets a second one with use="reference": its
      prompt with the answer to another prompt.
    temperature: sampling temperature assumed for text that no sampler wrote (demonstrations).
    turns: tokens of a demonstration that train.
    reads_reward: False if nothing depends on rewards. Attempts without a reward then train too.
    reads_parts: True if the named parts of the rewards matter. Attempts of equal reward then count
      as different if their parts differ.
    mean_reward_range: bounds (exclusive) of a group's mean reward, outside of which the group does
      not train; None: no bounds.
    replays_routes: True for router replay: the policy's routers choose the experts that the sampler
      recorded.
    exempt: properties of `ratchet.algorithms.properties` that the algorithm does not have, each
      with the reason.
    """

    name: str
    losses: Mapping[str, tuple[AlgorithmTerm, ...]]
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
    uses_mismatched_pairs: bool = False
    temperature: float = 1.0
    turns: TrainedTokens = "all"
    reads_reward: bool = True
    reads_parts: bool = False
    mean_reward_range: tuple[float, float] | None = None
    replays_routes: bool = False
    exempt: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = [term.name for terms in self.losses.values() for term in terms]
        if len(set(names)) != len(names):
            repeated = next(name for name in names if names.count(name) > 1)
            raise ConfigError(
                f"algorithm '{self.name}': two terms share the name '{repeated}'. Rename one."
            )
        used_roles = {*self.losses, *(scoring_pass.role for scoring_pass in self.passes)}
        unknown_roles = used_roles - {*self.roles, "policy"}
        if unknown_roles:
            raise ConfigError(
                f"algorithm '{self.name}' uses the role '{min(unknown_roles)}', which `roles` does "
                "not define. Add it to roles."
            )
        if self.minibatches_of == "attempts" and self.unit == "group":
            raise ConfigError(
                f"minibatches_of=attempts splits groups, but algorithm '{self.name}' compares the "
                "rows of a group. Set minibatches_of=groups."
            )
        reads_old_logprobs = any(
            "old_logprobs" in term.needs for terms in self.losses.values() for term in terms
        )
        if reads_old_logprobs and self.updates_per_batch > 1 and "old_logprobs" not in self.columns:
            raise ConfigError(
                f"algorithm '{self.name}' takes {self.updates_per_batch} optimizer steps a batch "
                "and reads old_logprobs, which no pass fills. Add "
                "Pass('policy', 'logprobs', 'old_logprobs'), or set minibatches and epochs to 1."
            )

    @property
    def updates_per_batch(self) -> int:
        """The number of optimizer steps for each batch."""
        return self.minibatches * self.epochs

    @property
    def columns(self) -> frozenset[str]:
        """The columns that are filled before the update."""
        return self.fills | {scoring_pass.produces for scoring_pass in self.passes}

    @property
    def unit(self) -> Level:
        """The unit that micro-batches never split: "group" or "sequence"."""
        levels = {term.level for terms in self.losses.values() for term in terms}
        return "group" if "group" in levels else "sequence"

    def required_outputs(self, role: str) -> frozenset[str]:
        """Return the outputs that the terms and passes need from a role's learner."""
        pass_outputs = (
            scoring_pass.output for scoring_pass in self.passes if scoring_pass.role == role
        )
        return frozenset(pass_outputs).union(*(term.needs for term in self.losses.get(role, ())))

    def roles_to_update(self, state: AlgoState) -> Iterator[str]:
        """Yield the roles with a loss whose warm-up is over."""
        return (role for role in self.losses if state.step >= self.warmup.get(role, 0))

    def split(self, batch: Batch) -> Iterator[Batch]:
        """Yield the mini-batches of a batch, each of them once an epoch.

        Mini-batches are of about equal size. Each has whole groups in order, or some attempts of
        every group. A step that lost groups to failures may have fewer groups than mini-batches.
        Empty mini-batches then count as optimizer steps that change nothing, so that the
        learning-rate schedule does not shift.
        """
        minibatches = [batch]
        if self.minibatches > 1:
            minibatch_S = self._assign_minibatches(batch)
            minibatches = [
                batch.take((minibatch_S == i).nonzero()[:, 0].tolist())
                for i in range(self.minibatches)
            ]
        for _ in range(self.epochs):
            yield from minibatches

    def _assign_minibatches(self, batch: Batch) -> Tensor:
        """Return the mini-batch of each sequence, int64 [S].

        With minibatches_of=groups, mini-batch i begins with group floor(i * G / count). Otherwise
        the attempts are dealt out in turn, each with all of its sequences.
        """
        count = self.minibatches
        group_S = batch.group_S
        if self.minibatches_of == "groups":
            return torch.div(
                (group_S + 1) * count - 1, max(1, batch.n_groups), rounding_mode="floor"
            )
        starts_attempt_S = torch.ones_like(batch.train_S)
        starts_attempt_S[1:] = (group_S.diff() != 0) | (batch.attempt_S.diff() != 0)
        # A greedy baseline trains nothing, so it goes with the attempt before it.
        starts_attempt_S &= ~batch.baseline_S
        return (starts_attempt_S.cumsum(0) - 1) % count

    def weigh(self, mini: Batch, state: AlgoState) -> Batch:
        """Return the mini-batch with the weight column of every loss term.

        `mini` must hold all rows of the optimizer step: the weights contain the normalisers, so
        that losses over micro-batches only sum.
        """
        weights: dict[str, LossWeights] = {}
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
            weights[term.name] = LossWeights(
                term.level, values, total, state.numbers.get(f"coef/{term.name}", term.coef)
            )
        return replace(mini, weights=weights)

    def token_weights(self, batch: Batch) -> Tensor:
        """Return the weight of each token in the policy's loss of its optimizer step, float64 [T].

        This weight is the sum over terms of |coef| times the term's weight.
        """
        terms = [term for term in self.losses.get("policy", ()) if term.coef]
        weights_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
        indexed = batch.fill_tokens(batch_index=torch.arange(batch.n_tokens))
        for mini in itertools.islice(self.split(indexed), self.minibatches):
            for term in terms:
                weights_T[mini.need("batch_index")] += abs(term.coef) * term.weighting(mini)
        return weights_T

    def observe(self, state: AlgoState, metrics: Mapping[str, float]) -> None:
        """Update the state after a training step.

        metrics: means over the optimizer steps of the training step, by "role/term/name" and
          "batch/name".
        """
        # During its warm-up the policy does not change, so coefficients have nothing to adapt to.
        if state.step >= self.warmup.get("policy", 0):
            self.adapt(state, metrics)
        state.step += 1
