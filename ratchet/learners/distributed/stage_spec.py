"""The specification of a stage's roles, which the driver sends to the ranks of a learner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.models.lora.decoder import Adapter
from ratchet.models.model_source import ModelSource


@dataclass(frozen=True)
class RoleSpec:
    """The specification of a role's learner.

    origin: source of its model; None: a copy of the policy's model. For the role "policy", which
      has the policy's model itself, it is None.
    optimizer: values of the optimizer's section; None freezes the role.
    has_scalar_head: True if the role has a scalar head.
    total_steps, shared_vocab, replays: as in `LocalLearner`.
    adapter: the adapter that is trained instead of the model's weights.
    """

    origin: ModelSource | None = None
    optimizer: Mapping[str, Any] | None = None
    total_steps: int = 1
    has_scalar_head: bool = False
    shared_vocab: int | None = None
    replays: bool = False
    adapter: Adapter | None = None
