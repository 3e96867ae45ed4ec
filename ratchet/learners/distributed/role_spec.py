"""The specification of one role's learner, which the driver sends to the learner's ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.models.lora.decoder import Adapter
from ratchet.models.model_source import ModelSource


@dataclass(frozen=True)
class RoleSpec:
    """The specification of a role's learner.

    origin: source of the role's model; None: a copy of the policy's model (for the role "policy":
      the policy's model itself).
    optimizer: values of the optimizer's section; None freezes the role.
    has_scalar_head: True if the role has a scalar head.
    total_steps, shared_vocab, replays_routes: as in `LocalLearner`.
    adapter: the adapter that is trained instead of the model's weights.
    """

    origin: ModelSource | None = None
    optimizer: Mapping[str, Any] | None = None
    total_steps: int = 1
    has_scalar_head: bool = False
    shared_vocab: int | None = None
    replays_routes: bool = False
    adapter: Adapter | None = None
