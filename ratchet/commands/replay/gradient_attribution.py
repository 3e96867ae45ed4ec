"""Attribute the gradient of a mini-batch to its groups and tokens.

T = tokens of a mini-batch, S = its sequences, G = its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.compute.microbatching import select_weighted_rows
from ratchet.learners.local import LocalLearner
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.protocols import LossTerm, list_needed_outputs


@dataclass
class GroupShare:
    """The contribution of one group to the optimizer steps that trained on it, as a sum over steps.

    g is the gradient of an optimizer step, and g_i is the group's summand of g.
    """

    # g_i . g / |g|^2. The sum over the groups of a step is 1. A group below 0 opposed the step.
    direction: float = 0.0
    norm: float = 0.0  # |g_i| / |g|
    loss: float = 0.0  # the group's summand of the loss


@dataclass(frozen=True)
class TokenPull:
    """The contribution of one token to the loss and its gradient."""

    group: str
    attempt: int
    trajectory: int  # index among the attempt's usable trajectories
    position: int  # index of the token in the trajectory
    token: int  # token id
    loss: float  # the token's summand of the token-level loss terms
    pull: float  # -d loss / d logprob; above 0 if the step makes the token likelier


@dataclass
class Influence:
    """The contributions of groups and tokens to the optimizer steps of one training step."""

    groups: dict[str, GroupShare] = field(default_factory=dict)
    # The strongest tokens of each optimizer step.
    tokens: list[TokenPull] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)  # one for each optimizer step
    total_abs_pull: float = 0.0  # sum of |pull| over all tokens
    total_abs_loss: float = 0.0  # sum of |loss| over all tokens

    @property
    def n_updates(self) -> int:
        """The number of optimizer steps with a gradient."""
        return len(self.gradient_norms)


class InfluenceRecorder(LearnerWrapper):
    """A learner wrapper that measures the contributions to each optimizer step before the step.

    Attributes:
        max_tokens: The number of tokens to keep for each optimizer step.
        influence: The measured contributions.
    """

    inner: LocalLearner

    def __init__(self, inner: LocalLearner, *, max_tokens: int) -> None:
        super().__init__(inner)
        self.max_tokens, self.influence = max_tokens, Influence()

    def fingerprint(self) -> str:
        return self.inner.fingerprint()

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        if select_weighted_rows(mini, terms):
            self._add_contributions(mini, terms)
        return await super().update(mini, terms)

    def _add_contributions(self, minibatch: Batch, terms: Sequence[LossTerm]) -> None:
        """Measure the contribution of each group and token to one optimizer step."""
        full_gradient, _ = self.inner.gradient(minibatch, terms)
        squared_norm = sum(float((g.double() ** 2).sum()) for g in full_gradient)
        self.influence.gradient_norms.append(squared_norm**0.5)
        group_S = minibatch.group_S.tolist()
        losses_and_pulls = list[tuple[Tensor, Tensor]]()
        # The sequences of a group are contiguous, so the pulls of all groups are in token order.
        for group_index, name in enumerate(minibatch.group_ids):
            group_batch = minibatch.take(
                [s for s, group in enumerate(group_S) if group == group_index]
            )
            losses_and_pulls.append(measure_token_pulls(self.inner, group_batch, terms))
            share = self.influence.groups.setdefault(name, GroupShare())
            if not squared_norm or not select_weighted_rows(group_batch, terms):
                continue
            gradient, loss = self.inner.gradient(group_batch, terms)
            share.loss += loss
            share.direction += (
                sum(
                    float((a.double() * b.double()).sum())
                    for a, b in zip(gradient, full_gradient, strict=True)
                )
                / squared_norm
            )
            share.norm += (
                sum(float((g.double() ** 2).sum()) for g in gradient) / squared_norm
            ) ** 0.5
        loss_T, pull_T = (torch.cat(columns) for columns in zip(*losses_and_pulls, strict=True))
        self.influence.total_abs_pull += float(pull_T.abs().sum())
        self.influence.total_abs_loss += float(loss_T.abs().sum())
        self.influence.tokens += find_strongest_tokens(minibatch, loss_T, pull_T, self.max_tokens)


def measure_token_pulls(
    learner: LocalLearner, batch: Batch, terms: Sequence[LossTerm]
) -> tuple[Tensor, Tensor]:
    """Return (loss_T, pull_T): the fields `loss` and `pull` of `TokenPull` for each token.

    Terms that don't read logprobs add 0 to the pulls. If no term reads logprobs, the losses are 0
    too.
    """
    forward = learner.forwards[0]
    micro = batch.to(forward.device, forward.dtype)
    monitor = forward.make_monitor(terms)
    needs = list_needed_outputs(terms)
    with torch.no_grad():
        outputs = forward.outputs(micro, forward.hidden(micro, monitor), needs)
        if monitor is not None:
            outputs = replace(outputs, routers=monitor.measure(micro.sequence_T, micro.n_sequences))
    loss_T = torch.zeros(batch.n_tokens, dtype=torch.float64)
    if outputs.logprobs is None:
        return loss_T, loss_T.clone()
    logprobs = outputs.logprobs.detach().requires_grad_()
    outputs = replace(outputs, logprobs=logprobs)
    total = logprobs.sum() * 0.0
    for term in terms:
        loss, _ = term(outputs, micro)
        total = total + loss
        loss_T += _compute_summands(term, outputs, micro)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return loss_T, -gradient.double().cpu()


def _compute_summands(term: Any, outputs: Any, micro: Batch) -> Tensor:
    """Return each token's summand of a token-level term; 0 for other terms."""
    level, weight, _, coef = micro.weights[term.name]
    if level != "token" or not coef:
        return torch.zeros(micro.n_tokens, dtype=torch.float64)
    x, _ = term.fn(outputs, micro)
    return (coef * weight * torch.where(weight != 0, x, 0.0)).detach().double().cpu()


def find_strongest_tokens(
    minibatch: Batch, loss_T: Tensor, pull_T: Tensor, max_tokens: int
) -> list[TokenPull]:
    """Return at most `max_tokens` tokens with a pull other than 0, the strongest first."""
    order = torch.argsort(pull_T.abs(), descending=True, stable=True)[:max_tokens].tolist()
    sequence_T, starts_S = minibatch.sequence_T, minibatch.starts_S
    attempts = list(zip(minibatch.group_S.tolist(), minibatch.attempt_S.tolist(), strict=True))
    pulls = []
    for t in order:
        if pull_T[t] == 0:
            break
        s = int(sequence_T[t])
        group, attempt = attempts[s]
        # The trajectories of an attempt are adjacent.
        trajectory = s - attempts.index(attempts[s])
        position = t - int(starts_S[s])
        location = minibatch.group_ids[group], attempt, trajectory, position
        pulls.append(
            TokenPull(*location, int(minibatch.tokens_T[t]), float(loss_T[t]), float(pull_T[t]))
        )
    return pulls
