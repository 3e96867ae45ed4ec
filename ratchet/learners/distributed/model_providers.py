"""The protocol of the classes that load models on the ranks of a distributed learner."""

from __future__ import annotations

from typing import Protocol

from ratchet.learners.distributed.base import RankLearner
from ratchet.learners.distributed.role_spec import RoleSpec
from ratchet.models.model_source import ModelSource
from ratchet.models.policy import PolicyModel


class ModelProvider(Protocol):
    """A loader and copier of the models on one rank: policy, reference, critic and reward model.

    `DistributedConfig.provider` names the class. An instance is created after torch's process
    group, from the learner's section, the rank's device and the dtype of weights.
    """

    def load(self, origin: ModelSource) -> PolicyModel:
        """Return the rank's part of a model, with its weights.

        No rank ever holds the whole model, unless transformers runs it.
        """
        ...

    def copy(self, policy: PolicyModel) -> PolicyModel:
        """Return a copy of the policy with its current weights."""
        ...

    def learner(self, model: PolicyModel, spec: RoleSpec) -> RankLearner:
        """Return the learner of a role, with a scalar head if `spec.has_scalar_head` is set."""
        ...

    def close(self) -> None:
        """Release all resources except torch's process group."""
        ...
