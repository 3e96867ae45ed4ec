"""Count the FLOP of learners, and record the times at which they work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.compute.microbatching import select_weighted_rows
from ratchet.learners.wrapper import LearnerWrapper
from ratchet.models.flops import TokenCost
from ratchet.observe.tracing.spans import ACTIVITY
from ratchet.protocols import Fingerprinted, Learner, LossTerm


@dataclass
class FlopCounter:
    """A counter of FLOP as if passes were dense: sharing, packing and recomputation don't matter.

    Attributes:
        works: Cost of each role's model. Roles whose model shape is unknown count nothing.
        update: Cost of an update in forward passes: one forward, and a backward that costs two (for
            inputs and for weights), or one if the weights are frozen beside an adapter.
        flop: FLOP counted so far.
    """

    works: Mapping[str, TokenCost]
    update: float = 3.0
    flop: float = 0.0

    def add(self, role: str, lengths: Sequence[int], passes: float = 1.0) -> None:
        """Add the FLOP of `passes` forward passes of the role's model over rows of these lengths.

        Each token attends to itself and the tokens before it.
        """
        if (work := self.works.get(role)) is not None and (tokens := sum(lengths)):
            pairs = (sum(map(mul, lengths, lengths)) + tokens) / 2
            self.flop += passes * work.forward_flop(tokens, pairs / tokens)


class FlopCountedLearner(LearnerWrapper):
    """A learner whose FLOP and working times are counted."""

    def __init__(self, inner: Learner, role: str, spent: FlopCounter) -> None:
        super().__init__(inner)
        self.role = role
        self.spent = spent

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        self.spent.add(self.role, batch.lengths_S.tolist())
        with ACTIVITY.work(self.role, "score"):
            return await super().score(batch, wanted, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Update the learner. Rows of weight 0 are not computed, and count nothing."""
        lengths = mini.lengths_S.tolist()
        self.spent.add(
            self.role,
            [lengths[row] for row in select_weighted_rows(mini, terms)],
            self.spent.update,
        )
        with ACTIVITY.work(self.role, "update"):
            return await super().update(mini, terms)


class FlopCountedFingerprintedLearner(FlopCountedLearner):
    """A counted learner that has a fingerprint of its weights."""

    def fingerprint(self) -> str:
        assert isinstance(self.inner, Fingerprinted)
        return self.inner.fingerprint()


def wrap_with_flop_counter(roles: Mapping[str, Learner], spent: FlopCounter) -> dict[str, Learner]:
    """Wrap the learners of all roles so that their FLOP are counted."""
    kinds = {
        name: FlopCountedFingerprintedLearner
        if isinstance(role, Fingerprinted)
        else FlopCountedLearner
        for name, role in roles.items()
    }
    return {name: kinds[name](role, name, spent) for name, role in roles.items()}
