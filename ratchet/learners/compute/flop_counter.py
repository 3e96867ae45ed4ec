"""The FLOP that learners are used for, and the times at which they work."""

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
    """The FLOP of dense passes over the rows, whatever is shared, packed or recomputed.

    works: cost of a role's model. Roles whose shape is not known count nothing.
    update: forward passes that an update is worth. Its backward takes two (for inputs and for
      weights), and one where weights are frozen beside an adapter.
    """

    works: Mapping[str, TokenCost]
    update: float = 3.0
    flop: float = 0.0

    def add(self, role: str, lengths: Sequence[int], passes: float = 1.0) -> None:
        """Add the FLOP of passes of rows of these lengths through the role's model.

        A token attends to itself and those before it.
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
