"""Where the ranks of a spread learner get their models from: policy, reference, critic and reward
model, for every backend."""

from __future__ import annotations

from typing import Protocol

from ratchet.learners.distributed.base import RankLearner
from ratchet.learners.distributed.stage_spec import RoleSpec
from ratchet.models.model_source import Origin
from ratchet.models.policy import PolicyModel


class Provider(Protocol):
    """Of one rank. The section of a kind of learner names it (`SpreadConfig.provider`), and it is
    made from that section, the rank's device and the dtype of weights, once torch's process group
    is there."""

    def load(self, origin: Origin) -> PolicyModel:
        """The rank's part, with its weights; no rank ever holds the whole, unless transformers runs
        it."""
        ...

    def copy(self, policy: PolicyModel) -> PolicyModel:
        """Another one with the same weights as these are now."""
        ...

    def learner(self, model: PolicyModel, spec: RoleSpec) -> RankLearner:
        """Trains the model, or scores with it, as the role of the specification; with a scalar head
        where it asks for one."""
        ...

    def close(self) -> None:
        """Lets go of what it keeps beside torch's process group."""
        ...
