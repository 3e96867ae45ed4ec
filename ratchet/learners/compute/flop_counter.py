"""What a learner is asked to compute, in FLOP, and when it is at it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import mul

from torch import Tensor

from ratchet.batch import Batch
from ratchet.learners.compute.microbatching import weighing_rows
from ratchet.learners.wrapper import Around
from ratchet.models.flops import Work
from ratchet.observe.tracing.spans import ACTIVITY
from ratchet.protocols import Fingerprinted, Learner, LossTerm


@dataclass
class Spent:
    """FLOP that dense passes over the same rows would take, whatever is shared, packed or computed
    again. works: of a role's model; the roles whose shape is not known count nothing. update:
    forward passes that an update is worth: its backward takes two (to inputs and to weights), and
    one where weights rest beside an adapter."""

    works: Mapping[str, Work]
    update: float = 3.0
    flop: float = 0.0

    def read(self, role: str, lengths: Sequence[int], passes: float = 1.0) -> None:
        """Rows of these lengths go through the role's model; a token attends to itself and those
        before it."""
        if (work := self.works.get(role)) is not None and (tokens := sum(lengths)):
            pairs = (sum(map(mul, lengths, lengths)) + tokens) / 2
            self.flop += passes * work.forward_flop(tokens, pairs / tokens)


class Metered(Around):
    def __init__(self, inner: Learner, role: str, spent: Spent) -> None:
        super().__init__(inner)
        self.role, self.spent = role, spent

    async def score(
        self, batch: Batch, wanted: Sequence[str], *, top_k: int = 0
    ) -> Mapping[str, Tensor]:
        self.spent.read(self.role, batch.lengths_S.tolist())
        with ACTIVITY.work(self.role, "score"):
            return await super().score(batch, wanted, top_k=top_k)

    async def update(self, mini: Batch, terms: Sequence[LossTerm]) -> Mapping[str, float]:
        """Rows that weigh nothing are not computed, and count nothing."""
        lengths = mini.lengths_S.tolist()
        self.spent.read(
            self.role, [lengths[row] for row in weighing_rows(mini, terms)], self.spent.update
        )
        with ACTIVITY.work(self.role, "update"):
            return await super().update(mini, terms)


class MeteredPrinted(Metered):
    """Of a learner that says which weights it has."""

    def fingerprint(self) -> str:
        assert isinstance(self.inner, Fingerprinted)
        return self.inner.fingerprint()


def metered(roles: Mapping[str, Learner], spent: Spent) -> dict[str, Learner]:
    kinds = {
        name: MeteredPrinted if isinstance(role, Fingerprinted) else Metered
        for name, role in roles.items()
    }
    return {name: kinds[name](role, name, spent) for name, role in roles.items()}
