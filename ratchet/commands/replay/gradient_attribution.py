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
from ratchet.protocols import LossTerm, needed


@dataclass
class GroupShare:
    """The share of one group in the gradients of its optimizer steps, summed over these steps.

    g is the gradient of a step, and g_i the group's summand of it.
    """

    # g_i . g / |g|^2: sums to 1 over the groups of a step; below 0 the group opposed the step
    direction: float = 0.0
    norm: float = 0.0  # |g_i| / |g|
    loss: float = 0.0  # the group's summand of the loss


@dataclass(frozen=True)
class TokenPull:
    """The contribution of one token to the loss and its gradient."""

    group: str
    attempt: int
    strand: int  # index of the trajectory among those of the attempt that count
    position: int  # in the trajectory
    token: int
    loss: float  # the token's summand of token-level terms
    pull: float  # -d loss / d logprob: above 0 the step makes the token likelier


@dataclass
class Influence:
    """The contributions of groups and tokens to the optimizer steps of one training step."""

    groups: dict[str, GroupShare] = field(default_factory=dict)
    tokens: list[TokenPull] = field(default_factory=list)  # the strongest of each optimizer step
    norms: list[float] = field(default_factory=list)  # gradient norm of each optimizer step
    pull: float = 0.0  # sum of |pull| over all tokens
    loss: float = 0.0  # sum of |loss| over all tokens

    @property
    def updates(self) -> int:
        """The number of optimizer steps with a gradient."""
        return len(self.norms)


class Influences(LearnerWrapper):
    """A learner wrapper that records the contributions to each update before it happens.

    most: number of tokens kept of each update.
    """

    inner: LocalLearner

    def __init__(self, inner: LocalLearner, *, most: int) -> None:
        super().__init__(inner)
        self.most, self.found = most, Influence()

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        if select_weighted_rows(mini, terms):
            self._note(mini, terms)
        return await super().update(mini, terms)

    def _note(self, mini: Batch, terms: Sequence[LossTerm]) -> None:
        whole, _ = self.inner.gradient(mini, terms)
        squared = sum(float((g.double() ** 2).sum()) for g in whole)
        self.found.norms.append(squared**0.5)
        group_S, pulls = mini.group_S.tolist(), list[tuple[Tensor, Tensor]]()
        # The sequences of a group are contiguous, so the pulls of all groups are in token order.
        for at, name in enumerate(mini.group_ids):
            part = mini.take([s for s, group in enumerate(group_S) if group == at])
            pulls.append(token_pulls(self.inner, part, terms))
            share = self.found.groups.setdefault(name, GroupShare())
            if not squared or not select_weighted_rows(part, terms):
                continue
            gradient, loss = self.inner.gradient(part, terms)
            share.loss += loss
            share.direction += (
                sum(
                    float((a.double() * b.double()).sum())
                    for a, b in zip(gradient, whole, strict=True)
                )
                / squared
            )
            share.norm += (sum(float((g.double() ** 2).sum()) for g in gradient) / squared) ** 0.5
        loss_T, pull_T = (torch.cat(columns) for columns in zip(*pulls, strict=True))
        self.found.pull += float(pull_T.abs().sum())
        self.found.loss += float(loss_T.abs().sum())
        self.found.tokens += strongest(mini, loss_T, pull_T, self.most)


def token_pulls(
    learner: LocalLearner, part: Batch, terms: Sequence[LossTerm]
) -> tuple[Tensor, Tensor]:
    """Return (loss, pull) of each token in a part of a mini-batch, [T] each.

    Terms that don't read logprobs add 0 to the pulls. If no term reads them, the losses are 0 too.
    """
    hand = learner.forwards[0]
    micro, watch = part.to(hand.device, hand.dtype), hand.watch(terms)
    needs = needed(terms)
    with torch.no_grad():
        out = hand.outputs(micro, hand.hidden(micro, watch), needs)
        if watch is not None:
            out = replace(out, routers=watch.columns(micro.sequence_T, micro.n_sequences))
    loss_T = torch.zeros(part.n_tokens, dtype=torch.float64)
    if out.logprobs is None:
        return loss_T, loss_T.clone()
    live = out.logprobs.detach().requires_grad_()
    out = replace(out, logprobs=live)
    total = live.sum() * 0.0
    for term in terms:
        loss, _ = term(out, micro)
        total = total + loss
        loss_T += _summands(term, out, micro)
    (slope,) = torch.autograd.grad(total, live)
    return loss_T, -slope.double().cpu()


def _summands(term: Any, out: Any, micro: Batch) -> Tensor:
    """Return each token's summand of a token-level term; 0 for other terms."""
    level, weight, _, coef = micro.weights[term.name]
    if level != "token" or not coef:
        return torch.zeros(micro.n_tokens, dtype=torch.float64)
    x, _ = term.fn(out, micro)
    return (coef * weight * torch.where(weight != 0, x, 0.0)).detach().double().cpu()


def strongest(mini: Batch, loss_T: Tensor, pull_T: Tensor, most: int) -> list[TokenPull]:
    """Return at most `most` tokens with a pull other than 0, the strongest first."""
    order = torch.argsort(pull_T.abs(), descending=True, stable=True)[:most].tolist()
    sequence_T, starts_S = mini.sequence_T, mini.starts_S
    units = list(zip(mini.group_S.tolist(), mini.attempt_S.tolist(), strict=True))
    losses = []
    for t in order:
        if pull_T[t] == 0:
            break
        s = int(sequence_T[t])
        group, attempt = units[s]
        place = mini.group_ids[group], attempt, s - units.index(units[s]), t - int(starts_S[s])
        losses.append(TokenPull(*place, int(mini.tokens_T[t]), float(loss_T[t]), float(pull_T[t])))
    return losses
