"""What the driver tells the ranks of a learner about a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ratchet.models.lora.decoder import Adapter
from ratchet.models.model_source import Origin


@dataclass(frozen=True)
class RoleSpec:
    """How the learner of a role is made. origin: of its model; None: a copy of the policy as it is,
    which for "policy" is the policy itself. adapter: what it trains in place of its weights.
    optimizer: the values of its section; None freezes it. scalar: whether it has a scalar head."""

    origin: Origin | None = None
    optimizer: Mapping[str, Any] | None = None
    total_steps: int = 1
    scalar: bool = False
    shared_vocab: int | None = None
    replays: bool = False
    adapter: Adapter | None = None
