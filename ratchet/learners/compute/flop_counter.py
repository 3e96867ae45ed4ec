"""Count the FLOP of learners, and record when they compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.compute.microbatching import select_weighted_rows
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.models.flops import TokenCost
from ratchet.observe.tracing.busy_time import BUSY_TIME
from ratchet.protocols import Learner, LossTerm
from ratchet.utils.tracer import span


@dataclass
class FlopCounter:
    """A counter of model FLOP, from which the MFU is computed.

    Prefix sharing, packing and recomputation do not change the count.
    """

    cost_by_role: Mapping[str, TokenCost]
    """Cost of one token by role. Roles whose model shape is unknown count nothing."""
    passes_per_update: float = 3.0
    """Cost of an update in forward passes: one for the forward and two for the backward (gradients
    of inputs and of weights). The backward costs only one if an adapter trains and the weights are
    frozen."""
    flop: float = 0.0
    """FLOP counted so far."""

    def add(self, role: str, lengths: Sequence[int], passes: float = 1.0) -> None:
        """Add the FLOP of `passes` forward passes of the role's model over rows of these lengths.

        Each token attends to itself and the tokens before it.
        """
        if (token_cost := self.cost_by_role.get(role)) is not None and (tokens := sum(lengths)):
            attended_pairs = (sum(map(mul, lengths, lengths)) + tokens) / 2
            self.flop += passes * token_cost.forward_flop(tokens, attended_pairs / tokens)


class FlopCountedLearner(LearnerWrapper):
    """A learner wrapper that counts FLOP and records when the learner computes."""

    def __init__(self, inner: Learner, role: str, counter: FlopCounter) -> None:
        super().__init__(inner)
        self.role = role
        self.counter = counter

    async def score(
        self, batch: Batch, output_names: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        self.counter.add(self.role, batch.lengths_S.tolist())
        with BUSY_TIME, span(self.role, "score"):
            return await super().score(batch, output_names, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Update the learner. Rows of weight 0 are not computed, and count nothing."""
        lengths = mini.lengths_S.tolist()
        self.counter.add(
            self.role,
            [lengths[row] for row in select_weighted_rows(mini, terms)],
            self.counter.passes_per_update,
        )
        with BUSY_TIME, span(self.role, "update"):
            return await super().update(mini, terms)

    def fingerprint(self) -> str | None:
        return self.inner.fingerprint()


def wrap_with_flop_counter(
    roles: Mapping[str, Learner], counter: FlopCounter
) -> dict[str, Learner]:
    """Wrap the learners of all roles so that their FLOP are counted."""
    return {name: FlopCountedLearner(learner, name, counter) for name, learner in roles.items()}
